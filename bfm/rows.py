# SPDX-License-Identifier: Apache-2.0
"""Training rows: silver labels and their examples -> ids of the controller and the reader.

A row is a prompt and its answer as one sequence; the loss stands on the answer and the token that
ends it, nowhere else.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from bfm import saliency
from bfm.actions import Action
from bfm.dialogue import Example, generator, turns_of
from bfm.heads import controller_prompt, grammar_of, prefilter, reader_prompt, reader_room
from bfm.prompts import LETTERS, PromptError, Scaffold, check_letters, has_answer
from bfm.settings import Settings


@dataclasses.dataclass(frozen=True)
class Row:
    """One training sequence; `ids[start:]` is the answer with its end token."""

    id: str
    head: str  # controller | reader
    ids: tuple[int, ...]
    start: int


@dataclasses.dataclass(frozen=True)
class Labelled:
    """An example with the score that decides for each turn, and the threshold on it.

    score: one number a turn (None: not scored), by `label.source`. sal_q ranks the candidates; both
    are empty without labels. shown: the turns, best first, that the reader's row shows where
    `train.evidence` is not silver.
    """

    example: Example
    sal_q: tuple[float | None, ...]
    score: tuple[float | None, ...]
    tau: float | None  # None: not chosen yet
    shown: tuple[int, ...] | None = None


def silver(labelled: Labelled, candidates: Sequence[int], max_focus: int) -> tuple[int, ...]:
    """Return the focus within the candidates: turns over the threshold, most salient first."""
    values = [labelled.score[i] for i in candidates]
    values = [float("nan") if value is None else value for value in values]
    return tuple(candidates[k] for k in saliency.focus(values, labelled.tau, max_focus))


def make_rows(
    labelled: Labelled, scaffold: Scaffold, settings: Settings, count: collections.Counter[str]
) -> list[Row]:
    """Return the rows of one example; `count` is told what was dropped or lies out of reach.

    Raises PromptError where question and answer alone do not fit.
    """
    example, train = labelled.example, settings.train
    turns = turns_of(example.question.messages, settings.unit)
    ranked = prefilter(labelled.sal_q, settings.prefilter_k)
    if silver(labelled, range(len(labelled.score)), 1) and not silver(labelled, ranked, 1):
        count["focus outside the candidates"] += 1
    rows = []
    if train.heads != "reader":
        prompt = controller_prompt(scaffold, example.question, turns, labelled.sal_q, settings)
        count["candidates dropped for length"] += prompt.dropped
        action = grammar_of(scaffold, settings.prefilter_k, settings).encode(
            _action(labelled, prompt.candidates, settings)
        )
        rows.append(_row(example, "controller", prompt.ids, action))
    if train.heads != "controller":
        evidence = _evidence(labelled, ranked, settings)
        rows.append(reader_row(example, scaffold, evidence, settings, count))
    return rows


def reader_row(
    example: Example,
    scaffold: Scaffold,
    evidence: Sequence[int],
    settings: Settings,
    count: collections.Counter[str],
) -> Row:
    """Return the reader's row for an example and the turns it shall read, best first."""
    form = settings.label.answer
    suffix = scaffold.suffix(example.question, letters=form != "text")
    answer = answer_ids(example, scaffold, form)
    room = reader_room(scaffold, example.question, settings, len(answer))
    if settings.train.evidence in ("recency", "bm25", "embedding"):
        room = min(room, settings.eval.budget)  # as such a selector is held to at inference
    if room < 0:
        raise PromptError(
            f"query: question, options and answer take {settings.train.tokens - room} of "
            f"{settings.train.tokens} tokens (train.tokens); they are never cut"
        )
    turns = turns_of(example.question.messages, settings.unit)
    prompt = reader_prompt(scaffold, turns, evidence, settings, room)
    count["evidence turns dropped for length"] += prompt.dropped
    return _row(example, "reader", (*scaffold.head, *prompt.prefix, *suffix.ids), answer)


def answer_ids(example: Example, scaffold: Scaffold, form: str) -> tuple[int, ...]:
    """Return what the reader shall write: the answer's text or its letter, and the end of turn."""
    if not has_answer(example, form):
        raise PromptError(f"answer: missing (label.answer={form} needs one)")
    if form == "text":
        return (*scaffold.tokenizer.encode(example.answer), scaffold.end)
    check_letters(example)
    return (*scaffold.tokenizer.encode(LETTERS[example.answer_index]), scaffold.end)


def _row(example: Example, head: str, prompt: Sequence[int], answer: Sequence[int]) -> Row:
    return Row(example.question.id, head, (*prompt, *answer), len(prompt))


def _action(labelled: Labelled, candidates: Sequence[int], settings: Settings) -> Action:
    chosen = silver(labelled, candidates, settings.max_focus)
    focus = tuple(candidates.index(i) + 1 for i in chosen)
    if settings.train.gate == "separate" and not focus and candidates:
        # The ablation's list does not know of the gate: it names the best candidate all the same.
        scored = [i for i in candidates if labelled.score[i] is not None] or candidates
        best = max(scored, key=lambda i: (labelled.score[i] or 0.0, -i))
        return Action(False, (candidates.index(best) + 1,))
    return Action(bool(focus), focus)


def _evidence(labelled: Labelled, ranked: Sequence[int], settings: Settings) -> tuple[int, ...]:
    """Return the turns a reader row shows; the silver focus is now and then a noisy version of it."""
    if labelled.shown is not None:
        return labelled.shown
    rng = generator(settings.seed, f"evidence {labelled.example.question.id}")
    chosen = silver(labelled, ranked, settings.max_focus)
    if rng.random() >= settings.train.noise:
        return chosen
    kept = [i for i in chosen if rng.random() < 0.5]
    others = [i for i in ranked if i not in chosen]
    extra = rng.permutation(others)[: rng.integers(1, 3)] if others else []
    return (*kept, *(int(i) for i in extra))[: settings.max_focus]
