# SPDX-License-Identifier: Apache-2.0
"""The two heads at work: the controller decides what to read, the reader answers. No gold here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from bfm.dialogue import Question, turns_of
from bfm.generate import write
from bfm.heads import ControllerPrompt, grammar_of, reader_prompt, reader_room
from bfm.lm import LM
from bfm.prompts import LETTERS, Scaffold
from bfm.saliency import Job, Scored, Scorer, Suffix
from bfm.settings import LabelSettings, Settings


@dataclasses.dataclass(frozen=True)
class Decision:
    """What the controller wrote for one question.

    open_probability: p(open) against p(closed) at the gate. focus: turns to read, most useful first.
    """

    gate: bool
    open_probability: float
    focus: tuple[int, ...]


def decide(
    lm: LM, prompts: Sequence[ControllerPrompt], settings: Settings, opened: bool = False
) -> list[Decision]:
    """Let the controller write an action for every prompt, by the grammar only.

    opened: hold the gate open wherever there are candidates; its probability is the model's still.
    """
    grammars = [grammar_of(lm.scaffold, len(p.candidates), settings) for p in prompts]
    slots = max((g.longest for g in grammars), default=1)
    first = write(
        lm.decoder, [p.ids for p in prompts], [g.allowed for g in grammars],
        slots=slots, batch_size=settings.batch_size,
    )  # fmt: skip
    actions = [g.parse(w.ids) for g, w in zip(grammars, first, strict=True)]
    shut = [i for i, p in enumerate(prompts) if opened and p.candidates and not actions[i].gate]
    if shut:  # go on after the word that opens
        rules = [lambda ids, g=grammars[i]: g.allowed((*g.open, *ids)) for i in shut]
        rest = write(
            lm.decoder, [(*prompts[i].ids, *grammars[i].open) for i in shut], rules,
            slots=slots, batch_size=settings.batch_size,
        )  # fmt: skip
        for i, w in zip(shut, rest, strict=True):
            actions[i] = grammars[i].parse((*grammars[i].open, *w.ids))
    decisions = []
    for prompt, grammar, w, action in zip(prompts, grammars, first, actions, strict=True):
        open_logp, closed_logp = (w.first.get(i, -math.inf) for i in grammar.gate)
        probability = float(np.exp(open_logp - np.logaddexp(open_logp, closed_logp)))
        focus = tuple(prompt.candidates[i - 1] for i in action.focus)
        decisions.append(Decision(action.gate, probability, focus if action.gate else ()))
    return decisions


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


def asked(
    scaffold: Scaffold, question: Question, form: str, thought: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return the reader's ids between memory and answer.

    thought: ids of a thinking block that is open at its start and closed at its end, if there is one.
    """
    bare = scaffold.suffix(question, letters=form != "text").ids
    return (*bare[: -len(scaffold.tail)], *thought) if thought else bare


def option_suffixes(scaffold: Scaffold, question: Question, form: str) -> tuple[Suffix, ...]:
    """Return what is scored after `asked` to choose an option: each text, or one place for letters."""
    encode = scaffold.tokenizer.encode
    if form == "text":
        answers = [(*encode(option), scaffold.end) for option in question.options]
        return tuple(Suffix(a, (0, 0), (0, len(a))) for a in answers)
    letters = tuple(encode(letter)[0] for letter in LETTERS[: len(question.options)])
    return (Suffix(letters[:1], (0, 0), (0, 1), choices=letters),)


def read_options(
    scorer: Scorer,
    scaffold: Scaffold,
    questions: Sequence[Question],
    prompts: Sequence[Sequence[tuple[int, ...]]],
    label: LabelSettings,
) -> list[list[Reading]]:
    """Return the reader's belief for each question after each of its prompts.

    prompts[i]: ids between the head and the answer, of question i: a memory block and `asked`. They
    are the states that all options of a question continue from.
    """
    jobs = [
        Job(tuple(dict.fromkeys(own)), option_suffixes(scaffold, question, label.answer))
        for question, own in zip(questions, prompts, strict=True)
    ]
    results = []
    for job, own, scored in zip(jobs, prompts, scorer.score(jobs), strict=True):
        by_prompt = dict(zip(job.prefixes, scored[1:], strict=True))
        results.append([_reading(by_prompt[prompt], label.norm) for prompt in own])
    return results


def read_turns(
    lm: LM,
    questions: Sequence[Question],
    chosen: Sequence[Sequence[Sequence[int]]],
    settings: Settings,
) -> list[list[Reading]]:
    """Return the reader's belief for each question with each of its sets of turns (best first)."""
    prompts = []
    for question, sets in zip(questions, chosen, strict=True):
        turns = turns_of(question.messages, settings.unit)
        room = reader_room(lm.scaffold, question, settings)
        bare = asked(lm.scaffold, question, settings.label.answer)
        blocks = (reader_prompt(lm.scaffold, turns, s, settings, room).prefix for s in sets)
        prompts.append([(*block, *bare) for block in blocks])
    scorer = Scorer(lm.decoder, lm.scaffold.head, batch_size=settings.batch_size)
    return read_options(scorer, lm.scaffold, questions, prompts, settings.label)


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
