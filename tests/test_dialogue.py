# SPDX-License-Identifier: Apache-2.0
"""The schema and its files: what is read is what was written, and every fault says where it is."""

import dataclasses
import hashlib
import json
import os
import pickle
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bfm import dialogue, jsonl
from bfm.dialogue import (
    Example,
    Label,
    Message,
    Question,
    RecordError,
    evidence_turns,
    parse_example,
    to_json,
    turns_of,
)
from bfm.jsonl import DataError, JsonlSource

LINE_BREAKS = "a\nb\r\nc\u2028d\u2029e\x85f\x0bg\x0ch\x1ci\x00j"


def user(content, session=""):
    return Message("user", content, session=session)


def bot(content, session=""):
    return Message("assistant", content, session=session)


def record(**fields):
    turns = [{"role": "user", "content": "I like tea."}, {"role": "assistant", "content": ""}]
    return {"id": "x", "turns": turns, "query": "Tea?", **fields}


def write(path, *records):
    lines = (r if isinstance(r, bytes) else json.dumps(r).encode() for r in records)
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


# Turns


def texts(turns):
    assert [turn.index for turn in turns] == list(range(len(turns)))
    return [" ".join(message.content for message in turn.messages) for turn in turns]


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([user("a"), bot("b"), user("c"), bot("d")], ["a b", "c d"]),
        ([user("a"), bot("b"), bot("c"), user("d")], ["a b c", "d"]),
        ([bot("a"), bot("b"), user("c"), bot("d")], ["a b", "c d"]),
        ([user("a"), user("b"), bot("c")], ["a", "b c"]),
        ([user("a", "1"), bot("b", "2"), bot("c", "2"), user("d", "2")], ["a", "b c", "d"]),
        ([user("a", "1"), bot("b", "1"), bot("c", "2")], ["a b", "c"]),
        ([], []),
    ],
)
def test_an_exchange_is_a_user_message_and_the_replies_to_it(messages, expected):
    assert texts(turns_of(tuple(messages))) == expected
    assert texts(turns_of(tuple(messages), "message")) == [m.content for m in messages]


def test_an_unknown_unit_is_refused():
    with pytest.raises(ValueError, match=r"unit: must be 'exchange' or 'message', not 'turn'"):
        turns_of((user("a"),), "turn")


def test_evidence_messages_map_to_their_turns():
    messages = (bot("0"), user("1"), bot("2"), bot("3"), user("4"))
    example = Example(Question("x", messages, "q"), evidence=(4, 3, 1, 3))
    assert evidence_turns(example) == (1, 2)
    assert evidence_turns(example, "message") == (1, 3, 4)


@given(st.lists(st.tuples(st.sampled_from(dialogue.ROLES), st.sampled_from("ab")), max_size=12))
def test_turns_partition_the_history(drawn):
    messages = tuple(Message(role, "", session=session) for role, session in drawn)
    for unit in ("exchange", "message"):
        turns = turns_of(messages, unit)
        assert sum((turn.messages for turn in turns), ()) == messages
        for turn in turns:
            assert all(message.role == "assistant" for message in turn.messages[1:])
            assert len({message.session for message in turn.messages}) == 1


# Records

text = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
wide = text | st.just(LINE_BREAKS)
not_blank = wide.filter(str.strip)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(wide, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def records(draw):
    optional = {"name": wide, "time": wide, "session": wide | st.integers(), "content": wide}
    turn = st.fixed_dictionaries(
        {"role": st.sampled_from(dialogue.ROLES), "content": wide},
        optional={key: st.none() | optional[key] for key in ("name", "time", "session")},
    )
    turns = draw(st.lists(turn, min_size=1, max_size=5))
    options = draw(st.none() | st.lists(not_blank, min_size=2, max_size=4))
    fields = {
        "query_time": st.none() | wide,
        "evidence": st.none() | st.lists(st.integers(0, len(turns) - 1), max_size=3),
        "meta": st.none() | st.dictionaries(wide, json_values, max_size=3),
    }
    found = draw(st.fixed_dictionaries({}, optional=fields))
    gold = draw(st.sampled_from(["none", "free", "text", "index", "both"]))
    index = draw(st.integers(0, len(options or [0, 0]) - 1))
    if gold == "free":
        found["answer"] = draw(not_blank)
    if options and gold in ("text", "both"):
        found["answer"] = options[index]
    if options and gold in ("index", "both"):
        found["answer_index"] = index
    id_ = draw(wide.filter(bool))
    return {"id": id_, "turns": turns, "query": draw(not_blank), "options": options, **found}


@given(records(), st.booleans())
def test_round_trip_keeps_every_character(obj, ascii_only):
    example = parse_example(obj)
    line = json.dumps(to_json(example), ensure_ascii=ascii_only, allow_nan=False)
    assert "\n" not in line
    assert parse_example(json.loads(line)) == example
    messages = example.question.messages
    assert [m.content for m in messages] == [turn["content"] for turn in obj["turns"]]
    assert example.question.query == obj["query"]
    assert pickle.loads(pickle.dumps(example)) == example


def test_a_question_holds_no_gold():
    names = {field.name for field in dataclasses.fields(Question)}
    assert names == {"id", "messages", "query", "query_time", "options"}


@pytest.mark.parametrize(
    ("fields", "answer", "index"),
    [
        ({}, "", -1),
        ({"answer": "free"}, "free", -1),
        ({"options": ["a", "b"]}, "", -1),
        ({"options": ["a", "b"], "answer": "b"}, "b", 1),
        ({"options": ["a", "b"], "answer": "free"}, "free", -1),
        ({"options": ["a", "b"], "answer": "b "}, "b ", -1),
        ({"options": ["a", "a"], "answer": "a"}, "a", 0),
        ({"options": ["a", "b"], "answer_index": 1}, "b", 1),
        ({"options": ["a", "b"], "answer_index": 1, "answer": "free"}, "free", 1),
        ({"options": ["a", "b", "b"], "answer_index": 2, "answer": "b"}, "b", 2),
        ({"options": None, "answer": None, "answer_index": None}, "", -1),
    ],
)
def test_answer_and_index_complete_each_other(fields, answer, index):
    example = parse_example(record(**fields))
    assert (example.answer, example.answer_index) == (answer, index)


def test_null_is_absent_and_a_number_names_a_session():
    turn = {"role": "user", "content": "", "name": None, "time": None, "session": 3}
    fields = dict.fromkeys(("query_time", "options", "answer", "answer_index", "evidence", "meta"))
    example = parse_example(record(turns=[turn], **fields))
    expected = Question("x", (Message("user", "", session="3"),), "Tea?")
    assert example == Example(expected)


def nested(depth):
    return {} if depth == 1 else {"a": nested(depth - 1)}


def turn(**fields):
    return record(turns=[{"role": "user", "content": "a"}, {"role": "user", **fields}])


def without(key):
    return {name: value for name, value in record().items() if name != key}


TWO = {"options": ["a", "b"]}
SURROGATE = "holds a lone surrogate U+D800, which is not text"
FAULTS = [
    ([], "record: must be an object, not a list"),
    (None, "record: must be an object, not null"),
    (without("id"), "id: is missing"),
    (record(id=""), "id: is empty"),
    (record(id=7), "id: must be a string, not an integer"),
    (record(id=None), "id: must be a string, not null"),
    (record(id="\ud800"), f"id: {SURROGATE}"),
    (without("turns"), "turns: is missing"),
    (record(turns=[]), "turns: is empty"),
    (record(turns={}), "turns: must be a list, not an object"),
    (record(turns=["hi"]), "turns[0]: must be an object, not a string"),
    (record(turns=[{"content": ""}]), "turns[0].role: is missing"),
    (turn(), "turns[1].content: is missing"),
    (turn(content=None), "turns[1].content: must be a string, not null"),
    (turn(content=["a"]), "turns[1].content: must be a string, not a list"),
    (turn(content="a\ud800"), f"turns[1].content: {SURROGATE}"),
    (turn(content="", role="User"), "turns[1].role: must be 'user' or 'assistant', not 'User'"),
    (turn(content="", name=1), "turns[1].name: must be a string, not an integer"),
    (turn(content="", time=1.5), "turns[1].time: must be a string, not a decimal number"),
    (turn(content="", session=True), "turns[1].session: must be a string, not a boolean"),
    (
        turn(content="", contnet=""),
        "turns[1]: has an unknown field 'contnet' (did you mean 'content'?); the fields are "
        "role, content, name, time, session; other data go under meta",
    ),
    (
        record(zzz=1),
        "record: has an unknown field 'zzz'; the fields are id, turns, query, query_time, options, "
        "answer, answer_index, evidence, meta; other data go under meta",
    ),
    (without("query"), "query: is missing"),
    (record(query=""), "query: is empty"),
    (record(query=" \u2028"), "query: is only white space"),
    (record(query=[]), "query: must be a string, not a list"),
    (record(query_time=2024), "query_time: must be a string, not an integer"),
    (record(options="ab"), "options: must be a list, not a string"),
    (record(options=[]), "options: needs at least 2 options, has 0"),
    (record(options=["a"]), "options: needs at least 2 options, has 1"),
    (record(options=["a", " "]), "options[1]: is only white space"),
    (record(options=["a", 2]), "options[1]: must be a string, not an integer"),
    (record(answer=""), "answer: is empty"),
    (record(answer=" "), "answer: is only white space"),
    (record(answer=1), "answer: must be a string, not an integer"),
    (record(answer_index=0), "answer_index: needs options"),
    (record(**TWO, answer_index=True), "answer_index: must be an integer, not a boolean"),
    (record(**TWO, answer_index=1.0), "answer_index: must be an integer, not a decimal number"),
    (record(**TWO, answer_index=2), "answer_index: must be from 0 to 1 (there are 2 options)"),
    (record(**TWO, answer_index=-1), "answer_index: must be from 0 to 1 (there are 2 options)"),
    (
        record(**TWO, answer_index=0, answer="b"),
        "answer: is the text of option 1, but answer_index is 0",
    ),
    (record(evidence=0), "evidence: must be a list, not an integer"),
    (record(evidence=[0, 2]), "evidence[1]: must be from 0 to 1 (there are 2 turns)"),
    (record(evidence=[-1]), "evidence[0]: must be from 0 to 1 (there are 2 turns)"),
    (record(evidence=[False]), "evidence[0]: must be an integer, not a boolean"),
    (record(meta=[]), "meta: must be an object, not a list"),
    (record(meta={"a": ["\ud800"]}), f"meta: {SURROGATE}"),
    (record(meta={"\ud800": 0}), f"meta: {SURROGATE}"),
    (record(meta={"a": float("nan")}), "meta: holds nan, which is not JSON"),
    (record(meta={"a": (1,)}), "meta: holds a Python tuple, which is not JSON"),
    (record(meta=nested(101)), "meta: is nested more than 100 deep"),
]


@pytest.mark.parametrize(("obj", "message"), FAULTS)
def test_every_fault_names_its_field_and_reason(obj, message):
    with pytest.raises(RecordError) as caught:
        parse_example(obj)
    assert str(caught.value) == message
    assert f"{caught.value.field}: {caught.value.reason}" == message


def test_meta_may_be_as_deep_as_the_limit():
    example = parse_example(record(meta=nested(100)))
    assert parse_example(json.loads(json.dumps(to_json(example)))) == example


@given(wide, st.booleans())
def test_an_error_is_one_line_whatever_the_data_hold(drawn, in_role):
    odd = "?" + drawn * 40
    turn = {"role": odd if in_role else "user", "content": "", **({} if in_role else {odd: 0})}
    with pytest.raises(RecordError) as caught:
        parse_example(record(turns=[turn]))
    assert str(caught.value).isprintable() and len(str(caught.value)) < 200


# Files


def test_records_are_read_at_random_and_in_order(tmp_path):
    path = write(tmp_path / "a.jsonl", *(record(id=f"n{i}", query="é" * (i + 1)) for i in range(5)))
    source = JsonlSource.open(path)
    assert len(source) == 5
    assert [example.question.id for example in source] == [f"n{i}" for i in range(5)]
    assert source[3] == list(source)[3] == source[-2]
    assert source[3].question.query == "éééé"
    assert source.path == str(path)
    assert source.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (source.skipped, source.skipped_messages) == (0, ())
    assert pickle.loads(pickle.dumps(source))[2] == source[2]
    with pytest.raises(IndexError):
        source[5]


def test_records_end_at_line_feeds_only(tmp_path):
    inner = record(id=LINE_BREAKS, query=LINE_BREAKS)
    raw = json.dumps(inner, ensure_ascii=False).encode()
    assert "\u2028".encode() in raw
    lines = [b"\xef\xbb\xbf" + raw + b"\r", b"  \r", b"", json.dumps(record()).encode()]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines))  # the last line has no end
    source = JsonlSource.open(path)
    assert [example.question.query for example in source] == [LINE_BREAKS, "Tea?"]
    assert source[0].question.id == source[0].question.query == LINE_BREAKS
    assert source.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


