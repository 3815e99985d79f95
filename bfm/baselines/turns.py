# SPDX-License-Identifier: Apache-2.0
"""What the memory systems see of a turn: who speaks, its words, sentences and day, in portions."""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Callable, Iterable, Sequence

from bfm.dialogue import Message, Turn
from bfm.shortlist import words

_LABEL = 40  # characters of a name or date that are shown; the longest real one has 26
Line = tuple[int, Message]  # a message and the index of its turn

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTH = rf"({'|'.join(_MONTHS)})[a-z]*\.?"
_DATES = (
    (re.compile(r"(?<!\d)(\d{4})[-/.](\d{1,2})[-/.](\d{1,2})(?!\d)"), "ymd"),
    (re.compile(rf"(?<!\d)(\d{{1,2}})(?:st|nd|rd|th)? +{_MONTH},? +(\d{{4}})(?!\d)", re.I), "dmy"),
    (re.compile(rf"\b{_MONTH} +(\d{{1,2}})(?:st|nd|rd|th)?,? +(\d{{4}})(?!\d)", re.I), "mdy"),
)
_ENDS = re.compile(r"(?<=[.!?…])[\"'”’)]*\s+|(?<=[。！？])|\n+")  # where a sentence ends


def speaker(message: Message) -> str:
    """Return the name shown before a message: its own (its first 40 characters), else the role's."""
    return message.name[:_LABEL] or message.role.capitalize()


def said_by_people(messages: Iterable[Message]) -> list[Message]:
    """Return the messages that state facts: a user's, and those of a named partner.

    An assistant repeats and invents; a named one is a person (the second speaker of LoCoMo).
    """
    return [m for m in messages if (m.role == "user" or m.name) and m.content.strip()]


def render(messages: Iterable[Message]) -> str:
    """Return one line a message, "Name: text"; empty messages are left out."""
    return "\n".join(f"{speaker(m)}: {m.content}" for m in messages if m.content.strip())


def lines_of(turn: Turn) -> list[Line]:
    """Return the turn's messages that hold text, each with the turn's index."""
    return [(turn.index, m) for m in turn.messages if m.content.strip()]


def time_of(turn: Turn) -> str:
    """Return the date of a turn as its first dated message has it (40 characters); "" without one."""
    return next((m.time[:_LABEL] for m in turn.messages if m.time), "")


def dated(text: str, time: str) -> str:
    """Return the text with its date in front, where there is one."""
    return f"[{time}] {text}" if time else text


def sentences(text: str) -> list[str]:
    """Split a text into sentences, also where no space follows (Chinese, Japanese)."""
    return [s.strip() for s in _ENDS.split(text) if s.strip()]


def is_question(sentence: str) -> bool:
    return sentence.rstrip("\"'”’) ").endswith(("?", "？", "؟"))


def statements(messages: Iterable[Message]) -> list[tuple[Message, str]]:
    """Return what people state: sentences of four words or more that are no questions."""
    return [
        (message, sentence)
        for message in said_by_people(messages)
        for sentence in sentences(message.content)
        if len(words(sentence)) >= 4 and not is_question(sentence)
    ]


def first_words(text: str, n: int) -> str:
    """Return the text up to its n-th word (a CJK character is a word), on one line."""
    text = " ".join(text.split())
    if len(words(text)) <= n:
        return text
    low, high = 0, len(text)  # the longest prefix of at most n words
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(words(text[:middle])) <= n else (low, middle - 1)
    space = text.rfind(" ", 0, low + 1)
    return text[: space if space > low // 2 else low].rstrip()


def day_number(time: str) -> int | None:
    """Return the day that a written date names, as a count of days; None if it names none.

    The day is read as written: no clock and no time zone. Years first, or English month names.

    >>> day_number("1:56 pm on 8 May, 2023") - day_number("2023-05-07T23:00Z")
    1
    """
    for pattern, order in _DATES:
        if found := pattern.search(time):
            part = dict(zip(order, found.groups(), strict=True))
            month = part["m"].lower()[:3]
            month = _MONTHS.index(month) + 1 if month in _MONTHS else int(month)
            try:
                return datetime.date(int(part["y"]), month, int(part["d"])).toordinal()
            except ValueError:
                continue
    return None


def split(text: str, room: int, count: Callable[[str], int]) -> list[str]:
    """Cut a text into parts of at most `room` tokens that join to it, at sentences where it can."""
    if len(text) <= 1 or count(text) <= room:
        return [text]
    middle = len(text) // 2
    place = max((m.end() for m in _ENDS.finditer(text, 0, middle)), default=0)
    least = max(1, middle // 2)
    if place < least:
        place = max(text.rfind(" ", 0, middle) + 1, text.rfind("\n", 0, middle) + 1)
    if place < least:
        place = middle
    return [*split(text[:place], room, count), *split(text[place:], room, count)]


def portions(lines: Sequence[Line], room: int, count: Callable[[str], int]) -> list[list[Line]]:
    """Group messages, in order, into portions of at most `room` tokens; a longer one is split."""
    groups: list[list[Line]] = [[]]
    used = 0
    for turn, message in lines:
        label = count(speaker(message)) + 4
        for part in split(message.content, max(1, room - label), count):
            cost = count(part) + label
            if groups[-1] and used + cost > room:
                groups.append([])
                used = 0
            groups[-1].append((turn, dataclasses.replace(message, content=part)))
            used += cost
    return [group for group in groups if group]
