# SPDX-License-Identifier: Apache-2.0
"""LongMemEval: official haystacks and the prepared pair, with invented text and upstream's traps."""

import collections
import json
import os
import tracemalloc
from pathlib import Path

import pytest

from bfm.datasets import longmemeval
from bfm.datasets.common import Reading
from bfm.dialogue import Message
from bfm.jsonl import DataError

REAL = Path(os.environ.get("BFM_DATA_DIR") or Path(__file__).parents[2] / "shared" / "data")
LATE, EARLY = "2022/03/09 (Wed) 08:00", "2021/11/30 (Tue) 23:17"


def said(role, content, **more):
    return {"role": role, "content": content, **more}


def item(id_="q1", **fields):
    """Sessions out of order, one of them empty, as the oracle file has them."""
    return {
        "question_id": id_,
        "question_type": "multi-session",
        "question": "How many owls did I see?",
        "answer": 3,
        "question_date": "2022/03/10 (Thu) 10:00",
        "haystack_session_ids": ["answer_b2", "filler", "answer_a1"],
        "haystack_dates": [LATE, LATE, EARLY],
        "haystack_sessions": [
            [said("user", "One more owl.", has_answer=True), said("assistant", "Lovely [\"}.")],
            [],
            [said("user", "Hello é\u2028."), said("assistant", "Hi.", has_answer=False),
             said("user", "Two owls!", has_answer=True)],
        ],
        "answer_session_ids": ["answer_b2", "answer_a1"],
        **fields,
    }  # fmt: skip


def write(root, value, name="longmemeval_s_cleaned.json"):
    path = root / "longmemeval" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), "utf-8"
    )


def load(root):
    return list(longmemeval.read("longmemeval", root, Reading(), collections.Counter()))


def test_sessions_are_in_date_order_and_evidence_follows(tmp_path):
    write(tmp_path, [item()])
    (example,) = load(tmp_path)
    assert example.question.messages == (
        Message("user", "Hello é\u2028.", "", EARLY, "0"),
        Message("assistant", "Hi.", "", EARLY, "0"),
        Message("user", "Two owls!", "", EARLY, "0"),
        Message("user", "One more owl.", "", LATE, "1"),
        Message("assistant", 'Lovely ["}.', "", LATE, "1"),
    )
    assert example.evidence == (2, 3) and example.answer == "3"
    assert example.question.query_time == "2022/03/10 (Thu) 10:00"
    assert example.meta == {
        "group": "q1",
        "category": "multi-session",
        "abstention": False,
        "session_ids": ["answer_a1", "answer_b2", "filler"],
    }


def test_session_ids_do_not_tell_where_the_answer_is(tmp_path):
    write(tmp_path, [item()])
    assert {m.session for m in load(tmp_path)[0].question.messages} == {"0", "1"}


def test_abstention_questions_have_no_evidence_and_share_the_group(tmp_path):
    write(tmp_path, [item(), item("q1_abs", answer="You did not say.")])
    examples = load(tmp_path)
    assert [e.question.id for e in examples] == ["q1", "q1_abs"]
    assert [e.meta["abstention"] for e in examples] == [False, True]
    assert examples[1].evidence == () and examples[1].meta["group"] == "q1"


def test_faults_that_change_no_meaning_are_named(tmp_path):
    ids, dates = ["a", "b", "b"], [EARLY, LATE, "2022/03/10 (Thu) 10:01"]
    write(tmp_path, [item(haystack_session_ids=ids, haystack_dates=dates)])
    meta = load(tmp_path)[0].meta
    assert meta["faults"] == {"repeated sessions": 1, "sessions after the question": 1}


def test_the_first_haystack_that_is_there_is_read(tmp_path):
    for name, id_ in (
        ("longmemeval_m.json", "m"),
        ("longmemeval_oracle.json", "oracle"),
        ("longmemeval_s", "old-s"),
        ("longmemeval_s_cleaned.json", "s"),
    ):
        write(tmp_path, [item(id_)], name)
        assert [e.question.id for e in load(tmp_path)] == [id_]
    with pytest.raises(ValueError, match="name"):
        next(longmemeval.read("longmemeval_s", tmp_path, Reading(), collections.Counter()))


