# SPDX-License-Identifier: Apache-2.0
"""What happens in one question of `shifting_prefs`: slots of facts, their wording, their changes."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence

from bfm.datasets.shifting_state import COMMITTED, Ask, Fact, answer, evidence
from bfm.datasets.shifting_words import FAMILIES, LANGUAGES, Topic

ASK_DAY = 720
_DAY_0 = datetime.date(2023, 1, 1)
KINDS = {  # needs -> what may happen
    "one": ("stated", "conditional", "other_person"),
    "several": ("reverted", "narrowed", "linked"),
    "latest": (
        *("overwritten", "temporary", "expired", "conditional_overwritten"),
        "other_person_overwritten",
    ),
    # Conditions stand in the question too, so what is said under one is never worded unlike it.
    "one dissimilar": ("stated", "stated", "other_person"),
    "latest dissimilar": ("overwritten", "temporary", "expired", "other_person_overwritten"),
    "adverse": ("overwritten", "conditional_overwritten", "other_person_overwritten"),
    "none": ("complete", "exception", "knowledge"),
}
CHANGES = ("holder", "negation", "order", "date", "condition", "source")
DISTRACTORS = {"hyp": "hypothetical", "quote": "quoted", "third": "stated", "suggest": "suggested"}


@dataclasses.dataclass(frozen=True)
class Slot:
    """One exchange about the topic: a fact and how it is worded."""

    fact: Fact
    key: str  # of the frame
    form: str  # sim | dis
    cue: bool  # says "these days" or the like
    salt: str  # equal salts choose equal wordings
    distractor: bool  # no part of the story, said beside it


def rng(*parts: object) -> random.Random:
    """Return random numbers that depend on `parts` only, not on the process."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return random.Random(int.from_bytes(digest, "little"))


def date_text(day: int, language: str) -> str:
    """Write a day in words of the language."""
    date, words = _DAY_0 + datetime.timedelta(days=day), LANGUAGES[language]
    return words.date.format(day=date.day, month=words.months[date.month - 1], year=date.year)


def time_text(day: int, minute: int) -> str:
    """Write a day and a minute as a time stamp."""
    date = _DAY_0 + datetime.timedelta(days=day)
    return f"{date.isoformat()} {minute // 60:02}:{minute % 60:02}"


def story(
    kind: str,
    topic: Topic,
    values: Sequence[str],
    who: str,
    conditions: Sequence[str],
    r: random.Random,
) -> tuple[list[tuple[str, Fact]], Ask]:
    """Return the user's facts in order, as (frame key, fact), and what is asked.

    values: gold, then the rival that was or is also true of somebody, then a third.
    """
    gold, rival, third = values[:3]
    here, there = conditions

    def of(key: str, value: str, **more: str) -> tuple[str, Fact]:
        return key, Fact(topic.label, value, **more)

    facts = [of("set", third), of("set", rival)]  # no memory needed: the user's own history
    match kind:
        case "stated":
            facts = [of("set", gold)]
        case "conditional":
            facts = [of("cond", gold, condition=here), of("cond", rival, condition=there)]
            r.shuffle(facts)
        case "other_person":
            facts = [of("set", rival), of("third", gold, holder=who)]
            r.shuffle(facts)
        case "reverted":
            facts = [of("set", gold), of("set", rival), of("revert", rival, op="not")]
        case "narrowed":
            both = r.sample([gold, rival], 2)
            facts = [of("pair", both[0], op="pair", other=both[1]), of("narrow", rival, op="not")]
        case "linked":
            facts = [of("set", rival), of("third", gold, holder=who)]
            facts.append(of("same", "", op="same", other=who))
        case "overwritten":
            facts = [of("set", rival), of("set", gold)]
        case "temporary":
            facts = [of("set", rival), of("temp", gold)]
        case "expired":
            facts = [of("set", gold), of("temp", rival)]
        case "conditional_overwritten":
            facts = [of("cond", value, condition=here) for value in (rival, gold)]
        case "other_person_overwritten":
            facts = [of("third", value, holder=who) for value in (rival, gold)]
    about = who if kind.startswith("other_person") else ""
    return facts, Ask(topic.label, ASK_DAY, about, here if kind.startswith("conditional") else "")


def dated(
    facts: Sequence[tuple[str, Fact]], days: Sequence[int], kind: str
) -> list[tuple[str, Fact]]:
    """Give each fact its day, and what is temporary its end."""
    made = []
    for (key, fact), day in zip(facts, days, strict=True):
        end = None
        if key == "temp":
            end = ASK_DAY + 40 if kind == "temporary" else (day + ASK_DAY) // 2
        made.append((key, dataclasses.replace(fact, start=day, end=end)))
    return made


def say(slot: Slot, topic: Topic, language: str, family: str) -> tuple[str, str]:
    """Return the user's message and the assistant's reply of a slot."""
    words, frames, fact = LANGUAGES[language], FAMILIES[family], slot.fact
    r = rng("say", slot.salt)
    which, cue, ack = r.random(), r.choice(words.cues), r.choice(frames["ack"])
    slots = {
        "area": topic.area, "v": fact.value, "cue": cue if slot.cue else "", "cond": fact.condition,
        "act": topic.act.format(v=fact.value), "act2": topic.act.format(v=fact.other),
        "sign": topic.signs.get(fact.value, ""), "sign2": topic.signs.get(fact.other, ""),
        "who": fact.other if fact.op == "same" else fact.holder,
        "until": date_text(fact.end, language) if fact.end is not None else "",
    }  # fmt: skip

    def fill(key: str) -> str:
        several = frames[key]
        return capital(several[int(which * len(several))].format(**slots))

    user = fill(f"{slot.key}.{slot.form}")
    return user, fill(f"suggest_reply.{slot.form}") if slot.key == "suggest" else ack


