# SPDX-License-Identifier: Apache-2.0
"""What every benchmark reader shares: the files it needs, its settings, permutations, clear errors."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bfm.dialogue import Example, Message, RecordError, generator, parse_example
from bfm.jsonl import DataError


@dataclasses.dataclass(frozen=True)
class File:
    """A raw file that a reader needs: where it goes, where it comes from, how large it is."""

    path: str  # below data_dir
    url: str
    size: str  # for people, such as "2.8 MB"
    direct: bool = True  # the url gives the file itself, so that it can be fetched


class Missing(DataError):
    """Raw files are not there: one line says which, where to put them and how large they are."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """How raw records become examples; part of the identity of what is prepared."""

    seed: int = 0  # of option shuffles and splits
    time_suffix: str = "keep"  # MemBench: keep | remove the place-and-time note in each message
    persona_card: bool = True  # PersonaMem: system messages that restate the persona, in or out
    padding_turns: int = 0  # PrefEval: unrelated exchanges between conversation and question
    length: int = 10  # shifting_prefs: exchanges of a history


def permutation(n: int, seed: int, key: str) -> tuple[int, ...]:
    """Return an order of n things that depends on seed and key only, not on the process.

    >>> permutation(4, 0, "a") == permutation(4, 0, "a")
    True
    """
    return tuple(int(i) for i in generator(seed, key).permutation(n))


def read_json(path: Path) -> Any:
    """Read one JSON file. Raises DataError (one line)."""
    try:
        return json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: is not JSON ({error})") from None


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) of a JSONL file, split at line feeds only. Raises DataError."""
    try:
        with open(path, "rb") as file:
            for number, raw in enumerate(file, start=1):
                if not raw.strip():
                    continue
                try:
                    obj = json.loads(raw)
                except (ValueError, RecursionError) as error:
                    raise DataError(f"{path}: line {number}: is not JSON ({error})") from None
                if not isinstance(obj, dict):
                    raise DataError(f"{path}: line {number}: is not an object")
                yield number, obj
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None


def read_csv(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield (record number, row) of a CSV file that must have `columns`. Raises DataError."""
    csv.field_size_limit(1 << 30)
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file)
            if absent := [c for c in columns if c not in (rows.fieldnames or ())]:
                raise DataError(f"{path}: lacks the column(s) {', '.join(absent)}")
            for number, row in enumerate(rows, start=1):
                if None in row or None in row.values():
                    raise DataError(
                        f"{path}: record {number}: has not as many fields as the header"
                    )
                yield number, row
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: is not CSV in UTF-8 ({error})") from None


def field(obj: Any, key: str, kind: type | tuple[type, ...], where: str) -> Any:
    """Return obj[key] if it is of `kind`. Raises DataError naming file, record, field and reason."""
    if not isinstance(obj, dict) or key not in obj:
        raise DataError(f"{where}: {key}: is missing")
    if not isinstance(obj[key], kind) or (kind is int and isinstance(obj[key], bool)):
        raise DataError(f"{where}: {key}: is of the wrong type ({type(obj[key]).__name__})")
    return obj[key]


def ask(
    record: dict[str, Any], messages: tuple[Message, ...], evidence: Sequence[int], where: str
) -> Example:
    """Return the example of a record over messages that were checked once for all its questions.

    Raises DataError naming file, record and field.
    """
    asked = example(record | {"turns": [{"role": "user", "content": ""}]}, where)
    question = dataclasses.replace(asked.question, messages=messages)
    return dataclasses.replace(asked, question=question, evidence=tuple(evidence))


def text_of(obj: dict[str, Any], key: str, where: str) -> str:
    """Return the text obj[key]: some answers are numbers, or lists of all that is right. DataError."""
    value = field(obj, key, (str, int, float, list), where)
    if isinstance(value, bool) or value == []:
        raise DataError(f"{where}: {key}: is neither a text, a number nor a list of them")
    if isinstance(value, list):
        return ", ".join(text_of({key: part}, key, where) for part in value)
    return str(value)


def example(record: dict[str, Any], where: str) -> Example:
    """Check a record against the one schema. Raises DataError naming file, record and field."""
    try:
        return parse_example(record)
    except RecordError as error:
        raise DataError(f"{where}: {error}") from None
