# SPDX-License-Identifier: Apache-2.0
"""LoCoMo in its official layout, with invented text and upstream's traps."""

import collections
import json
import os
from pathlib import Path

import pytest

from bfm.datasets import locomo
from bfm.datasets.common import Reading
from bfm.dialogue import Message, turns_of
from bfm.jsonl import DataError

REAL = Path(os.environ.get("BFM_DATA_DIR") or Path(__file__).parents[2] / "shared" / "data")


def said(speaker, dia_id, text, **more):
    return {"speaker": speaker, "dia_id": dia_id, "text": text, **more}


def conversation(sample_id="conv-1", **fields):
    picture = {"img_url": ["https://x.invalid/a.jpg"], "query": "red kite", "re-download": True}
    return {
        "sample_id": sample_id,
        "conversation": {
            "speaker_a": "Ulla",
            "speaker_b": "Rex",
            "session_10_date_time": "9:00 am on 1 June, 2022",
            "session_10": [said("Rex", "D10:1", "The kite tore."), said("Ulla", "D10:2", "Oh no.")],
            "session_2_date_time": "2:05 pm on 8 May, 2022",
            "session_2": [
                said("Rex", "D2:1", "Look!", blip_caption="a red kite", **picture),
                said("Ulla", "D2:2", "I bought a boat.\nIn 2021."),
            ],
            "session_3_date_time": "7:00 pm on 9 May, 2022",
            "session_3": [],
            "session_11_date_time": "8:00 am on 2 June, 2022",  # a date without its session
            **fields.pop("conversation", {}),
        },
        "qa": [
            {"question": "When was it?", "answer": 2021, "evidence": ["D2:2"], "category": 2},
            {"question": "Both?", "answer": "yes", "evidence": ["D2:1; D10:1 D:2:02"], "category": 1},
            {"question": "Lost?", "answer": 1.5, "evidence": ["D9:9", "D", "D10:2"], "category": 3},
            {"question": "None?", "answer": "none", "evidence": [], "category": 4},
            {"question": "Did Rex buy it?", "adversarial_answer": "a boat", "evidence": ["D2:2"],
             "category": 5},
            {"question": "Is it Rex's?", "adversarial_answer": "Yes", "answer": "No",
             "evidence": ["D2:2"], "category": 5},
        ],
        "event_summary": {},
        **fields,
    }  # fmt: skip


def write(root, value):
    path = root / "locomo" / "locomo10.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value), "utf-8")


def load(root, seed=0):
    return list(locomo.read("locomo", root, Reading(seed=seed), collections.Counter()))


def test_sessions_are_in_numeric_order_with_names_dates_and_captions(tmp_path):
    write(tmp_path, [conversation()])
    first = load(tmp_path)[0].question
    may, june = "2:05 pm on 8 May, 2022", "9:00 am on 1 June, 2022"
    assert first.messages == (
        Message("assistant", "Look!\n[shares a red kite]", "Rex", may, "2"),
        Message("user", "I bought a boat.\nIn 2021.", "Ulla", may, "2"),
        Message("assistant", "The kite tore.", "Rex", june, "10"),
        Message("user", "Oh no.", "Ulla", june, "10"),
    )
    assert len(turns_of(first.messages)) == 4
    assert (first.query_time, first.query) == (june, "When was it?")


def test_answers_evidence_and_categories(tmp_path):
    write(tmp_path, [conversation(), conversation("conv-2")])
    examples = load(tmp_path)
    assert [e.question.id for e in examples] == [f"conv-{c}/{i}" for c in (1, 2) for i in range(6)]
    examples = examples[:6]
    assert [e.answer for e in examples[:4]] == ["2021", "yes", "1.5", "none"]
    assert [e.evidence for e in examples] == [(1,), (0, 2, 1), (3,), (), (1,), (1,)]
    assert [e.meta.get("faults") for e in examples] == [
        *(None, None, {"evidence that names no message": 2}, None, None, None),
    ]
    assert [e.meta["category"] for e in examples] == [
        *("temporal", "multi-hop", "open-domain", "single-hop", "adversarial", "adversarial"),
    ]
    assert {e.meta["group"] for e in examples} == {"conv-1"}
    assert all(e.question.options == () for e in examples[:4])


