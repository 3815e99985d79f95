# SPDX-License-Identifier: Apache-2.0
"""One harness for every way of choosing evidence: same reader, same budget, same rendering.

Predictions see `Question`s only. Gold meets them in `grade`, after everything is predicted.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bfm import extract
from bfm.answering import Answer, answers, longest, reference_logp
from bfm.choosing import (
    BY_OPTIONS,
    BY_SAL_Q,
    CONTROLS,
    WHOLE,
    Choice,
    Models,
    Oracle,
    choose,
    saliency_a,
    saliency_q,
)
from bfm.dialogue import Example, Question, Turn, evidence_turns, group_of, turns_of
from bfm.heads import ReaderPrompt, reader_prompt, reader_room
from bfm.policy import Reading, asked, credit
from bfm.settings import Settings


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """What a group of examples gave: result lines by example, and what scored every turn.

    scores[i]: sal_q, sal_a (None where not scored) and each method that ranks by a score of its own ->
    one number a turn of example i, None for a turn that was never in question.
    """

    lines: list[list[dict[str, Any]]]
    scores: list[dict[str, list[float | None] | None]]


def evaluate(
    examples: Sequence[Example],
    others: Sequence[Sequence[Turn]],
    methods: Sequence[str],
    models: Models,
    settings: Settings,
    ks: Mapping[str, Sequence[int]],
    on_steps: Callable[[int], None] = lambda n: None,
) -> Evaluated:
    """Run every method on a group of examples.

    others[i]: turns of another user, for the control of that name. ks: most turns by method (default
    eval.k); several give a line each, which names its k, and the turns are ranked once. `seconds` of a
    line is the share of its choice in the group's time and of its prompt's tokens in the reader's; the
    first group's holds compilation. on_steps is told how many steps more are done; an example takes
    `steps` of them where each method has one k.
    """
    questions = [example.question for example in examples]
    turns = [turns_of(question.messages, settings.unit) for question in questions]
    started = time.perf_counter()
    ranked = wants_sal_q(methods, settings)
    sal_q = saliency_q(models, questions, settings) if ranked else [None] * len(examples)
    base_s = (time.perf_counter() - started) / len(examples)
    on_steps(len(examples) * ranked)
    wanted = wants_sal_a(methods, settings)
    sal_a = saliency_a(models, examples, settings) if wanted else [None] * len(examples)
    on_steps(len(examples) * wanted)
    oracle = Oracle([evidence_turns(example, settings.unit) for example in examples], sal_a)
    most = {method: ks.get(method, (settings.eval.k,)) for method in methods}
    chosen: dict[tuple[str, int], list[Choice | None]] = {}
    spent: dict[str, float] = {}
    for method in methods:
        if method in CONTROLS:
            continue
        started = time.perf_counter()
        own = most[method]
        choices = choose(
            method, questions, turns, others, sal_q, models, settings, oracle, max(own)
        )
        for k in own:
            chosen[method, k] = choices if len(own) == 1 else [_first(c, k) for c in choices]
        spent[method] = (time.perf_counter() - started) / len(examples)
        if method in BY_SAL_Q:
            spent[method] += base_s
        on_steps(len(examples))
    shown = _show(chosen, questions, turns, models, settings)
    form, scaffold = settings.label.answer, models.base.scaffold
    bare = [len(asked(scaffold, question, form)) for question in questions]
    found, per_token = _answer(shown, examples, models, settings, bare)
    on_steps(len(examples) * len(spent))
    lines = []
    for i, example in enumerate(examples):
        own = []
        for method in methods:
            if method in BY_OPTIONS and not example.question.options:
                continue
            if method in CONTROLS:
                reading = _control(method, example.question)
                own.append(grade(example, method, Answer(reading), oracle.evidence[i]))
                continue
            head = len(models.reader_of(method)[0].scaffold.head)
            for k in most[method]:
                prompt, choice = shown[method, k][i], chosen[method, k][i]
                reply, logp = found[(method, k), i]
                read = choice.evidence(prompt.evidence)
                line = grade(example, method, reply, oracle.evidence[i], read, choice, logp)
                line |= _cost(method, prompt, head, bare[i], reply)
                line["seconds"] = round(spent[method] + per_token * (line["tokens"] - head), 4)
                if choice.decision is None:
                    line["gate"] = int(bool(prompt.prefix))
                if prompt.dropped and line["status"] == "ok":
                    line["status"] = "truncated"
                if method in ks:
                    line["k"] = k
                own.append(line)
        for line in own:
            line["n_turns"] = len(turns[i])
        lines.append(own)
    scores = [
        {"sal_q": sal_q[i], "sal_a": sal_a[i]}
        | {m: list(own[i].scores) for (m, _), own in chosen.items() if own[i] and own[i].scores}
        for i in range(len(examples))
    ]
    return Evaluated(lines, scores)


def wants_sal_q(methods: Sequence[str], settings: Settings) -> bool:
    """Say whether Sal_q of every turn is scored: beside Sal_a, or because a method reads by it."""
    return wants_sal_a(methods, settings) or bool({*BY_SAL_Q} & {*methods})


def wants_sal_a(methods: Sequence[str], settings: Settings) -> bool:
    """Say whether Sal_a of every turn is scored: asked for, or what a method reads by."""
    return settings.eval.sal_a or "sal_a" in methods


def steps(methods: Sequence[str], settings: Settings) -> int:
    """Return how many steps an example takes: both saliencies; of each method, choice and answer."""
    scored = wants_sal_q(methods, settings) + wants_sal_a(methods, settings)
    return scored + 2 * sum(method not in CONTROLS for method in methods)


def _cost(method: str, prompt: ReaderPrompt, head: int, bare: int, reply: Answer) -> dict[str, int]:
    """Return what an answer took: tokens read and written, turns that did not fit, calls."""
    size = len(prompt.prefix)
    return {
        "tokens": head + size + bare, "memory_tokens": size, "dropped": prompt.dropped,
        "written": reply.written, "calls": 2 if method in ("bfm", "bfm_open") else 1,
    }  # fmt: skip


def _first(choice: Choice | None, k: int) -> Choice | None:
    """Return a selector's choice of at most k turns."""
    return choice and dataclasses.replace(choice, turns=choice.turns[:k])


