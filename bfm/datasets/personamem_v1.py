# SPDX-License-Identifier: Apache-2.0
"""PersonaMem v1: lettered questions in a CSV, asked at a place of a shared history."""

from __future__ import annotations

import collections
import functools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from bfm.datasets.common import Reading, ask, read_csv
from bfm.datasets.personamem_chat import (
    NO_HISTORY,
    NULLS,
    REPEATED,
    Chat,
    faults,
    literal,
    make_chat,
    number,
    texts,
)
from bfm.dialogue import Example, shown
from bfm.jsonl import DataError

SIZES = {"personamem_32k": "32k", "personamem_128k": "128k", "personamem_1m": "1M"}

_QUESTION, _CONTEXT = "user_question_or_message", "shared_context_id"
_END = "end_index_in_shared_context"
_NUMBERS = (
    *("context_length_in_tokens", "context_length_in_letters", "distance_to_ref_in_blocks"),
    *(
        "distance_to_ref_in_tokens",
        "num_irrelevant_tokens",
        "distance_to_ref_proportion_in_context",
    ),
)
_COLUMNS = (
    *("persona_id", "question_id", "question_type", "topic", _QUESTION, "correct_answer"),
    *("all_options", _CONTEXT, _END, *_NUMBERS),
)
_PREFIX = {"user": "User: ", "assistant": "Assistant: "}
# Between the sizes some classes go by two names; in 32k the first one does within one file.
_CLASS = {
    "recalling_facts_mentioned_by_the_user": "recall_user_shared_facts",
    "revisit_reasons_behind_preference_updates": "recalling_the_reasons_behind_previous_updates",
    "generalize_to_new_scenarios": "generalizing_to_new_scenarios",
    "track_full_preference_updates": "track_full_preference_evolution",
    "acknowledge_latest_preferences": "acknowledge_latest_user_preferences",
}


def find(data_dir: Path, name: str) -> tuple[Path, list[Path]]:
    """Return where the questions should be and the files of histories that are there."""
    folder = data_dir / "personamem_v1"
    contexts = sorted(folder.glob(f"shared_contexts_{SIZES[name]}*.jsonl"))
    return folder / f"questions_{SIZES[name]}.csv", contexts


def read(
    path: Path, contexts: Sequence[Path], reading: Reading, skipped: collections.Counter[str]
) -> Iterator[Example]:
    """Yield the questions of one size; see personamem.read. Raises DataError."""
    places = _index(contexts)

    @functools.lru_cache(maxsize=2)
    def load(key: str) -> Chat:
        return _load(key, *places[key], reading.persona_card)

    seen: set[tuple] = set()
    first: dict[tuple, str] = {}
    ids: set[str] = set()
    nulls: collections.Counter[str] = collections.Counter()
    for record_number, row in read_csv(path, _COLUMNS):
        where = f"{path}: record {record_number}"
        options, gold = _lettered(row, where)
        end = number(row, _END, where)
        numbers = {column: number(row, column, where) for column in _NUMBERS}
        query, context, id_ = row[_QUESTION], row[_CONTEXT], row["question_id"]
        whole = (query, options, gold, context, end)
        if whole in seen:  # under an id of its own, yet the same question twice in an average
            skipped[REPEATED] += 1
            continue
        seen.add(whole)
        if id_ in ids:
            raise DataError(f"{where}: question_id: is already that of an earlier record")
        ids.add(id_)
        # The same question over another history is another question: kept, and named.
        earlier = first.setdefault((query, options), id_)
        if context not in places:
            skipped[NO_HISTORY] += 1
            continue
        chat = load(context)
        if not isinstance(end, int) or not 0 < end <= len(chat.raw):
            raise DataError(f"{where}: {_END}: must be from 1 to {len(chat.raw)}, not {end}")
        messages = chat.messages[: chat.starts[end]]  # nothing after the question's place
        if not messages:
            raise DataError(f"{where}: {_END}: leaves no message before the question")
        if chat.nulls[end] > nulls[context]:  # each null once, not once a question
            skipped[NULLS] += chat.nulls[end] - nulls[context]
            nulls[context] = chat.nulls[end]
        meta = {
            "group": row["persona_id"],
            "category": _CLASS.get(row["question_type"], row["question_type"]),
            "question_type": row["question_type"],
            "topic": row["topic"],
            **numbers,
            **faults(options, chat.nulls[end]),
            **({"repeats": earlier} if earlier != id_ else {}),
        }
        record = {"id": id_, "query": query, "options": list(options), "answer_index": gold}
        yield ask(record | {"meta": meta}, messages, (), where)


def _index(files: Sequence[Path]) -> dict[str, tuple[Path, int]]:
    """Return where each history's line begins: lines are megabytes, so one is held at a time."""
    places: dict[str, tuple[Path, int]] = {}
    for path in files:
        offset = 0
        try:
            with open(path, "rb") as file:
                for line_number, line in enumerate(file, start=1):
                    where = f"{path}: line {line_number}"
                    if line.strip():
                        key = re.match(rb'\s*\{\s*"([^"\\]+)"\s*:\s*\[', line)
                        if not key:
                            raise DataError(f'{where}: is not {{"shared_context_id": [messages]}}')
                        id_ = key[1].decode("utf-8", "replace")
                        if id_ in places and places[id_][0] == path:
                            raise DataError(
                                f"{where}: shared_context_id: is that of an earlier line"
                            )
                        places.setdefault(id_, (path, offset))
                    offset += len(line)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    return places


def _load(key: str, path: Path, offset: int, persona_card: bool) -> Chat:
    where = f"{path}: {shown(key)}"
    with open(path, "rb") as file:
        file.seek(offset)
        try:
            obj = json.loads(file.readline())
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: is not JSON ({error})") from None
    if list(obj) != [key]:
        raise DataError(f"{where}: its line holds other fields too")
    return make_chat(obj[key], persona_card, _PREFIX, where)


def _lettered(row: dict[str, str], where: str) -> tuple[tuple[str, ...], int]:
    """Return the options without their letters, in the file's order, and the gold position."""
    options = texts(literal(row, "all_options", where), "all_options", where)
    letters = [f"({chr(ord('a') + i)})" for i in range(len(options))]
    for i, (letter, option) in enumerate(zip(letters, options, strict=True)):
        if not option.startswith(f"{letter} "):
            raise DataError(f"{where}: all_options: option {i} does not start with '{letter} '")
    gold = row["correct_answer"].strip()
    if gold not in letters:
        raise DataError(f"{where}: correct_answer: is not one of {', '.join(letters)}")
    return tuple(option[4:] for option in options), letters.index(gold)
