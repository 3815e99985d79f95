# SPDX-License-Identifier: Apache-2.0
"""The one schema: messages, turns, questions, examples and labels, and the JSONL they live in.

A record is checked whole before anything uses it, and its text is kept exactly as it came. What a
method may read at prediction time is a `Question`; the gold answer lives beside it in `Example`.
"""

import dataclasses
import difflib
import hashlib
import json
import math
from typing import Any, Literal

import numpy as np

RECORD_FIELDS = (
    *("id", "turns", "query", "query_time", "options"),
    *("answer", "answer_index", "evidence", "meta"),
)
TURN_FIELDS = ("role", "content", "name", "time", "session")
ROLES = ("user", "assistant")
META_DEPTH = 100  # deeper data overflow the stack of json, copy and pickle on some Python
_CLIP = 60  # characters of data quoted in an error
_KINDS = {
    **{type(None): "null", bool: "a boolean", int: "an integer", float: "a decimal number"},
    **{str: "a string", list: "a list", dict: "an object"},
}


class RecordError(ValueError):
    """One field of one record is wrong."""

    def __init__(self, field: str, reason: str):
        super().__init__(field, reason)
        self.field = field
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.field}: {self.reason}"


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    role: Literal["user", "assistant"]
    content: str
    name: str = ""
    time: str = ""
    session: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """A unit of history that is scored, ranked and shown as one."""

    index: int
    messages: tuple[Message, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """What a method may read: the user's history in time order and what is asked. No gold."""

    id: str
    messages: tuple[Message, ...]
    query: str
    query_time: str = ""
    options: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Example:
    """A question with its gold. `answer` "" and `answer_index` -1 mean that there is none."""

    question: Question
    answer: str = ""
    answer_index: int = -1
    evidence: tuple[int, ...] = ()  # indices into question.messages
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Label:
    """One line of labels.jsonl. Without an answer every field that needs one is None."""

    id: str
    n_turns: int
    q_tokens: int
    a_tokens: int | None
    logp_q: float
    logp_a: float | None
    sal_q: tuple[float | None, ...]  # None: not on the shortlist
    sal_a: tuple[float | None, ...] | None
    gate: int | None
    focus: tuple[int, ...] | None
    truncated: tuple[int, ...]
    tau: float | None
    neutral: dict[str, float | None]  # "sal_q" and "sal_a" of the neutral turn

    def to_json_line(self) -> str:
        """The record and its newline; a NaN or an infinity raises rather than leave silently."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False, allow_nan=False) + "\n"


def turns_of(messages: tuple[Message, ...], unit: str = "exchange") -> tuple[Turn, ...]:
    """Split a history into exchanges (a user message and the replies to it) or single messages.

    Assistant messages with no user message before them in their session form one turn.
    """
    if unit not in ("exchange", "message"):
        raise ValueError(f"unit: must be 'exchange' or 'message', not {shown(unit)}")
    groups: list[list[Message]] = []
    for message in messages:
        reply = message.role == "assistant" and unit == "exchange"
        if reply and groups and groups[-1][-1].session == message.session:
            groups[-1].append(message)
        else:
            groups.append([message])
    return tuple(Turn(index, tuple(group)) for index, group in enumerate(groups))


def evidence_turns(example: Example, unit: str = "exchange") -> tuple[int, ...]:
    """The turns that hold the evidence messages: sorted, each once."""
    turns = turns_of(example.question.messages, unit)
    turn_at = [turn.index for turn in turns for _ in turn.messages]
    return tuple(sorted({turn_at[i] for i in example.evidence}))


def group_of(example: Example) -> str:
    """Return what must not be split: the user, persona, trajectory .. of an example."""
    return str(example.meta.get("group", example.question.id))


def generator(seed: int, key: str) -> np.random.Generator:
    """Return a generator that depends on seed and key only, not on process or order."""
    digest = hashlib.sha256(f"{seed}\0{key}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:16], "little"))


def parse_example(obj: Any) -> Example:
    """Check one decoded record; the first fault raises `RecordError`."""
    _check_object(obj, "record", RECORD_FIELDS)
    id_ = _required(obj, "id")
    if not id_:
        raise RecordError("id", "is empty")
    turns = _list(obj, "turns")
    if not turns:
        raise RecordError("turns", "is empty" if "turns" in obj else "is missing")
    messages = tuple(_parse_message(turn, f"turns[{i}]") for i, turn in enumerate(turns))
    query = _required(obj, "query")
    _check_not_blank(query, "query")
    options = _parse_options(obj)
    answer, answer_index = _parse_answer(obj, options)
    question = Question(id_, messages, query, _optional(obj, "query_time"), options)
    evidence = tuple(
        _index(value, f"evidence[{i}]", len(messages), "turns")
        for i, value in enumerate(_list(obj, "evidence"))
    )
    meta = {} if obj.get("meta") is None else obj["meta"]
    _check_meta(meta)
    return Example(question, answer, answer_index, evidence, dict(meta))


def to_json(example: Example) -> dict[str, Any]:
    """The record that `parse_example` reads back as an equal example."""
    question = example.question
    turns = [
        {
            "role": message.role,
            "content": message.content,
            **{key: getattr(message, key) for key in TURN_FIELDS[2:] if getattr(message, key)},
        }
        for message in question.messages
    ]
    record = {
        "id": question.id,
        "turns": turns,
        "query": question.query,
        "query_time": question.query_time,
        "options": list(question.options),
        "answer": example.answer,
        "answer_index": example.answer_index if example.answer_index >= 0 else None,
        "evidence": list(example.evidence),
        "meta": dict(example.meta),
    }
    return {key: value for key, value in record.items() if value not in ("", [], {}, None)}


# Fields


def _check_object(obj: Any, where: str, known: tuple[str, ...]) -> None:
    if not isinstance(obj, dict):
        raise RecordError(where, f"must be an object, not {_kind(obj)}")
    for key in obj:
        if key not in known:
            near = difflib.get_close_matches(str(key)[:_CLIP], known, 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise RecordError(
                where,
                f"has an unknown field {shown(str(key))}{hint}; the fields are "
                f"{', '.join(known)}; other data go under meta",
            )


def _parse_message(obj: Any, where: str) -> Message:
    _check_object(obj, where, TURN_FIELDS)
    role = _required(obj, "role", where)
    if role not in ROLES:
        raise RecordError(f"{where}.role", f"must be 'user' or 'assistant', not {shown(role)}")
    content = _required(obj, "content", where)
    session = obj.get("session")
    if isinstance(session, int) and not isinstance(session, bool):
        session = str(session)
    else:
        session = _optional(obj, "session", where)
    return Message(
        role, content, _optional(obj, "name", where), _optional(obj, "time", where), session
    )


def _parse_options(obj: dict) -> tuple[str, ...]:
    if obj.get("options") is None:
        return ()
    options = _list(obj, "options")
    if len(options) < 2:
        raise RecordError("options", f"needs at least 2 options, has {len(options)}")
    for i, option in enumerate(options):
        _check_text(option, f"options[{i}]")
        _check_not_blank(option, f"options[{i}]")
    return tuple(options)


def _parse_answer(obj: dict, options: tuple[str, ...]) -> tuple[str, int]:
    """Either of `answer` and `answer_index` gives the other where it can."""
    answer = _optional(obj, "answer")
    if obj.get("answer") is not None:
        _check_not_blank(answer, "answer")
    if obj.get("answer_index") is None:
        return answer, options.index(answer) if answer in options else -1
    if not options:
        raise RecordError("answer_index", "needs options")
    index = _index(obj["answer_index"], "answer_index", len(options), "options")
    if answer in options and answer != options[index]:
        raise RecordError(
            "answer", f"is the text of option {options.index(answer)}, but answer_index is {index}"
        )
    return answer or options[index], index


def _check_meta(meta: Any) -> None:
    """Only what JSON can hold, so that every example can be written, copied and pickled."""
    if not isinstance(meta, dict):
        raise RecordError("meta", f"must be an object, not {_kind(meta)}")
    level: list[Any] = [meta]
    for _ in range(META_DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                for key in value:
                    _check_text(key, "meta")
                below.extend(value.values())
            elif isinstance(value, list):
                below.extend(value)
            elif isinstance(value, str):
                _check_text(value, "meta")
            elif isinstance(value, float) and not math.isfinite(value):
                raise RecordError("meta", f"holds {value}, which is not JSON")
            elif not (value is None or isinstance(value, bool | int | float)):
                raise RecordError("meta", f"holds {_kind(value)}, which is not JSON")
        if not below:
            return
        level = below
    raise RecordError("meta", f"is nested more than {META_DEPTH} deep")


def _required(obj: dict, key: str, where: str = "") -> str:
    field = f"{where}.{key}" if where else key
    if key not in obj:
        raise RecordError(field, "is missing")
    _check_text(obj[key], field)
    return obj[key]


def _optional(obj: dict, key: str, where: str = "") -> str:
    return "" if obj.get(key) is None else _required(obj, key, where)


def _list(obj: dict, field: str) -> list:
    value = obj.get(field)
    if value is not None and not isinstance(value, list):
        raise RecordError(field, f"must be a list, not {_kind(value)}")
    return value or []


def _index(value: Any, field: str, size: int, of: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise RecordError(field, f"must be an integer, not {_kind(value)}")
    if not 0 <= value < size:
        raise RecordError(field, f"must be from 0 to {size - 1} (there are {size} {of})")
    return value


def _check_text(value: Any, field: str) -> None:
    if not isinstance(value, str):
        raise RecordError(field, f"must be a string, not {_kind(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(value[error.start])
        reason = f"holds a lone surrogate U+{code:04X}, which is not text"
        raise RecordError(field, reason) from None


def _check_not_blank(text: str, field: str) -> None:
    if not text.strip():
        raise RecordError(field, "is empty" if not text else "is only white space")


# Words for error messages, each on one line whatever the data hold


def shown(text: str) -> str:
    """Quote text from data for an error message: one line, clipped."""
    quoted = repr(text[: _CLIP + 1])
    return quoted if len(quoted) <= _CLIP else quoted[: _CLIP - 3] + "..."


def _kind(value: Any) -> str:
    return _KINDS.get(type(value)) or f"a Python {type(value).__name__}"
