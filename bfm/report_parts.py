# SPDX-License-Identifier: Apache-2.0
"""The parts of a report: what each says, its tables as plain text, its plots.

A part whose numbers are absent says in one sentence what is missing, and draws nothing.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from bfm import plots

Row = Mapping[str, Any]

# What became of a question, in the order of the table; `outcome` chooses.
OUTCOMES = (
    "right, read the evidence",
    "right, read part of the evidence",
    "right without the evidence",
    "right",
    "tie",
    "wrong, did not open the memory",
    "wrong, evidence missed",
    "wrong, read part of the evidence",
    "wrong, read the evidence",
    "wrong",
    "no answer",
)


# Further columns of the first table: heading, field of a row, format, factor.
COLUMNS = (
    ("mass on letters, %", "mass", "{:.1f}", 100),
    ("tokens", "tokens", "{:,.0f}", 1),
    ("turns read", "turns", "{:.1f}", 1),
    ("gate open, %", "open", "{:.1f}", 100),
    ("evidence recall, %", "recall", "{:.1f}", 100),
    ("n", "n", "{:,g}", 1),
    ("unparsed", "unparsed", "{:,g}", 1),
    ("unfinished", "unfinished", "{:,g}", 1),
    ("errors", "errors", "{:,g}", 1),
    ("calls", "calls", "{:,g}", 1),
    ("p50, s", "p50_s", "{:.3g}", 1),
    ("p95, s", "p95_s", "{:.3g}", 1),
)


@dataclasses.dataclass(frozen=True)
class Table:
    """Cells are plain text; the first `names` columns are names, the others numbers."""

    head: tuple[str, ...]
    rows: list[tuple[str, ...]]
    names: int = 1
    bold: frozenset[tuple[int, int]] = frozenset()


@dataclasses.dataclass(frozen=True)
class Section:
    title: str
    text: str
    tables: tuple[Table, ...] = ()
    svgs: tuple[str, ...] = ()


def outcome(correct: float, gate: int | None, recall: float | None, status: str, read: int) -> str:
    """Return what became of one question, one of OUTCOMES; `read` counts the turns shown."""
    if status not in ("ok", "truncated", "unfinished"):
        return "no answer"
    if 0 < correct < 1:
        return "tie"
    verdict = "right" if correct else "wrong"
    if not correct and not read and not gate:
        return "wrong, did not open the memory"
    if recall is None:
        return verdict
    if recall >= 1:
        return verdict + ", read the evidence"
    if recall > 0:
        return verdict + ", read part of the evidence"
    return "right without the evidence" if correct else "wrong, evidence missed"


def sections(summary: Mapping[str, Any], results: Sequence[Row]) -> list[Section]:
    """Return the parts of a report, in order; a part without numbers says what is missing."""
    rows, found = summary.get("rows") or [], summary.get("diagnosis") or {}
    names = {row["method"]: bool(row.get("control")) for row in rows}
    drawn = sorted(names, key=lambda name: names[name])[: plots.SERIES]  # controls last
    bins = ("method", "bin", "accuracy", "n")
    by_bin = lambda title, key, xlabel: _part(  # noqa: E731
        title, found.get(key), bins, f"Accuracy was not measured by {xlabel}.",
        lambda part: Section(
            title, "Percent right with 95 % intervals." + _drawn(part, drawn),
            (_bin_table(part),), (plots.lines_by_bin(_of(part, drawn), _in(part, drawn), xlabel, key),),
        ),
    )  # fmt: skip
    return [
        _accuracy(rows, {s["system"] for s in summary.get("systems") or () if not s["measured"]}),
        _tokens(rows),
        _part("Contrasts", summary.get("contrasts"), ("a", "b", "difference"),
              "No contrast was declared for this run.", _contrasts),
        _why(results),
        _recall(found),
        _part("Gate reliability", found.get("reliability"), (0, 1, 2),
              "No gate with a probability was run.", _reliability),
        _saliency(found),
        _part("Rank agreement of Sal_q with Sal_a", found.get("rank_agreement"), ("stratum", "rho"),
              "No turn has both saliencies, so their rankings cannot be compared.", _agreement),
        _part("Does saliency order the evidence first?", found.get("separation"), ("stratum", "auc"),
              "The data has no labelled evidence.", _separation),
        by_bin("Accuracy by distance of the evidence", "by_distance",
               "distance of the evidence, turns back"),
        by_bin("Accuracy by density of the evidence", "by_density", "density of the evidence"),
        by_bin("Accuracy by length of the history", "by_length", "length of the history, turns"),
        by_bin("Accuracy by place of the right option", "by_position", "letter of the right option"),
        _part("Cost of a question", found.get("cost"), ("method", "turns", "p50_s"),
              "Time was not measured at growing histories.", lambda part: _cost(part, drawn)),
        _part("Memory systems", summary.get("systems"), ("system",),
              "No memory system was run.", _systems),
    ]  # fmt: skip


# Parts


def _accuracy(rows: Sequence[Row], unmeasured: Collection[str] = ()) -> Section:
    title = "Accuracy"
    if not rows:
        return Section(title, "No method was run.")
    tables = []
    sets = list(dict.fromkeys(str(row.get("data", "")) for row in rows))
    if len(sets) > 1:  # the shape of the paper's table: a column a data set
        cell = {(row["method"], str(row.get("data", ""))): i for i, row in enumerate(rows)}
        methods = list(dict.fromkeys(row["method"] for row in rows))
        best = {
            i for name in sets for i in _best([r for r in rows if str(r["data"]) == name], rows)
        }
        at = [[cell.get((method, name)) for name in sets] for method in methods]
        tables.append(Table(
            ("method", *sets),
            [(_name(next(r for r in rows if r["method"] == method)),
              *("–" if i is None else _percent(rows[i]) for i in line))
             for method, line in zip(methods, at, strict=True)],
            bold=frozenset((r, c + 1) for r, line in enumerate(at) for c, i in enumerate(line)
                           if i in best),
        ))  # fmt: skip
    for name in sets:
        own = [row for row in rows if str(row.get("data", "")) == name]
        free = any(row.get("f1") is not None for row in own)
        what = "exact match, %" if free else "accuracy, %"
        columns = {
            f"{what} ({name})" if name else what: _percent,
            "F1, %": lambda r: _range(
                r.get("f1"), r.get("f1_low"), r.get("f1_high"), "{:.1f}", 100
            ),
            "log p(right), nats": lambda r: _range(
                r.get("logp"), r.get("logp_low"), r.get("logp_high"), "{:.2f}"
            ),
            **{head: _cell(key, form, scale) for head, key, form, scale in COLUMNS},
        }
        if not free:
            del columns["F1, %"]
        rare = ("mass on letters, %", "unparsed", "unfinished", "errors")
        columns = {
            head: cell for head, cell in columns.items()
            if head not in rare or any(cell(row) not in ("–", "0") for row in own)
        }  # fmt: skip
        tables.append(Table(
            ("method", *columns),
            [(_name(row) + (" (not measured with this model)" if row["method"] in unmeasured else ""),
              *(cell(row) for cell in columns.values())) for row in own],
            bold=frozenset((i, 1) for i in _best(own, own)),
        ))  # fmt: skip
    text = (
        "Percent right with 95 % intervals, from resampling users. Controls say how far the numbers "
        "can be trusted and take no part in the comparison. A best method is bold only where its "
        "interval stands apart from that of every other method. Columns of failures are left out where "
        "there were none; every failure counts as wrong."
    )
    return Section(title, text, tuple(tables))


def _cell(key: str, form: str, scale: float) -> Callable[[Row], str]:
    return lambda row: _number(row.get(key), form, scale)


def _best(own: Sequence[Row], rows: Sequence[Row]) -> list[int]:
    """The index in rows of the best method of `own`, or none where another's interval reaches it."""
    known = [r for r in own if not r.get("control") and _complete(r, ("accuracy", "low", "high"))]
    if len(known) < 2:
        return []
    best = max(known, key=lambda row: row["accuracy"])
    apart = all(best["low"] > row["high"] for row in known if row is not best)
    return [next(i for i, row in enumerate(rows) if row is best)] if apart else []


