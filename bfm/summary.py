# SPDX-License-Identifier: Apache-2.0
"""Result lines -> the table, contrasts and diagnosis of an evaluation. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from bfm.evaluation import CONTROLS
from bfm.intervals import contrast, holm, interval, mean

GAP, GAP_LOW = 0.15, 0.05  # oracle evidence must beat no memory by so much to tell anything
MOST_ERRORS = 0.02

Lines = Sequence[dict[str, Any]]


def by_method(results: Lines) -> dict[str, Lines]:
    """Group result lines by method, in the order of first appearance."""
    groups: dict[str, list] = defaultdict(list)
    for line in results:
        groups[line["method"]].append(line)
    return groups


def rows(results: Lines, data: str) -> list[dict[str, Any]]:
    """Return one row a method: accuracy and log p of the right option with 95 % intervals, costs."""
    made = []
    for method, lines in by_method(results).items():
        groups = [line["group"] for line in lines]
        accuracy, low, high = interval(groups, mean(column(lines, "correct")))
        known = [line for line in lines if line["logp"] is not None]
        logp = (None, None, None)
        if len(known) == len(lines):
            logp = interval(groups, mean(column(lines, "logp")))
        recalls = [line["recall"] for line in lines if line["recall"] is not None]
        seconds = column(lines, "seconds")
        made.append({
            "method": method, "data": data, "accuracy": accuracy, "low": low, "high": high,
            "n": len(lines), "logp": logp[0], "logp_low": logp[1], "logp_high": logp[2],
            "tokens": float(column(lines, "tokens").mean()),
            "turns": float(np.mean([len(line["evidence"]) for line in lines])),
            "open": float(column(lines, "gate").mean()),
            "recall": float(np.mean(recalls)) if recalls and method not in CONTROLS else None,
            "errors": sum(line["status"] not in ("ok", "truncated") for line in lines),
            "calls": float(column(lines, "calls").mean()),
            "p50_s": float(np.percentile(seconds, 50)), "p95_s": float(np.percentile(seconds, 95)),
            "control": method in CONTROLS,
        })  # fmt: skip
    return made


def column(lines: Lines, name: str) -> np.ndarray:
    """Return a field of all lines as float64."""
    return np.array([line[name] for line in lines], np.float64)


def contrasts(results: Lines, pairs: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return paired differences of the declared pairs, accuracy and logp, corrected together (Holm)."""
    lines, made = by_method(results), []
    for a, b in pairs:
        groups = [line["group"] for line in lines[a]]
        for metric, name in (("accuracy", "correct"), ("logp", "logp")):
            if any(line[name] is None for line in (*lines[a], *lines[b])):
                continue
            found = contrast(groups, column(lines[a], name), column(lines[b], name))
            made.append({
                "a": a, "b": b, "metric": metric, "difference": found.difference,
                "low": found.low, "high": found.high, "p": found.p, "detectable": found.detectable,
            })  # fmt: skip
    for row, p in zip(made, holm([row["p"] for row in made]), strict=True):
        row["p_holm"] = p
    return made


def notes(results: Lines, table: Sequence[dict[str, Any]]) -> tuple[list[str], bool]:
    """Return what a reader of the table must know, and whether the run is valid."""
    found, lines = [], by_method(results)
    errors = sum(row["errors"] for row in table)
    valid = errors <= MOST_ERRORS * len(results)
    if not valid:
        found.append(f"This run is invalid: {errors} of {len(results)} answers failed.")
    if "evidence" in lines and "none" in lines:
        gap = contrast(
            [line["group"] for line in lines["none"]],
            column(lines["evidence"], "correct"), column(lines["none"], "correct"),
        )  # fmt: skip
        if gap.difference < GAP or gap.low is None or gap.low < GAP_LOW:
            span = "one user, no interval"
            if gap.low is not None:
                span = f"{100 * gap.low:.1f} to {100 * gap.high:.1f}"
            found.append(
                f"Uninformative for this model: labelled evidence beats no memory by "
                f"{100 * gap.difference:.1f} points ({span}); it takes {100 * GAP:.0f}, and at least "
                f"{100 * GAP_LOW:.0f} at the interval's lower end."
            )
    return found, valid


