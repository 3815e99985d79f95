# SPDX-License-Identifier: Apache-2.0
"""One harness for every way of choosing evidence: same reader, same budget, same rendering.

Predictions see `Question`s only. Gold meets them in `grade`, and reaches one method, `evidence`,
through the argument named `oracle`.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bfm import selectors
from bfm.dialogue import Example, Question, Turn, evidence_turns, group_of, turns_of
from bfm.heads import controller_prompt, prefilter, reader_prompt, reader_room
from bfm.labeling import asked
from bfm.lm import LM
from bfm.policy import Decision, Reading, credit, decide, read_options
from bfm.prompts import turn_messages
from bfm.saliency import Job, Scorer
from bfm.settings import Settings, SettingsError

# Method -> what it does, in a few words; the controls answer from the options alone.
METHODS: Mapping[str, str] = {
    "bfm": "Sal_q pre-filter, controller, reader",
    "tau_q": "turns of Sal_q above eval.tau_q, no controller",
    "none": "no memory",
    "full": "the whole history, oldest turns cut to train.tokens",
    "random": "turns by chance",
    "recency": "the newest turns",
    "latest": "the newest turns that share a rarer word with the question",
    "bm25": "BM25",
    "bm25+o": "BM25, options in the query",
    "embedding": "MiniLM cosine",
    "embedding+o": "MiniLM cosine, options in the query",
    "sal_q": "query likelihood of the base model",
    "ebf": "expected Bayes factor of the K best by Sal_q",
    "evidence": "oracle: the labelled evidence",
    "longest": "control: the longest option",
    "shortest": "control: the shortest option",
    "first": "control: the first option",
}
CONTROLS = ("longest", "shortest", "first")


@dataclasses.dataclass(frozen=True)
class Choice:
    """What a method chose for one question: turns, best first, and the controller's gate if any."""

    turns: tuple[int, ...]
    decision: Decision | None = None


@dataclasses.dataclass(frozen=True)
class Models:
    """The base model that pre-filters, the policy that decides and reads, and what both need."""

    base: LM
    base_scorer: Scorer
    reader: LM
    reader_scorer: Scorer
    policy: LM | None
    encoder: Any = None


def parse_methods(text: str) -> tuple[str, ...]:
    """Read comma text as methods. Raises SettingsError naming an unknown one."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in METHODS]
    if unknown or not names or len(set(names)) < len(names):
        what = unknown[0] if unknown else text
        raise SettingsError(f"methods: {what!r}: give some of {', '.join(METHODS)}, each once")
    return names


def saliency_q(
    models: Models, questions: Sequence[Question], settings: Settings
) -> list[list[float]]:
    """Return Sal_q of every turn of every question under the base model, nats."""
    scaffold, jobs = models.base.scaffold, []
    for question in questions:
        turns = turns_of(question.messages, settings.unit)
        suffix = scaffold.suffix(question)
        # What is too long for the window was refused before, or is to be cut (on_overflow).
        room = models.base.config.window - len(scaffold.head) - len(suffix.ids)
        prefixes = tuple(
            scaffold.prefix(turn_messages(turns, i, settings.context_turns), room)[0]
            for i in range(len(turns))
        )
        jobs.append(asked(Job(prefixes, (suffix,))))
    return [
        [turn[0].logp_q - scored[0][0].logp_q for turn in scored[1:]]
        for scored in models.base_scorer.score(jobs)
    ]


def choose(
    method: str,
    questions: Sequence[Question],
    turns: Sequence[Sequence[Turn]],
    sal_q: Sequence[Sequence[float]],
    models: Models,
    settings: Settings,
    oracle: Sequence[tuple[int, ...]],
) -> list[Choice]:
    """Return a method's choice for every question; only `evidence` looks at `oracle`."""
    if method == "bfm":
        return _controlled(questions, turns, sal_q, models, settings)
    if method == "ebf":
        return _expected(questions, turns, sal_q, models, settings)
    pairs = list(zip(questions, turns, strict=True))
    k = settings.eval.k
    with_options = method.endswith("+o")
    match method.removesuffix("+o"):
        case "none":
            orders = [() for _ in pairs]
        case "full":
            return [Choice(selectors.recency(q, t)) for q, t in pairs]
        case "random":
            orders = [selectors.random(q, t, settings.seed) for q, t in pairs]
        case "recency":
            orders = [selectors.recency(q, t) for q, t in pairs]
        case "latest":
            orders = [selectors.latest(q, t) for q, t in pairs]
        case "bm25":
            orders = [selectors.lexical(q, t, with_options) for q, t in pairs]
        case "embedding":
            orders = [selectors.embedding(q, t, with_options, models.encoder) for q, t in pairs]
        case "sal_q":
            orders = [selectors.by_score(scores) for scores in sal_q]
        case "tau_q":
            over = [[s if s > settings.eval.tau_q else None for s in scores] for scores in sal_q]
            orders = [selectors.by_score(scores) for scores in over]
        case "evidence":
            return [Choice(evidence) for evidence in oracle]
    return [Choice(order[:k]) for order in orders]