def _tokens(rows: Sequence[Row]) -> Section:
    title = "Accuracy against tokens read"
    known = [row for row in rows if _complete(row, ("accuracy", "tokens"))]
    if not known:
        return Section(title, "No row has both an accuracy and a number of tokens.")
    sets = list(dict.fromkeys(str(row.get("data", "")) for row in known))
    drawings = [
        plots.accuracy_tokens([r for r in known if str(r.get("data", "")) == s]) for s in sets
    ]
    order = f" In this order: {', '.join(sets)}." if len(sets) > 1 else ""
    text = "Up and to the left is better: more right answers for less reading. Bars are 95 % intervals."
    return Section(title, text + order, (), tuple(drawings))


def _contrasts(part: Sequence[Row]) -> Section:
    rows = []
    for row in part:
        nats = row.get("metric") == "logp"
        form, scale = ("{:+.3f}", 1) if nats else ("{:+.1f}", 100)
        told = row.get("p_holm")
        rows.append((
            f"{row['a']} − {row['b']}", "log p(right), nats" if nats else "accuracy, points",
            _range(row["difference"], row.get("low"), row.get("high"), form, scale),
            _p(row.get("p")), _p(told),
            _number(row.get("detectable"), form.replace("+", ""), scale),
            "–" if told is None else "yes" if told < 0.05 else "no",
        ))  # fmt: skip
    head = (
        "contrast",
        "measure",
        "difference",
        "p",
        "p (Holm)",
        "smallest detectable",
        "told apart",
    )
    text = (
        "Paired differences over the same questions, with 95 % intervals. p (Holm) is corrected for "
        "all contrasts of this table; a true difference below the smallest detectable one would "
        "most often have gone unseen here, so a 'no' does not say that two methods are equal."
    )
    return Section("Contrasts", text, (Table(head, rows, names=2),))


