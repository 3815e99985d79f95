# SPDX-License-Identifier: Apache-2.0
"""PrefEval as multiple choice: three ways to tell a preference, joined by index with four options.

Each topic has one file of the same name in four folders, with the same questions in the same order.
"""

from __future__ import annotations

import collections
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bfm.datasets.common import File, Missing, Reading, example, field, permutation, read_json
from bfm.datasets.membench import SPLIT_FILE, split_numbers
from bfm.dialogue import Example
from bfm.jsonl import DataError

NAMES = ("prefeval_persona", "prefeval_choice", "prefeval_explicit")
_HOME = "prefeval/benchmark_dataset"
_URL = "https://raw.githubusercontent.com/amazon-science/PrefEval/main/benchmark_dataset"
_EXPLICIT, _OPTIONS = "explicit_preference", "mcq_options"
_FORMS = {
    "prefeval_persona": "implicit_preference/persona-driven",
    "prefeval_choice": "implicit_preference/choice-based",
    "prefeval_explicit": _EXPLICIT,
}
_FOLDERS = {  # folder -> the size of one of its files
    _EXPLICIT: "about 25 KB",
    "implicit_preference/choice-based": "about 100 KB",
    "implicit_preference/persona-driven": "about 270 KB",
    _OPTIONS: "about 45 KB",
}
TOPICS = (  # as published; what is read is decided by the files that are there
    *("education_learning_styles", "education_resources", "entertain_games"),
    *("entertain_music_book", "entertain_shows", "entertain_sports", "lifestyle_beauty"),
    *("lifestyle_dietary", "lifestyle_fit", "lifestyle_health", "pet_ownership"),
    *("professional_work_location_style", "shop_fashion", "shop_home", "shop_motors"),
    *("shop_technology", "travel_activities", "travel_hotel", "travel_restaurant"),
    "travel_transportation",
)
# All four folders for each name: the explicit one groups duplicates, and every question is compared.
PADDING = File(
    f"{_HOME}/filtered_inter_turns.json", f"{_URL}/filtered_inter_turns.json", "about 0.6 MB"
)
FILES = {
    name: (
        *(
            File(f"{_HOME}/{folder}/{topic}.json", f"{_URL}/{folder}/{topic}.json", size)
            for folder, size in _FOLDERS.items()
            for topic in TOPICS
        ),
        PADDING,
    )
    for name in NAMES
}
_CHOICE_PARTS = (
    *(("user", "query"), ("assistant", "assistant_options")),
    *(("user", "user_selection"), ("assistant", "assistant_acknowledgment")),
)
_N_OPTIONS = 4  # the first is the gold


def find(name: str, data_dir: Path, reading: Reading) -> list[Path]:
    """Return the raw files that are read. Raises Missing (one line)."""
    home, split = Path(data_dir) / _HOME, Path(data_dir) / SPLIT_FILE
    topics = _topics(home, collections.Counter())
    files = [home / folder / f"{topic}.json" for folder in _FOLDERS for topic in topics]
    padding = (
        [_padding_file(Path(data_dir), reading.padding_turns)] if reading.padding_turns else []
    )
    return [*files, *padding, *([split] if split.exists() else [])]


def read(
    name: str, data_dir: Path, reading: Reading, skipped: collections.Counter[str]
) -> Iterator[Example]:
    """Yield the examples of one form of PrefEval, topic by topic in the order of their names.

    With `reading.padding_turns`, so many unrelated exchanges stand between the conversation and the
    question: the first of the published file, the same for every question, as in the official code.

    Raises DataError (one line: file, record, field, reason).
    """
    home = Path(data_dir) / _HOME
    topics = _topics(home, skipped)
    padding = _padding(Path(data_dir), reading.padding_turns) if reading.padding_turns else []
    return _read(name, home, topics, padding, reading)


