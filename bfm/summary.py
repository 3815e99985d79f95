# SPDX-License-Identifier: Apache-2.0
"""Result lines -> the table, contrasts and notes of an evaluation. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bfm.choosing import CONTROLS
from bfm.intervals import Contrast, contrast, holm, interval, mean

GAP, GAP_LOW = 0.15, 0.05  # oracle evidence must beat no memory by so much to tell anything
MOST_ERRORS = 0.02
# What became of an answer; anything else is a failure. All count in the denominator.
ANSWERED = ("ok", "truncated", "unparsed", "unfinished")

Lines = Sequence[dict[str, Any]]


def by_method(results: Lines) -> dict[str, Lines]:
    """Group result lines by method, in the order of first appearance."""
    groups: dict[str, list] = defaultdict(list)
    for line in results:
        groups[line["method"]].append(line)
    return groups


def by_example(results: Lines) -> dict[str, Lines]:
    """Group result lines by question id, in the order of first appearance."""
    groups: dict[str, list] = defaultdict(list)
    for line in results:
        groups[line["id"]].append(line)
    return groups


def rows(results: Lines, data: str) -> list[dict[str, Any]]:
    """Return one row a method: accuracy and log p of the right answer with 95 % intervals, costs.

    accuracy is exact match for free answers, beside their F1. The last row is the control that always
    names the letter which is right most often.
    """
    made = []
    for method, lines in by_method(results).items():
        accuracy, low, high = spread(lines, column(lines, "correct"))
        known = [line for line in lines if line["logp"] is not None]
        logp = (None, None, None)
        if len(known) == len(lines):
            logp = spread(lines, column(lines, "logp"))
        overlaps = (None, None, None)
        if free := [i for i, line in enumerate(lines) if line.get("f1") is not None]:
            part = [lines[i] for i in free]
            overlaps = spread(part, column(part, "f1"))
        masses = [line["mass"] for line in lines if line.get("mass") is not None]
        recalls = [line["recall"] for line in lines if line["recall"] is not None]
        seconds = column(lines, "seconds")
        made.append({
            "method": method, "data": data, "accuracy": accuracy, "low": low, "high": high,
            "n": len(lines), "logp": logp[0], "logp_low": logp[1], "logp_high": logp[2],
            "f1": overlaps[0], "f1_low": overlaps[1], "f1_high": overlaps[2],
            "mass": float(np.mean(masses)) if masses else None,
            "tokens": float(column(lines, "tokens").mean()),
            "turns": float(np.mean([len(line["evidence"]) for line in lines])),
            "open": float(column(lines, "gate").mean()),
            "recall": float(np.mean(recalls)) if recalls and method not in CONTROLS else None,
            "errors": sum(line["status"] not in ANSWERED for line in lines),
            "truncated": sum(line["dropped"] > 0 for line in lines),
            **{s: sum(line["status"] == s for line in lines) for s in ANSWERED[2:]},
            "calls": float(column(lines, "calls").mean()),
            "p50_s": float(np.percentile(seconds, 50)), "p95_s": float(np.percentile(seconds, 95)),
            "control": method in CONTROLS,
        })  # fmt: skip
    return [*made, *_majority(results, data)]


def _majority(results: Lines, data: str) -> list[dict[str, Any]]:
    """Return the row of the control that knows which letter is right most often (rule of every MCQ)."""
    if not results:
        return []
    lines = [line for line in next(iter(by_method(results).values())) if line.get("gold", -1) >= 0]
    if not lines:
        return []
    gold = np.array([line["gold"] for line in lines])
    right = (gold == np.bincount(gold).argmax()).astype(float)
    accuracy, low, high = spread(lines, right)
    return [{"method": "majority letter", "data": data, "accuracy": accuracy, "low": low,
             "high": high, "n": len(lines), "errors": 0, "control": True}]  # fmt: skip


def column(lines: Lines, name: str) -> np.ndarray:
    """Return a field of all lines as float64."""
    return np.array([line[name] for line in lines], np.float64)


def spread(lines: Lines, values: np.ndarray) -> tuple[float | None, float | None, float | None]:
    """Return the mean of a value a line with its interval: by user and by training of the policy."""
    return spread_of(lines, mean(values))


def spread_of(
    lines: Lines, statistic: Callable[[np.ndarray], float]
) -> tuple[float | None, float | None, float | None]:
    """Return a statistic of the lines with its interval: by user and by training of the policy."""
    return interval([line["group"] for line in lines], statistic, runs=_runs(lines))


def paired(lines: Lines, a: np.ndarray, b: np.ndarray) -> Contrast:
    """Compare two values a line, by user and by training of the policy."""
    return contrast([line["group"] for line in lines], a, b, runs=_runs(lines))


def _runs(lines: Lines) -> list[int] | None:
    runs = [line.get("seed", 0) for line in lines]
    return runs if len(set(runs)) > 1 else None


def outcomes(lines: Lines) -> np.ndarray:
    """Return how good each answer is, 0 to 1: F1 of a free answer, else whether it is right."""
    return np.array(
        [line["correct"] if line.get("f1") is None else line["f1"] for line in lines], np.float64
    )


def contrasts(results: Lines, pairs: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return paired differences of the declared pairs by each measure, corrected together (Holm)."""
    lines, made = by_method(results), []
    for a, b in pairs:
        ours, theirs = shared(lines[a], lines[b])
        for metric, name in (("accuracy", "correct"), ("f1", "f1"), ("logp", "logp")):
            if not ours or any(line.get(name) is None for line in (*ours, *theirs)):
                continue
            found = paired(ours, column(ours, name), column(theirs, name))
            made.append({
                "a": a, "b": b, "metric": metric, "difference": found.difference,
                "low": found.low, "high": found.high, "p": found.p, "detectable": found.detectable,
            })  # fmt: skip
    for row, p in zip(made, holm([row["p"] for row in made]), strict=True):
        row["p_holm"] = p
    return made


