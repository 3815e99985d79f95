# SPDX-License-Identifier: Apache-2.0
"""One MemBench trajectory as an example: its steps, times, evidence, options, and known faults."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable
from typing import Any

from bfm.datasets.common import Reading, example, field, text_of
from bfm.dialogue import Example
from bfm.jsonl import DataError

# Here the questions ask what the assistant recommended, so its reply belongs to the evidence. In
# every other type the statement asked for is the user's, and the reply only echoes it.
_ASSISTANT_TYPES = ("highlevel_rec", "lowlevel_rec", "RecMultiSession")
# "(place: Oslo; time: '2024-10-01 08:00' Tuesday)"; ThirdAgentDataLowLevel has no second colon.
_SUFFIX = re.compile(
    r"\s*\(place:(?:(?!\(place:).)*?;\s*time:?\s*('[^']*'[^()]*?)\s*\)\s*\Z", re.DOTALL
)
_STAMP = re.compile(r"'(\d{4}-\d\d-\d\d \d\d:\d\d)'")

# What a highlevel question is about is named in its evidence: a title, a dish. A name is a run of
# capitalised words and what joins them, without the year and an "I" beside it.
_WORD = r"[A-Z0-9][\w'’.&-]*"
_NAME = re.compile(
    rf"{_WORD}(?:[,:]? (?:(?:of|the|and|in|a|an|to|on|for|with|by|at|from|or) )*{_WORD})*"
)
_BESIDE = re.compile(
    r"^(?:(?:[Aa]nd |[Bb]ut )?I(?:['’]\w+)?(?: |$))+|(?: and| but)? I(?:['’]\w+)?$"
    r"|,? (?:from |in )?\(?\d{4}$|[.&'’-]+$"
)

Step = tuple[dict[str, Any], ...]  # the one or two messages that a step id names


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """A trajectory of any layout: sessions of steps, and the question about them."""

    kind: str  # the benchmark's question type, such as "highlevel"
    scenario: str
    tid: int | str
    index: int  # running number in the set
    sessions: list[list[Step]]
    qa: dict[str, Any]
    where: str  # for errors

    @property
    def key(self) -> str:
        """The question's id: `tid` is unique only inside one scenario of one type."""
        return f"{self.kind}/{self.scenario}/{self.tid}"


def example_of(trajectory: Trajectory, reading: Reading) -> Example:
    """Return the checked example of a trajectory. Raises DataError (one line)."""
    if reading.time_suffix not in ("keep", "remove"):
        raise ValueError(f"time_suffix: must be 'keep' or 'remove', not {reading.time_suffix!r}")
    qa, where = trajectory.qa, trajectory.where
    remove = reading.time_suffix == "remove"
    turns: list[dict[str, Any]] = []
    steps: list[list[int]] = []  # of each step, over all sessions: where its messages are in turns
    for i, session in enumerate(trajectory.sessions):
        label = str(i) if len(trajectory.sessions) > 1 else ""
        for step in session:
            steps.append(list(range(len(turns), len(turns) + len(step))))
            turns.extend(_timed(message, label, remove) for message in step)
    wanted, faults = _step_ids(qa, [len(session) for session in trajectory.sessions], where)
    whole = trajectory.kind in _ASSISTANT_TYPES
    evidence = sorted({m for i in wanted for m in (steps[i] if whole else steps[i][:1])})
    labels, options = _options(qa, where)
    letter = field(qa, "ground_truth", str, where)
    if letter not in labels:
        raise DataError(f"{where}: ground_truth: is none of the choices {', '.join(labels)}")
    stated = text_of(qa, "answer", where)
    record = {
        "id": trajectory.key,
        "turns": turns,
        "query": field(qa, "question", str, where),
        "query_time": field(qa, "time", str, where) if qa.get("time") is not None else "",
        "options": options,
        "answer_index": labels.index(letter),
        "evidence": evidence,
    }
    if stated in options:  # the schema then checks that it is the option of that letter
        record["answer"] = stated
    # Faulty questions stay: each has an answer, and published accuracies count them.
    if len(set(options)) < len(options):
        faults["identical options"] = sum(options.count(o) > 1 for o in options)
    stamps = [m[1] for turn in turns if (m := _STAMP.search(turn["time"]))]
    if stamps != sorted(stamps):
        faults["times not in order"] = sum(a > b for a, b in itertools.pairwise(stamps))
    shown = [turns[m]["content"] for m in evidence if turns[m]["role"] == "user"]
    record["meta"] = {
        "entities": sorted(names_in(_SUFFIX.sub("", text) for text in shown)),
        "group": trajectory.key,
        "category": trajectory.scenario,
        "type": trajectory.kind,
        "index": trajectory.index,
        **({} if stated in options else {"answer": stated}),
        **({"faults": faults} if faults else {}),
    }
    return example(record, where)


