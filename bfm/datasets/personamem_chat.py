# SPDX-License-Identifier: Apache-2.0
"""What PersonaMem v1 and v2 share: a chat as messages, cells that hold literals and numbers."""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import re
import warnings
from collections.abc import Sequence
from typing import Any

from bfm.datasets.common import example
from bfm.dialogue import Message
from bfm.jsonl import DataError

NO_HISTORY = "rows whose history is not in the files at hand"
REPEATED = "rows that repeat an earlier row in full"
NULLS = "null messages left out of histories"


@dataclasses.dataclass(frozen=True)
class Chat:
    """A history as its file has it, and as messages."""

    raw: list[Any]
    messages: tuple[Message, ...]
    starts: tuple[int, ...]  # messages[:starts[i]] is made from raw[:i]; one longer than raw
    nulls: tuple[int, ...]  # messages without text (null) in raw[:i]


def make_chat(raw: list[Any], persona_card: bool, prefix: dict[str, str], where: str) -> Chat:
    """Return the chat as messages: sessions numbered from 0, nulls left out, prefixes removed.

    prefix: role -> what is taken off the start of its texts. Raises DataError.
    """
    turns: list[dict[str, str]] = []
    starts, nulls, session = [0], [0], -1
    for i, message in enumerate(raw):
        if message is not None and not (isinstance(message, dict) and "content" in message):
            raise DataError(f"{where}: message {i}: is not an object with role and content")
        if message is not None:
            role, content = message.get("role"), message["content"]
            if role not in ("system", "user", "assistant"):
                raise DataError(f"{where}: message {i}: role: must be system, user or assistant")
            if not isinstance(content, str | None):
                raise DataError(f"{where}: message {i}: content: is not text")
            # A system message begins a session even where its own text is null.
            session = session + 1 if role == "system" else max(session, 0)
        else:
            role = content = None
        turn = {"role": role, "content": content, "session": str(session)}
        if role == "system" and content is not None and persona_card:
            turns.append(turn | {"role": "user", "name": "persona"})
        elif role != "system" and content is not None:
            turns.append(turn | {"content": content.removeprefix(prefix.get(role, ""))})
        starts.append(len(turns))
        nulls.append(nulls[-1] + (content is None))
    if not turns:
        raise DataError(f"{where}: holds no message with text")
    checked = example({"id": "history", "turns": turns, "query": "?"}, where)
    return Chat(raw, checked.question.messages, tuple(starts), tuple(nulls))


def faults(options: Sequence[str], nulls: int) -> dict[str, Any]:
    """Return what is wrong with a row that is kept, for its meta.

    Rows with two equal options stay, since published scores count them.
    """
    counts = {"identical options": sum(list(options).count(o) > 1 for o in options)}
    found = {fault: n for fault, n in {**counts, "null messages": nulls}.items() if n}
    return {"faults": found} if found else {}


def parsed(row: dict[str, str], column: str, where: str) -> Any:
    """Return a cell's JSON, or its Python literal, which upstream's writer gives some columns."""
    try:
        return json.loads(row[column])
    except (ValueError, RecursionError):
        return literal(row, column, where)


def literal(row: dict[str, str], column: str, where: str) -> Any:
    """Return a cell's Python literal. Raises DataError."""
    try:
        with warnings.catch_warnings():  # of odd escapes, which are the data's own
            warnings.simplefilter("ignore")
            return ast.literal_eval(row[column].strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise DataError(f"{where}: {column}: cannot be parsed") from None


def texts(value: Any, column: str, where: str) -> list[str]:
    """Return the value if it is a list of texts. Raises DataError."""
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise DataError(f"{where}: {column}: is not a list of texts")
    return value


def number(row: dict[str, str], column: str, where: str) -> int | float | None:
    """Return a cell's number, of a percentage the fraction; None where it is empty or nan."""
    text = row[column].strip()
    try:
        if re.fullmatch(r"[+-]?\d{1,18}", text):
            return int(text)
        value = float(text.removesuffix("%") or "nan")
    except ValueError:
        raise DataError(f"{where}: {column}: is not a number") from None
    if not math.isfinite(value):
        return None
    return round(value / 100, 8) if text.endswith("%") else value