@pytest.mark.parametrize("chunk", [1, 2, 7, 64, 1000])
@pytest.mark.parametrize("indent", [None, 1])
def test_reading_in_pieces_changes_nothing(tmp_path, monkeypatch, chunk, indent):
    items = [item(f"q{i}", answer=f'é\\" {i}') for i in range(3)]
    write(tmp_path, "\ufeff" + json.dumps(items, indent=indent) + "\n")
    whole = load(tmp_path)
    monkeypatch.setattr(longmemeval, "CHUNK", chunk)
    assert load(tmp_path) == whole and len(whole) == 3
    write(tmp_path, "[ ] ")
    assert load(tmp_path) == []


def test_a_large_file_is_not_held_whole(tmp_path):
    filler = [said("user", "x" * 2000) for _ in range(100)]
    sessions = {"haystack_sessions": [filler], "haystack_dates": [EARLY]}
    sessions["haystack_session_ids"] = ["a"]
    write(tmp_path, [item(f"q{i}", **sessions) for i in range(80)])
    size = (tmp_path / "longmemeval" / "longmemeval_s_cleaned.json").stat().st_size
    tracemalloc.start()
    try:
        examples = longmemeval.read("longmemeval", tmp_path, Reading(), collections.Counter())
        assert sum(1 for _ in examples) == 80
        assert tracemalloc.get_traced_memory()[1] < size / 3
    finally:
        tracemalloc.stop()


def pair(**fields):
    """One line of source.jsonl and its line of target.jsonl."""
    messages = [
        said("user", "I have 2 owls.", has_answer=True),
        said("assistant", "Nice.", has_answer=False),
    ]
    meta = {
        "question_id": "p1",
        "question_type": "single-session-user",
        "question_date": "2022/03/10 (Thu) 10:00",
        "haystack_dates": [EARLY],
        "haystack_session_ids": ["answer_c3"],
        "has_answer_turns": [0],
        **fields.pop("metadata", {}),
    }
    source = {"source": "longmemeval", "id": 4, "task_main": "How many owls?", "messages": messages,
              "target_ids": [4], "memory": "", "metadata": meta}  # fmt: skip
    target = {"source": "longmemeval", "id": 4, "question_id": "p1", "answer": 2,
              "question_type": "single-session-user", "question": "How many owls?"}  # fmt: skip
    source |= fields.pop("source", {})
    return source, target | fields


def write_pair(root, sources, targets):
    for name, lines in (("source.jsonl", sources), ("target.jsonl", targets)):
        write(root, "".join(json.dumps(line) + "\n" for line in lines), name)


def test_the_prepared_pair_is_joined_on_id(tmp_path):
    one, two = pair(), pair(id=9, source={"id": 9}, question_id="p2_abs", answer="Not said.",
                            metadata={"question_id": "p2_abs"})  # fmt: skip
    write_pair(tmp_path, [one[0], two[0]], [two[1], one[1]])
    first, second = load(tmp_path)
    assert first.question.messages == (
        Message("user", "I have 2 owls.", "", EARLY, "0"),
        Message("assistant", "Nice.", "", EARLY, "0"),
    )
    assert (first.question.id, first.answer, first.evidence) == ("p1", "2", (0,))
    assert first.question.query_time == "2022/03/10 (Thu) 10:00"
    assert first.meta["category"] == "single-session-user"
    assert (second.question.id, second.answer, second.evidence) == ("p2_abs", "Not said.", ())


def broken(**fields):
    return lambda root: write(root, [item(**fields)])


def text(value):
    return lambda root: write(root, value)


def pairs(sources, targets):
    return lambda root: write_pair(root, sources, targets)


def pair_with(**fields):
    source, target = pair(**fields)
    return pairs([source], [target])