def _show(chosen, questions, turns, models, settings) -> dict[tuple, list[ReaderPrompt | None]]:
    """Render what each method chose, the same for all, within the budget of tokens."""
    shown = {}
    for (method, k), choices in chosen.items():
        scaffold = models.reader_of(method)[0].scaffold
        shown[method, k] = []
        for question, own, choice in zip(questions, turns, choices, strict=True):
            if choice is None:
                shown[method, k].append(None)
                continue
            own = own if choice.history is None else choice.history
            room = reader_room(scaffold, question, settings, longest(question, settings))
            if method not in WHOLE:
                room = min(room, settings.eval.budget)
            shown[method, k].append(reader_prompt(scaffold, own, choice.turns, settings, room))
    return shown


def _answer(shown, examples, models, settings, bare) -> tuple[dict, float]:
    """Return (key of shown, example) -> (answer, log p of a reference or None), and seconds a token."""
    questions = [example.question for example in examples]
    open_ended = [i for i, question in enumerate(questions) if not question.options]
    found, seconds, tokens = {}, 0.0, 0
    by_reader: dict[int, list[tuple[str, int]]] = {}
    for key in shown:
        by_reader.setdefault(id(models.reader_of(key[0])[0]), []).append(key)
    for keys in by_reader.values():
        reader, scorer = models.reader_of(keys[0][0])
        able = [[key for key in keys if shown[key][i]] for i in range(len(examples))]
        blocks = [[shown[key][i].prefix for key in own] for i, own in enumerate(able)]
        started = time.perf_counter()
        given = answers(reader, scorer, questions, blocks, settings)
        seconds += time.perf_counter() - started
        tokens += sum(len(b) + n for own, n in zip(blocks, bare, strict=True) for b in own)
        # The reference meets the model here, when all that is predicted is there.
        logps = reference_logp(
            scorer, reader, [questions[i] for i in open_ended],
            [examples[i].answer for i in open_ended], [blocks[i] for i in open_ended],
        )  # fmt: skip
        at = dict(zip(open_ended, logps, strict=True))
        for i, own in enumerate(given):
            for place, key in enumerate(able[i]):
                found[key, i] = own[place], at[i][place] if i in at else None
    return found, seconds / max(1, tokens)


def _control(method: str, question: Question) -> Reading:
    sizes = [len(option) for option in question.options]
    wanted = {"longest": max(sizes), "shortest": min(sizes)}.get(method)
    picked = [size == wanted if wanted is not None else i == 0 for i, size in enumerate(sizes)]
    share = np.array(picked) / sum(picked)
    with np.errstate(divide="ignore"):
        return Reading(np.log(share), math.nan)


def grade(
    example: Example,
    method: str,
    answer: Answer,
    labelled: Sequence[int],
    evidence: tuple[int, ...] = (),
    choice: Choice | None = None,
    logp: float | None = None,
) -> dict[str, Any]:
    """Return the result line of a method on an example: here the prediction meets the gold.

    correct: credit for the option, or exact match of a free answer; f1: of a free answer's words.
    """
    gold, question, reading = example.answer_index, example.question, answer.reading
    decision = choice.decision if choice else None
    prediction: int | str | None = answer.text
    overlap = None
    if question.options and answer.text is not None:
        prediction = extract.choice(answer.text, question.options)
        correct = float(prediction == gold)
    elif question.options:
        prediction = int(reading.best[0]) if len(reading.best) == 1 else None
        correct = credit(reading, gold)
    else:
        said = extract.answer_of(answer.text) or ""
        correct = extract.exact(said, example.answer)
        overlap = extract.f1(said, example.answer)
    if reading is not None:
        logp = float(reading.log_posterior[gold])
    return {
        "id": question.id, "method": method, "prediction": prediction, "correct": correct,
        "f1": overlap, "logp": logp if logp is not None and math.isfinite(logp) else None,
        "probs": None if reading is None
                 else [round(float(p), 6) for p in np.exp(reading.log_posterior)],
        "mass": None if reading is None or math.isnan(reading.mass) else round(reading.mass, 6),
        "reply": answer.text if question.options else None,
        "gold": gold, "gate": int(decision.gate) if decision else 0,
        "open_probability": decision.open_probability if decision else None,
        "focus": list(choice.turns[:20]) if choice else [],
        "evidence": list(evidence), "tokens": 0, "memory_tokens": 0, "dropped": 0, "written": 0,
        "calls": 0, "seconds": 0.0, "status": answer.status, "group": group_of(example),
        "stratum": str(example.meta.get("stratum", example.meta.get("category", ""))),
        "n_turns": 0,
        "recall": len({*labelled} & {*evidence}) / len(labelled) if labelled else None,
    }  # fmt: skip