def test_adversarial_questions_are_a_choice_with_a_recorded_shuffle(tmp_path):
    write(tmp_path, [conversation(f"conv-{i}") for i in range(40)])
    hard = [e for e in load(tmp_path) if e.meta["category"] == "adversarial"]
    for example in hard:
        options = [locomo.NOT_MENTIONED, "Yes" if example.meta.get("answer") else "a boat"]
        assert [options[i] for i in example.meta["permutation"]] == list(example.question.options)
        assert example.question.options[example.answer_index] == locomo.NOT_MENTIONED
    assert 20 < sum(e.answer_index for e in hard) < 60
    assert [e.answer_index for e in hard] == [
        e.answer_index for e in load(tmp_path) if e.question.options
    ]
    other = [e.answer_index for e in load(tmp_path, seed=1) if e.question.options]
    assert other != [e.answer_index for e in hard]


def changed(**fields):
    return [conversation(**fields)]


def asked(**fields):
    item = {"question": "Q?", "answer": "A", "evidence": [], "category": 1}
    return [conversation(qa=[{k: v for k, v in (item | fields).items() if v is not None}])]


def in_session(*messages):
    return [conversation(conversation={"session_2": list(messages)})]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, "is missing: put it there from https"),
        ("[{", "is not JSON"),
        ({}, "is not a list of conversations"),
        ([{"qa": []}], "conversation 0: sample_id: is missing"),
        ([conversation(), conversation()], "'conv-1': sample_id: is already that of an earlier"),
        ([conversation("a\nb", qa=3)], r"'a\nb': qa: is of the wrong type (int)"),
        (changed(conversation={"speaker_b": "Ulla"}), "speaker_b: is named like speaker_a"),
        (changed(conversation={"session_2_date_time": 5}), "session_2_date_time: is of the wrong"),
        (changed(conversation={"session_2": [], "session_10": []}), "turns: is empty"),
        (in_session(said("Zoe", "D2:1", "x")), "session_2[0]: speaker: is neither speaker_a nor"),
        (in_session(said("Rex", "2:1", "x")), "session_2[0]: dia_id: must be a new id"),
        (in_session(*[said("Rex", "D2:1", "x")] * 2), "session_2[1]: dia_id: must be a new id"),
        (
            in_session(said("Rex", "D2:1", None)),
            "session_2[0]: text: is of the wrong type (NoneType)",
        ),
        (
            in_session(said("Rex", "D2:1", "x", blip_caption=1)),
            "blip_caption: is of the wrong type",
        ),
        (asked(category=6), "qa[0]: category: must be from 1 to 5, not 6"),
        (asked(category="2"), "qa[0]: category: is of the wrong type (str)"),
        (asked(answer=None), "qa[0]: answer: is missing"),
        (asked(answer=True), "qa[0]: answer: is neither a text, a number nor"),
        (asked(answer=" "), "qa[0]: answer: is only white space"),
        (asked(category=5), "qa[0]: adversarial_answer: is missing"),
        (asked(evidence=[3]), "qa[0]: evidence[0]: is not text"),
        (asked(evidence="D2:1"), "qa[0]: evidence: is of the wrong type (str)"),
        (asked(question=""), "qa[0]: query: is empty"),
    ],
)
def test_broken_files_say_what_is_wrong(tmp_path, value, says):
    if value is not None:
        write(tmp_path, value)
    with pytest.raises(DataError) as error:
        load(tmp_path)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_only_its_own_name_is_read(tmp_path):
    with pytest.raises(ValueError, match="name"):
        next(locomo.read("locomo10", tmp_path, Reading(), collections.Counter()))


@pytest.mark.skipif(
    not (REAL / "locomo").is_dir(),
    reason="needs the real file: set BFM_DATA_DIR or put it into ../shared/data",
)
def test_the_real_file_has_the_known_counts():
    examples = load(REAL)
    assert len(examples) == len({e.question.id for e in examples}) == 1986
    counts = collections.Counter(e.meta["category_id"] for e in examples)
    assert [counts[i] for i in range(1, 6)] == [282, 321, 96, 841, 446]
    assert sum("answer" not in e.meta for e in examples if e.meta["category_id"] == 5) == 444
    # Of nine ids that name no message as they stand, six do once joined ids are taken apart.
    assert sum(sum(e.meta.get("faults", {}).values()) for e in examples) == 3
    assert sum(not e.evidence for e in examples) == 4
    assert len({e.meta["group"] for e in examples}) == 10