ONE = json.dumps(item())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda root: None, "longmemeval_s_cleaned.json: is missing: put it there from https"),
        (text("{}"), "is not a JSON list of questions"),
        (text(""), "is not a JSON list of questions"),
        (text(f"[{ONE}"), "is not JSON (Expecting ',' delimiter at character"),
        (text(f"[{ONE} {ONE}]"), "is not JSON (Expecting ',' delimiter at character"),
        (text(f"[{ONE},]"), "is not JSON (Expecting value at character"),
        (text(f"[{ONE}, {{]"), "is not JSON"),
        (text(f"[{ONE}] 1"), "holds more after the end of its list"),
        (text("[" * 200_000), "is not JSON"),
        (text("[3]"), "record 1: haystack_session_ids: is missing"),
        (lambda root: (root / "longmemeval").mkdir() or (root / "longmemeval/longmemeval_s.json")
         .write_bytes(b'["\xff'), "is not JSON in UTF-8"),
        (broken(answer=None), "record 1: answer: is of the wrong type (NoneType)"),
        (broken(answer=True), "record 1: answer: is neither a text, a number nor"),
        (broken(question=" "), "record 1: query: is only white space"),
        (broken(question_date="10 March"), "question_date: is not a date such as"),
        (broken(haystack_dates=[LATE, LATE, None]), "haystack_dates[2]: is not a date such as"),
        (broken(haystack_dates=[LATE]), "haystack_dates: 3 sessions have 1 dates and 3 ids"),
        (broken(haystack_session_ids=[1, 2, 3]), "haystack_session_ids: holds what is not text"),
        (broken(haystack_sessions=[[], [], {}]), "haystack_sessions[2]: is not a list of messages"),
        (broken(haystack_sessions=[[], [], ["x"]]), "haystack_sessions[2][0]: role: is missing"),
        (broken(haystack_sessions=[[], [], [said("user", 1)]]), "content: is of the wrong type"),
        (broken(haystack_sessions=[[], [], [said("system", "")]]), "turns[0].role: must be 'user'"),
        (broken(haystack_sessions=[[], [], []]), "turns: is empty"),
        (lambda root: write(root, [item(), item()]), "record 2: question_id: is already that of"),
        (pairs([pair()[0]], []), "source.jsonl: line 1: id: has no line of its own in target.jsonl"),
        (pairs([], [pair()[1]]), "target.jsonl: id '4': has no line in source.jsonl"),
        (pairs([pair()[0]], [pair()[1]] * 2), "line 2: id: is already that of an earlier line"),
        (pair_with(metadata={"question_id": "p9"}), "metadata.question_id: differs from that in"),
        (pair_with(metadata={"has_answer_turns": [1]}), "has_answer_turns: differs from the messages'"),
        (pair_with(metadata={"haystack_dates": [EARLY, LATE]}), "1 sessions have 2 dates and 1 ids"),
        (pair_with(source={"messages": "x"}), "line 1: messages: is of the wrong type (str)"),
    ],
)  # fmt: skip
def test_broken_files_say_what_is_wrong(tmp_path, make, says):
    make(tmp_path)
    with pytest.raises(DataError) as error:
        load(tmp_path)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_fault_early_in_a_large_file_is_found_without_reading_on(tmp_path, monkeypatch):
    monkeypatch.setattr(longmemeval, "CHUNK", 1000)
    write(tmp_path, '[{"a" 1}, "' + "x" * 5_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="Expecting ':' delimiter at character 6"):
            load(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.skipif(
    not (REAL / "longmemeval").is_dir(),
    reason="needs the real files: set BFM_DATA_DIR or put them into ../shared/data",
)
def test_the_real_files_have_the_known_counts():
    examples = load(REAL)
    if any((REAL / "longmemeval" / name).is_file() for name in longmemeval.HAYSTACKS):
        assert len(examples) == 500 and sum(e.meta["abstention"] for e in examples) == 30
        return
    counts = collections.Counter(e.meta["category"] for e in examples)
    assert len(examples) == 176 and counts == {
        "single-session-user": 70,
        "single-session-assistant": 56,
        "single-session-preference": 30,
        "temporal-reasoning": 20,
    }
    assert all(bool(e.evidence) != e.meta["abstention"] for e in examples)
    assert {m.session for e in examples for m in e.question.messages} == {"0"}