def shared(a: Lines, b: Lines) -> tuple[Lines, Lines]:
    """Return the lines of two methods on the questions that both answered."""
    if len(a) == len(b):
        return a, b
    asked = [{(line["id"], line.get("seed")) for line in own} for own in (a, b)]
    both = asked[0] & asked[1]
    return tuple([line for line in own if (line["id"], line.get("seed")) in both] for own in (a, b))


def unread(line: Mapping[str, Any]) -> bool:
    """Say whether a method chose turns of which not one fitted."""
    return line.get("dropped", 0) > 0 and not line["memory_tokens"]


def notes(
    results: Lines, table: Sequence[dict[str, Any]], methods: Sequence[str]
) -> tuple[list[str], bool]:
    """Return what a reader of the table must know, and whether the run is valid."""
    found, lines = [], by_method(results)
    asked = {m: len({line["id"] for line in lines[m]}) for m in methods}  # once for all seeds
    total = max(asked.values(), default=0)
    for n in sorted(set(asked.values()) - {total}):
        names = ", ".join(m for m in methods if asked[m] == n)
        found.append(f"{names}: by options, which {n:,} of {total:,} questions have.")
    if blind := [(m, n) for m, own in lines.items() if (n := sum(map(unread, own)))]:
        named, most = ", ".join(f"{m} {n:,}" for m, n in blind), max(map(len, lines.values()))
        found.append(
            f"Read nothing, for no turn that was chosen fits eval.budget (full and the oracles: "
            f"train.tokens), answers of {most:,}: {named}. Raise it, or set unit=message."
        )
    errors = sum(row["errors"] for row in table)
    valid = errors <= MOST_ERRORS * len(results)
    if not valid:
        found.append(f"This run is invalid: {errors} of {len(results)} answers failed.")
    if "evidence" in lines and all(line["recall"] is None for line in lines["evidence"]):
        found.append("No example names its evidence, so the row 'evidence' reads nothing.")
    elif "evidence" in lines and "none" in lines:
        gap = paired(lines["none"], outcomes(lines["evidence"]), outcomes(lines["none"]))
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
