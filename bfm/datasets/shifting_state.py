# SPDX-License-Identifier: Apache-2.0
"""What is true of a user in `shifting_prefs`: facts, the answer they give, and labels by intervention.

No text and no model is read here. A fact is evidence if the answer without it is another one; it is
stale if it is not evidence now but was on an earlier day.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

COMMITTED = ("stated", "implied")  # other sources name a value and bind nobody


@dataclasses.dataclass(frozen=True)
class Fact:
    """One thing said about an attribute. Days count from the first day of the history.

    op: set (value holds), pair (value and other both do), not (value does not, or no longer),
    same (whatever `other`, a person, has on that day).
    """

    attribute: str
    value: str
    start: int = 0
    end: int | None = None  # first day on which it no longer holds
    holder: str = ""  # "": the user
    condition: str = ""
    source: str = "stated"  # stated | implied | hypothetical | quoted | suggested
    op: str = "set"
    other: str = ""


@dataclasses.dataclass(frozen=True)
class Ask:
    attribute: str
    day: int
    holder: str = ""
    condition: str = ""


def answer(facts: Sequence[Fact], ask: Ask) -> str | None:
    """Return the one value in force for what is asked, None where there is none or no single one."""
    in_force: list[
        tuple[tuple[str, ...], int | None]
    ] = []  # the last one that has not ended counts
    for fact in sorted(facts, key=lambda f: f.start):
        if (
            fact.attribute != ask.attribute
            or fact.source not in COMMITTED
            or fact.holder != ask.holder
            or fact.condition not in ("", ask.condition)
            or fact.start > ask.day
        ):
            continue
        if fact.op == "set":
            in_force.append(((fact.value,), fact.end))
        elif fact.op == "pair":
            in_force.append(((fact.value, fact.other), fact.end))
        elif fact.op == "same":
            theirs = answer(facts, Ask(ask.attribute, fact.start, fact.other))
            if theirs is not None:
                in_force.append(((theirs,), fact.end))
        else:
            left = [(tuple(v for v in values if v != fact.value), e) for values, e in in_force]
            in_force = [(values, end) for values, end in left if values]
    values = [values for values, end in in_force if end is None or end > ask.day]
    return values[-1][0] if values and len(values[-1]) == 1 else None


def evidence(facts: Sequence[Fact], ask: Ask) -> tuple[int, ...]:
    """Return the indices of the facts without which the answer is another one."""
    now = answer(facts, ask)
    without = [answer([*facts[:i], *facts[i + 1 :]], ask) for i in range(len(facts))]
    return tuple(i for i, other in enumerate(without) if other != now)


def stale(facts: Sequence[Fact], ask: Ask) -> tuple[int, ...]:
    """Return the indices of the facts that were evidence on an earlier day and are not now."""
    days = {fact.start for fact in facts if fact.start < ask.day}
    once = {i for day in days for i in evidence(facts, dataclasses.replace(ask, day=day))}
    return tuple(sorted(once - set(evidence(facts, ask))))


def needs(evidence: Sequence[int], stale: Sequence[int]) -> str:
    """Say what a question needs of the history: none, one turn, several, or the latest of some."""
    if not evidence:
        return "none"
    return "several" if len(evidence) > 1 else "latest" if stale else "one"
