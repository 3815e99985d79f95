# SPDX-License-Identifier: Apache-2.0
"""The parts of a report: what each says, its tables as plain text, its plots.

A part whose numbers are absent says in one sentence what is missing, and draws nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from bfm import plots
from bfm import report_diagnosis as diagnosis
from bfm.report_cells import (
    Row,
    Section,
    Table,
    complete,
    label,
    number,
    p_value,
    part_of,
    percent,
    ranged,
)  # fmt: skip

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
    ("cut to fit", "truncated", "{:,g}", 1),  # questions whose chosen turns were more than the room
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
    by_bin = lambda title, key, xlabel: part_of(  # noqa: E731
        title, found.get(key), bins, f"Accuracy was not measured by {xlabel}.",
        lambda part: Section(
            title, "Percent right with 95 % intervals." + _drawn(part, drawn),
            (_bin_table(part),), (plots.lines_by_bin(_of(part, drawn), _in(part, drawn), xlabel, key),),
        ),
    )  # fmt: skip
    return [
        _accuracy(rows, {s["system"] for s in summary.get("systems") or () if not s["measured"]}),
        _tokens(rows),
        part_of("Contrasts", summary.get("contrasts"), ("a", "b", "difference"),
              "No contrast was declared for this run.", _contrasts),
        _why(results),
        diagnosis.recall(found),
        part_of("Gate reliability", found.get("reliability"), (0, 1, 2),
              "No gate with a probability was run.",
              lambda part: diagnosis.reliability(part, found.get("gate_area"))),
        diagnosis.saliency(found),
        part_of("Rank agreement of Sal_q with Sal_a", found.get("rank_agreement"), ("stratum", "rho"),
              "No turn has both saliencies, so their rankings cannot be compared.",
              diagnosis.agreement),
        part_of("Does saliency order the evidence first?", found.get("separation"), ("stratum", "auc"),
              "The data has no labelled evidence.", diagnosis.separation),
        part_of("Accuracy by kind of question", found.get("by_stratum"), bins,
              "The questions are of one kind: their data name no strata or categories.", _kinds),
        by_bin("Accuracy by distance of the evidence", "by_distance",
               "distance of the evidence, turns back"),
        by_bin("Accuracy by density of the evidence", "by_density", "density of the evidence"),
        by_bin("Accuracy by length of the history", "by_length", "length of the history, turns"),
        by_bin("Accuracy by place of the right option", "by_position", "letter of the right option"),
        part_of("Cost of a question", found.get("cost"), ("method", "turns", "p50_s"),
              "Time was not measured at growing histories.", lambda part: _cost(part, drawn)),
        part_of("Memory systems", summary.get("systems"), ("system",),
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
            [(label(next(r for r in rows if r["method"] == method)),
              *("–" if i is None else percent(rows[i]) for i in line))
             for method, line in zip(methods, at, strict=True)],
            bold=frozenset((r, c + 1) for r, line in enumerate(at) for c, i in enumerate(line)
                           if i in best),
        ))  # fmt: skip
    for name in sets:
        own = [row for row in rows if str(row.get("data", "")) == name]
        free = any(row.get("f1") is not None for row in own)
        what = "exact match, %" if free else "accuracy, %"
        columns = {
            f"{what} ({name})" if name else what: percent,
            "F1, %": lambda r: ranged(
                r.get("f1"), r.get("f1_low"), r.get("f1_high"), "{:.1f}", 100
            ),
            "log p(right), nats": lambda r: ranged(
                r.get("logp"), r.get("logp_low"), r.get("logp_high"), "{:.2f}"
            ),
            **{head: _cell(key, form, scale) for head, key, form, scale in COLUMNS},
        }
        if not free:
            del columns["F1, %"]
        rare = ("mass on letters, %", "cut to fit", "unparsed", "unfinished", "errors")
        columns = {
            head: cell for head, cell in columns.items()
            if head not in rare or any(cell(row) not in ("–", "0") for row in own)
        }  # fmt: skip
        tables.append(Table(
            ("method", *columns),
            [(label(row) + (" (not measured with this model)" if row["method"] in unmeasured else ""),
              *(cell(row) for cell in columns.values())) for row in own],
            bold=frozenset((i, 1) for i in _best(own, own)),
        ))  # fmt: skip
    text = (
        "Percent right with 95 % intervals, from resampling users. Controls say how far the numbers "
        "can be trusted and take no part in the comparison. A best method is bold only where its "
        "interval stands apart from that of every other method. Columns of failures are left out where "
        "there were none; every failure counts as wrong. Cut to fit: questions whose chosen turns were "
        "more than the budget (full, evidence and sal_a: the reader's room); the first chosen stay."
    )
    return Section(title, text, tuple(tables))


def _cell(key: str, form: str, scale: float) -> Callable[[Row], str]:
    return lambda row: number(row.get(key), form, scale)


def _best(own: Sequence[Row], rows: Sequence[Row]) -> list[int]:
    """The index in rows of the best method of `own`, or none where another's interval reaches it."""
    known = [r for r in own if not r.get("control") and complete(r, ("accuracy", "low", "high"))]
    if len(known) < 2:
        return []
    best = max(known, key=lambda row: row["accuracy"])
    apart = all(best["low"] > row["high"] for row in known if row is not best)
    return [next(i for i, row in enumerate(rows) if row is best)] if apart else []


