# SPDX-License-Identifier: Apache-2.0
"""LoCoMo: questions about ten long conversations between two people, with evidence per message.

Speaker A is the user and speaker B the assistant; their names are kept. A message that shared a
picture gets the line "[shares CAPTION]" at its end, as upstream's prompts show it, since questions
ask about pictures; pictures and search queries are left out. The file (2.8 MB) is read whole.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bfm.datasets.common import (
    File,
    Missing,
    Reading,
    ask,
    example,
    field,
    permutation,
    read_json,
    text_of,
)
from bfm.dialogue import Example, shown
from bfm.jsonl import DataError

NAMES = ("locomo",)
FILES = {
    "locomo": (
        File(
            "locomo/locomo10.json",
            "https://raw.githubusercontent.com/snap-research/locomo/main/data/locomo10.json",
            "2.8 MB",
        ),
    )
}

# The numbers do not follow the paper's order. Told by count in the released file:
# 282, 321, 96, 841, 446.
CATEGORIES = {1: "multi-hop", 2: "temporal", 3: "open-domain", 4: "single-hop", 5: "adversarial"}
NOT_MENTIONED = "Not mentioned in the conversation"  # upstream's words
_SPEAKERS = {"speaker_a": "user", "speaker_b": "assistant"}


def find(name: str, data_dir: Path, reading: Reading) -> list[Path]:
    """Return the raw files that are read. Raises Missing (one line)."""
    file = FILES[name][0]
    path = Path(data_dir) / file.path
    if not path.is_file():
        raise Missing(f"{path}: is missing: put it there from {file.url} ({file.size})")
    return [path]


def read(
    name: str, data_dir: Path, reading: Reading, skipped: collections.Counter[str]
) -> Iterator[Example]:
    """Yield the questions of every conversation in file order; none is left out.

    Evidence ids that name no message are a fault in meta. Raises DataError (one line).
    """
    if name not in NAMES:
        raise ValueError(f"name: must be one of {', '.join(NAMES)}, not {name!r}")
    [path] = find(name, data_dir, reading)
    conversations = read_json(path)
    if not isinstance(conversations, list):
        raise DataError(f"{path}: is not a list of conversations")
    seen: set[str] = set()
    for number, conversation in enumerate(conversations):
        group = field(conversation, "sample_id", str, f"{path}: conversation {number}")
        where = f"{path}: {shown(group)}"
        if group in seen:
            raise DataError(f"{where}: sample_id: is already that of an earlier conversation")
        seen.add(group)
        turns, place = _history(field(conversation, "conversation", dict, where), where)
        checked = example({"id": group, "turns": turns, "query": "?"}, where)
        for i, item in enumerate(field(conversation, "qa", list, where)):
            record = _record(item, f"{group}/{i}", place, reading.seed, f"{where}: qa[{i}]")
            evidence = record.pop("evidence")
            record["meta"]["group"] = group
            # Questions come after the last session, which gives them their date.
            record["query_time"] = turns[-1]["time"]
            yield ask(record, checked.question.messages, evidence, f"{where}: qa[{i}]")


def _history(
    conversation: dict[str, Any], where: str
) -> tuple[list[dict[str, str]], dict[tuple[int, int], int]]:
    """All sessions as turns, and dialogue id -> turn. Dates without a session are passed over."""
    roles = {field(conversation, key, str, where): role for key, role in _SPEAKERS.items()}
    if len(roles) != 2:
        raise DataError(f"{where}: speaker_b: is named like speaker_a")
    numbers = sorted(
        int(m[1]) for key in conversation if (m := re.fullmatch(r"session_(\d+)", key))
    )
    turns: list[dict[str, str]] = []
    place: dict[tuple[int, int], int] = {}
    for number in numbers:  # 2 before 10
        key = f"session_{number}"
        messages = field(conversation, key, list, where)
        time = field(conversation, f"{key}_date_time", str, where) if messages else ""
        for i, message in enumerate(messages):
            at = f"{where}: {key}[{i}]"
            speaker, text = field(message, "speaker", str, at), field(message, "text", str, at)
            if speaker not in roles:
                raise DataError(f"{at}: speaker: is neither speaker_a nor speaker_b")
            ids = _dialogue_ids(field(message, "dia_id", str, at))
            if len(ids) != 1 or ids[0] in place:
                raise DataError(f"{at}: dia_id: must be a new id such as 'D1:3'")
            place[ids[0]] = len(turns)
            if message.get("blip_caption") is not None:
                text += f"\n[shares {field(message, 'blip_caption', str, at)}]"
            turn = {"role": roles[speaker], "content": text, "name": speaker}
            turns.append(turn | {"time": time, "session": str(number)})
    return turns, place


def _record(
    item: Any, id_: str, place: dict[tuple[int, int], int], seed: int, where: str
) -> dict[str, Any]:
    category = field(item, "category", int, where)
    if category not in CATEGORIES:
        raise DataError(f"{where}: category: must be from 1 to 5, not {category}")
    evidence, unresolved = _evidence(field(item, "evidence", list, where), place, where)
    meta = {"category": CATEGORIES[category], "category_id": category}
    if unresolved:
        meta["faults"] = {"evidence that names no message": unresolved}
    record = {"id": id_, "query": field(item, "question", str, where), "evidence": evidence}
    if category != 5:
        return record | {"answer": text_of(item, "answer", where), "meta": meta}
    # The key of an adversarial question is the answer that must not be given; `answer` is absent
    # in most. Upstream asks for one of two options in random order, as here.
    options = [NOT_MENTIONED, text_of(item, "adversarial_answer", where)]
    if item.get("answer") is not None:
        meta["answer"] = text_of(item, "answer", where)
    order = permutation(2, seed, id_)
    meta["permutation"] = list(order)
    record |= {"options": [options[i] for i in order], "answer_index": order.index(0)}
    return record | {"meta": meta}


def _evidence(
    ids: list[Any], place: dict[tuple[int, int], int], where: str
) -> tuple[list[int], int]:
    """Message indices in the given order, each once, and how many ids name no message.

    One text may hold several ids ("D8:6; D9:17"); leading zeros and "D:8:6" are read as meant.
    """
    found: dict[int, None] = {}
    unresolved = 0
    for i, text in enumerate(ids):
        if not isinstance(text, str):
            raise DataError(f"{where}: evidence[{i}]: is not text")
        named = _dialogue_ids(text)
        unresolved += sum(id_ not in place for id_ in named) if named else 1
        found |= {place[id_]: None for id_ in named if id_ in place}
    return list(found), unresolved


def _dialogue_ids(text: str) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for a, b in re.findall(r"\bD:?(\d{1,9}):(\d{1,9})\b", text)]