def diagnosis(
    results: Lines, sal_q: Sequence[Sequence[float]], evidence: Sequence[Sequence[int]], k: int
) -> dict[str, Any]:
    """Return how well Sal_q finds evidence, and how well the gate knows when to open.

    sal_q and evidence are by example, in the order of the result lines.
    """
    labelled = [i for i, turns in enumerate(evidence) if turns]
    found: dict[str, Any] = {"saliency_evidence": [], "saliency_other": []}
    ranks = {}
    for i in labelled:
        order = sorted(range(len(sal_q[i])), key=lambda t, i=i: (-sal_q[i][t], t))
        ranks[i] = [order.index(t) for t in evidence[i]]
        for t, value in enumerate(sal_q[i]):
            name = "saliency_evidence" if t in evidence[i] else "saliency_other"
            found[name].append(round(value, 4))
    if labelled:
        found["recall_at_k"] = [
            [n, float(np.mean([np.mean([r < n for r in ranks[i]]) for i in labelled]))]
            for n in sorted({1, 2, 3, 5, k, 20})
        ]
        found["oracle_in_k"] = float(np.mean([all(r < k for r in ranks[i]) for i in labelled]))
    lines = by_method(results)
    if "bfm" in lines:
        opened = [(line["open_probability"], bool(turns))
                  for line, turns in zip(lines["bfm"], evidence, strict=True)]  # fmt: skip
        found["reliability"] = reliability(opened)
    sizes = [len(scores) for scores in sal_q]
    pairs = list(zip(evidence, sizes, strict=True))
    found["by_length"] = binned(lines, sizes, "turns")
    # From the newest evidence to the question, and the share of turns that are evidence.
    ago = [n - max(turns) if turns else None for turns, n in pairs]
    found["by_distance"] = binned(lines, ago, "turns ago")
    found["by_density"] = binned(lines, [len(t) / n if t else None for t, n in pairs], "of turns")
    return found


def reliability(opened: Sequence[tuple[float, bool]], bins: int = 5) -> list[list[float]]:
    """Return [mean predicted probability of opening, share that had evidence, n] by bin."""
    parts: dict[int, list] = defaultdict(list)
    for probability, needed in opened:
        parts[min(bins - 1, int(probability * bins))].append((probability, needed))
    return [
        [float(np.mean([p for p, _ in part])), float(np.mean([n for _, n in part])), len(part)]
        for _, part in sorted(parts.items())
    ]


def binned(
    lines: dict[str, Lines], values: Sequence[float | None], unit: str
) -> list[dict[str, Any]]:
    """Return accuracy by a property of the examples: three bins of about equal numbers of them.

    values[i] belongs to example i; None leaves it out. `unit` ends a bin's name.
    """
    known = [i for i, value in enumerate(values) if value is not None]
    if not known:
        return []
    sizes = np.array([values[i] for i in known], np.float64)
    edges = np.unique(np.quantile(sizes, [0, 1 / 3, 2 / 3, 1]))
    place = np.clip(np.searchsorted(edges, sizes, "right") - 1, 0, max(0, len(edges) - 2))
    made = []
    for method, own in lines.items():
        if method in CONTROLS:
            continue
        for b in np.unique(place):
            chosen = np.flatnonzero(place == b)
            part = [own[known[k]] for k in chosen]
            value, low, high = interval(
                [line["group"] for line in part], mean(column(part, "correct"))
            )
            least, most = sizes[chosen].min(), sizes[chosen].max()
            span = f"{least:.3g}" if least == most else f"{least:.3g} to {most:.3g}"
            made.append({
                "method": method, "bin": f"{span} {unit}".strip(), "accuracy": value,
                "low": low, "high": high, "n": len(part),
            })  # fmt: skip
    return made
