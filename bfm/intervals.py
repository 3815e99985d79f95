# SPDX-License-Identifier: Apache-2.0
"""Intervals by resampling whole groups (users), because questions of one user are not independent.

Where a policy was trained several times, every resample also draws among its trainings, the same ones
for all users: a training that went well went well for all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from scipy.stats import rankdata

RESAMPLES = 1000


def interval(
    groups: Sequence[str],
    statistic: Callable[[np.ndarray], float],
    *,
    runs: Sequence[int] | None = None,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> tuple[float | None, float | None, float | None]:
    """Return a statistic of all items with the 2.5th and 97.5th percentile of its bootstrap.

    groups[i] is the group of item i, runs[i] the trained policy that it comes from; statistic takes an
    array of item indices (with repeats) and gives nan where it is undefined; such resamples are left
    out. None stands for what is not known: the value where it is undefined, the percentiles of a single
    group.
    """
    members: dict[str, dict[int, list[int]]] = {}
    for i, (name, run) in enumerate(zip(groups, runs or [0] * len(groups), strict=True)):
        members.setdefault(name, {}).setdefault(run, []).append(i)
    parts = [
        {run: np.asarray(own) for run, own in members[name].items()} for name in sorted(members)
    ]
    trainings = sorted(set(runs or [0]))
    value = float(statistic(np.arange(len(groups))))
    if np.isnan(value) or len(parts) < 2:
        return None if np.isnan(value) else value, None, None
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(resamples):
        chosen = [parts[k] for k in rng.integers(0, len(parts), len(parts))]
        some = trainings
        if len(trainings) > 1:
            some = [trainings[k] for k in rng.integers(0, len(trainings), len(trainings))]
        items = [own[run] for own in chosen for run in some if run in own]
        drawn.append(float(statistic(np.concatenate(items))) if items else float("nan"))
    drawn = [x for x in drawn if not np.isnan(x)]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return value, float(low), float(high)


def f1(hits: np.ndarray, found: np.ndarray, wanted: np.ndarray) -> Callable[[np.ndarray], float]:
    """Return the micro F1 over items as a statistic: 2 hits / (found + wanted); nan without either."""

    def statistic(index: np.ndarray) -> float:
        total = found[index].sum() + wanted[index].sum()
        return 2.0 * hits[index].sum() / total if total else float("nan")

    return statistic


def area(scores: np.ndarray, inside: np.ndarray) -> Callable[[np.ndarray], float]:
    """Return the share of pairs (inside, outside) that scores order right, ties half, as a statistic.

    The area under the curve. scores: [n]; inside: [n], bool. nan where a kind of item is missing.

    >>> area(np.array([0.5, 2.0, 0.5]), np.array([False, True, False]))(np.arange(3))
    1.0
    """

    def statistic(index: np.ndarray) -> float:
        chosen = inside[index]
        n, others = int(chosen.sum()), int((~chosen).sum())
        if not n or not others:
            return float("nan")
        below = rankdata(scores[index])[chosen].sum() - n * (n + 1) / 2
        return float(below / (n * others))

    return statistic


def mean(values: np.ndarray) -> Callable[[np.ndarray], float]:
    """Return the mean over items as a statistic."""
    return lambda index: float(values[index].mean()) if len(index) else float("nan")


@dataclasses.dataclass(frozen=True)
class Contrast:
    """A paired difference with its interval. detectable: what 80 % power would find at 5 %.

    One group alone gives no interval and nothing to detect by: None, and p is 1. Groups that all
    differ by the same amount show no spread, so what could be detected is not known either.
    """

    difference: float
    low: float | None
    high: float | None
    p: float
    detectable: float | None


def contrast(
    groups: Sequence[str],
    a: np.ndarray,
    b: np.ndarray,
    *,
    runs: Sequence[int] | None = None,
    seed: int = 0,
    resamples: int = 2000,
) -> Contrast:
    """Compare two methods on the same items: mean of a - b, bootstrap as in `interval`, two-sided p."""
    names, place = np.unique(np.asarray(groups), return_inverse=True)
    seeds, run = np.unique(np.zeros(len(place)) if runs is None else runs, return_inverse=True)
    sums, counts = np.zeros((2, len(names), len(seeds)))
    np.add.at(sums, (place, run), a - b)
    np.add.at(counts, (place, run), 1)
    mean = float(sums.sum() / counts.sum())
    if len(names) < 2:
        return Contrast(mean, None, None, 1.0, None)
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, len(names), (resamples, len(names)))[..., None]
    some = np.arange(len(seeds))
    if len(seeds) > 1:
        some = rng.integers(0, len(seeds), (resamples, 1, len(seeds)))
    means = sums[drawn, some].sum((1, 2)) / counts[drawn, some].sum((1, 2))
    low, high = np.percentile(means, [2.5, 97.5])
    # The share of resamples on the far side of 0, never below what the resamples can tell.
    tail = min((means <= 0).mean(), (means >= 0).mean())
    p = min(1.0, max(2 * tail, 1 / resamples))
    return Contrast(mean, float(low), float(high), float(p), 2.8 * float(means.std()) or None)


def holm(p: Sequence[float]) -> list[float]:
    """Return p values corrected for their number (Holm 1979), in the order given.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    corrected, least = [0.0] * len(p), 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        least = max(least, min(1.0, (len(p) - rank) * p[i]))
        corrected[i] = least
    return corrected
