# SPDX-License-Identifier: Apache-2.0
"""The two heads' prompts, rendered once for training and inference alike: candidates in, ids out.

What does not fit loses its least salient turns first; question, options and answer are never cut.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import NamedTuple

from bfm.actions import Grammar
from bfm.dialogue import Message, Question, Turn
from bfm.prompts import LETTERS, PromptError, Scaffold, turn_messages
from bfm.settings import Settings


class ControllerPrompt(NamedTuple):
    """What the controller reads: `ids`, and the turns that its numbers 1, 2, .. stand for."""

    ids: tuple[int, ...]
    candidates: tuple[int, ...]  # indices of turns, by Sal_q
    dropped: int


class ReaderPrompt(NamedTuple):
    """What the reader reads before the question: a memory block, empty when the gate is closed."""

    prefix: tuple[int, ...]
    evidence: tuple[int, ...]  # indices of turns, in time order
    dropped: int


def prefilter(sal_q: Sequence[float | None], k: int) -> tuple[int, ...]:
    """Return the k turns of highest Sal_q, best first, ties by lower index; None is not a candidate.

    >>> prefilter([0.1, None, 0.5, 0.5], 2)
    (2, 3)
    """
    scored = [i for i, value in enumerate(sal_q) if value is not None]
    return tuple(sorted(scored, key=lambda i: (-sal_q[i], i))[:k])


def grammar_of(scaffold: Scaffold, n: int, settings: Settings) -> Grammar:
    """Return the grammar of actions over n candidates."""
    coupled = settings.train.gate == "coupled"
    return Grammar.of(scaffold.tokenizer, scaffold.end, n, settings.max_focus, coupled)


def controller_prompt(
    scaffold: Scaffold,
    question: Question,
    turns: Sequence[Turn],
    sal_q: Sequence[float | None],
    settings: Settings,
) -> ControllerPrompt:
    """Render the `prefilter_k` candidates of highest Sal_q; prompt and action take `train.tokens`.

    They stand in time order, which tells the current from the stale, each under its rank by Sal_q.
    Raises PromptError when the question alone does not fit.
    """
    ranked = prefilter(sal_q, settings.prefilter_k)
    limit = settings.train.tokens - grammar_of(scaffold, settings.prefilter_k, settings).longest

    def render(keep: int) -> tuple[int, ...]:
        chosen = sorted((i, rank) for rank, i in enumerate(ranked[:keep], start=1))
        groups = [(rank, turn_messages(turns, i, settings.context_turns)) for i, rank in chosen]
        return scaffold.controller(question, groups)

    keep = _most(len(ranked), lambda k: len(render(k)) <= limit)
    ids = render(keep)
    if len(ids) > limit:
        raise PromptError(
            f"query: question and options take {len(ids)} of {limit} tokens (train.tokens less the "
            "action); they are never cut"
        )
    return ControllerPrompt(ids, ranked[:keep], len(ranked) - keep)


def reader_room(scaffold: Scaffold, question: Question, settings: Settings, answer: int = 0) -> int:
    """Return the tokens that `train.tokens` leaves for memory; below 0 where there is no room at all.

    Room is kept for the longest answer that could be given: an option, or `answer` tokens if more. So
    the right answer's length moves nothing that is shown.
    """
    form, encode = settings.label.answer, scaffold.tokenizer.encode
    answers = question.options if form == "text" else LETTERS[: len(question.options)]
    longest = max([answer, *(len(encode(text)) + 1 for text in answers)])
    suffix = scaffold.suffix(question, letters=form != "text")
    return settings.train.tokens - len(scaffold.head) - len(suffix.ids) - longest


def reader_prompt(
    scaffold: Scaffold,
    turns: Sequence[Turn],
    ranked: Sequence[int],
    settings: Settings,
    room: int,
) -> ReaderPrompt:
    """Render the turns `ranked` (best first) as one memory block of at most `room` tokens."""

    def render(keep: int) -> tuple[int, ...]:
        return scaffold.prefix(together(turns, ranked[:keep], settings.context_turns))[0]

    keep = _most(len(ranked), lambda k: len(render(k)) <= room)
    return ReaderPrompt(
        render(keep) if keep else (), tuple(sorted(ranked[:keep])), len(ranked) - keep
    )


def _most(n: int, fits: Callable[[int], bool]) -> int:
    """Return the largest k in 0 .. n that fits, by halving: whatever fits, fewer turns fit too."""
    return bisect.bisect_left(range(1, n + 1), True, key=lambda k: not fits(k))


def together(
    turns: Sequence[Turn], chosen: Sequence[int], context_turns: int
) -> tuple[Message, ...]:
    """Return the messages of the chosen turns and their context in time order, each once."""
    shown = {j for i in chosen for j in range(max(0, i - context_turns), i + 1)}
    return tuple(message for i in sorted(shown) for message in turns[i].messages)
