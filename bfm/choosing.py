# SPDX-License-Identifier: Apache-2.0
"""The methods that are compared: what each chooses to read for a question.

Every method but the two oracles sees `Question`s only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from bfm import selectors
from bfm.baselines import MAKERS, Note
from bfm.dialogue import Example, Question, Turn, turns_of
from bfm.heads import controller_prompt, prefilter
from bfm.labels import label, render
from bfm.lm import LM
from bfm.policy import Decision, asked, decide, read_options
from bfm.prompts import has_answer, turn_messages
from bfm.saliency import Job, Scorer, focus, unanswered
from bfm.settings import Settings, SettingsError
from bfm.systems import Systems, as_turns

# Method -> what it does, in a few words; the controls answer from the options alone.
METHODS: Mapping[str, str] = {
    "bfm": "Sal_q pre-filter, controller, reader",
    "bfm_open": "the same with the gate held open",
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
    "sal_a": "oracle: turns whose Sal_a (it knows the answer) is over tau",
    "other": "control: the newest turns of another user's history",
    "mem0": "Mem0 of its paper: facts with add, update, delete",
    "mem0_add": "Mem0 2.x: facts, only added",
    "amem": "A-MEM: linked notes that evolve",
    "memorybank": "MemoryBank: pairs, day summaries, portrait",
    "memorybank_c1": "the same, forgetting as published",
    "memorybank_c5": "the same, forgetting five times as slowly",
    "rmm": "RMM: topics with their turns; its reranker is trained on eval.tune_split",
    "longest": "control: the longest option",
    "shortest": "control: the shortest option",
    "first": "control: the first option",
}
BY_SAL_Q = ("bfm", "bfm_open", "tau_q", "sal_q", "ebf")  # score every turn with the question first
CONTROLS = ("longest", "shortest", "first")
BY_OPTIONS = ("ebf", *CONTROLS)  # have nothing to say on a question without options
SYSTEMS = tuple(MAKERS)  # memories that an LM writes
WHOLE = ("full", "evidence", "sal_a")  # not held to eval.budget
TUNED = (
    "random",
    "recency",
    "latest",
    "bm25",
    "bm25+o",
    "embedding",
    "embedding+o",
    "sal_q",
    "ebf",
)


@dataclasses.dataclass(frozen=True)
class Choice:
    """What a method chose for one question: turns, best first, and the controller's gate if any.

    history: what stands in the place of the user's turns, where `turns` are places in something else;
    sources[place]: the user's turns that it rests on. scores: what ranked the user's turns, one number
    each (None: never in question); empty where nothing did.
    """

    turns: tuple[int, ...]
    decision: Decision | None = None
    history: tuple[Turn, ...] | None = None
    sources: tuple[tuple[int, ...], ...] = ()
    scores: tuple[float | None, ...] = ()

    def evidence(self, shown: Sequence[int]) -> tuple[int, ...]:
        """Return the user's turns behind the places that a reader was shown, in time order."""
        if self.history is None:
            return tuple(shown)
        return tuple(sorted({turn for place in shown for turn in self.sources[place]}))


@dataclasses.dataclass(frozen=True)
class Models:
    """The base model that pre-filters, the policy that decides, the readers, and their scorers.

    own: method -> a reader of its own (protocol C); the others share `reader`.
    """

    base: LM
    base_scorer: Scorer
    reader: LM
    reader_scorer: Scorer
    policy: LM | None
    encoder: Any = None
    own: Mapping[str, tuple[LM, Scorer]] = dataclasses.field(default_factory=dict)
    systems: Systems | None = None

    def reader_of(self, method: str) -> tuple[LM, Scorer]:
        return self.own.get(method, (self.reader, self.reader_scorer))


@dataclasses.dataclass(frozen=True)
class Oracle:
    """What knows the answers, by example: only the methods evidence and sal_a are given it.

    evidence: labelled turns. sal_a: of every turn, nats; None where it is not scored.
    """

    evidence: Sequence[tuple[int, ...]]
    sal_a: Sequence[Sequence[float] | None]


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
        jobs.append(unanswered(Job(prefixes, (suffix,))))
    return [
        [turn[0].logp_q - scored[0][0].logp_q for turn in scored[1:]]
        for scored in models.base_scorer.score(jobs)
    ]