def named_split(name: str, data_dir: Path) -> frozenset[str]:
    """Return the question ids that membench/split_per20.json, where it is there, trains on.

    It lists running numbers over all topics in the order of their names. Raises DataError.
    """
    numbers = split_numbers("prefeval-mcq", data_dir)
    if not numbers:
        return frozenset()
    home = Path(data_dir) / _HOME
    ids = [
        _id(topic, i)
        for topic in _topics(home, collections.Counter())
        for i in range(len(_rows(home / _OPTIONS / f"{topic}.json")))
    ]
    return frozenset(id_ for number, id_ in enumerate(ids) if number in numbers)


# Files


def _topics(home: Path, skipped: collections.Counter[str]) -> list[str]:
    """The topics that all folders have, by exact file name.

    A file that only one folder has belongs to no topic: the published options hold a stale copy of a
    topic under another name. One that several but not all have is a hole in the data.
    """
    found: dict[str, list[str]] = {}
    for folder, size in _FOLDERS.items():
        paths = sorted((home / folder).glob("*.json"))
        if not paths:
            raise Missing(
                f"{home / folder}: has no topic files; put {len(TOPICS)} files such as "
                f"{TOPICS[0]}.json ({size} each) there from {_URL}/{folder}"
            )
        for path in paths:
            found.setdefault(path.stem, []).append(folder)
    for topic, folders in sorted(found.items()):
        if 1 < len(folders) < len(_FOLDERS):
            folder = next(f for f in _FOLDERS if f not in folders)
            raise Missing(
                f"{home / folder / topic}.json: is missing ({_FOLDERS[folder]}; from "
                f"{_URL}/{folder}/{topic}.json), but {folders[0]} has the topic"
            )
    topics = sorted(topic for topic, folders in found.items() if len(folders) == len(_FOLDERS))
    if not topics:
        raise DataError(f"{home}: its folders have no topic file in common")
    if alone := len(found) - len(topics):
        skipped["file that is in one folder only"] += alone
    return topics


def _rows(path: Path) -> list[Any]:
    rows = read_json(path)
    if not isinstance(rows, list):
        raise DataError(f"{path}: is not a list of records")
    return rows


def _padding_file(data_dir: Path, n: int) -> Path:
    path = data_dir / PADDING.path
    if not path.exists():
        raise Missing(
            f"{path}: is missing, and padding_turns is {n}; put it there ({PADDING.size}) from "
            f"{PADDING.url}, or set padding_turns to 0"
        )
    return path


def _padding(data_dir: Path, n: int) -> list[dict[str, str]]:
    """The first n exchanges of the chats with strangers, each chat a session of its own."""
    path = _padding_file(data_dir, n)
    turns: list[dict[str, str]] = []
    for i, chat in enumerate(_rows(path)):
        where = f"{path}: record {i}"
        for j, message in enumerate(field(chat, "conversation", list, where)):
            at = f"{where}: conversation[{j}]"
            role, wanted = field(message, "role", str, at), ("user", "assistant")[len(turns) % 2]
            if role != wanted:
                raise DataError(f"{at}: role: must be {wanted!r}, since the roles take turns")
            content = field(message, "content", str, at)
            turns.append({"role": role, "content": content, "session": f"padding {i}"})
            if len(turns) == 2 * n:
                return turns
    raise DataError(f"{path}: holds {len(turns) // 2} exchanges, but padding_turns is {n}")


# Examples


def _read(
    name: str, home: Path, topics: list[str], padding: list[dict[str, str]], reading: Reading
) -> Iterator[Example]:
    held = _topics_of(home, topics)
    number = 0
    for topic in topics:
        paths = {folder: home / folder / f"{topic}.json" for folder in _FOLDERS}
        tables = {folder: _rows(path) for folder, path in paths.items()}
        if len({len(rows) for rows in tables.values()}) > 1:
            sizes = ", ".join(f"{len(rows)} in {folder}" for folder, rows in tables.items())
            raise DataError(f"{home}: {topic}.json: its folders differ in records ({sizes})")
        for i in range(len(tables[_OPTIONS])):
            joined = {folder: rows[i] for folder, rows in tables.items()}
            where = {folder: f"{path}: record {i}" for folder, path in paths.items()}
            query = field(joined[_OPTIONS], "question", str, where[_OPTIONS])
            for folder, row in joined.items():
                if field(row, "question", str, where[folder]) != query:
                    raise DataError(
                        f"{where[folder]}: question: differs from that of {where[_OPTIONS]}"
                    )
            yield _example(name, topic, i, number, joined, where, padding, held, reading)
            number += 1