def _why(results: Sequence[Row]) -> Section:
    title = "Why answers were right or wrong"
    if not results:
        return Section(title, "There are no results.")
    counts: dict[str, Counter[str]] = {}
    for row in results:
        verdict = outcome(row["correct"] or 0, row.get("gate"), row.get("recall"), row["status"],
                          len(row.get("evidence") or ()))  # fmt: skip
        counts.setdefault(row["method"], Counter())[verdict] += 1
    seen = [name for name in OUTCOMES if any(count[name] for count in counts.values())]
    rows = [(name, *(_number(count[key] / count.total(), "{:.1f}", 100) for key in seen))
            for name, count in counts.items()]  # fmt: skip
    text = (
        "Percent of questions. 'Evidence' is what the data's authors labelled; it may be missing or "
        "incomplete, and other turns may serve. No method read these labels, controls apart."
    )
    return Section(title, text, (Table(("method", *seen), rows),))


def _recall(found: Mapping[str, Any]) -> Section:
    title, ceiling = "Evidence recall at K", found.get("oracle_in_k")
    pairs = [pair for pair in found.get("recall_at_k") or () if _complete(pair, (0, 1))]
    if not pairs:
        return Section(title, "The data has no labelled evidence, or no shortlist was made.")
    text = (
        "Share of the labelled evidence turns that the pre-filter (Sal_q) keeps among its K turns."
    )
    if ceiling is not None:
        text += " The dashed line is the ceiling: the oracle held to the shortlist."
    rows = [(f"{k:g}", _number(recall, "{:.1f}", 100)) for k, recall in pairs]
    if ceiling is not None:
        rows.append(("oracle within K", _number(ceiling, "{:.1f}", 100)))
    svg = plots.recall_at_k(pairs, ceiling)
    return Section(title, text, (Table(("K", "recall, %"), rows),), (svg,))


