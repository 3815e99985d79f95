# SPDX-License-Identifier: Apache-2.0
"""Intervals by resampling whole groups (users), because questions of one user are not independent."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

RESAMPLES = 1000


def interval(
    groups: Sequence[str],
    statistic: Callable[[np.ndarray], float],
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> tuple[float, float, float]:
    """Return a statistic of all items with the 2.5th and 97.5th percentile of its bootstrap.

    groups[i] is the group of item i; statistic takes an array of item indices (with repeats). nan
    where it is undefined on everything; undefined resamples are left out.
    """
    names = sorted(set(groups))
    members = {name: [] for name in names}
    for i, name in enumerate(groups):
        members[name].append(i)
    parts = [np.asarray(members[name]) for name in names]
    value = float(statistic(np.arange(len(groups))))
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(resamples):
        chosen = rng.integers(0, len(parts), len(parts))
        drawn.append(float(statistic(np.concatenate([parts[k] for k in chosen]))))
    drawn = [x for x in drawn if not np.isnan(x)]
    if not drawn:
        return value, float("nan"), float("nan")
    low, high = np.percentile(drawn, [2.5, 97.5])
    return value, float(low), float(high)


def f1(hits: np.ndarray, found: np.ndarray, wanted: np.ndarray) -> Callable[[np.ndarray], float]:
    """Return the micro F1 over items as a statistic: 2 hits / (found + wanted); nan without either."""

    def statistic(index: np.ndarray) -> float:
        total = found[index].sum() + wanted[index].sum()
        return 2.0 * hits[index].sum() / total if total else float("nan")

    return statistic


def mean(values: np.ndarray) -> Callable[[np.ndarray], float]:
    """Return the mean over items as a statistic."""
    return lambda index: float(values[index].mean()) if len(index) else float("nan")
