# SPDX-License-Identifier: Apache-2.0
"""What callers give a memory, checked by the one schema; and turns as text, in time order, each once.

Every error is a RecordError that names the argument.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bfm.dialogue import Message, Question, RecordError, Turn, parse_example, shown, turns_of
from bfm.memory_store import Entry
from bfm.prompts import LETTERS
from bfm.shortlist import words


def user(user_id: Any) -> str:
    """Check a user's name: any text but the empty one, compared exactly."""
    if not isinstance(user_id, str) or not user_id:
        raise RecordError("user_id", f"must be a text that is not empty, not {shown(str(user_id))}")
    try:
        user_id.encode()
    except UnicodeEncodeError:
        raise RecordError("user_id", "holds a lone surrogate, which is not text") from None
    return user_id


def asking(query: Any, query_time: Any, options: Sequence[str] = ()) -> Question:
    """Check a question; its history is not part of it."""
    options = options if isinstance(options, str) else list(options)
    if len(options) > len(LETTERS):
        raise RecordError("options", f"{len(options)} options, letters name {len(LETTERS)}")
    return dataclasses.replace(
        _parsed(query=query, query_time=query_time, options=options or None), messages=()
    )


def _parsed(**fields: Any) -> Question:
    """Check fields by the one schema of records."""
    record = {"id": "-", "turns": [{"role": "user", "content": ""}], "query": "-"} | fields
    return parse_example(record).question


def exchanges(turn: Any, time: Any, unit: str) -> list[tuple[Message, ...]]:
    """Check what `BayesFactorMemory.add` is given and split it into exchanges (or messages: `unit`)."""
    if isinstance(turn, str):
        turn = {"role": "user", "content": turn}
    if isinstance(turn, Turn):
        turn = turn.messages
    if not isinstance(turn, list | tuple):
        turn = [turn]
    given = [dataclasses.asdict(m) if isinstance(m, Message) else m for m in turn]
    given = [{**m, "time": m.get("time") or time} if isinstance(m, Mapping) else m for m in given]
    split = [exchange.messages for exchange in turns_of(_parsed(turns=given).messages, unit)]
    for messages in split:
        if not any(message.content.strip() for message in messages):
            raise RecordError("turn", "holds no text; nothing was stored")
    return split


def numbered(turn: Any) -> Callable[[Entry], bool]:
    """Return the rule that one turn meets."""
    if type(turn) is not int:
        raise RecordError("turn", f"must be a turn's number, not {shown(str(turn))}")
    return lambda entry: entry.turn == turn


def about(topic: Any) -> Callable[[Entry], bool]:
    """Return the rule that turns with every word of a topic meet, in contents or names."""
    wanted = set(words(topic)) if isinstance(topic, str) else set()
    if not wanted:
        raise RecordError("topic", f"must be a text that holds a word, not {shown(str(topic))}")

    def goes(entry: Entry) -> bool:
        names = " ".join(message.name for message in entry.messages)
        return wanted <= set(words(f"{names} {text_of(entry)}"))

    return goes


def text_of(entry: Entry) -> str:
    """Return what BM25 sees of a turn."""
    return " ".join(message.content for message in entry.messages)


def by_time(entries: Sequence[Entry]) -> list[Entry]:
    """Return turns in the order of their times, not of adding: an old talk may be added late.

    A time counts when it is ISO 8601 (with an offset: as UTC). A turn without one stands at the time of
    the turn added before it, the first ones at the beginning.
    """
    key, keys = datetime.datetime.min, []
    for entry in entries:
        key = _moment(entry.time) or key
        keys.append(key)
    return [entries[i] for i in sorted(range(len(entries)), key=lambda i: keys[i])]


def _moment(text: str) -> datetime.datetime | None:
    try:
        moment = datetime.datetime.fromisoformat(text)
        return moment.astimezone(datetime.UTC).replace(tzinfo=None) if moment.tzinfo else moment
    except (ValueError, OverflowError):
        return None


def same_words(entries: Sequence[Entry]) -> list[list[int]]:
    """Group the places of turns in which the same people say the same, whatever their times."""
    groups: dict[tuple, list[int]] = {}
    for i, entry in enumerate(entries):
        said = tuple((message.role, message.name, message.content) for message in entry.messages)
        groups.setdefault(said, []).append(i)
    return list(groups.values())