def _reliability(part: Sequence[Sequence[float]]) -> Section:
    part = [line for line in part if line[2] > 0]
    if not part:
        return Section("Gate reliability", "No gate with a probability was run.")
    text = (
        "Points on the dotted line: the gate's probability means what it says. The area of a point "
        "grows with its questions; bars are 95 % intervals that take questions as independent."
    )
    rows = [tuple(_number(v, f) for v, f in zip(line, ("{:.3f}", "{:.3f}", "{:,g}"), strict=False))
            for line in part]  # fmt: skip
    table = Table(("predicted", "needed", "n"), rows, names=0)
    return Section("Gate reliability", text, (table,), (plots.reliability(part),))


def _saliency(found: Mapping[str, Any]) -> Section:
    title = "Saliency of evidence against other turns"
    evidence, other = ([v for v in found.get(key) or () if v is not None]
                       for key in ("saliency_evidence", "saliency_other"))  # fmt: skip
    if not evidence or not other:
        return Section(title, "Sal_q of evidence and of other turns was not recorded.")
    ranked = np.sort(np.array(other, float))
    below, upto = (np.searchsorted(ranked, evidence, side=side) for side in ("left", "right"))
    area = float((below + upto).mean() / (2 * len(ranked)))
    text = (
        f"Sal_q of an evidence turn exceeds that of another turn in {100 * area:.1f} % of all pairs "
        "(50 % would be chance; pairs are of turns of any two histories)."
    )
    rows = [(name, f"{len(v):,}", *(f"{x:+.3f}" for x in np.percentile(v, (5, 25, 50, 75, 95))))
            for name, v in (("evidence", evidence), ("other", other))]  # fmt: skip
    table = Table(("turns", "n", "5 %", "25 %", "median", "75 %", "95 %"), rows)
    return Section(title, text, (table,), (plots.two_distributions(evidence, other),))


def _agreement(part: Sequence[Row]) -> Section:
    rows = [(str(r["stratum"]), _range(r["rho"], r.get("low"), r.get("high"), "{:+.3f}"),
             _number(r.get("n"), "{:,g}")) for r in part]  # fmt: skip
    text = (
        "Spearman's rank correlation within a history, averaged over a stratum. 1: the proxy ranks "
        "turns as the oracle does; 0: it says nothing about them."
    )
    table = Table(("stratum", "rho", "n"), rows)
    svg = plots.dots(part, "stratum", "rho", "rank correlation of Sal_q with Sal_a")
    return Section("Rank agreement of Sal_q with Sal_a", text, (table,), (svg,))


def _systems(part: Sequence[Row]) -> Section:
    columns = {
        "histories": ("histories", "{:,g}"), "records": ("records", "{:,.1f}"),
        "characters": ("characters", "{:,.0f}"),
    }  # fmt: skip
    for phase, unit in (("add", "turn"), ("ask", "question")):
        columns |= {
            f"calls a {unit}": (f"{phase}_calls", "{:.2f}"),
            f"prompt tokens a {unit}": (f"{phase}_prompt_tokens", "{:,.0f}"),
            f"written a {unit}": (f"{phase}_generated_tokens", "{:,.0f}"),
            f"s a {unit}": (f"{phase}_seconds", "{:.2f}"),
        }
    for head, key in (
        ("replies", "asked"),
        ("second tries", "retries"),
        ("fallbacks", "fallbacks"),
    ):
        columns[head] = key, "{:,g}"
    rows = [
        (row["system"], *(_number(row.get(key), form) for key, form in columns.values()),
         "yes" if row["measured"] else "no")
        for row in part
    ]  # fmt: skip
    text = (
        "What the memory systems cost, and how often a reply could not be read. Where over a fifth of "
        "the replies fell back, the row says nothing about the system: it was not measured with this "
        "model."
    )
    return Section("Memory systems", text, (Table(("system", *columns, "measured"), rows),))


