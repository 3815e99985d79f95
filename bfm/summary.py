# SPDX-License-Identifier: Apache-2.0
"""Result lines -> the table, contrasts and diagnosis of an evaluation. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import rankdata

from bfm.choosing import CONTROLS
from bfm.intervals import Contrast, contrast, holm, interval, mean
from bfm.prompts import LETTERS

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
    return interval([line["group"] for line in lines], mean(values), runs=_runs(lines))


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
    total = max(map(len, lines.values()), default=0)
    for n in sorted({len(lines[m]) for m in methods} - {total}):
        names = ", ".join(m for m in methods if len(lines[m]) == n)
        found.append(f"{names}: by options, which {n:,} of {total:,} questions have.")
    if blind := [(m, n) for m, own in lines.items() if (n := sum(map(unread, own)))]:
        named = ", ".join(f"{m} {n:,}" for m, n in blind)
        found.append(
            f"Read nothing, for no turn that was chosen fits eval.budget (full and the oracles: "
            f"train.tokens), questions of {total:,}: {named}. Raise it, or set unit=message."
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


def diagnosis(
    results: Lines,
    scores: Sequence[Mapping[str, Any]],
    evidence: Sequence[Sequence[int]],
    k: int,
) -> dict[str, Any]:
    """Return how well saliency finds evidence, and how well the gate knows when to open.

    scores: the lines of saliency.jsonl; they and evidence are by example, in the order of the result
    lines.
    """
    sal_q, sal_a = ([line[name] for line in scores] for name in ("sal_q", "sal_a"))
    labelled = [i for i, turns in enumerate(evidence) if turns and sal_q[i] is not None]
    lines = by_method(results)
    first = max(lines.values(), key=len, default=[])  # of a method that answered every question
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
    pairs = zip(sal_q, sal_a, strict=True)
    both = [None if q is None or a is None else agreement(q, a) for q, a in pairs]
    found["rank_agreement"] = [{"rho": v, **row} for v, row in by_stratum(first, both)]
    found["separation"] = separations(first, scores, evidence)
    if "bfm" in lines:
        opened = [(line["open_probability"], bool(turns))
                  for line, turns in zip(lines["bfm"], evidence, strict=True)]  # fmt: skip
        found["reliability"] = reliability(opened)
    sizes = [line["n_turns"] for line in first]
    pairs = list(zip(evidence, sizes, strict=True))
    found["by_length"] = binned(lines, sizes, "turns")
    # From the newest evidence to the question, and the share of turns that are evidence.
    ago = [n - max(turns) if turns else None for turns, n in pairs]
    found["by_distance"] = binned(lines, ago, "turns ago")
    found["by_density"] = binned(lines, [len(t) / n if t else None for t, n in pairs], "of turns")
    found["by_position"] = by_position(lines)
    found["cost"] = cost(lines, sizes)
    return found


def agreement(sal_q: Sequence[float], sal_a: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation of two saliencies of one history; None where it is undefined.

    >>> round(agreement([1.0, 2.0, 3.0], [0.1, 0.5, 0.9]), 6)
    1.0
    """
    if len(sal_q) < 3 or len(set(sal_q)) < 2 or len(set(sal_a)) < 2:
        return None
    return float(np.corrcoef(rankdata(sal_q), rankdata(sal_a))[0, 1])


def separations(
    first: Lines, scores: Sequence[Mapping[str, Any]], evidence: Sequence[Sequence[int]]
) -> list[dict[str, Any]]:
    """Return how well each score orders the evidence first, over all and by stratum.

    The rows over all also compare it with Sal_q on the same histories (`difference`, paired).
    """
    areas = {
        name: [None if line.get(name) is None else separation(line[name], own)
               for line, own in zip(scores, evidence, strict=True)]
        for name in dict.fromkeys(n for line in scores for n in line if n not in ("id", "seed"))
    }  # fmt: skip
    made = []
    for name, own in areas.items():
        rows = [{"score": name, "auc": value, **row} for value, row in by_stratum(first, own)]
        pairs = [
            (line, a, b)
            for line, a, b in zip(first, own, areas["sal_q"], strict=True)
            if a is not None and b is not None
        ]
        if rows and pairs and name != "sal_q":
            lines, a, b = zip(*pairs, strict=True)
            against = paired(lines, np.array(a), np.array(b))
            rows[0] |= {"difference": against.difference,
                        "difference_low": against.low, "difference_high": against.high}  # fmt: skip
        made += rows
    return made


