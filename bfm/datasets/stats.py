# SPDX-License-Identifier: Apache-2.0
"""What is in a data set: counts, lengths, evidence, where the gold stands; plain numbers."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from bfm.dialogue import Example, evidence_turns, turns_of


def stats(examples: Iterable[Example], count_tokens: Callable[[str], int] | None) -> dict[str, Any]:
    """Count a data set in one pass.

    count_tokens: of a text, by the tokenizer of a model; None leaves token lengths out.
    `faults`: how many examples have each of the known faults that are kept. `gold_longest` and
    `gold_shortest` are shares of questions with options whose gold is the only one of that length
    (characters): what a length rule would gain.
    """
    by = {key: collections.Counter() for key in ("category", "group", "position", "options")}
    lengths: dict[str, list[int]] = collections.defaultdict(list)
    texts, faults = collections.Counter(), collections.Counter()
    # Examples of one user repeat messages: LoCoMo's 1,986 questions are about ten histories.
    count = functools.lru_cache(1 << 14)(count_tokens) if count_tokens else None
    answers = longest = shortest = with_options = 0
    for example in examples:
        question = example.question
        turns = turns_of(question.messages)
        lengths["turns"].append(len(turns))
        lengths["evidence"].append(len(evidence_turns(example)))
        lengths["characters"].append(sum(len(m.content) for m in question.messages))
        if count:
            lengths["tokens"].append(sum(count(m.content) for m in question.messages))
        by["category"][str(example.meta.get("category", ""))] += 1
        by["group"][str(example.meta.get("group", question.id))] += 1
        texts[question.query] += 1
        faults.update(dict.fromkeys(example.meta.get("faults", ()), 1))
        answers += bool(example.answer)
        if not question.options:
            continue
        by["options"][len(question.options)] += 1
        if example.answer_index >= 0:
            with_options += 1
            by["position"][example.answer_index] += 1
            sizes = [len(option) for option in question.options]
            gold = sizes.pop(example.answer_index)
            longest += gold > max(sizes)
            shortest += gold < min(sizes)
    n = len(lengths["turns"])
    evidence = [e / t for e, t in zip(lengths["evidence"], lengths["turns"], strict=True) if e]
    return {
        "examples": n,
        "groups": len(by["group"]),
        "distinct_questions": len(texts),
        "with_answer": answers,
        "with_evidence": len(evidence),
        "evidence_density": float(np.mean(evidence)) if evidence else None,
        "faults": dict(sorted(faults.items())),
        "categories": dict(sorted(by["category"].items())),
        "option_counts": {str(k): v for k, v in sorted(by["options"].items())},
        "gold_positions": {str(k): v for k, v in sorted(by["position"].items())},
        "gold_longest": longest / with_options if with_options else None,
        "gold_shortest": shortest / with_options if with_options else None,
        **{key: _summary(values) for key, values in lengths.items()},
    }


def _summary(values: list[int]) -> dict[str, float]:
    if not values:
        return {}
    low, middle, high = np.percentile(values, (5, 50, 95))
    return {
        "min": min(values), "p5": float(low), "median": float(middle), "mean": float(np.mean(values)),
        "p95": float(high), "max": max(values),
    }  # fmt: skip
