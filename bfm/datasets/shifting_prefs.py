# SPDX-License-Identifier: Apache-2.0
"""`shifting_prefs`: questions about users whose preferences change, generated from a seed.

A user has a topic for every question, and each topic a story of dated facts. A history tells the
story of the topic that is asked for, with distractors, between exchanges from the user's other topics
and small talk; the answer and all labels are computed from the facts (shifting_state). What is to be
balanced is dealt from decks, so that nothing has to be filtered afterwards.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bfm.datasets import shifting_plot as plot
from bfm.datasets.common import File, Reading, permutation
from bfm.datasets.shifting_measure import measure
from bfm.datasets.shifting_plot import Slot, rng
from bfm.datasets.shifting_state import Ask, evidence
from bfm.datasets.shifting_words import (
    FAMILIES,
    LANGUAGES,
    SPLIT_FAMILIES,
    TOPICS,
    Language,
    Topic,
)
from bfm.datasets.shifting_write import LENGTHS, Case, user_of, written
from bfm.dialogue import Example

__all__ = ["FILES", "NAMES", "VERSION", "find", "generate", "measure", "read", "small"]

NAMES = ("shifting_prefs",)
VERSION = "3"
_DRAWS = "2"  # names the random numbers: version 3 differs only in second halves of pairs
FILES: dict[str, tuple[File, ...]] = {"shifting_prefs": ()}  # generated: no raw files
USERS = {"train": 400, "dev": 480, "test": 560}
SMALL = {"train": 12, "dev": 16, "test": 12}  # users of the small part: 108, 75 and 124 questions
# Every 24 questions: (stratum, what the question needs). A quarter each of none, one, several, latest.
CELLS = (
    *(("similar_useful", n) for n in ("one", "several", "several", "latest")),
    *(
        ("dissimilar_useful", n)
        for n in ("one dissimilar", "several", "several", "latest dissimilar")
    ),
    *(("similar_useless", n) for n in ("none", "none", "none", "none")),
    *(("dissimilar_useless", n) for n in ("none", "none", "several", "several")),
    *(("placebo", n) for n in ("one", "one", "one", "one")),
    *(("adverse", n) for n in ("adverse", "adverse", "adverse", "adverse")),
)


def _decks(*seed: object) -> Callable[[str, Sequence[Any]], Any]:
    """Return a dealer: of each named pack it deals every card, shuffled, before any card again."""
    left: dict[str, list[Any]] = {}
    packs = collections.Counter()

    def deal(name: str, cards: Sequence[Any]) -> Any:
        if not left.get(name):
            packs[name] += 1
            left[name] = list(cards)
            rng(*seed, name, packs[name]).shuffle(left[name])
        return left[name].pop()

    return deal


def generate(
    split: str, seed: int = 0, users: int | None = None, length: int = 10
) -> Iterator[Example]:
    """Yield the examples of a split, user by user, the two halves of a minimal pair side by side.

    split: train, dev or test. users: how many, by default USERS[split], of histories of 1,000 exchanges
    (200 KB each) the tenth part; the first n of more are the same. length: exchanges of a history, one
    of LENGTHS; the longer hold the shorter. ValueError.
    """
    if split not in TOPICS:
        raise ValueError(f"split: must be one of {', '.join(TOPICS)}, not {split!r}")
    if length not in LENGTHS:
        raise ValueError(f"length: must be one of {LENGTHS}, not {length}")
    deal = _decks(_DRAWS, seed, split)
    if users is None:
        users = USERS[split] // (10 if length == LENGTHS[-1] else 1)
    for index in range(users):
        language = _language(split, index)
        families = SPLIT_FAMILIES[split][language]
        family = deal(f"family {language}", families)
        group = f"{split}-{seed}-u{index:04d}"
        cases = _user(deal, split, language, family, group)
        user = user_of(split, language, family, group, VERSION, cases)
        for case in cases:
            for half in _paired(deal, case):
                yield written(half, user, length)


def find(name: str, data_dir: Path | None, reading: Reading) -> list[Path]:
    """Return the raw files that are read: none."""
    return []


def read(
    name: str, data_dir: Path | None, reading: Reading, skipped: collections.Counter[str]
) -> Iterator[Example]:
    """Yield all splits, as the readers of the benchmarks do; no raw file is needed."""
    for split in TOPICS:
        yield from generate(split, reading.seed, length=reading.length)


def small(reading: Reading) -> list[Example]:
    """Return the first few users of every split: what the package gives without any preparation."""
    return [
        example
        for split, users in SMALL.items()
        for example in generate(split, reading.seed, users, reading.length)
    ]


# Users


def _language(split: str, index: int) -> str:
    if split == "test":  # 22, 3 and 3 of 28
        return {1: "zh", 10: "zh", 19: "zh", 2: "es", 11: "es", 20: "es"}.get(index % 28, "en")
    return "zh" if index % 8 == 1 else "en"


def _user(deal: Callable, split: str, language: str, family: str, group: str) -> tuple[Case, ...]:
    """Deal one user: a story for every topic of the language, no two on one day."""
    r = rng(_DRAWS, group)
    topics = list(TOPICS[split][language])
    r.shuffle(topics)
    people = list(LANGUAGES[language].people)
    r.shuffle(people)
    days = r.sample(range(10, plot.ASK_DAY - 5), 8 * len(topics))
    return tuple(
        _case(deal, f"{group}-q{i}", topic, people[i % len(people)], days[8 * i : 8 * i + 8],
              language, family)
        for i, topic in enumerate(topics)
    )  # fmt: skip


def _case(
    deal: Callable, id_: str, topic: Topic, who: str, days: list[int], language: str, family: str
) -> Case:
    r, words = rng(_DRAWS, id_), LANGUAGES[language]
    stratum, need = deal("cell", CELLS)
    kind = deal(f"kind {need}", plot.KINDS[need])
    # Values are shown equally often, and the gold is dealt by its rank in length, so that each of the
    # four has equal chances. Were it dealt by value, a value that was right often would be wrong next:
    # a prior learned from other users would fall below chance, and cards could be counted.
    four = list(deal(f"shown {language} {topic.label}", [*itertools.combinations(topic.values, 4)]))
    r.shuffle(four)  # among equal lengths
    gold = sorted(four, key=len)[deal(f"length {stratum}", range(4))]
    others = [v for v in four if v != gold]
    r.shuffle(others)
    values = [gold, *others]
    at = deal(f"position {stratum}", range(4))
    order = [i for i in permutation(4, 0, id_) if i]
    order.insert(at, 0)

    conditions = r.choice(words.conditions)
    facts, own = plot.story(kind, topic, values, who, conditions, r)
    if need == "none" and deal("short story", (True, False)):
        facts = facts[1:]
    count = len(facts) + 2
    early, *mine, late = sorted(days)[: count + 2]
    facts, beside = _order(deal, facts, mine, kind, topic, values, who, words, need, r)
    ask = None if need == "none" else own
    now = {id(facts[i]) for i in evidence([f for _, f in facts], own)} if ask else set()
    slots = []
    for i, (key, fact) in enumerate([*facts, *beside]):
        distractor = i >= len(facts)
        telling = not distractor and id(facts[i]) in now
        form = _form(deal, stratum, need, distractor, telling)
        if fact.source == "stated" and form == "dis":
            fact = dataclasses.replace(fact, source="implied")
        cue = deal(f"cue {'distractor' if distractor else 'story'}", (True, False))
        salt = f"{id_} {i}"
        if stratum == "adverse" and not distractor:  # current and stale worded alike
            cue, salt = slots[0].cue if slots else cue, f"{id_} 0"
        slots.append(Slot(fact, key, form, cue, salt, distractor))
    query = _query(deal, topic, kind, values, own, need, stratum, language, family, id_, r)
    around = (early, late, words.spare, who, conditions[1])
    if kind == "stated" and stratum == "dissimilar_useful":
        kind = "implied"
    return Case(
        id_,
        topic,
        stratum,
        kind,
        tuple(values),
        tuple(order),
        query,
        ask,
        own,
        tuple(slots),
        around,
    )


def _order(
    deal: Callable, facts: list, days: list[int], kind: str, topic: Topic, values: list[str], who: str,
    words: Language, need: str, r: random.Random,
) -> tuple[list, list]:  # fmt: skip
    """Place two distractors among the facts; two times of three the latest mention is one of them."""
    last = deal("latest mention", ("fact", "fact", *plot.DISTRACTORS))
    types = [last if last != "fact" else r.choice(list(plot.DISTRACTORS))]
    types.append(r.choice([t for t in plot.DISTRACTORS if t != types[0]]))
    said = [values[2], values[1] if kind == "stated" else r.choice(values[:3])]
    if need == "none":
        said = [r.choice(values[:3]), r.choice(values[:3])]
    involved = kind.startswith("other_person") or kind == "linked"
    beside = []
    for type_, value in zip(types, said, strict=True):
        fact = plot.Fact(topic.label, value, source=plot.DISTRACTORS[type_])
        if type_ == "third":
            fact = dataclasses.replace(fact, holder=words.spare if involved else who)
        beside.append((type_, fact))
    first = sorted(r.sample(range(len(days) - 1), 2)) if last == "fact" else None
    if first is None:
        first = [len(days) - 1, r.randrange(len(days) - 1)]
    left = [day for i, day in enumerate(days) if i not in first]
    beside = [
        (key, dataclasses.replace(fact, start=days[i]))
        for (key, fact), i in zip(beside, first, strict=True)
    ]
    return plot.dated(facts, left, kind), beside


def _form(deal: Callable, stratum: str, need: str, distractor: bool, telling: bool) -> str:
    """Decide whether an exchange speaks in the question's words: the design of the strata."""
    if stratum == "dissimilar_useful":
        return "dis" if telling else "sim"
    if stratum == "placebo":
        return "sim" if telling else "dis"
    if stratum == "dissimilar_useless":
        return "dis" if distractor or need == "none" else "sim"
    if stratum == "similar_useful" and distractor:
        return deal("form", ("sim", "dis"))
    return "sim"


