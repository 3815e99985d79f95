# SPDX-License-Identifier: Apache-2.0
"""Cheap rules that answer a multiple-choice question, measured per stratum: what a set gives away.

Each rule reads an `Example` only; one that ties on k options earns 1/k. `evidence_mention` reads the
labels and is no baseline.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from bfm.dialogue import Example, turns_of
from bfm.shortlist import bm25, words

Embed = Callable[[Sequence[str]], np.ndarray]  # texts -> unit vectors [texts, D]
_COUNTED = ("needs", "kind", "language", "frame_family")
EMBEDDED = 3000  # texts of examples spread evenly, about: a sentence encoder takes 20 ms for one


def measure(examples: Iterable[Example], embed: Embed | None = None) -> dict[str, Any]:
    """Return accuracies of cheap rules and counts, over all and per stratum; iterates twice.

    `options_prior` knows how often each option text is right where it is shown, among the half of the
    users that the question's is not in. `bm25` and (with `embed`) `minilm` take the option that shares
    most words with the turn most similar to the question. `.._percentile`: the share of turns that are
    less similar than the turn that gives the stratum its name (0.5: as similar as any).
    `chance_error`: the standard error of a rule that is at chance.
    """
    asked = [_options(e) for e in examples if e.answer_index >= 0]
    prior = _priors(asked)
    letter = collections.Counter(gold for _, _, gold in asked).most_common(1)[0][0]
    rows, sample, per_example = [], [], 0
    for i, example in enumerate(e for e in examples if e.answer_index >= 0):
        options, gold = example.question.options, example.answer_index
        scores = _rules(example)
        scores["majority_letter"] = [float(i == letter) for i in range(len(options))]
        scores["options_prior"] = prior(*asked[i][:2])
        row = {name: _credit(s, gold) for name, s in scores.items()}
        texts = _texts(example)
        row |= _similarity(example, texts, bm25(example.question.query, texts), "bm25")
        per_example = per_example or len(texts) + 1
        if embed and i % max(1, len(asked) * per_example // EMBEDDED) == 0:
            sample.append((row, example, texts))
        about = {key: example.meta.get(key) for key in ("stratum", *_COUNTED)}
        rows.append(
            (row, about | {"group": asked[i][0], "gold": gold, "off": not example.evidence})
        )
    if sample:
        every = sorted({t for _, e, texts in sample for t in (e.question.query, *texts)}, key=len)
        vectors = dict(zip(every, embed(every), strict=True))
        for row, example, texts in sample:
            cosines = [float(vectors[example.question.query] @ vectors[t]) for t in texts]
            row |= _similarity(example, texts, cosines, "minilm")
    by = collections.defaultdict(list)
    for row, about in rows:
        by[about["stratum"] or ""].append((row, about))
    return {"all": _summary(rows), "strata": {key: _summary(by[key]) for key in sorted(by)}}


def _summary(rows: Sequence[tuple[dict[str, float], dict[str, Any]]]) -> dict[str, Any]:
    totals: dict[str, list[float]] = collections.defaultdict(list)
    for row, _ in rows:
        for name, value in row.items():
            totals[name].append(value)

    def count(key: str) -> dict[str, int]:
        return dict(sorted(collections.Counter(str(about[key]) for _, about in rows).items()))

    n = len(rows)
    return {
        "n": n,
        "n_minilm": len(totals["minilm"]),
        "groups": len(count("group")),
        "chance_error": (0.25 * 0.75 / n) ** 0.5,
        "gate_off": sum(about["off"] for _, about in rows) / n,
        **{name: sum(values) / len(values) for name, values in sorted(totals.items()) if values},
        "gold_position": {position: c / n for position, c in count("gold").items()},
        **{key: count(key) for key in _COUNTED},
    }


def _options(example: Example) -> tuple[str, tuple[str, ...], int]:
    group = example.meta.get("group", example.question.id)
    return group, example.question.options, example.answer_index


def _priors(
    asked: Sequence[tuple[str, tuple[str, ...], int]],
) -> Callable[[str, Sequence[str]], list]:
    """Return a function of a user and options: how often each is right among the other half of users.

    Leaving out one user at a time would be worse: where two values are about equally often right, the
    one answer left out decides between them, the errors are not independent, and the result swings.
    """
    halves = set(sorted({group for group, _, _ in asked})[::2])
    right, shown = collections.Counter(), collections.Counter()
    for group, options, gold in asked:
        shown.update((group in halves, option) for option in options)
        right[group in halves, options[gold]] += 1

    def rates(group: str, options: Sequence[str]) -> list[float]:
        keys = [(group not in halves, option) for option in options]
        return [right[key] / shown[key] if shown[key] else 1 / len(options) for key in keys]

    return rates


def _rules(example: Example) -> dict[str, list[float]]:
    """Score the options by each rule; the highest is the rule's answer."""
    question = example.question
    texts = [m.content.casefold() for m in question.messages]
    options = [option.casefold() for option in question.options]
    named = [[option in text for text in texts] for option in options]
    evidence = set(example.evidence)
    return {
        "longest": [float(len(o)) for o in options],
        "shortest": [-float(len(o)) for o in options],
        "latest_mention": [
            float(max((i for i, x in enumerate(n) if x), default=-1)) for n in named
        ],
        "earliest_mention": [-float(n.index(True)) if any(n) else -1e9 for n in named],
        "most_frequent": [float(sum(text.count(o) for text in texts)) for o in options],
        "least_frequent": [-float(sum(text.count(o) for text in texts)) for o in options],
        "in_question": [float(o in question.query.casefold()) for o in options],
        "evidence_mention": [float(any(n[i] for i in evidence)) for n in named],
    }


def _texts(example: Example) -> list[str]:
    """The turns as texts."""
    turns = turns_of(example.question.messages)
    return [" ".join(message.content for message in turn.messages) for turn in turns]


def _similarity(
    example: Example, texts: Sequence[str], scores: Sequence[float], name: str
) -> dict[str, float]:
    """What the most similar turn gives away, and how similar the turn is that names the stratum."""
    top = set(words(texts[max(range(len(texts)), key=scores.__getitem__)]))
    shared = [
        sum(w in top for w in own) / max(1, len(own))
        for own in (words(option) for option in example.question.options)
    ]
    row = {name: _credit(shared, example.answer_index)}
    if "probe" in example.meta:
        turns = turns_of(example.question.messages)
        of = [turn.index for turn in turns for _ in turn.messages][example.meta["probe"]]
        below = sum(score < scores[of] for score in scores)
        row[f"{name}_percentile"] = below / max(1, len(texts) - 1)
    return row


def _credit(scores: Sequence[float], gold: int) -> float:
    best = max(scores)
    return (scores[gold] == best) / sum(score == best for score in scores)