def _controlled(questions, turns, sal_q, models, settings) -> list[Choice]:
    policy = models.policy or models.base
    prompts = [
        controller_prompt(policy.scaffold, question, own, scores, settings)
        for question, own, scores in zip(questions, turns, sal_q, strict=True)
    ]
    return [Choice(decision.focus, decision) for decision in decide(policy, prompts, settings)]


def _expected(questions, turns, sal_q, models, settings) -> list[Choice]:
    ranked = [prefilter(scores, settings.prefilter_k) for scores in sal_q]
    blocks = [
        [(), *(models.reader.scaffold.prefix(turn_messages(own, i, settings.context_turns))[0]
               for i in order)]
        for own, order in zip(turns, ranked, strict=True)
    ]  # fmt: skip
    readings = read_options(
        models.reader_scorer, models.reader.scaffold, questions, blocks, settings.label
    )
    chosen = []
    for order, (before, *after) in zip(ranked, readings, strict=True):
        values = selectors.expected_bayes_factor(
            before.log_posterior, [reading.log_posterior for reading in after]
        )
        best = selectors.by_score(values)[: settings.eval.k]
        chosen.append(Choice(tuple(order[i] for i in best)))
    return chosen


def evaluate(
    examples: Sequence[Example], methods: Sequence[str], models: Models, settings: Settings
) -> tuple[list[list[dict[str, Any]]], list[list[float]]]:
    """Run every method on a group of examples; return result lines [example][method] and Sal_q."""
    questions = [example.question for example in examples]
    turns = [turns_of(question.messages, settings.unit) for question in questions]
    oracle = [evidence_turns(example, settings.unit) for example in examples]
    started = time.perf_counter()
    sal_q = saliency_q(models, questions, settings)
    base_s = (time.perf_counter() - started) / len(examples)
    chosen: dict[str, list[Choice]] = {}
    spent: dict[str, float] = {}
    for method in methods:
        if method in CONTROLS:
            continue
        started = time.perf_counter()
        chosen[method] = choose(method, questions, turns, sal_q, models, settings, oracle)
        spent[method] = (time.perf_counter() - started) / len(examples)
        if method in ("bfm", "tau_q", "sal_q", "ebf"):
            spent[method] += base_s
    scaffold = models.reader.scaffold
    head = len(scaffold.head)
    shown: list[dict[str, Any]] = []
    for i, question in enumerate(questions):
        most = reader_room(scaffold, question, settings)
        prompts = {}
        for method, choices in chosen.items():
            room = most if method in ("full", "evidence") else min(most, settings.eval.budget)
            prompts[method] = reader_prompt(scaffold, turns[i], choices[i].turns, settings, room)
        shown.append(prompts)
    blocks = [[prompt.prefix for prompt in prompts.values()] for prompts in shown]
    started = time.perf_counter()
    readings = read_options(models.reader_scorer, scaffold, questions, blocks, settings.label)
    total = sum(len(block) + 1 for own in blocks for block in own)
    per_token = (time.perf_counter() - started) / total
    lines = []
    for i, example in enumerate(examples):
        by_method = dict(zip(shown[i], readings[i], strict=True))
        own = []
        for method in methods:
            if method in CONTROLS:
                own.append(grade(example, method, _control(method, example.question), oracle[i]))
                continue
            prompt, choice = shown[i][method], chosen[method][i]
            seconds = spent[method] + per_token * (len(prompt.prefix) + 1)
            line = grade(example, method, by_method[method], oracle[i], prompt.evidence, choice)
            line["n_turns"] = len(turns[i])
            line["calls"] = 2 if method == "bfm" else 1
            line["tokens"] = head + len(prompt.prefix) + len(scaffold.suffix(example.question).ids)
            line["seconds"] = round(seconds, 4)
            line["status"] = "truncated" if prompt.dropped else "ok"
            own.append(line)
        lines.append(own)
    return lines, sal_q


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
    reading: Reading,
    labelled: Sequence[int],
    evidence: tuple[int, ...] = (),
    choice: Choice | None = None,
) -> dict[str, Any]:
    """Return the result line of a method on an example: here the prediction meets the gold."""
    gold = example.answer_index
    decision = choice.decision if choice else None
    logp = float(reading.log_posterior[gold])
    return {
        "id": example.question.id, "method": method,
        "prediction": int(reading.best[0]) if len(reading.best) == 1 else None,
        "correct": credit(reading, gold),
        "logp": logp if math.isfinite(logp) else None,
        "probs": [round(float(p), 6) for p in np.exp(reading.log_posterior)],
        "gate": int(decision.gate) if decision else int(bool(evidence)),
        "open_probability": decision.open_probability if decision else None,
        "focus": list(choice.turns[:20]) if choice else [],
        "evidence": list(evidence), "tokens": 0, "calls": 0,
        "seconds": 0.0, "status": "ok", "group": group_of(example),
        "stratum": str(example.meta.get("stratum", example.meta.get("category", ""))),
        "n_turns": 0,
        "recall": len({*labelled} & {*evidence}) / len(labelled) if labelled else None,
    }  # fmt: skip
