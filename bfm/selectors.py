# SPDX-License-Identifier: Apache-2.0
"""Ways to choose turns for a question that need no memory model: turns, best first, or their scores.

They see a `Question` and its turns, never gold; the oracle is given evidence through a channel of its
own. A budget then cuts what is shown, the same for all.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from bfm.dialogue import Question, Turn, generator
from bfm.shortlist import bm25, words


def text_of(turn: Turn) -> str:
    """Return what similarity sees of a turn: its date, where it has one, and its words."""
    parts = [turn.messages[0].time, *(message.content for message in turn.messages)]
    return "\n".join(part for part in parts if part)


def query_of(question: Question, with_options: bool) -> str:
    """Return what similarity sees of a question: its words, and those of the options on request."""
    return "\n".join([question.query, *(question.options if with_options else ())])


def by_score(scores: Sequence[float | None]) -> tuple[int, ...]:
    """Return the turns by falling score, ties to the lower index; None is never chosen."""
    scored = [i for i, score in enumerate(scores) if score is not None]
    return tuple(sorted(scored, key=lambda i: (-scores[i], i)))


def none(question: Question, turns: Sequence[Turn]) -> tuple[int, ...]:
    """Read nothing."""
    return ()


def recency(question: Question, turns: Sequence[Turn]) -> tuple[int, ...]:
    """Read the newest turns."""
    return tuple(range(len(turns) - 1, -1, -1))


def random(question: Question, turns: Sequence[Turn], seed: int) -> tuple[int, ...]:
    """Read turns by chance; the order depends on seed and question id only."""
    order = generator(seed, f"random {question.id}").permutation(len(turns))
    return tuple(int(i) for i in order)


def latest(question: Question, turns: Sequence[Turn]) -> tuple[int, ...]:
    """Read the newest turns that share a rarer word with the question (in under half of the turns)."""
    held = [set(words(text_of(turn))) for turn in turns]
    asked = set(words(question.query))
    rare = {w for w in asked if 0 < sum(w in h for h in held) < max(2, len(turns) / 2)}
    return tuple(i for i in range(len(turns) - 1, -1, -1) if rare & held[i])


def lexical(question: Question, turns: Sequence[Turn], with_options: bool) -> list[float]:
    """Score each turn by BM25."""
    return [float(x) for x in bm25(query_of(question, with_options), [text_of(t) for t in turns])]


def embedding(
    pairs: Sequence[tuple[Question, Sequence[Turn]]], with_options: bool, encoder
) -> list[list[float]]:
    """Score the turns of each question by their cosine with it; a text that comes again, once."""
    from bfm import embed

    asked = [query_of(question, with_options) for question, _ in pairs]
    told = [[text_of(turn) for turn in turns] for _, turns in pairs]
    texts = list(dict.fromkeys((*asked, *itertools.chain(*told))))
    unit = dict(zip(texts, embed.embed(encoder, texts), strict=True))
    return [
        [float(unit[text] @ unit[query]) for text in own]
        for query, own in zip(asked, told, strict=True)
    ]


def expected_bayes_factor(log_before: np.ndarray, log_after: Sequence[np.ndarray]) -> list[float]:
    """Return U(c) = KL( p(o | q, c, O) || p(o | q, O) ) of each turn, nats.

    It is the expectation of the option's Sal_a under the model's own belief after reading c: no gold.
    log_before [n], log_after [turn][n]: log posteriors over the options.

    >>> expected_bayes_factor(np.log([0.5, 0.5]), [np.log([0.5, 0.5])])
    [0.0]
    """
    return [float(np.sum(np.exp(after) * (after - log_before))) for after in log_after]