def capital(text: str) -> str:
    """Begin with a capital letter."""
    return text[:1].upper() + text[1:]


# Minimal pairs


def changes(
    slots: Sequence[Slot], ask: Ask, early: int, late: int, spare: str, who: str, elsewhere: str
) -> Iterator[tuple[str, int, Slot]]:
    """Yield (what changed, which slot, its new form): one exchange of the history said otherwise.

    early, late: days before and after all slots. elsewhere: the condition that is not asked for.
    Only changes after which the whole still makes sense: nothing that a later "I went back" or "the
    same as my sister" leans on moves.
    """
    leaning = any(slot.key in ("revert", "narrow", "same") for slot in slots)
    telling = [slots[i].form for i in evidence([s.fact for s in slots], ask)]
    end_of_story = max(slot.fact.start for slot in slots if not slot.distractor)
    for i, slot in enumerate(slots):
        own = slot.fact.holder in ("", ask.holder) and slot.fact.source in COMMITTED

        def new(
            key: str, i: int = i, slot: Slot = slot, form: str = "", **changed
        ) -> tuple[int, Slot]:
            fact = dataclasses.replace(slot.fact, **changed)
            return i, dataclasses.replace(slot, fact=fact, key=key, form=form or slot.form)

        if slot.key == "revert":
            yield "negation", *new("set", op="set")
        if slot.key == "temp":
            middle = (slot.fact.start + ASK_DAY) // 2
            for end in (ASK_DAY + 40, ASK_DAY + 75, middle, middle + 9):
                if end != slot.fact.end and slot.fact.start < end:
                    yield "date", *new("temp", end=end)
        if slot.key in ("hyp", "quote") and (not leaning or slot.fact.start > end_of_story):
            # If it is to tell the answer now, it is worded as what told it before.
            for form in sorted({slot.form, *telling}):
                source = "implied" if form == "dis" else "stated"
                yield "source", *new("set", form=form, source=source)
        if slot.key == "cond" and ask.condition:
            here = slot.fact.condition == ask.condition
            yield "condition", *new("cond", condition=elsewhere if here else ask.condition)
        if leaning and (own or slot.fact.holder == who):
            continue
        if slot.key == "set":
            yield "holder", *new("third", holder=spare)
            yield "negation", *new("not", op="not")
        if slot.key == "third":
            yield "holder", *new("third", holder=who if slot.fact.holder == spare else spare)
            yield "holder", *new("set", holder="")
            yield "negation", *new("third_not", op="not")
        if slot.key in ("set", "cond", "third", "hyp", "quote") and not any(
            other.key == "temp" for other in slots
        ):
            yield "order", *new(slot.key, start=early)
            yield "order", *new(slot.key, start=late)


def changed(
    slots: Sequence[Slot],
    ask: Ask | None,
    found: Sequence[tuple[str, int, Slot]],
    options: Sequence[str],
    want: str,
    flip: bool,
    r: random.Random,
) -> tuple[str, list[Slot], bool] | None:
    """Choose a change that flips the answer to another option or leaves it.

    What tells the answer, and what does not, stays worded as the stratum has it. want: the kind of
    change, where there is one. ask None: nothing in the history matters. Returns what changed, the new
    slots, whether it flips; None where nothing does as asked.
    """
    fitting = []
    before = answer([s.fact for s in slots], ask) if ask else ""
    forms = _telling(slots, ask) if ask else set()
    for what, i, slot in found:
        after = [*slots[:i], slot, *slots[i + 1 :]]
        facts = [s.fact for s in after]
        now = answer(facts, ask) if ask else ""
        as_asked = (now != before and now in options) if flip else now == before
        worded = _telling(after, ask) == forms if ask else True
        if as_asked and worded and (flip or slot.form == slots[i].form):
            fitting.append((what, after))
    if not fitting:
        return None
    kinds = sorted({what for what, _ in fitting})
    chosen = want if want in kinds else r.choice(kinds)
    return (*r.choice([f for f in fitting if f[0] == chosen]), flip)


def _telling(slots: Sequence[Slot], ask: Ask) -> set[str]:
    """The forms of the slots that are evidence."""
    return {slots[i].form for i in evidence([s.fact for s in slots], ask)}


def roles(
    options: Sequence[str], gold: str, slots: Sequence[Slot], old: Mapping[int, object]
) -> list[str]:
    """Say of each option what it is: gold, stale, unmentioned, or other.

    other: said, but of or by somebody else, under another condition, not in earnest, or beside a
    question that needs no memory.
    """
    were = {slots[i].fact.value for i in old} | {
        s.fact.value for s in slots if s.fact.op == "not" and s.key in ("revert", "narrow")
    }
    said = {value for s in slots for value in (s.fact.value, s.fact.other)}
    return [
        "gold" if o == gold else "stale" if o in were else "other" if o in said else "unmentioned"
        for o in options
    ]
