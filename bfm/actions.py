# SPDX-License-Identifier: Apache-2.0
"""The controller's action: a grammar over token ids in which gate and focus cannot contradict.

    action := none end | read number ("," number)* end        coupled: one decision
    action := (none | read) number ("," number)* end          decoupled: the ablation of unity

A number is that of a candidate in the prompt, 1 .. n, each at most once, most useful first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from bfm.tokenizer import Tokenizer

CLOSED, OPEN, COMMA = "none", "read", ","


class ActionError(ValueError):
    """Ids that are no action, or an action that the grammar cannot write."""


@dataclasses.dataclass(frozen=True)
class Action:
    """Open the memory? Read which candidates (numbers from 1, most useful first)?"""

    gate: bool
    focus: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Grammar:
    """The actions over `n` candidates, at most `max_focus` of them read, as ids of one tokenizer.

    closed, open: ids of the two gate words, which differ in their first id: the gate's probability is
    that of one token against another. numbers: ids of each candidate's number. comma, end: the rest.
    """

    closed: tuple[int, ...]
    open: tuple[int, ...]
    numbers: tuple[tuple[int, ...], ...]
    comma: tuple[int, ...]
    end: int
    max_focus: int
    coupled: bool = True

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, end: int, n: int, max_focus: int, coupled: bool = True
    ) -> Grammar:
        """Make the grammar for a prompt of n candidates. Raises ActionError for a tokenizer whose
        two gate words begin alike."""
        encode = tokenizer.encode
        closed, open_ = tuple(encode(CLOSED)), tuple(encode(OPEN))
        if closed[0] == open_[0]:
            raise ActionError(f"{tokenizer.path}: {CLOSED!r} and {OPEN!r} begin with the same id")
        numbers = tuple(tuple(encode(f" {i + 1}")) for i in range(n))
        return cls(closed, open_, numbers, tuple(encode(COMMA)), end, max_focus, coupled)

    @property
    def gate(self) -> tuple[int, int]:
        """The two ids that compete for the first place: open, closed."""
        return self.open[0], self.closed[0]

    @property
    def longest(self) -> int:
        """The most tokens that an action takes, its end included."""
        by_length = sorted(range(len(self.numbers)), key=lambda i: -len(self.numbers[i]))
        focus = tuple(i + 1 for i in by_length[: self.max_focus])
        return max(len(self.encode(Action(bool(focus), focus))), len(self.closed) + 1)

    def encode(self, action: Action) -> tuple[int, ...]:
        """Return the ids of an action, its end included.

        Raises ActionError where gate and focus contradict, a number is unknown or stands twice.
        """
        focus = action.focus
        if self.coupled and bool(focus) != action.gate:
            raise ActionError(f"gate {action.gate} contradicts focus {list(focus)}")
        if not self.coupled and not focus and self.numbers:
            raise ActionError("a decoupled action names at least one candidate")
        if len(set(focus)) != len(focus) or len(focus) > self.max_focus:
            raise ActionError(f"focus {list(focus)}: a number twice, or over {self.max_focus}")
        if any(not 1 <= i <= len(self.numbers) for i in focus):
            raise ActionError(f"focus {list(focus)}: candidates are 1..{len(self.numbers)}")
        ids = list(self.open if action.gate else self.closed)
        for place, i in enumerate(focus):
            ids += [*(self.comma if place else ()), *self.numbers[i - 1]]
        return (*ids, self.end)

    def allowed(self, ids: Sequence[int]) -> list[int]:
        """Return the ids that may follow `ids`, sorted; empty after the end.

        Raises ActionError when `ids` begins no action.
        """
        live = [rest for rest in self._continuations(tuple(ids)) if rest is not None]
        if not live:
            raise ActionError(f"{list(ids)} begins no action")
        return sorted({rest[0] for rest in live if rest})

    def parse(self, ids: Sequence[int]) -> Action:
        """Return the action of ids that end with `end`. Raises ActionError."""
        ids = tuple(ids)
        for gate, word in self._words():
            if ids[: len(word)] == word:
                for focus, rest in self._lists(ids[len(word) :], gate):
                    if rest == (self.end,) and rest in self._pieces(focus, gate):
                        return Action(gate, focus)
        raise ActionError(f"{list(ids)} is no action")

    def _words(self) -> list[tuple[bool, tuple[int, ...]]]:
        opens = self.numbers or not self.coupled  # nothing to read: the gate stays closed
        return [*([(True, self.open)] if opens else []), (False, self.closed)]

    def _continuations(self, ids: tuple[int, ...]):
        """Yield what may stand after `ids`: each a non-empty tuple of ids, or () at the end."""
        for gate, word in self._words():
            if len(ids) < len(word):
                yield word[len(ids) :] if word[: len(ids)] == ids else None
            elif ids[: len(word)] == word:
                for focus, rest in self._lists(ids[len(word) :], gate):
                    yield from self._after(focus, rest, gate)

    def _after(self, focus: tuple[int, ...], rest: tuple[int, ...], gate: bool):
        for piece in self._pieces(focus, gate):
            if len(rest) < len(piece):
                yield piece[len(rest) :] if piece[: len(rest)] == rest else None
            elif rest == piece == (self.end,):
                yield ()

    def _pieces(self, focus: tuple[int, ...], gate: bool) -> list[tuple[int, ...]]:
        """Return what may follow a complete list: one more number, or the end."""
        lists = gate or not self.coupled
        pieces = []
        if lists and len(focus) < min(self.max_focus, len(self.numbers)):
            comma = self.comma if focus else ()
            left = (n for i, n in enumerate(self.numbers, start=1) if i not in focus)
            pieces += [(*comma, *number) for number in left]
        if focus or not lists or not self.numbers:
            pieces.append((self.end,))
        return pieces

    def _lists(self, ids: tuple[int, ...], gate: bool):
        """Yield each reading of `ids` as (complete numbers, rest); a number may begin another."""
        stack = [((), ids)]
        while stack:
            focus, rest = stack.pop()
            yield focus, rest
            for piece in self._pieces(focus, gate):
                if piece != (self.end,) and rest[: len(piece)] == piece:
                    number = piece[len(self.comma) if focus else 0 :]
                    stack.append(((*focus, self.numbers.index(number) + 1), rest[len(piece) :]))
