# SPDX-License-Identifier: Apache-2.0
"""An evaluation for a person: `report.md` for papers, `report.html` to look into, one file each.

Every text that comes from data is data: escaped in Markdown, in HTML and in the page's JSON.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import markupsafe

from bfm.jsonl import whole
from bfm.report_cells import Section
from bfm.report_parts import outcome, sections

Row = Mapping[str, Any]

TEMPLATE = Path(__file__).with_name("report.html.jinja")
PAGE_CHARS = 8_000_000  # text of examples in the page, so that a phone can open it
TURN_CHARS = 20_000  # of one turn
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f\ufffe\uffff]")  # no XML may hold them


def write(
    workdir: Path, summary: Mapping[str, Any], results: Sequence[Row], examples: Iterable[Row]
) -> None:
    """Write `report.md` and `report.html` into workdir, each whole or not at all.

    summary, results (lines of results.jsonl) and examples are as `bfm.evaluation` makes them. A
    part of the diagnosis that is absent or empty is named as missing; numbers that are None or not
    finite are shown as a dash.
    """
    summary, results = _plain(summary), _plain(results)
    parts = sections(summary, results)
    with whole(workdir / "report.md") as file:
        file.write(_markdown(summary, parts))
    status = {(row["id"], row["method"]): row["status"] for row in results}
    shown, left_out = _examples(map(_plain, examples), status)
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    page = environment.from_string(TEMPLATE.read_text("utf-8")).render(
        title=_title(summary), notes=_notes(summary), sections=parts, svg=markupsafe.Markup,
        command=summary.get("command") or "",
        identity=[(key, _text(value)) for key, value in summary.get("identity", {}).items()],
        examples=shown, left_out=left_out,
    )  # fmt: skip
    with whole(workdir / "report.html") as file:
        file.write(page)


# Examples


def _examples(examples: Iterable[Row], status: Mapping[tuple[str, str], str]) -> tuple[list, int]:
    """Examples as the page's script reads them, and how many did not fit."""
    shown, size, left_out = [], 0, 0
    for example in examples:
        item = _example(example, status)
        size += len(json.dumps(item))
        if size > PAGE_CHARS and shown:
            left_out += 1
        else:
            shown.append(item)
    return shown, left_out


def _example(example: Row, status: Mapping[tuple[str, str], str]) -> dict[str, Any]:
    labelled = {i for i, turn in enumerate(example["turns"]) if turn.get("evidence")}
    options, gold = example.get("options") or [], example.get("gold", -1)
    methods = []
    for name, m in example["methods"].items():
        read, probs, said = m.get("evidence") or [], m.get("probs"), m.get("prediction")
        recall = len(labelled & set(read)) / len(labelled) if labelled else None
        state = status.get((example["id"], name), "ok")
        chose = isinstance(said, int) and 0 <= said < len(options)
        methods.append({
            "name": name,
            "answer": options[said] if chose else "" if said is None else str(said),
            "p": probs[said] if probs and chose else None,
            "p_right": probs[gold] if probs and gold >= 0 else None,
            "read": read, "tokens": m.get("tokens"), "right": m.get("correct") or 0,
            "why": outcome(m.get("correct") or 0, m.get("gate"), recall, state, len(read)),
            "status": "" if state == "ok" else state,
        })  # fmt: skip
    turns = [
        {"text": _cut(turn["text"]), "time": turn.get("time") or "", "evidence": i in labelled,
         "sal_q": turn.get("sal_q"), "sal_a": turn.get("sal_a")}
        for i, turn in enumerate(example["turns"])
    ]  # fmt: skip
    return {
        **{key: example.get(key) or "" for key in ("id", "query", "query_time", "answer")},
        "options": options, "gold": gold, "turns": turns, "methods": methods,
    }  # fmt: skip


def _cut(text: str) -> str:
    over = len(text) - TURN_CHARS
    return text if over <= 0 else f"{text[:TURN_CHARS]} [… {over:,} further characters]"


# Text


def _title(summary: Mapping[str, Any]) -> str:
    split = summary.get("split") or "all"
    what = " ".join([str(summary.get("data") or ""), *([split] if split != "all" else [])]).strip()
    n = summary.get("n")
    return f"Evaluation on {what or 'unnamed data'}" + (f", {n:,} questions" if n else "")


def _notes(summary: Mapping[str, Any]) -> list[str]:
    notes = [str(note) for note in summary.get("notes") or ()]
    return notes if summary.get("valid", True) else ["This run is invalid.", *notes]


def _markdown(summary: Mapping[str, Any], parts: Sequence[Section]) -> str:
    lines = [f"# {_escape(_title(summary))}", ""]
    lines += [f"> **{_escape(note)}**\n>" for note in _notes(summary)]
    for part in parts:
        lines += ["", f"## {part.title}", "", _escape(part.text)]
        for table in part.tables:
            sides = [":--" if i < table.names else "--:" for i in range(len(table.head))]
            lines += ["", _line(table.head), f"| {' | '.join(sides)} |"]
            for r, row in enumerate(table.rows):
                lines.append(_line(row, [(r, c) in table.bold for c in range(len(row))]))
    if command := summary.get("command"):
        lines += ["", f"Again: `{' '.join(command.split())}`"] if "`" not in command else []
    lines += ["", "## Identity", ""]
    lines += [
        f"- {_escape(k)}: {_escape(_text(v))}" for k, v in summary.get("identity", {}).items()
    ]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str], bold: Sequence[bool] = ()) -> str:
    texts = [_escape(cell) for cell in cells]
    texts = [f"**{t}**" if i < len(bold) and bold[i] else t for i, t in enumerate(texts)]
    return f"| {' | '.join(texts)} |"


def _escape(text: str) -> str:
    """Escape what GitHub's Markdown reads as markup; a line break becomes a space."""
    text = "".join("\\" + c if c in "\\`*_[]|~#$!" else c for c in " ".join(str(text).split()))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """Copy as plain values that any writer takes: no NaN, lone surrogate or control character."""
    if isinstance(value, Mapping):
        return {_plain(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, str):
        whole = value.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
        return _CONTROL.sub("\ufffd", whole.replace("\r\n", "\n"))
    if hasattr(value, "tolist"):  # of numpy
        return _plain(value.tolist())
    if isinstance(value, Iterable):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
