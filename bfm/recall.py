# SPDX-License-Identifier: Apache-2.0
"""What a memory gives back: hits with their saliency, a selection, its rendering, an answer."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence

from bfm.memory_store import Entry


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a question took. turns: of the user. scored: by the model, the others were left out by BM25
    and recency or say what a later one says. dropped: candidates that did not fit the controller's
    prompt. tokens: computed by models (what a kept state spares is not). seconds: on the clock.
    """

    turns: int
    scored: int
    dropped: int
    tokens: int
    seconds: float

    def plus(self, tokens: int, seconds: float) -> Cost:
        return dataclasses.replace(
            self, tokens=self.tokens + tokens, seconds=self.seconds + seconds
        )


@dataclasses.dataclass(frozen=True)
class Hit(Entry):
    """A turn and its Sal_q, nats. cut: oldest tokens of the turn that the model's window did not hold.

    repeats: earlier turns of the same words, for which this one stands.
    """

    saliency: float
    cut: int = 0
    repeats: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Hits(Sequence[Hit]):
    """Hits, best first, and what they cost."""

    hits: tuple[Hit, ...]
    cost: Cost = dataclasses.field(compare=False)

    def __len__(self) -> int:
        return len(self.hits)

    def __getitem__(self, index):
        return self.hits[index]


@dataclasses.dataclass(frozen=True)
class Selection:
    """Whether to open the memory for a question, and what to read.

    open_probability: the controller's; None without a policy. focus: the turns to read, in time
    order (`bfm.memory_input.by_time`). ranked: their numbers, most useful first. reasons: a short text
    for each turn of the focus; for a closed gate, one that says why.
    """

    gate: bool
    open_probability: float | None
    focus: tuple[Hit, ...]
    ranked: tuple[int, ...]
    reasons: tuple[str, ...]
    cost: Cost = dataclasses.field(compare=False)
    count: Callable[[str], int] = dataclasses.field(compare=False, repr=False)

    def render(self, max_tokens: int | None = None, max_chars: int | None = None) -> str:
        """Return the focus as a block of plain text for any model's prompt; "" for a closed gate.

        Lines that are not ours begin with "> ", a message's further lines with five more spaces, so
        no text of a user can look like a marker or another message. Line ends of any kind become
        plain ones. max_tokens (counted by the memory's own tokenizer) and max_chars drop the least
        useful turns, whole ones, and the first line says so. Raises ValueError where a limit does not
        even hold that line.
        """
        if not self.focus:
            return ""
        for keep in range(len(self.focus), -1, -1):
            shown = [hit for hit in self.focus if hit.turn in self.ranked[:keep]]
            text = block(shown, len(self.focus))
            if (max_chars is None or len(text) <= max_chars) and (
                max_tokens is None or self.count(text) <= max_tokens
            ):
                return text
        raise ValueError(f"max_tokens, max_chars: {max_tokens}, {max_chars} hold no block at all")


@dataclasses.dataclass(frozen=True)
class Answer:
    """An answer. text: what was written, or the option of highest belief (the first of equal ones).

    beliefs: with options, the reader's probability of each; they sum to one. ended: False where the
    text was cut at max_tokens. read: numbers of the turns that were read, in time order: the focus
    less what the budget (`settings.eval.budget`) did not hold. cost: selection included.
    """

    text: str
    beliefs: tuple[float, ...]
    ended: bool
    read: tuple[int, ...]
    selection: Selection
    cost: Cost = dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True)
class Deleted:
    """The turns that went (or would go). wiped: their bytes are out of the file; where another process
    reads it they leave with the next delete, or when the file is next opened.
    """

    turns: tuple[Entry, ...]
    wiped: bool


def block(entries: Sequence[Entry], of: int) -> str:
    """Return turns as text between two marker lines, out of `of` turns; ends with a line end."""
    n = len(entries)
    turns = "1 turn" if n == of == 1 else f"{n} turns" if n == of else f"{n} of {of} turns that fit"
    lines = [f"=== Earlier conversation with the user ({turns}) ==="]
    for i, entry in enumerate(entries):
        lines += [">"] * bool(i)
        last_time = ""
        for message in entry.messages:
            who = message.role.capitalize()
            if message.name:
                who = f"{_on_one_line(message.name, ':()[]')} ({message.role})"
            if message.time and message.time != last_time:
                who = f"[{_on_one_line(message.time, '[]')}] {who}"
                last_time = message.time
            first, *rest = message.content.splitlines() or [""]
            lines.append(f"> {who}: {first}")
            lines += [f">      {line}" for line in rest]
    return "\n".join([*lines, "=== End of earlier conversation ===", ""])


def _on_one_line(text: str, ours: str) -> str:
    """Return a name or time as it is, or quoted where it holds a line end or a sign of our own."""
    return text if text.isprintable() and not set(ours) & set(text) else json.dumps(text)
