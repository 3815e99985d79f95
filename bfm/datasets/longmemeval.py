# SPDX-License-Identifier: Apache-2.0
"""LongMemEval: free-text questions over dated chat sessions, with evidence per message.

Reads the official haystacks (a JSON list, streamed one question at a time) or the prepared pair
source.jsonl and target.jsonl. Sessions are put in order of their dates and numbered from 0: the
file's own session ids say which session holds the answer ("answer_..") and stay in meta.
"""

from __future__ import annotations

import collections
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bfm.datasets.common import File, Missing, Reading, example, field, read_jsonl, text_of
from bfm.dialogue import Example, shown
from bfm.jsonl import DataError

NAMES = ("longmemeval",)
_HUB = "https://huggingface.co/datasets/xiaowu0162/longmemeval-cleaned/resolve/main"
FILES = {
    "longmemeval": (
        File(
            "longmemeval/longmemeval_s_cleaned.json", f"{_HUB}/longmemeval_s_cleaned.json", "277 MB"
        ),
    )
}
# The first that is there is read: S is the size that results are reported on. The names with and
# without "_cleaned" are two releases; the first release had no ending on the hub.
HAYSTACKS = tuple(
    f"longmemeval_{size}{ending}"
    for size in ("s", "oracle", "m")
    for ending in ("_cleaned.json", ".json", "")
)
PREPARED = ("source.jsonl", "target.jsonl")
CHUNK = 1 << 20  # characters read at a time
LARGEST = 1 << 26  # characters of one question: those of the largest haystack have 6 million


def find(name: str, data_dir: Path, reading: Reading) -> list[Path]:
    """Return the raw files that are read: a haystack or the prepared pair. Raises Missing."""
    folder = Path(data_dir) / "longmemeval"
    haystack = next((folder / n for n in HAYSTACKS if (folder / n).is_file()), None)
    pair = [folder / n for n in PREPARED]
    if haystack or all(path.is_file() for path in pair):
        return [haystack] if haystack else pair
    file = FILES[name][0]
    raise Missing(
        f"{Path(data_dir) / file.path}: is missing: put it there from {file.url} ({file.size}); "
        "longmemeval_oracle.json (15 MB) and longmemeval_m_cleaned.json (2.7 GB) serve too"
    )


def read(
    name: str, data_dir: Path, reading: Reading, skipped: collections.Counter[str]
) -> Iterator[Example]:
    """Yield the questions in file order; none is left out. Raises DataError (one line)."""
    if name not in NAMES:
        raise ValueError(f"name: must be one of {', '.join(NAMES)}, not {name!r}")
    files = find(name, data_dir, reading)
    records = _read_haystack(*files) if len(files) == 1 else _read_prepared(*files)
    seen: set[str] = set()
    for record, where in records:
        if record["id"] in seen:
            raise DataError(f"{where}: question_id: is already that of an earlier record")
        seen.add(record["id"])
        yield example(record, where)


