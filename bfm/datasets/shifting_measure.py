# SPDX-License-Identifier: Apache-2.0
"""Cheap rules that answer a multiple-choice question, measured per stratum: what a set gives away.

Each rule reads an `Example` only; one that ties on k options earns 1/k. `evidence_mention` reads the
labels and is no baseline.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from bfm.dialogue import Example, turns_of

_WORD = re.compile(r"[a-zà-ÿ0-9]+|[\u4e00-\u9fff]")
_K1, _B = 1.2, 0.75


def measure(examples: Iterable[Example]) -> dict[str, Any]:
    """Return accuracies of cheap rules and counts, over all and per stratum.

    `options_prior` learns from every second user how often each option text is right where it is
    shown, and is scored on the others. `probe_percentile`: the share of turns that
    BM25 puts below the turn that gives the stratum its name (0.5: as similar as any).
    """
    examples = [e for e in examples if e.answer_index >= 0]
    prior, learners = _prior(examples)
    letter = collections.Counter(e.answer_index for e in examples).most_common(1)[0][0]
    rows = []
    for example in examples:
        scores = _rules(example)
        scores["majority_letter"] = [
            float(i == letter) for i in range(len(example.question.options))
        ]
        if _group(example) not in learners:
            scores["options_prior"] = [prior.get(o, 0.25) for o in example.question.options]
        row = {name: _credit(s, example.answer_index) for name, s in scores.items()}
        rows.append((example, {**row, **_probe(example)}))
    by = collections.defaultdict(list)
    for example, row in rows:
        by[example.meta.get("stratum", "")].append((example, row))
    return {"all": _summary(rows), "strata": {key: _summary(by[key]) for key in sorted(by)}}


def _summary(rows: Sequence[tuple[Example, dict[str, float]]]) -> dict[str, Any]:
    totals: dict[str, list[float]] = collections.defaultdict(list)
    for _, row in rows:
        for name, value in row.items():
            totals[name].append(value)
    examples = [example for example, _ in rows]

    def count(key: str) -> dict[str, int]:
        return dict(sorted(collections.Counter(str(e.meta.get(key)) for e in examples).items()))

    positions = collections.Counter(e.answer_index for e in examples)
    return {
        "n": len(rows),
        "groups": len({_group(e) for e in examples}),
        "gate_off": sum(not e.evidence for e in examples) / len(rows),
        **{name: sum(values) / len(values) for name, values in sorted(totals.items())},
        "gold_position": {str(k): v / len(rows) for k, v in sorted(positions.items())},
        **{key: count(key) for key in ("needs", "kind", "language", "frame_family")},
    }


def _group(example: Example) -> str:
    return example.meta.get("group", example.question.id)


def _prior(examples: Sequence[Example]) -> tuple[dict[str, float], set[str]]:
    learners = set(sorted({_group(e) for e in examples})[::2])
    right, shown = collections.Counter(), collections.Counter()
    for example in examples:
        if _group(example) in learners:
            shown.update(example.question.options)
            right[example.question.options[example.answer_index]] += 1
    return {option: right[option] / n for option, n in shown.items()}, learners


def _rules(example: Example) -> dict[str, list[float]]:
    """Score the options by each rule; the highest is the rule's answer."""
    question = example.question
    texts = [m.content.casefold() for m in question.messages]
    options = [option.casefold() for option in question.options]
    turns = [_words(" ".join(m.content for m in t.messages)) for t in turns_of(question.messages)]
    named = [[option in text for text in texts] for option in options]
    scores = bm25(turns, _words(question.query))
    top = turns[max(range(len(turns)), key=scores.__getitem__)]
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
        "bm25": [_overlap(_words(o), top) for o in options],
        "evidence_mention": [float(any(n[i] for i in evidence)) for n in named],
    }


def _probe(example: Example) -> dict[str, float]:
    if "probe" not in example.meta:
        return {}
    turns = turns_of(example.question.messages)
    words = [_words(" ".join(m.content for m in turn.messages)) for turn in turns]
    scores = bm25(words, _words(example.question.query))
    of = [turn.index for turn in turns for _ in turn.messages][example.meta["probe"]]
    below = sum(score < scores[of] for score in scores)
    return {"probe_percentile": below / max(1, len(turns) - 1)}


def bm25(documents: Sequence[Sequence[str]], query: Sequence[str]) -> list[float]:
    """Score documents for a query, the documents themselves being the collection."""
    n, counts = len(documents), [collections.Counter(d) for d in documents]
    mean = sum(map(len, documents)) / n or 1.0
    holding = {word: sum(word in c for c in counts) for word in set(query)}
    weight = {w: math.log(1 + (n - h + 0.5) / (h + 0.5)) for w, h in holding.items()}

    def part(count: int, size: int) -> float:
        return count * (_K1 + 1) / (count + _K1 * (1 - _B + _B * size / mean))

    return [
        math.fsum(weight[w] * part(c[w], len(d)) for w in sorted(holding) if c[w])
        for c, d in zip(counts, documents, strict=True)
    ]


def _overlap(words: Sequence[str], document: Sequence[str]) -> float:
    return sum(w in document for w in words) / max(1, len(words))


def _credit(scores: Sequence[float], gold: int) -> float:
    best = max(scores)
    return (scores[gold] == best) / sum(score == best for score in scores)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())