def _tokens(rows: Sequence[Row]) -> Section:
    title = "Accuracy against tokens read"
    known = [row for row in rows if complete(row, ("accuracy", "tokens"))]
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
            ranged(row["difference"], row.get("low"), row.get("high"), form, scale),
            p_value(row.get("p")), p_value(told),
            number(row.get("detectable"), form.replace("+", ""), scale),
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
    rows = [(name, *(number(count[key] / count.total(), "{:.1f}", 100) for key in seen))
            for name, count in counts.items()]  # fmt: skip
    text = (
        "Percent of questions. 'Evidence' is what the data's authors labelled; it may be missing or "
        "incomplete, and other turns may serve. No method read these labels, controls apart."
    )
    return Section(title, text, (Table(("method", *seen), rows),))


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
        (row["system"], *(number(row.get(key), form) for key, form in columns.values()),
         str(row.get("chat", "")), "yes" if row["measured"] else "no")
        for row in part
    ]  # fmt: skip
    text = (
        "What the memory systems cost, and how often a reply could not be read. Where over a fifth of "
        "the replies fell back, the row says nothing about the system: it was not measured with this "
        "model."
    )
    return Section(
        "Memory systems", text, (Table(("system", *columns, "written by", "measured"), rows),)
    )


def _kinds(part: Sequence[Row]) -> Section:
    """A line a kind, for there may be many and their names are long."""
    names, sizes = _in(part), {str(row["bin"]): row["n"] for row in part}
    free = {str(row["bin"]) for row in part if row.get("f1") is not None}
    cells = {
        (row["method"], str(row["bin"])): percent(row) if row.get("f1") is None
        else ranged(row["f1"], row["f1_low"], row["f1_high"], "{:.1f}", 100)
        for row in part
    }  # fmt: skip
    rows = [
        (
            kind + " (F1)" * (kind in free),
            number(n, "{:g}"),
            *(cells.get((m, kind), "–") for m in names),
        )
        for kind, n in sizes.items()
    ]
    text = (
        "Percent right (F1: of words, where answers are free) with 95 % intervals, by the stratum or "
        "category that the data name."
    )
    return Section("Accuracy by kind of question", text, (Table(("kind", "n", *names), rows),))


def _bin_table(part: Sequence[Row]) -> Table:
    bins = list(dict.fromkeys(str(row["bin"]) for row in part))
    cells = {(row["method"], str(row["bin"])): f"{percent(row)} (n {number(row['n'], '{:g}')})"
             for row in part}  # fmt: skip
    rows = [(name, *(cells.get((name, b), "–") for b in bins)) for name in _in(part)]
    return Table(("method", *bins), rows)


def _cost(part: Sequence[Row], drawn: Sequence[str]) -> Section:
    rows = [(r["method"], f"{r['turns']:,g}", number(r["p50_s"], "{:.3g}"),
             number(r.get("p95_s"), "{:.3g}")) for r in part]  # fmt: skip
    text = "Median seconds a question (p50), with whiskers up to the 95th percentile." + _drawn(
        part, drawn
    )
    table = Table(("method", "turns", "p50, s", "p95, s"), rows)
    svg = plots.cost(_of(part, drawn), _in(part, drawn))
    return Section("Cost of a question", text, (table,), (svg,))


def _in(part: Sequence[Row], drawn: Sequence[str] = ()) -> list[str]:
    """Methods of a part: those of `drawn` that it has, or where it has none of them its first."""
    names = list(dict.fromkeys(row["method"] for row in part))
    return [name for name in drawn if name in names] or (names[: plots.SERIES] if drawn else names)


def _of(part: Sequence[Row], drawn: Sequence[str]) -> list[Row]:
    return [row for row in part if row["method"] in _in(part, drawn)]


def _drawn(part: Sequence[Row], drawn: Sequence[str]) -> str:
    left = len(_in(part)) - len(_in(part, drawn))
    return f" {left} further methods stand in the table only." if left else ""