def _read_haystack(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    for number, item in enumerate(_stream(path), start=1):
        where = f"{path}: record {number}"
        ids = field(item, "haystack_session_ids", list, where)
        dates = field(item, "haystack_dates", list, where)
        sessions = field(item, "haystack_sessions", list, where)
        field(item, "answer_session_ids", list, where)
        question_date = field(item, "question_date", str, where)
        yield _record(item, ids, dates, sessions, question_date, where), where


def _read_prepared(source: Path, target: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Join on `id`; each source holds one session as a flat list of messages."""
    targets: dict[int | str, dict[str, Any]] = {}
    for number, item in read_jsonl(target):
        where = f"{target}: line {number}"
        key = field(item, "id", (int, str), where)
        if key in targets:
            raise DataError(f"{where}: id: is already that of an earlier line")
        targets[key] = item
    for number, item in read_jsonl(source):
        where = f"{source}: line {number}"
        key = field(item, "id", (int, str), where)
        if key not in targets:
            raise DataError(f"{where}: id: has no line of its own in {target.name}")
        asked = targets.pop(key)
        meta = field(item, "metadata", dict, where)
        if meta.get("question_id") != field(
            asked, "question_id", str, f"{target}: id {shown(str(key))}"
        ):
            raise DataError(f"{where}: metadata.question_id: differs from that in {target.name}")
        messages = field(item, "messages", list, where)
        marked = [i for i, m in enumerate(messages) if isinstance(m, dict) and m.get("has_answer")]
        if marked != field(meta, "has_answer_turns", list, f"{where}: metadata"):
            raise DataError(f"{where}: metadata.has_answer_turns: differs from the messages' marks")
        ids = field(meta, "haystack_session_ids", list, f"{where}: metadata")
        dates = field(meta, "haystack_dates", list, f"{where}: metadata")
        question_date = field(meta, "question_date", str, f"{where}: metadata")
        yield _record(asked, ids, dates, [messages], question_date, where), where
    if targets:
        raise DataError(
            f"{target}: id {shown(str(next(iter(targets))))}: has no line in {source.name}"
        )


def _record(
    item: dict[str, Any],
    ids: list[Any],
    dates: list[Any],
    sessions: list[Any],
    question_date: str,
    where: str,
) -> dict[str, Any]:
    if not len(ids) == len(dates) == len(sessions):
        counts = f"{len(sessions)} sessions have {len(dates)} dates and {len(ids)} ids"
        raise DataError(f"{where}: haystack_dates: {counts}")
    if not all(isinstance(id_, str) for id_ in ids):
        raise DataError(f"{where}: haystack_session_ids: holds what is not text")
    id_ = field(item, "question_id", str, where)
    answer = text_of(item, "answer", where)
    when = [_sortable(date, f"{where}: haystack_dates[{i}]") for i, date in enumerate(dates)]
    asked = _sortable(question_date, f"{where}: question_date")
    order = sorted(range(len(sessions)), key=when.__getitem__)  # stable: ties stay as they came
    turns: list[dict[str, Any]] = []
    evidence: list[int] = []
    for number, i in enumerate(order):
        at = f"{where}: haystack_sessions[{i}]"
        if not isinstance(sessions[i], list):
            raise DataError(f"{at}: is not a list of messages")
        for j, message in enumerate(sessions[i]):
            role = field(message, "role", str, f"{at}[{j}]")
            content = field(message, "content", str, f"{at}[{j}]")
            if message.get("has_answer"):
                evidence.append(len(turns))
            turn = {"role": role, "content": content, "time": dates[i]}
            turns.append(turn | {"session": str(number)})
    abstention = id_.endswith("_abs")
    meta: dict[str, Any] = {
        "group": id_.removesuffix("_abs"),
        "category": field(item, "question_type", str, where),
        "abstention": abstention,
        "session_ids": [ids[i] for i in order],
    }
    # Faults of the data that change no meaning are kept and named: filler sessions that occur
    # twice, and sessions dated after the question, which upstream puts in its prompts all the same.
    late = sum(time > asked for time in when)
    counts = {"repeated sessions": len(ids) - len(set(ids)), "sessions after the question": late}
    if faults := {fault: n for fault, n in counts.items() if n}:
        meta["faults"] = faults
    return {
        "id": id_,
        "turns": turns,
        "query": field(item, "question", str, where),
        "query_time": question_date,
        "answer": answer,
        # What an abstention question asks for is in no message, whatever is marked.
        "evidence": [] if abstention else evidence,
        "meta": meta,
    }


def _sortable(date: Any, where: str) -> tuple[str, ...]:
    """The order of dates such as "2023/05/30 (Tue) 23:17"; fields have fixed widths."""
    pattern = r"(\d{4})/(\d\d)/(\d\d) \(\w+\) (\d\d):(\d\d)"
    match = re.fullmatch(pattern, date) if isinstance(date, str) else None
    if not match:
        raise DataError(f"{where}: is not a date such as '2023/05/30 (Tue) 23:17'")
    return match.groups()


def _stream(path: Path) -> Iterator[Any]:
    """Yield the items of a JSON list, holding one and what was read with it.

    A text that ends early and one that is broken look alike to the decoder except by where it
    stopped: a fault well before the end of what was read will not go away by reading on.
    """
    decode = json.JSONDecoder().raw_decode
    try:
        with open(path, encoding="utf-8-sig") as file:
            text, done = file.read(CHUNK), 0  # done: characters before text
            at = _skip(text, 0)
            if text[at : at + 1] != "[":
                raise DataError(f"{path}: is not a JSON list of questions")
            at, comma = at + 1, False
            while True:
                at = _skip(text, at)
                if text[at : at + 1] == "]":
                    if text[at + 1 :].strip() or file.read(CHUNK).strip():
                        raise DataError(f"{path}: holds more after the end of its list")
                    return
                try:
                    if comma and text[at : at + 1] != ",":
                        raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
                    item, end = decode(text, _skip(text, at + comma))
                except json.JSONDecodeError as error:
                    more = file.read(max(CHUNK, len(text)))
                    early = "Unterminated" not in error.msg and error.pos + 16 < len(text)
                    if early or not more or len(text) > LARGEST:
                        reason = f"is not JSON ({error.msg} at character {done + error.pos})"
                        raise DataError(f"{path}: {reason}") from None
                    text += more
                    continue
                yield item
                text, done, at, comma = text[end:], done + end, 0, True
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path}: is not JSON in UTF-8 ({error})") from None


def _skip(text: str, at: int) -> int:
    return re.compile(r"[ \t\r\n]*").match(text, at).end()