def _query(
    deal: Callable, topic: Topic, kind: str, values: list[str], own: Ask, need: str, stratum: str,
    language: str, family: str, id_: str, r: random.Random,
) -> str:  # fmt: skip
    """Write the question. What needs a memory and what does not begin alike, half of the time."""
    words, frames = LANGUAGES[language], FAMILIES[family]
    gap = "" if language == "zh" else " "
    guest = r.choice(words.guests)

    def fill(key: str, value: str, **more: str) -> str:
        text = r.choice(frames[key])
        act = topic.act.format(v=value)
        made = text.format(
            act=act, sign=topic.signs[value], area=topic.area, label=topic.label, name=guest, **more
        )
        return plot.capital(made)

    if kind == "knowledge":
        return fill("know", values[0])
    who = own.holder or words.me
    cond = own.condition and ("" if language == "zh" else " ") + own.condition
    if need == "none":
        who = guest if kind == "complete" else who
        opening = fill("guest" if kind == "complete" else "today", values[0])
        return opening + gap + fill("ask", values[0], who=who, cond=cond)
    asked = fill("ask", values[0], who=who, cond=cond)
    opening = deal("opening", ("guest", "shop", "", ""))
    if not opening or stratum == "placebo":
        return asked
    return fill(opening, r.choice(values[1:3])) + gap + asked


def _paired(deal: Callable, case: Case) -> tuple[Case, ...]:
    """Return the case alone or, a quarter of the time where one can be made, as a minimal pair."""
    if not deal(f"pair {case.stratum}", (True, False, False, False)):
        return (case,)
    flip = case.ask is not None and deal(f"flip {case.stratum}", (True, True, True, False))
    want = deal(f"change {flip}", plot.CHANGES)
    r = rng(_DRAWS, case.id, "pair")
    found = tuple(plot.changes(case.slots, case.own, *case.around))
    made = None
    # Whatever flips a placebo leaves two turns worded like the question: no longer a placebo.
    for wanted in (True, False) if flip and case.stratum != "placebo" else (False,):
        made = made or plot.changed(case.slots, case.ask, found, case.options, want, wanted, r)
    if made is None:
        return (case,)
    what, slots, flips = made
    pair = (("id", case.id), ("change", what), ("flips", flips))
    return (
        dataclasses.replace(case, pair=(*pair, ("member", "a"))),
        dataclasses.replace(
            case, id=f"{case.id}-b", slots=tuple(slots), pair=(*pair, ("member", "b"))
        ),
    )
