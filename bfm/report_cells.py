# SPDX-License-Identifier: Apache-2.0
"""What the parts of a report are made of: tables as plain text, and figures as a person reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


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


def part_of(
    title: str, part: Any, keys: Sequence[Any], missing: str, make: Callable[[list], Section]
) -> Section:
    """Make a section of the lines that have all of `keys`; where none has, say what is missing."""
    known = [line for line in part or () if complete(line, keys)]
    return make(known) if known else Section(title, missing)


def complete(line: Any, keys: Sequence[Any]) -> bool:
    get = line.get if isinstance(line, Mapping) else line.__getitem__
    return all(get(key) is not None for key in keys)


def label(row: Row) -> str:
    return row["method"] + (" (control)" if row.get("control") else "")


def number(value: Any, form: str, scale: float = 1) -> str:
    return "–" if value is None else form.format(scale * value)


def ranged(value: Any, low: Any, high: Any, form: str, scale: float = 1) -> str:
    text = number(value, form, scale)
    if value is None or low is None or high is None:
        return text
    return f"{text} [{form.format(scale * low)}, {form.format(scale * high)}]"


def percent(row: Row) -> str:
    return ranged(row.get("accuracy"), row.get("low"), row.get("high"), "{:.1f}", 100)


def p_value(value: float | None) -> str:
    return "–" if value is None else "<0.001" if value < 0.001 else f"{value:.3f}"