def separation(scores: Sequence[float | None], evidence: Sequence[int]) -> float | None:
    """Return the share of (evidence, other) pairs of turns that the score orders right, ties half.

    The area under the curve of one history; None without evidence or without other turns. A turn
    without a score comes last.

    >>> separation([0.5, 2.0, 0.5], [1])
    1.0
    """
    scores = [-np.inf if s is None else s for s in scores]
    inside = np.array([scores[t] for t in evidence])
    outside = np.array([s for t, s in enumerate(scores) if t not in evidence])
    if not len(inside) or not len(outside):
        return None
    above = (inside[:, None] > outside).mean() + 0.5 * (inside[:, None] == outside).mean()
    return float(above)


def by_stratum(first: Lines, values: Sequence[float | None]) -> list[tuple[float, dict[str, Any]]]:
    """Return the mean of a property of the examples over all and by stratum, with 95 % intervals.

    first: the lines of one method, which name stratum and group of every example.
    """
    known = [i for i, value in enumerate(values) if value is not None]
    parts: dict[str, list[int]] = {"all": known}
    strata = sorted({first[i]["stratum"] for i in known})
    for stratum in strata if len(strata) > 1 else ():
        parts[stratum or "(none)"] = [i for i in known if first[i]["stratum"] == stratum]
    made = []
    for name, chosen in parts.items():
        if chosen:
            value, low, high = spread(
                [first[i] for i in chosen], np.array([values[i] for i in chosen])
            )
            made.append((value, {"stratum": name, "low": low, "high": high, "n": len(chosen)}))
    return made


def by_position(lines: dict[str, Lines]) -> list[dict[str, Any]]:
    """Return accuracy by the letter of the right option: a reader that prefers letters shows here."""
    made = []
    for method, own in compared(lines):
        chosen: dict[int, list] = defaultdict(list)
        for line in own:
            if line.get("gold", -1) >= 0:
                chosen[line["gold"]].append(line)
        made += [_bin(method, LETTERS[gold], chosen[gold]) for gold in sorted(chosen)]
    return made


def cost(lines: dict[str, Lines], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Return p50 and p95 of seconds a question by length of the history: three bins of examples."""
    made = []
    for method, own in compared(lines):
        for chosen in thirds(sizes):
            p50, p95 = np.percentile([own[i]["seconds"] for i in chosen], [50, 95])
            made.append({
                "method": method, "turns": float(np.mean([sizes[i] for i in chosen])),
                "p50_s": float(p50), "p95_s": float(p95), "n": len(chosen),
            })  # fmt: skip
    return made


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
    sizes = np.array([values[i] for i in known], np.float64)
    made = []
    for method, own in compared(lines):
        for chosen in thirds(sizes):
            least, most = sizes[chosen].min(), sizes[chosen].max()
            span = f"{least:.3g}" if least == most else f"{least:.3g} to {most:.3g}"
            made.append(_bin(method, f"{span} {unit}".strip(), [own[known[k]] for k in chosen]))
    return made


def compared(lines: dict[str, Lines]) -> list[tuple[str, Lines]]:
    """Return the methods that read and answered every question, with their lines."""
    most = max(map(len, lines.values()), default=0)
    return [(m, own) for m, own in lines.items() if m not in CONTROLS and len(own) == most]


def thirds(values: Sequence[float]) -> list[np.ndarray]:
    """Return the indices of values in three bins of about equal numbers; equal values share one."""
    if not len(values):
        return []
    edges = np.unique(np.quantile(values, [0, 1 / 3, 2 / 3, 1]))
    place = np.clip(np.searchsorted(edges, values, "right") - 1, 0, max(0, len(edges) - 2))
    return [np.flatnonzero(place == b) for b in np.unique(place)]


def _bin(method: str, name: str, part: Lines) -> dict[str, Any]:
    accuracy, low, high = spread(part, column(part, "correct"))
    return {"method": method, "bin": name, "accuracy": accuracy, "low": low, "high": high,
            "n": len(part)}  # fmt: skip