def names_in(texts: Iterable[str]) -> set[str]:
    """Return the names in texts, lower case: by capitals, so a name that begins a sentence is lost.

    >>> sorted(names_in(["I'm a fan of Emma (1996) but I also like Three Colors: Red from 1994."]))
    ['emma', 'three colors red']
    """
    found = set()
    for sentence in (part for text in texts for part in re.split(r"(?<=[.!?;—]) +", text)):
        for match in _NAME.finditer(sentence):
            name, before = match[0], ""
            while name != before:
                name, before = _BESIDE.sub("", name), name
            begins = match.start() == 0 and match[0].startswith(name)
            plain = " ".join(re.findall(r"\w+", name.casefold()))
            if not begins and len(plain) > 2 and not plain.isdecimal():
                found.add(plain)
    return found


def _step_ids(qa: dict[str, Any], sizes: list[int], where: str) -> tuple[list[int], dict[str, int]]:
    """The evidence steps as flat indices, and what is wrong with them, counted.

    Two-part ids are [step, session]. The official code reads the first part as an index over all
    sessions; where that contradicts the second part, it is an index inside the session.
    """
    raw = field(qa, "target_step_id", (list, int), where)
    ids = [raw] if isinstance(raw, int) else raw
    parts = [i if isinstance(i, list) else [i] for i in ids]
    if any(len(p) not in (1, 2) or any(type(n) is not int for n in p) for p in parts):
        raise DataError(f"{where}: target_step_id: must hold step numbers or [step, session] pairs")
    starts = [sum(sizes[:s]) for s in range(len(sizes))]
    session_of = [s for s, size in enumerate(sizes) for _ in range(size)]
    total = len(session_of)
    pairs = [p for p in parts if len(p) == 2 and len(sizes) > 1]
    over_all = [0 <= step < total and session_of[step] == session for step, session in pairs]
    inside = [0 <= s < len(sizes) and 0 <= step < sizes[s] for step, s in pairs]
    if not all(over_all) and all(inside):
        flat = [starts[p[1]] + p[0] if len(p) == 2 else p[0] for p in parts]
    else:  # -1: a step that is not in the session named
        flat = [
            p[0] if p not in pairs or session_of[p[0] : p[0] + 1] == p[1:] else -1 for p in parts
        ]
    # Two official questions name the step after the last, one names none: their gold is sound.
    kept = [i for i in flat if 0 <= i < total]
    lost = len(flat) - len(kept)
    faults = {"evidence that names no message": lost} if lost else {}
    return kept, faults if flat else {"no evidence given": 1}


def _options(qa: dict[str, Any], where: str) -> tuple[list[str], list[str]]:
    choices = field(qa, "choices", (dict, list), where)
    if isinstance(choices, list):
        choices = {chr(ord("A") + i): choice for i, choice in enumerate(choices)}
    labels = sorted(choices)
    return labels, [text_of(choices, key, f"{where}: choices") for key in labels]


# Messages


def sessions_of(message_list: list[Any], where: str) -> list[list[Step]]:
    """Return the sessions of steps: a flat list is one session. Raises DataError (one line)."""
    nested = bool(message_list) and isinstance(message_list[0], list)
    sessions = []
    for i, session in enumerate(message_list if nested else [message_list]):
        name = f"message_list[{i}]" if nested else "message_list"
        if not isinstance(session, list):
            raise DataError(f"{where}: {name}: is not a list, but others beside it are")
        sessions.append([_step(step, f"{where}: {name}[{j}]") for j, step in enumerate(session)])
    return sessions


def _step(step: Any, where: str) -> Step:
    """The messages of one step: a pair in first person, a text the user sees in observation."""
    if isinstance(step, str):
        return ({"role": "user", "content": step},)
    if not isinstance(step, dict):
        raise DataError(f"{where}: is neither a text nor an object ({type(step).__name__})")
    # MemData, from which data2test is made, has other names and the time in a field of its own.
    time = {"time": field(step, "time", str, where)} if "time" in step else {}
    if "message" in step:
        return ({"role": "user", "content": field(step, "message", str, where), **time},)
    user = "user_message" if "user_message" in step else "user"
    agent = next((k for k in ("assistant", "assistant_message") if k in step), "agent")
    return tuple(
        {"role": role, "content": field(step, key, str, where), **time}
        for role, key in (("user", user), ("assistant", agent))
    )


def pairs_of(messages: list[Any], where: str) -> list[Step]:
    """Return the steps of a prepared history, two messages each. Raises DataError (one line)."""
    roles = [field(m, "role", str, f"{where}: messages[{i}]") for i, m in enumerate(messages)]
    if roles != ["user", "assistant"] * (len(messages) // 2):
        raise DataError(f"{where}: messages: must be pairs of a user and an assistant message")
    texts = [field(m, "content", str, f"{where}: messages[{i}]") for i, m in enumerate(messages)]
    made = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)]
    return list(zip(made[::2], made[1::2], strict=True))


def _timed(message: dict[str, Any], session: str, remove: bool) -> dict[str, Any]:
    content, time = message["content"], message.get("time", "")
    if match := _SUFFIX.search(content):
        time = match[1]  # as in QA.time and in the questions: the quoted time, then the weekday
        content = content[: match.start()] if remove else content
    return {"role": message["role"], "content": content, "time": time, "session": session}
