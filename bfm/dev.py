# SPDX-License-Identifier: Apache-2.0
"""Measurements on held-out labelled examples: does the controller find the silver focus, does the
reader answer, and what do both give together?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bfm.dialogue import group_of, turns_of
from bfm.heads import controller_prompt, prefilter
from bfm.intervals import f1, interval, mean
from bfm.lm import LM
from bfm.policy import Decision, credit, decide, read_turns
from bfm.rows import Labelled, silver
from bfm.settings import Settings


def measure(lm: LM, items: Sequence[Labelled], settings: Settings) -> dict:
    """Return name -> [value, low, high] (95 % by group) and `score`, which checkpoints are kept by.

    gate_f1, focus_f1: the controller against the silver focus within its candidates. accuracy_none,
    accuracy_silver (or another `train.evidence`), accuracy_policy: the reader with no memory, with
    what its rows show, with what the controller chose. logp_*: log posterior of the right option,
    nats. Examples without options have no
    accuracy and are left out of those rows (`n_options` says how many there are).
    """
    found: dict = {"n": len(items)}
    groups = [group_of(item.example) for item in items]
    focus = [_silver(item, settings) for item in items]
    decisions = None
    if settings.labels and settings.train.heads != "reader":
        decisions = controller(lm, items, settings)
        wanted = np.array([len(f) for f in focus])
        chosen = np.array([len(d.focus) for d in decisions])
        hits = np.array([len({*d.focus} & {*f}) for d, f in zip(decisions, focus, strict=True)])
        opened = np.array([d.gate for d in decisions], int)
        right = (opened > 0) & (wanted > 0)
        found["gate_f1"] = interval(groups, f1(right.astype(int), opened, (wanted > 0).astype(int)))
        found["gate_accuracy"] = interval(groups, mean((opened > 0) == (wanted > 0)))
        found["focus_f1"] = interval(groups, f1(hits, chosen, wanted))
    if settings.train.heads != "controller":
        found |= _reading(lm, items, groups, focus, decisions, settings)
    scores = ("accuracy_policy", f"accuracy_{settings.train.evidence}", "focus_f1")
    known = (found[name][0] for name in scores if name in found)
    found["score"] = next((value for value in known if value is not None), 0.0)
    return found


def controller(lm: LM, items: Sequence[Labelled], settings: Settings) -> list[Decision]:
    """Let the controller decide on every item."""
    prompts = []
    for item in items:
        question = item.example.question
        turns = turns_of(question.messages, settings.unit)
        prompts.append(controller_prompt(lm.scaffold, question, turns, item.sal_q, settings))
    return decide(lm, prompts, settings)


def _silver(item: Labelled, settings: Settings) -> tuple[int, ...]:
    if item.shown is not None:
        return item.shown
    return silver(item, prefilter(item.sal_q, settings.prefilter_k), settings.max_focus)


def _reading(lm, items, groups, focus, decisions, settings) -> dict:
    asked = [i for i, item in enumerate(items) if item.example.answer_index >= 0]
    found: dict = {"n_options": len(asked)}
    if not asked:
        return found
    names = ["none", settings.train.evidence, *(["policy"] if decisions else [])]
    chosen = [[(), focus[i], *([decisions[i].focus] if decisions else [])] for i in asked]
    readings = read_turns(lm, [items[i].example.question for i in asked], chosen, settings)
    gold = [items[i].example.answer_index for i in asked]
    of = [groups[i] for i in asked]
    for k, name in enumerate(names):
        right = np.array([credit(r[k], g) for r, g in zip(readings, gold, strict=True)])
        logp = np.array([r[k].log_posterior[g] for r, g in zip(readings, gold, strict=True)])
        found[f"accuracy_{name}"] = interval(of, mean(right))
        found[f"logp_{name}"] = interval(of, mean(logp))
    return found