def _topics_of(home: Path, topics: list[str]) -> dict[str, list[str]]:
    """Group -> the topics that hold its preference: four have one in two, three with its question."""
    found: dict[str, list[str]] = {}
    for topic in topics:
        path = home / _EXPLICIT / f"{topic}.json"
        for i, row in enumerate(_rows(path)):
            of = found.setdefault(_group(field(row, "preference", str, f"{path}: record {i}")), [])
            of.extend([] if topic in of else [topic])
    return found


def _example(
    name: str,
    topic: str,
    i: int,
    number: int,
    joined: dict[str, Any],
    where: dict[str, str],
    padding: list[dict[str, str]],
    held: dict[str, list[str]],
    reading: Reading,
) -> Example:
    row, at = joined[_FORMS[name]], where[_FORMS[name]]
    options = field(joined[_OPTIONS], "classification_task_options", list, where[_OPTIONS])
    texts = {option for option in options if isinstance(option, str) and option.strip()}
    if not len(options) == len(texts) == _N_OPTIONS:
        raise DataError(
            f"{where[_OPTIONS]}: classification_task_options: must be {_N_OPTIONS} different texts"
        )
    order = permutation(_N_OPTIONS, reading.seed, _id(topic, i))
    # 30 preferences are worded otherwise in the explicit file than in the others, where they hide
    # that they are duplicates; so its wording is what groups, in every form alike.
    shared = field(joined[_EXPLICIT], "preference", str, where[_EXPLICIT])
    record = {
        "id": _id(topic, i),
        "turns": [*_MESSAGES[name](row, at), *padding],
        "query": row["question"],
        "options": [options[j] for j in order],
        "answer_index": order.index(0),
        "meta": {
            "group": _group(shared),
            "category": topic,
            "topic": held[_group(shared)],  # to leave a topic out with all its preferences
            "index": number,
            "preference": field(row, "preference", str, at),
            "permutation": list(order),
            **({"persona": field(row, "persona", str, at)} if "persona" in row else {}),
        },
    }
    return example(record, at)


def _persona_turns(row: Any, where: str) -> list[dict[str, str]]:
    conversation = field(row, "conversation", dict, where)
    if not all(key.isdecimal() for key in conversation):
        raise DataError(f"{where}: conversation: its keys must be numbers")
    return [
        {
            "role": role,
            "content": field(conversation[key], role, str, f"{where}: conversation {key}"),
        }
        for key in sorted(conversation, key=int)  # as text, "10" would stand before "2"
        for role in ("user", "assistant")
    ]


def _choice_turns(row: Any, where: str) -> list[dict[str, str]]:
    conversation = field(row, "conversation", dict, where)
    return [
        {"role": role, "content": field(conversation, key, str, f"{where}: conversation")}
        for role, key in _CHOICE_PARTS
    ]


def _explicit_turns(row: Any, where: str) -> list[dict[str, str]]:
    # The reply is not in the data: the official code has the model under test write it.
    return [{"role": "user", "content": field(row, "preference", str, where)}]


_MESSAGES = {
    "prefeval_persona": _persona_turns,
    "prefeval_choice": _choice_turns,
    "prefeval_explicit": _explicit_turns,
}


def _id(topic: str, index: int) -> str:
    return f"{topic}/{index}"  # the same in the three forms, which so share their permutations


def _group(preference: str) -> str:
    words = " ".join(re.findall(r"\w+", preference.casefold()))
    return hashlib.sha256(words.encode()).hexdigest()[:16]