def choose(
    method: str,
    questions: Sequence[Question],
    turns: Sequence[Sequence[Turn]],
    others: Sequence[Sequence[Turn]],
    sal_q: Sequence[Sequence[float]],
    models: Models,
    settings: Settings,
    oracle: Oracle,
    k: int,
) -> list[Choice | None]:
    """Return a method's choice for every question, at most k turns; see `Oracle` for who sees it.

    others[i]: turns of another user, for the control of that name. None where a method of BY_OPTIONS
    meets a question without options.
    """
    if method in ("bfm", "bfm_open"):
        return _controlled(questions, turns, sal_q, models, settings, method == "bfm_open")
    if method == "ebf":
        able = [i for i, question in enumerate(questions) if question.options]
        parts = ([column[i] for i in able] for column in (questions, turns, sal_q))
        found = iter(_expected(*parts, models, settings, k))
        return [next(found) if question.options else None for question in questions]
    if method in SYSTEMS:
        return [_noted(notes) for notes in models.systems.search(method, questions, turns)]
    pairs = list(zip(questions, turns, strict=True))
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
            return [_ranked(selectors.lexical(q, t, with_options), k) for q, t in pairs]
        case "embedding":
            scores = selectors.embedding(pairs, with_options, models.encoder)
            return [_ranked(own, k) for own in scores]
        case "sal_q":
            orders = [selectors.by_score(scores) for scores in sal_q]
        case "tau_q":
            over = [[s if s > settings.eval.tau_q else None for s in scores] for scores in sal_q]
            orders = [selectors.by_score(scores) for scores in over]
        case "other":
            return [
                Choice(selectors.recency(q, t)[:k], history=tuple(t), sources=((),) * len(t))
                for q, t in zip(questions, others, strict=True)
            ]
        case "evidence":
            return [Choice(evidence) for evidence in oracle.evidence]
        case "sal_a":
            tau = settings.threshold
            return [
                Choice(tuple(focus(own or (), tau, settings.max_focus))) for own in oracle.sal_a
            ]
    return [Choice(order[:k]) for order in orders]


def _ranked(scores: Sequence[float | None], k: int) -> Choice:
    return Choice(selectors.by_score(scores)[:k], scores=tuple(scores))


def _noted(notes: Sequence[Note]) -> Choice:
    history, ranked = as_turns(notes)
    sources = dict(zip(ranked, (note.turns for note in notes), strict=True))
    return Choice(ranked, history=history, sources=tuple(sources[i] for i in range(len(notes))))


def _controlled(questions, turns, sal_q, models, settings, opened) -> list[Choice]:
    policy = models.policy or models.base
    prompts = [
        controller_prompt(policy.scaffold, question, own, scores, settings)
        for question, own, scores in zip(questions, turns, sal_q, strict=True)
    ]
    decisions = decide(policy, prompts, settings, opened)
    return [Choice(decision.focus, decision) for decision in decisions]


def _expected(questions, turns, sal_q, models, settings, k) -> list[Choice]:
    ranked = [prefilter(scores, settings.prefilter_k) for scores in sal_q]
    scaffold, prompts = models.reader.scaffold, []
    for question, own, order in zip(questions, turns, ranked, strict=True):
        bare = asked(scaffold, question, settings.label.answer)
        groups = [turn_messages(own, i, settings.context_turns) for i in order]
        prompts.append([bare, *((*scaffold.prefix(group)[0], *bare) for group in groups)])
    readings = read_options(models.reader_scorer, scaffold, questions, prompts, settings.label)
    chosen = []
    for own, order, (before, *after) in zip(turns, ranked, readings, strict=True):
        values = selectors.expected_bayes_factor(
            before.log_posterior, [reading.log_posterior for reading in after]
        )
        by_turn = dict(zip(order, values, strict=True))
        chosen.append(_ranked([by_turn.get(i) for i in range(len(own))], k))
    return chosen


def saliency_a(
    models: Models, examples: Sequence[Example], settings: Settings
) -> list[list[float] | None]:
    """Return Sal_a of every turn under the shared reader, nats; None without an answer.

    It knows the answer: it is for the diagnosis and for the method of that name only.
    """
    lm, known = models.reader, [e for e in examples if has_answer(e, settings.label.answer)]
    rendered = [render(e, lm.scaffold, lm.config.window, settings) for e in known]
    scores = models.reader_scorer.score([r.job for r in rendered])
    labels = {
        r.id: list(label(r, scored, settings).sal_a)
        for r, scored in zip(rendered, scores, strict=True)
    }
    return [labels.get(example.question.id) for example in examples]
