# SPDX-License-Identifier: Apache-2.0
"""Labels for a person's eyes: a panel a dialogue, with each turn's saliency, the gate and the focus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from bfm.dialogue import Example, Label, evidence_turns, turns_of

BAR = 10  # characters a side of the bar that shows Sal_a
LEGEND = (
    "Sal_q, Sal_a: how much a turn changes log p(question) and log p(answer), in nats "
    "(a log Bayes factor).\n"
    "● focus: Sal_a above tau, so the gate opens.  ★ turn that decides the answer, according to the "
    "dialogue's author (for comparison; never read by the model)."
)


def dialogue(example: Example, label: Label, unit: str = "exchange") -> RenderableType:
    """Return a panel with the question, the answer and one row a turn."""
    evidence, focus = set(evidence_turns(example, unit)), label.focus or ()
    scale = max((abs(value) for value in label.sal_a or ()), default=0.0) or 1.0
    table = Table(box=box.SIMPLE_HEAD, expand=True, pad_edge=False)
    table.add_column("turn", justify="right")
    table.add_column("", width=2)
    table.add_column("date", no_wrap=True)
    table.add_column("what the user said", ratio=1)
    table.add_column("Sal_q", justify="right", no_wrap=True)
    table.add_column("Sal_a", justify="right", no_wrap=True)
    table.add_column("", width=2 * BAR + 1, no_wrap=True)
    for turn in turns_of(example.question.messages, unit):
        i, first = turn.index, turn.messages[0]
        table.add_row(
            str(i),
            ("●" if i in focus else " ") + ("★" if i in evidence else " "),
            first.time,
            Text(first.content),
            f"{label.sal_q[i]:+.2f}",
            f"{label.sal_a[i]:+.2f}" if label.sal_a else "-",
            bar(label.sal_a[i] / scale) if label.sal_a else "",
            style="bold green" if i in focus else "",
        )
    head = Text.assemble(
        ("Q  ", "dim"), example.question.query, "\n",
        ("A  ", "dim"), example.answer or "(no answer given)", "\n",
    )  # fmt: skip
    return Panel(Group(head, table, _verdict(label)), title=example.question.id, title_align="left")


def example(example: Example) -> RenderableType:
    """Return a panel with the whole of an example: history, question, options and gold."""
    question, evidence = example.question, set(example.evidence)
    table = Table(box=box.SIMPLE_HEAD, expand=True, pad_edge=False)
    for name, ratio in (("", None), ("when", None), ("who", None), ("says", 1)):
        table.add_column(name, ratio=ratio, no_wrap=not ratio)
    for i, m in enumerate(question.messages):
        when = f"{m.session} {m.time}".strip()
        table.add_row("★" if i in evidence else "", when, m.name or m.role, Text(m.content))
    lines = [Text.assemble(("Q  ", "dim"), question.query, (f"  {question.query_time}", "dim"))]
    for i, option in enumerate(question.options):
        right = i == example.answer_index
        lines.append(
            Text(f"{'●' if right else ' '}  {option}", style="bold green" if right else "")
        )
    if not question.options:
        lines.append(Text.assemble(("A  ", "dim"), example.answer or "(no answer given)"))
    simple = {k: v for k, v in example.meta.items() if not isinstance(v, list | dict)}
    meta = ", ".join(f"{key}={value}" for key, value in simple.items())
    lines.append(Text(meta, style="dim"))
    return Panel(Group(table, *lines), title=question.id, title_align="left")


def bar(share: float) -> Text:
    """Draw a value of -1..1 as a bar to the left or right of a middle line."""
    cells = round(min(1.0, abs(share)) * BAR)
    left, right = ("━" * cells, "") if share < 0 else ("", "━" * cells)
    return Text.assemble((left.rjust(BAR), "red"), ("│", "dim"), (right.ljust(BAR), "green"))


def compared(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return the table of an evaluation: a row a method, as `bfm.summary.rows` makes them."""
    free = any(row.get("f1") is not None for row in rows)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=free)
    # Eighty columns hold one interval, and free answers have two measures.
    names = ("exact", "F1, 95 %") if free else ("accuracy, 95 %",)
    cut = any(row.get("truncated") for row in rows)  # what was chosen did not all fit
    figures = [
        ("log p", "logp", "{:.1f}" if free else "{:.2f}"),
        ("tokens", "tokens", "{:.0f}"),
        ("turns", "turns", "{:.1f}"),
        *([("cut", "truncated", "{:d}")] if cut else []),
        ("recall", "recall", "{:.2f}"),
    ]
    for name in ("method", *names, *(name for name, _, _ in figures)):
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    for row in rows:
        cells = [with_interval(row["accuracy"], row["low"], row["high"])]
        if free:
            overlap = with_interval(*(row.get(k) for k in ("f1", "f1_low", "f1_high")))
            cells = [with_interval(row["accuracy"], None, None), overlap]
        for _, key, form in figures:
            cells.append("" if row.get(key) is None else form.format(row[key]))
        table.add_row(row["method"], *cells, style="dim" if row["control"] else "")
    return table


def with_interval(value: float | None, low: float | None, high: float | None) -> str:
    """Write a figure and its interval for a table; a dash for what is not known."""
    if value is None:
        return "–"
    return f"{value:.2f}" if low is None else f"{value:.2f}  ({low:.2f} .. {high:.2f})"


def quality(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return how far labels agree with labelled evidence, as `bfm.quality.compare` gives it."""
    table = Table(box=box.SIMPLE_HEAD, title="labels against evidence", title_justify="left")
    for name in ("", "share, 95 %", "records"):
        table.add_column(name, justify="right" if name else "left")
    for row in rows:
        cell = with_interval(row["value"], row["low"], row["high"])
        table.add_row(row["what"], cell, str(row["n"]))
    return table


def _verdict(label: Label) -> Text:
    if label.gate is None:
        return Text("no answer: Sal_q only")
    if not label.gate:
        return Text(f"gate closed: no turn raises log p(answer) by more than {label.tau:g} nats")
    turns = ", ".join(map(str, label.focus))
    return Text.assemble("gate ", ("open", "bold green"), f": read turn {turns}")


def summary(pairs: Iterable[tuple[Example, Label]], unit: str = "exchange") -> RenderableType:
    """Return one row a kind of dialogue (meta.kind): gates opened, and evidence ranked first."""
    rows: dict[str, list[tuple[int, int, int, int]]] = {}
    for example, label in pairs:
        evidence = evidence_turns(example, unit)
        top_q = max(range(label.n_turns), key=lambda i: (label.sal_q[i], -i)) in evidence
        top_a = bool(label.sal_a) and (
            max(range(label.n_turns), key=lambda i: (label.sal_a[i], -i)) in evidence
        )
        entry = (label.gate or 0, int(top_q), int(top_a), int(bool(evidence)))
        rows.setdefault(str(example.meta.get("kind", "all")), []).append(entry)
    table = Table(box=box.SIMPLE_HEAD, title="what the untrained model sees", title_justify="left")
    table.add_column("kind")
    for name in ("dialogues", "gate open", "★ first by Sal_q", "★ first by Sal_a"):
        table.add_column(name, justify="right")
    for kind, entries in sorted(rows.items()):
        gates, q, a, labelled = map(sum, zip(*entries, strict=True))
        ranked = (f"{q}/{labelled}", f"{a}/{labelled}") if labelled else ("-", "-")
        table.add_row(kind, str(len(entries)), str(gates), *ranked)
    return table
