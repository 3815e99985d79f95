# SPDX-License-Identifier: Apache-2.0
"""The two heads at work: the controller decides what to read, the reader answers. No gold here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from bfm.actions import Action, Grammar
from bfm.dialogue import Question
from bfm.generate import write
from bfm.heads import ControllerPrompt
from bfm.lm import LM
from bfm.prompts import LETTERS, Scaffold
from bfm.saliency import Job, Scored, Scorer, Suffix


@dataclasses.dataclass(frozen=True)
class Decision:
    """What the controller wrote for one question.

    open_probability: p(open) against p(closed) at the gate. focus: turns to read, most useful first.
    """

    gate: bool
    open_probability: float
    focus: tuple[int, ...]


def decide(
    lm: LM, prompts: Sequence[ControllerPrompt], *, max_focus: int, coupled: bool, batch_size: int
) -> list[Decision]:
    """Let the controller write an action for every prompt, by the grammar only."""
    scaffold = lm.scaffold
    grammars = [
        Grammar.of(scaffold.tokenizer, scaffold.end, len(p.candidates), max_focus, coupled)
        for p in prompts
    ]
    longest = max((_longest(g) for g in grammars), default=1)
    written = write(
        lm.decoder, [p.ids for p in prompts], [g.allowed for g in grammars],
        slots=longest, batch_size=batch_size,
    )  # fmt: skip
    decisions = []
    for prompt, grammar, w in zip(prompts, grammars, written, strict=True):
        action = grammar.parse(w.ids)
        opened, closed = (w.first.get(i, -math.inf) for i in grammar.gate)
        probability = float(np.exp(opened - np.logaddexp(opened, closed)))
        focus = tuple(prompt.candidates[i - 1] for i in action.focus)
        decisions.append(Decision(action.gate, probability, focus if action.gate else ()))
    return decisions


def _longest(grammar: Grammar) -> int:
    longest = sorted(range(len(grammar.numbers)), key=lambda i: -len(grammar.numbers[i]))
    focus = tuple(i + 1 for i in longest[: grammar.max_focus])
    return max(len(grammar.encode(Action(bool(focus), focus))), len(grammar.closed) + 1)


@dataclasses.dataclass(frozen=True)
class Reading:
    """The reader's belief in each option: log posterior (nats, sums to one over the options).

    mass: probability of all letters together where letters are scored; nan for texts.
    """

    log_posterior: np.ndarray
    mass: float

    @property
    def best(self) -> tuple[int, ...]:
        """The options of highest belief: one, or several where they are equal."""
        return tuple(np.flatnonzero(self.log_posterior == self.log_posterior.max()))


def option_suffixes(scaffold: Scaffold, question: Question, form: str) -> tuple[Suffix, ...]:
    """Return what is scored to choose an option: each option's text, or one place for all letters."""
    bare = scaffold.suffix(question, letters=form != "text")
    at, encode = len(bare.ids), scaffold.tokenizer.encode
    if form == "text":
        answers = [(*encode(option), scaffold.end) for option in question.options]
        return tuple(
            dataclasses.replace(bare, ids=(*bare.ids, *a), a=(at, at + len(a))) for a in answers
        )
    letters = tuple(encode(letter)[0] for letter in LETTERS[: len(question.options)])
    return (
        dataclasses.replace(bare, ids=(*bare.ids, letters[0]), a=(at, at + 1), choices=letters),
    )


def read_options(
    scorer: Scorer,
    scaffold: Scaffold,
    questions: Sequence[Question],
    prefixes: Sequence[Sequence[tuple[int, ...]]],
    *,
    form: str,
    norm: str = "sum",
) -> list[list[Reading]]:
    """Return the reader's belief for each question under each of its memory blocks.

    prefixes[i]: the blocks (ids) to read question i with; () is no memory. form and norm are
    `label.answer` and `label.norm`.
    """
    jobs = [
        Job(tuple(p for p in blocks if p), option_suffixes(scaffold, question, form))
        for question, blocks in zip(questions, prefixes, strict=True)
    ]
    results = []
    for job, blocks, scored in zip(jobs, prefixes, scorer.score(jobs), strict=True):
        by_block = dict(zip(((), *job.prefixes), scored, strict=True))
        results.append([_reading(by_block[block], norm) for block in blocks])
    return results


def _reading(scored: Sequence[Scored], norm: str) -> Reading:
    if scored[0].choices is not None:
        logp = scored[0].choices.astype(np.float64)
        total = np.logaddexp.reduce(logp)
        return Reading(logp - total, float(np.exp(total)))
    logp = np.array([s.logp_a / (len(s.a) if norm == "token" else 1) for s in scored])
    return Reading(logp - np.logaddexp.reduce(logp), math.nan)


def credit(reading: Reading, gold: int) -> float:
    """Return 1 for the right option, 1/k where k options share the highest belief, else 0."""
    return float(gold in reading.best) / len(reading.best)
