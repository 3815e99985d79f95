# SPDX-License-Identifier: Apache-2.0
"""The parts of a report about saliency and the gate: do they find what is needed?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bfm import plots
from bfm.intervals import area
from bfm.report_cells import Row, Section, Table, complete, number, ranged


def recall(found: Mapping[str, Any]) -> Section:
    title, ceiling = "Evidence recall at K", found.get("oracle_in_k")
    pairs = [pair for pair in found.get("recall_at_k") or () if complete(pair, (0, 1))]
    if not pairs:
        return Section(title, "The data has no labelled evidence, or no shortlist was made.")
    text = (
        "Share of the labelled evidence turns that the pre-filter (Sal_q) keeps among its K turns."
    )
    if ceiling is not None:
        text += " The dashed line is the ceiling: the oracle held to the shortlist."
    rows = [(f"{k:g}", number(recall, "{:.1f}", 100)) for k, recall in pairs]
    if ceiling is not None:
        rows.append(("oracle within K", number(ceiling, "{:.1f}", 100)))
    svg = plots.recall_at_k(pairs, ceiling)
    return Section(title, text, (Table(("K", "recall, %"), rows),), (svg,))


def reliability(
    part: Sequence[Sequence[float]], apart: Sequence[float | None] | None = None
) -> Section:
    part = [line for line in part if line[2] > 0]
    if not part:
        return Section("Gate reliability", "No gate with a probability was run.")
    text = (
        "Points on the dotted line: the gate's probability means what it says. The area of a point "
        "grows with its questions; bars are 95 % intervals that take questions as independent."
    )
    if apart and apart[0] is not None:
        text += (
            " The probability is higher for the question that has evidence in "
            f"{ranged(*apart, '{:.1f}', 100)} % of all pairs of one with and one without "
            "(50 % would be chance)."
        )
    rows = [tuple(number(v, f) for v, f in zip(line, ("{:.3f}", "{:.3f}", "{:,g}"), strict=False))
            for line in part]  # fmt: skip
    table = Table(("predicted", "needed", "n"), rows, names=0)
    return Section("Gate reliability", text, (table,), (plots.reliability(part),))


def saliency(found: Mapping[str, Any]) -> Section:
    title = "Saliency of evidence against other turns"
    evidence, other = ([v for v in found.get(key) or () if v is not None]
                       for key in ("saliency_evidence", "saliency_other"))  # fmt: skip
    if not evidence or not other:
        return Section(title, "Sal_q of evidence and of other turns was not recorded.")
    values = np.array([*evidence, *other], np.float64)
    places = np.arange(len(values))
    share = area(values, places < len(evidence))(places)
    text = (
        f"Sal_q of an evidence turn exceeds that of another turn in {100 * share:.1f} % of all pairs "
        "(50 % would be chance; pairs are of turns of any two histories)."
    )
    rows = [(name, f"{len(v):,}", *(f"{x:+.3f}" for x in np.percentile(v, (5, 25, 50, 75, 95))))
            for name, v in (("evidence", evidence), ("other", other))]  # fmt: skip
    table = Table(("turns", "n", "5 %", "25 %", "median", "75 %", "95 %"), rows)
    return Section(title, text, (table,), (plots.two_distributions(evidence, other),))


def agreement(part: Sequence[Row]) -> Section:
    rows = [(str(r["stratum"]), ranged(r["rho"], r.get("low"), r.get("high"), "{:+.3f}"),
             number(r.get("n"), "{:,g}")) for r in part]  # fmt: skip
    text = (
        "Spearman's rank correlation within a history, averaged over a stratum. 1: the proxy ranks "
        "turns as the oracle does; 0: it says nothing about them."
    )
    table = Table(("stratum", "rho", "n"), rows)
    svg = plots.dots(part, "stratum", "rho", "rank correlation of Sal_q with Sal_a")
    return Section("Rank agreement of Sal_q with Sal_a", text, (table,), (svg,))


def separation(part: Sequence[Row]) -> Section:
    title = "Does saliency order the evidence first?"
    shown = {"sal_q": "Sal_q", "sal_a": "Sal_a"}
    rows = [(shown.get(r["score"], r["score"]), str(r["stratum"]),
             ranged(r["auc"], r.get("low"), r.get("high"), "{:.2f}"),
             ranged(r.get("difference"), r.get("difference_low"), r.get("difference_high"), "{:+.2f}"),
             number(r.get("n"), "{:,g}")) for r in part]  # fmt: skip
    text = (
        "Share of pairs of an evidence turn and another turn of the same history that the score "
        "orders right (area under the curve; 0.5 is chance), averaged over histories. Sal_a is the "
        "shared reader's and knows the answer; Sal_q is the base model's; the others are the methods "
        "of that name. The difference is paired, by history."
    )
    return Section(
        title, text, (Table(("score", "stratum", "area", "minus Sal_q", "n"), rows, names=2),)
    )
