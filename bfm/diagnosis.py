# SPDX-License-Identifier: Apache-2.0
"""Why a table is as it is: do saliencies find the evidence, does the gate know when to open. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import rankdata

from bfm.choosing import CONTROLS
from bfm.intervals import area
from bfm.prompts import LETTERS
from bfm.summary import Lines, by_method, column, paired, spread, spread_of


def diagnose(
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
        opened = np.array([line["open_probability"] for line in lines["bfm"]], np.float64)
        needed = np.array([bool(turns) for turns in evidence])
        found["reliability"] = reliability(list(zip(opened, needed, strict=True)))
        found["gate_area"] = spread_of(lines["bfm"], area(opened, needed))
    sizes = [line["n_turns"] for line in first]
    pairs = list(zip(evidence, sizes, strict=True))
    found["by_length"] = binned(lines, sizes, "turns")
    # From the newest evidence to the question, and the share of turns that are evidence.
    ago = [n - max(turns) if turns else None for turns, n in pairs]
    found["by_distance"] = binned(lines, ago, "turns ago")
    found["by_density"] = binned(lines, [len(t) / n if t else None for t, n in pairs], "of turns")
    found["by_position"] = parted(
        lines, lambda line: LETTERS[line["gold"]] if line.get("gold", -1) >= 0 else None
    )
    kinds = {line["stratum"] for line in first}
    found["by_stratum"] = (
        parted(lines, lambda line: line["stratum"] or "(none)") if len(kinds) > 1 else []
    )
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
    inside = np.isin(np.arange(len(scores)), evidence)
    known = np.array([-np.inf if s is None else s for s in scores], np.float64)
    value = area(known, inside)(np.arange(len(scores)))
    return None if np.isnan(value) else value


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


def parted(
    lines: Mapping[str, Lines], part_of: Callable[[Mapping[str, Any]], str | None]
) -> list[dict[str, Any]]:
    """Return accuracy by part of the examples, parts in the order of their names; None leaves one out.

    By the letter of the right option, a reader that prefers letters shows.
    """
    made = []
    for method, own in compared(lines):
        chosen: dict[str, list] = defaultdict(list)
        for line in own:
            if (name := part_of(line)) is not None:
                chosen[name].append(line)
        made += [_bin(method, name, chosen[name]) for name in sorted(chosen)]
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


def compared(lines: Mapping[str, Lines]) -> list[tuple[str, Lines]]:
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
    found = {"method": method, "bin": name, "accuracy": accuracy, "low": low, "high": high,
             "n": len(part)}  # fmt: skip
    if all(line.get("f1") is not None for line in part):
        # Free answers: few are the same word for word.
        overlap = spread(part, column(part, "f1"))
        found |= dict(zip(("f1", "f1_low", "f1_high"), overlap, strict=True))
    return found