def _separation(part: Sequence[Row]) -> Section:
    title = "Does saliency order the evidence first?"
    rows = [(r["score"], str(r["stratum"]), _range(r["auc"], r.get("low"), r.get("high"), "{:.2f}"),
             _number(r.get("n"), "{:,g}")) for r in part]  # fmt: skip
    text = (
        "Share of pairs of an evidence turn and another turn of the same history that the saliency "
        "orders right (area under the curve; 0.5 is chance), averaged over histories. Sal_a is the "
        "shared reader's and knows the answer; Sal_q is the base model's."
    )
    return Section(title, text, (Table(("score", "stratum", "area", "n"), rows, names=2),))


def _bin_table(part: Sequence[Row]) -> Table:
    bins = list(dict.fromkeys(str(row["bin"]) for row in part))
    cells = {(row["method"], str(row["bin"])): f"{_percent(row)} (n {_number(row['n'], '{:g}')})"
             for row in part}  # fmt: skip
    rows = [(name, *(cells.get((name, b), "–") for b in bins)) for name in _in(part)]
    return Table(("method", *bins), rows)


def _cost(part: Sequence[Row], drawn: Sequence[str]) -> Section:
    rows = [(r["method"], f"{r['turns']:,g}", _number(r["p50_s"], "{:.3g}"),
             _number(r.get("p95_s"), "{:.3g}")) for r in part]  # fmt: skip
    text = "Median seconds a question (p50), with whiskers up to the 95th percentile." + _drawn(
        part, drawn
    )
    table = Table(("method", "turns", "p50, s", "p95, s"), rows)
    svg = plots.cost(_of(part, drawn), _in(part, drawn))
    return Section("Cost of a question", text, (table,), (svg,))


def _part(
    title: str, part: Any, keys: Sequence[Any], missing: str, make: Callable[[list], Section]
) -> Section:
    """Make a section of the lines that have all of `keys`; where none has, say what is missing."""
    known = [line for line in part or () if _complete(line, keys)]
    return make(known) if known else Section(title, missing)


def _complete(line: Any, keys: Sequence[Any]) -> bool:
    get = line.get if isinstance(line, Mapping) else line.__getitem__
    return all(get(key) is not None for key in keys)


def _in(part: Sequence[Row], drawn: Sequence[str] = ()) -> list[str]:
    """Methods of a part: those of `drawn` that it has, or where it has none of them its first."""
    names = list(dict.fromkeys(row["method"] for row in part))
    return [name for name in drawn if name in names] or (names[: plots.SERIES] if drawn else names)


def _of(part: Sequence[Row], drawn: Sequence[str]) -> list[Row]:
    return [row for row in part if row["method"] in _in(part, drawn)]


def _drawn(part: Sequence[Row], drawn: Sequence[str]) -> str:
    left = len(_in(part)) - len(_in(part, drawn))
    return f" {left} further methods stand in the table only." if left else ""


# Text


def _name(row: Row) -> str:
    return row["method"] + (" (control)" if row.get("control") else "")


def _number(value: Any, form: str, scale: float = 1) -> str:
    return "–" if value is None else form.format(scale * value)


def _range(value: Any, low: Any, high: Any, form: str, scale: float = 1) -> str:
    text = _number(value, form, scale)
    if value is None or low is None or high is None:
        return text
    return f"{text} [{form.format(scale * low)}, {form.format(scale * high)}]"


def _percent(row: Row) -> str:
    return _range(row.get("accuracy"), row.get("low"), row.get("high"), "{:.1f}", 100)


def _p(value: float | None) -> str:
    return "–" if value is None else "<0.001" if value < 0.001 else f"{value:.3f}"
