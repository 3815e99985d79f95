# SPDX-License-Identifier: Apache-2.0
"""PersonaMem v2: a right and three wrong answers as text, asked after a persona's whole history."""

from __future__ import annotations

import collections
import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bfm.datasets.common import Reading, ask, permutation, read_csv, read_json
from bfm.datasets.personamem_chat import (
    NO_HISTORY,
    NULLS,
    REPEATED,
    Chat,
    faults,
    make_chat,
    number,
    parsed,
    texts,
)
from bfm.dialogue import Example
from bfm.jsonl import DataError

_PLACES = ("data/chat_history_32k", "chat_history_32k", ".")  # of the histories
SPLITS = ("benchmark", "train", "val")  # upstream's files; no persona is in two of them

_SNIPPET = "related_conversation_snippet"
_TEXTS = (
    *("preference", "topic_query", "topic_preference", "conversation_scenario", "pref_type"),
    *("who", "updated", "prev_pref", "sensitive_info"),
)
_NUMBERS = (
    *("total_tokens_in_chat_history_32k", "distance_from_related_snippet_to_query_32k"),
    *("num_persona_relevant_tokens_32k", "num_persona_irrelevant_tokens_32k"),
)
_COLUMNS = (
    *("persona_id", "chat_history_32k_link", "user_query", "correct_answer", "incorrect_answers"),
    *(_SNIPPET, *_TEXTS, *_NUMBERS),
)


def tables(data_dir: Path) -> dict[str, Path]:
    """Return split -> CSV of those that are there, as upstream lays them out or in the folder."""
    folder = data_dir / "personamem_v2"
    return {
        split: path
        for split in SPLITS
        for path in (folder / f"{split}.csv", folder / "benchmark" / "text" / f"{split}.csv")
        if path.is_file()
    }


def chat_files(data_dir: Path) -> list[Path]:
    """Return the histories that are there."""
    return sorted(
        path
        for place in _PLACES
        for path in (data_dir / "personamem_v2" / place).glob("*.json")
        if path.is_file()
    )


def read(
    files: dict[str, Path], reading: Reading, skipped: collections.Counter[str]
) -> Iterator[Example]:
    """Yield the questions of all splits; see personamem.read. Raises DataError."""
    load = functools.lru_cache(maxsize=2)(
        functools.partial(_load, persona_card=reading.persona_card)
    )
    counted: set[Path] = set()
    for split, path in files.items():
        seen: set[tuple] = set()
        for record_number, row in read_csv(path, _COLUMNS):
            where = f"{path}: record {record_number}"
            query, answers = _query(row, where), _answers(row, where)
            numbers = {column: number(row, column, where) for column in _NUMBERS}
            whole = (row["persona_id"], query, *answers)
            if whole in seen:
                skipped[REPEATED] += 1
                continue
            seen.add(whole)
            file = _chat_file(path, row["chat_history_32k_link"], where)
            if file is None:
                skipped[NO_HISTORY] += 1
                continue
            chat = load(file)
            if chat.nulls[-1] and file not in counted:
                skipped[NULLS] += chat.nulls[-1]
                counted.add(file)
            # The file has no ids; a row's number within its split is as stable as the file.
            id_ = f"{split}/{record_number - 1}"
            order = permutation(len(answers), reading.seed, id_)
            options = [answers[i] for i in order]
            evidence, snippet = _evidence(row, chat, where)
            meta = {
                "group": row["persona_id"],
                "category": row["pref_type"],
                "split": split,
                **{column: row[column] for column in _TEXTS},
                **numbers,
                "permutation": list(order),
                "snippet": snippet,
                **faults(options, chat.nulls[-1]),
            }
            record = {"id": id_, "query": query, "options": options, "meta": meta}
            yield ask(record | {"answer_index": order.index(0)}, chat.messages, evidence, where)


def _chat_file(table: Path, link: str, where: str) -> Path | None:
    """Return the history of that file name. The link's folders are data, so none is followed."""
    name = re.split(r"[\\/]", link.strip())[-1]
    if name in ("", ".", ".."):
        raise DataError(f"{where}: chat_history_32k_link: names no file")
    folder = next(parent for parent in table.parents if parent.name == "personamem_v2")
    for place in _PLACES:
        if os.path.isfile(folder / place / name):
            return folder / place / name
    return None


def _load(path: Path, persona_card: bool) -> Chat:
    obj = read_json(path)
    chat = obj.get("chat_history") if isinstance(obj, dict) else obj
    if not isinstance(chat, list):
        raise DataError(f"{path}: chat_history: is not a list of messages")
    return make_chat(chat, persona_card, {}, str(path))


def _query(row: dict[str, str], where: str) -> str:
    query = parsed(row, "user_query", where)
    if not isinstance(query, dict) or not isinstance(query.get("content"), str):
        raise DataError(f"{where}: user_query: is not a message with content")
    return query["content"]


def _answers(row: dict[str, str], where: str) -> tuple[str, ...]:
    """Return the right answer, then the three wrong ones."""
    wrong = texts(parsed(row, "incorrect_answers", where), "incorrect_answers", where)
    if len(wrong) != 3:
        raise DataError(f"{where}: incorrect_answers: must be exactly 3, not {len(wrong)}")
    return (row["correct_answer"], *wrong)


def _evidence(row: dict[str, str], chat: Chat, where: str) -> tuple[list[int], str]:
    """Return the snippet's messages where the history has them word for word and in a row.

    Elsewhere there is none: about a tenth were rewritten upstream, and a near match is a guess.
    """
    if not row[_SNIPPET].strip():
        return [], "none"
    snippet = parsed(row, _SNIPPET, where)
    if not isinstance(snippet, list) or not all(isinstance(turn, dict) for turn in snippet):
        raise DataError(f"{where}: {_SNIPPET}: is not a list of turns")

    def key(message: Any) -> tuple:
        return (message.get("role"), message.get("content")) if message else ()

    wanted, have = [key(turn) for turn in snippet], [key(message) for message in chat.raw]
    said = [turn.get("role") in ("user", "assistant") and turn.get("content") for turn in snippet]
    if not wanted or not all(said):
        return [], "unmatched"
    for start in range(len(have) - len(wanted) + 1):
        if have[start : start + len(wanted)] == wanted:
            return [chat.starts[start + i] for i in range(len(wanted))], "matched"
    return [], "unmatched"
