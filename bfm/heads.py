# SPDX-License-Identifier: Apache-2.0
"""The two heads' prompts, rendered once for training and inference alike: candidates in, ids out.

What does not fit loses its least salient turns first; question, options and answer are never cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bfm.dialogue import Message, Question, Turn
from bfm.prompts import PromptError, Scaffold, turn_messages


class ControllerPrompt(NamedTuple):
    """What the controller reads: `ids`, and the turns that its numbers 1, 2, .. stand for."""

    ids: tuple[int, ...]
    candidates: tuple[int, ...]  # indices of turns, in time order
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


def controller_prompt(
    scaffold: Scaffold,
    question: Question,
    turns: Sequence[Turn],
    ranked: Sequence[int],
    *,
    limit: int,
    context_turns: int = 0,
) -> ControllerPrompt:
    """Render the candidates `ranked` (best first) for the controller, in at most `limit` tokens.

    Raises PromptError when the question alone does not fit.
    """
    for keep in range(len(ranked), -1, -1):
        chosen = tuple(sorted(ranked[:keep]))
        ids = scaffold.controller(
            question, [turn_messages(turns, i, context_turns) for i in chosen]
        )
        if len(ids) <= limit:
            return ControllerPrompt(ids, chosen, len(ranked) - keep)
    raise PromptError(f"query: question and options take {len(ids)} of {limit} tokens; never cut")


def reader_prompt(
    scaffold: Scaffold,
    turns: Sequence[Turn],
    ranked: Sequence[int],
    *,
    room: int,
    context_turns: int = 0,
) -> ReaderPrompt:
    """Render the turns `ranked` (best first) as one memory block of at most `room` tokens."""
    for keep in range(len(ranked), 0, -1):
        prefix, _ = scaffold.prefix(together(turns, ranked[:keep], context_turns))
        if len(prefix) <= room:
            return ReaderPrompt(prefix, tuple(sorted(ranked[:keep])), len(ranked) - keep)
    return ReaderPrompt((), (), len(ranked))


def together(
    turns: Sequence[Turn], chosen: Sequence[int], context_turns: int
) -> tuple[Message, ...]:
    """Return the messages of the chosen turns and their context in time order, each once."""
    shown = {j for i in chosen for j in range(max(0, i - context_turns), i + 1)}
    return tuple(message for i in sorted(shown) for message in turns[i].messages)
