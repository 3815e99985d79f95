# SPDX-License-Identifier: Apache-2.0
"""A case of `shifting_prefs` written down as an example: the history around it, labels, meta."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from bfm.datasets import shifting_plot as plot
from bfm.datasets.shifting_plot import Slot, rng
from bfm.datasets.shifting_state import Ask, answer, evidence, needs, stale
from bfm.datasets.shifting_words import TALK, THINGS, Topic
from bfm.dialogue import Example, Message, Question

LENGTHS = (10, 100, 1000)  # exchanges of a history


@dataclasses.dataclass(frozen=True)
class Case:
    """One question before it is written down."""

    id: str
    topic: Topic
    stratum: str
    kind: str
    options: tuple[str, ...]  # the gold of the question as dealt comes first
    order: tuple[int, ...]  # position shown -> index in options
    query: str
    ask: Ask | None  # None: the answer stands in the question or is common knowledge
    own: Ask  # what is stale where ask is None is stale for this
    slots: tuple[Slot, ...]
    around: tuple[int, int, str, str, str] = (0, 0, "", "", "")  # what plot.changes asks for
    pair: tuple[tuple[str, str | bool], ...] = ()


@dataclasses.dataclass(frozen=True)
class _Exchange:
    day: int
    minute: int
    salt: str
    user: str
    assistant: str


@dataclasses.dataclass(frozen=True)
class User:
    """All that the histories of one user share."""

    split: str
    language: str
    family: str
    group: str
    version: str
    stories: tuple[tuple[str, tuple[_Exchange, ...]], ...]  # case id -> what is said of its topic


def user_of(
    split: str, language: str, family: str, group: str, version: str, cases: Sequence[Case]
) -> User:
    """Return a user with the stories of all cases told."""
    stories = tuple(
        (case.id, tuple(_exchange(slot, case.topic, language, family) for slot in case.slots))
        for case in cases
    )
    return User(split, language, family, group, version, stories)


def written(case: Case, user: User, length: int) -> Example:
    """Return the example of a case, its history filled up to `length` exchanges."""
    focal = [_exchange(slot, case.topic, user.language, user.family) for slot in case.slots]
    history = [*focal, *_filling(case, user, length - len(focal))]
    history.sort(key=lambda e: (e.day, e.minute, e.salt))
    at = [2 * history.index(exchange) for exchange in focal]
    messages = tuple(
        Message(role, text, time=time)
        for e in history
        for time in (plot.time_text(e.day, e.minute),)
        for role, text in (("user", e.user), ("assistant", e.assistant))
    )
    facts = [slot.fact for slot in case.slots]
    # Slot i of a suggestion names its value in the assistant's message; no label ever points there.
    found = evidence(facts, case.ask) if case.ask else ()
    old = stale(facts, case.ask or case.own)
    gold = answer(facts, case.ask) if case.ask else case.options[0]
    shown = tuple(case.options[i] for i in case.order)
    probe = _probe(case, found)
    meta = {
        "stratum": case.stratum,
        "category": case.stratum,
        "kind": case.kind,
        "needs": needs(found, old),
        "group": user.group,
        "split": user.split,
        "language": user.language,
        "topic": case.topic.label,
        "frame_family": user.family,
        "length": length,
        "stale": sorted(at[i] for i in old),
        "distractors": sorted(at[i] for i in _distractors(case, found)),
        "probe": at[probe],  # the turn that gives the stratum its name
        "probe_useful": probe in found,
        "roles": plot.roles(shown, gold, case.slots, old),
        "permutation": list(case.order),
        "pair": dict(case.pair),
        "ask": dict(vars(case.ask)) if case.ask else {},
        "timeline": [
            {**vars(slot.fact), "message": at[i], "form": slot.form, "cue": slot.cue}
            for i, slot in enumerate(case.slots)
        ],
        "version": user.version,
    }
    question = Question(case.id, messages, case.query, plot.time_text(plot.ASK_DAY, 720), shown)
    return Example(question, gold, shown.index(gold), tuple(sorted(at[i] for i in found)), meta)


def _distractors(case: Case, found: Sequence[int]) -> list[int]:
    """The slots beside the story, less one that a minimal pair has made evidence."""
    return [i for i, slot in enumerate(case.slots) if slot.distractor and i not in found]


def _probe(case: Case, found: Sequence[int]) -> int:
    """Return the slot that is similar or not, useful or not, as the stratum says."""
    fitting = _distractors(case, found) if case.stratum.endswith("useless") else found
    return max(fitting, key=lambda i: case.slots[i].fact.start)


def _exchange(slot: Slot, topic: Topic, language: str, family: str) -> _Exchange:
    said = plot.say(slot, topic, language, family)
    minute = 8 * 60 + slot.fact.start * 211 % (14 * 60)
    return _Exchange(slot.fact.start, minute, slot.salt, *said)


def _filling(case: Case, user: User, count: int) -> list[_Exchange]:
    """Return `count` exchanges beside the topic; the first of many are the same as the few.

    Ten exchanges hold a draw of the user's other stories and small talk, a hundred all the stories.
    """
    id_ = case.id.removesuffix("-b")
    r = rng("filling", id_)
    other = [exchange for of, story in user.stories if of != id_ for exchange in story]
    r.shuffle(other)
    few = LENGTHS[0] - len(case.slots)
    stories = min(len(other), r.randint(few // 2, few))
    made = other[:stories]
    made += [_small_talk(id_, i, user) for i in range(few - stories)]
    if count > few:
        made += other[stories : stories + LENGTHS[1] - LENGTHS[0]]
        made += [_small_talk(id_, few + i, user) for i in range(count - len(made))]
    return made


def _small_talk(id_: str, index: int, user: User) -> _Exchange:
    r = rng("small talk", id_, index)
    split = "train" if user.split == "dev" else user.split
    n, m, thing = r.randint(3, 97), r.randint(3, 97), r.choice(THINGS[user.language])
    even = "even" if n % 2 == 0 else "odd"
    slots = {
        "n": n,
        "m": m,
        "s": n + m,
        "p": n * m,
        "even": even,
        "thing": thing,
        "back": thing[::-1],
    }
    said = [text.format(**slots) for text in r.choice(TALK[user.language, split])]
    day, minute = r.randrange(3, plot.ASK_DAY - 1), r.randrange(8 * 60, 22 * 60)
    return _Exchange(day, minute, f"talk {index}", *said)