DEEP = b'{"id": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
BAD_LINES = [
    (
        b"{'id': 1}",
        "record: is not JSON: Expecting property name enclosed in double quotes at colum",
    ),
    (b'{"id":', "record: is not JSON: Expecting value at column 7"),
    (b"{} {}", "record: is not JSON: Extra data at column 4"),
    (b"\xef\xbb\xbf{}", "record: is not JSON: Unexpected UTF-8 BOM"),
    (b'{"id": "\xff"}', "record: is not UTF-8: byte 0xff at offset 8 of the line"),
    (b'{"id": "a", "id": "b"}', "record: holds the field 'id' twice in one object"),
    (b'{"meta": {"a\\n": 1, "a\\n": 2}}', "record: holds the field 'a\\n' twice in one object"),
    (b'{"id": %s}' % (b"1" * 5000), "record: holds a number with too many digits"),
    (DEEP, "record: is nested too deeply"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = write(tmp_path / "a.jsonl", record(), b" ", line, record(id="y"))
    with pytest.raises(DataError) as caught:
        JsonlSource.open(path)
    assert str(caught.value).startswith(f"{path}: record 2 (line 3): {message}")
    assert str(caught.value).isprintable()
    source = JsonlSource.open(path, "skip")
    assert [example.question.id for example in source] == ["x", "y"]


def test_a_bad_field_is_named_with_the_id(tmp_path):
    path = write(tmp_path / "a.jsonl", record(), b"", record(id="y\n", query=""))
    with pytest.raises(DataError) as caught:
        JsonlSource.open(path)
    assert str(caught.value) == f"{path}: record 2 (line 3, id 'y\\n'): query: is empty"
    with pytest.raises(DataError) as caught:
        JsonlSource.open(write(tmp_path / "b.jsonl", record(id=LINE_BREAKS * 9, query="")))
    assert str(caught.value).isprintable() and "...): query: is empty" in str(caught.value)


def test_a_later_record_may_not_repeat_an_id(tmp_path):
    path = write(tmp_path / "a.jsonl", b"", record(), record(id="y"), record(query="Other?"))
    with pytest.raises(DataError) as caught:
        JsonlSource.open(path)
    expected = f"{path}: record 3 (line 4, id 'x'): id: is already that of line 2"
    assert str(caught.value) == expected
    source = JsonlSource.open(path, "skip")
    assert [example.question.query for example in source] == ["Tea?", "Tea?"]
    assert source.skipped_messages == (expected,)


def test_skipping_counts_all_and_keeps_the_first_messages(tmp_path):
    bad = [record(id=f"bad{i}", query="") for i in range(7)]
    source = JsonlSource.open(write(tmp_path / "a.jsonl", *bad, record(), b"{"), "skip")
    assert len(source) == 1 and source.skipped == 8
    assert [f"id 'bad{i}'" in message for i, message in enumerate(source.skipped_messages)] == (
        [True] * 5
    )
    with pytest.raises(DataError, match=r"a.jsonl: all 7 records are bad; the first: .*'bad0'"):
        JsonlSource.open(write(tmp_path / "a.jsonl", *bad), "skip")


def test_a_limit_keeps_the_first_but_checks_all(tmp_path):
    path = write(tmp_path / "a.jsonl", *(record(id=f"n{i}") for i in range(4)), record(query=""))
    with pytest.raises(DataError, match=r"record 5 \(line 5, id 'x'\): query: is empty"):
        JsonlSource.open(path, limit=2)
    source = JsonlSource.open(path, "skip", limit=2)
    assert [example.question.id for example in source] == ["n0", "n1"]
    assert source.skipped == 1
    assert source.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert len(JsonlSource.open(path, "skip", limit=9)) == 4


def test_a_further_check_is_a_record_fault_like_others(tmp_path):
    def needs_answer(example):
        if not example.answer:
            raise RecordError("answer", "is needed")

    path = write(tmp_path / "a.jsonl", record(answer="Yes"), record(id="y"))
    with pytest.raises(DataError, match=r"record 2 \(line 2, id 'y'\): answer: is needed"):
        JsonlSource.open(path, check=needs_answer)
    assert len(JsonlSource.open(path, "skip", check=needs_answer)) == 1


def test_a_file_that_cannot_serve_is_named(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_bytes(b"\xef\xbb\xbf \n\r\n")
    os.mkfifo(tmp_path / "pipe")
    reasons = {
        tmp_path / "none": "cannot be read: No such file or directory",
        tmp_path: "is a directory, not a file",
        tmp_path / "pipe": "is not a file",
        empty: "holds no record",
        "a\0b": "cannot be read: no file can have this name",
    }
    for path, reason in reasons.items():
        with pytest.raises(DataError) as caught:
            JsonlSource.open(path)
        shown = str(path) if str(path).isprintable() else repr(path)
        assert str(caught.value) == f"{shown}: {reason}"


def test_a_file_that_changes_under_the_reader_is_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", record())
    source = JsonlSource.open(path)
    write(path, record(id="other"))
    with pytest.raises(DataError, match="has changed since it was checked"):
        source[0]


def test_wrong_arguments_are_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", record())
    with pytest.raises(ValueError, match="on_bad_record"):
        JsonlSource.open(path, "ignore")
    with pytest.raises(ValueError, match="limit"):
        JsonlSource.open(path, limit=-1)


def test_a_large_file_does_not_sit_in_memory(tmp_path):
    big = "word " * 20_000
    path = write(tmp_path / "a.jsonl", *(record(id=f"n{i}", query=big) for i in range(100)))
    tracemalloc.start()
    try:
        source = JsonlSource.open(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(source) == 100
    assert peak < path.stat().st_size / 10


def test_what_is_written_is_read_back_and_a_part_never_takes_the_name(tmp_path):
    source = JsonlSource.open(write(tmp_path / "a.jsonl", *(record(id=f"é{i}") for i in range(3))))
    path = tmp_path / "b.jsonl"
    assert jsonl.write(path, iter(source)) == 3 and list(JsonlSource.open(path)) == list(source)

    def broken():
        yield source[0]
        raise KeyError("a fault of the source")

    with pytest.raises(KeyError):
        jsonl.write(path, broken())
    assert len(JsonlSource.open(path)) == 3  # what was there before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl"]
    with pytest.raises(DataError, match=r"^.*/no/c\.jsonl: cannot be written: No such file"):
        jsonl.write(tmp_path / "no" / "c.jsonl", source)


# Labels and the bundled file


def test_a_label_is_one_line_in_the_documented_order():
    label = Label(
        **{"id": LINE_BREAKS, "n_turns": 2, "q_tokens": 3, "a_tokens": None, "logp_q": -1.5},
        **{"logp_a": None, "sal_q": (0.5, -0.25), "sal_a": None, "gate": None, "focus": None},
        **{"truncated": (1,), "tau": None, "neutral": {"sal_q": 0.0, "sal_a": None}},
    )
    line = label.to_json_line()
    assert line.encode().split(b"\n")[1:] == [b""]
    assert ", ".join(json.loads(line)) == (
        "id, n_turns, q_tokens, a_tokens, logp_q, logp_a, sal_q, sal_a, gate, focus, truncated, "
        "tau, neutral"
    )
    assert json.loads(line)["id"] == LINE_BREAKS
    assert json.loads(line)["sal_q"] == [0.5, -0.25]
    with pytest.raises(ValueError):
        dataclasses.replace(label, logp_q=float("nan")).to_json_line()


def test_the_bundled_dialogues_are_balanced_and_decided_by_their_evidence():
    examples = list(JsonlSource.open(Path(dialogue.__file__).with_name("dialogues.jsonl")))
    assert len(examples) == 16
    kinds = [example.meta["kind"] for example in examples]
    named = {"overwritten", "topical_distractor", "distant_sparse", "implicit_hint", "no_memory"}
    assert set(kinds) == named and all(kinds.count(kind) >= 3 for kind in named)
    positions = [example.answer_index for example in examples]
    assert [positions.count(i) for i in range(4)] == [4, 4, 4, 4]
    for example in examples:
        question, messages = example.question, example.question.messages
        assert 5 <= len(turns_of(messages)) <= 9
        assert len(set(question.options)) == 4
        assert example.answer == question.options[example.answer_index]
        lengths = [len(option) for option in question.options]
        assert lengths[example.answer_index] < max(lengths) <= 1.5 * min(lengths)
        assert all(messages[i].role == "user" for i in example.evidence)
        assert bool(example.evidence) == (example.meta["kind"] != "no_memory")
        times = [message.time for message in messages if message.role == "user"]
        assert all(times) and sorted(times) == times and times[-1] < question.query_time
