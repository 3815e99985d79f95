# SPDX-License-Identifier: Apache-2.0
"""MemBench: both layouts, first person and observation, every trap, broken files, real counts."""

import collections
import copy
import json
import os
from pathlib import Path

import pytest

from bfm.datasets import membench, splits
from bfm.datasets.common import Reading
from bfm.datasets.membench_record import names_in
from bfm.datasets.stats import stats
from bfm.dialogue import evidence_turns, parse_example, to_json
from bfm.jsonl import DataError

DATA = Path(os.environ.get("BFM_DATA_DIR") or Path(__file__).parents[2] / "shared" / "data")
needs_data = pytest.mark.skipif(
    not (DATA / "membench" / "high_source.jsonl").is_file(),
    reason=f"the real MemBench files are not in {DATA}; set BFM_DATA_DIR to the folder that has them",
)
HIGH, LOW = (membench.FILES[name][0].path for name in membench.NAMES)
KEPT = Reading()
DAY = "'2031-05-06 07:{:02d}' Tuesday"


def note(minute, colon=":"):
    return f" (place: Elmsfoot, QZ; time{colon} {DAY.format(minute)})"


def step(text, minute, reply="Noted."):
    return {"user": text + note(minute), "agent": reply + note(minute)}


def qa(**changes):
    return {
        "qid": 0,
        "question": "Which lamps might I like?",
        "answer": "Paper lamps",
        "target_step_id": [1],
        "choices": {"A": "Tin lamps", "B": "Paper lamps", "C": "Oil lamps", "D": "Neon lamps"},
        "ground_truth": "B",
        "time": DAY.format(9),
        **changes,
    }


def trajectory(tid=0, steps=None, **changes):
    steps = steps or [step("It rains.", 0), step("I fold paper lamps.", 1), step("Bye.", 2)]
    return {"tid": tid, "message_list": steps, "QA": qa(**changes)}


def write(folder, path, data):
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(data if isinstance(data, str) else json.dumps(data), "utf-8")
    return file


def official(folder, items, kind="highlevel", scenario="lamp", path=HIGH):
    return write(folder, path, {kind: {scenario: items}})


def examples(folder, items, kind="highlevel", reading=KEPT, skipped=None):
    path = official(folder, items, kind)
    skipped = collections.Counter() if skipped is None else skipped
    return list(membench.read_official(path, (kind,), reading, skipped))


def one(folder, *args, kind="highlevel", reading=KEPT, **changes):
    [example] = examples(folder, [trajectory(*args, **changes)], kind, reading)
    return example


def test_official_first_person(tmp_path):
    data = {
        "highlevel": {"lamp": [trajectory(0), trajectory(1)], "kite": [trajectory(0)]},
        "highlevel_rec": {"lamp": [trajectory(0)]},  # not part of MemBench-High
    }
    write(tmp_path, HIGH, data)
    found = list(membench.read("membench_high", tmp_path, Reading(), collections.Counter()))
    ids = ["highlevel/lamp/0", "highlevel/lamp/1", "highlevel/kite/0"]  # tid alone is not unique
    assert [e.question.id for e in found] == ids == [e.meta["group"] for e in found]
    assert [e.meta["category"] for e in found] == ["lamp", "lamp", "kite"]
    assert [e.meta["index"] for e in found] == [0, 1, 2]
    question = found[0].question
    assert [m.role for m in question.messages] == ["user", "assistant"] * 3
    assert question.messages[2].content == "I fold paper lamps." + note(1)
    assert {m.time for m in question.messages[2:4]} == {DAY.format(1)}
    assert question.query_time == DAY.format(9)
    assert question.options == ("Tin lamps", "Paper lamps", "Oil lamps", "Neon lamps")
    assert (found[0].answer, found[0].answer_index) == ("Paper lamps", 1)
    assert found[0].evidence == (2,)  # the user's message of the exchange with index 1
    assert evidence_turns(found[0]) == (1,)
    assert all(parse_example(to_json(e)) == e for e in found)


def test_low_is_the_simple_type_only(tmp_path):
    data = {"simple": {"roles": [trajectory(3)]}, "noisy": {"roles": [trajectory(3)]}}
    write(tmp_path, LOW, data)
    [found] = membench.read("membench_low", tmp_path, Reading(), collections.Counter())
    assert found.question.id == "simple/roles/3"


@pytest.mark.parametrize("kind", ["highlevel_rec", "lowlevel_rec", "RecMultiSession"])
def test_what_the_assistant_recommended_is_evidence_too(tmp_path, kind):
    assert one(tmp_path, kind=kind).evidence == (2, 3)


@pytest.mark.parametrize("colon", [":", ""])
def test_the_note_is_kept_or_removed(tmp_path, colon):
    text = "A time: 'no time' (place: of no use)"
    steps = [f"{text} (place: Elm (west); time{colon}{DAY.format(4)})", "No note: 'noise'"]
    kept = one(tmp_path, 0, steps, target_step_id=[0])
    bare = one(tmp_path, 0, steps, target_step_id=[0], reading=Reading(time_suffix="remove"))
    assert [m.time for m in kept.question.messages] == [DAY.format(4), ""]
    assert [m.time for m in bare.question.messages] == [DAY.format(4), ""]
    assert [m.content for m in kept.question.messages] == steps
    assert [m.content for m in bare.question.messages] == [text, steps[1]]
    assert "faults" not in kept.meta


def test_observation_steps_are_user_messages(tmp_path):
    found = one(tmp_path, 0, ["It is wet." + note(0), "Lamps." + note(1)], target_step_id=[0, 1])
    assert [m.role for m in found.question.messages] == ["user", "user"]
    assert found.evidence == (0, 1)


def nested():
    return [[step("a", 0), step("b", 1), step("c", 2)], [step("d", 3), step("e", 4)]]


@pytest.mark.parametrize(
    ("ids", "evidence", "faults"),
    [
        ([[1, 0], [4, 1]], (2, 8), None),  # over all sessions, as the official code counts
        ([[1, 0], [0, 1]], (2, 6), None),  # step 0 is not in session 1: inside the session
        ([3], (6,), None),
        ([[1, 0], [2, 5]], (2,), {"evidence that names no message": 1}),
        ([[9, 1]], (), {"evidence that names no message": 1}),
    ],
)
def test_nested_sessions_and_two_part_ids(tmp_path, ids, evidence, faults):
    found = one(tmp_path, 0, nested(), target_step_id=ids)
    assert [m.session for m in found.question.messages] == ["0"] * 6 + ["1"] * 4
    assert found.evidence == evidence
    assert found.meta.get("faults") == faults


def test_two_part_ids_of_flat_steps(tmp_path):
    assert one(tmp_path, target_step_id=[[2, 1]]).evidence == (4,)


def test_raw_steps_with_fields_of_their_own(tmp_path):
    raw = {"time": DAY.format(0), "place": "Elmsfoot"}
    steps = [
        {"mid": 0, "user": "a", "assistant": "b", **raw},
        {"sid": 1, "user_message": "c", "assistant_message": "d", **raw},
        {"mid": 2, "message": "e", **raw},
    ]
    found = one(tmp_path, 0, steps, target_step_id=2)
    assert "".join(m.content for m in found.question.messages) == "abcde"
    assert {m.time for m in found.question.messages} == {DAY.format(0)}
    assert found.evidence == (4,)


def test_choices_may_be_a_list_and_answers_too(tmp_path):
    choices = [["Tin", "Oil"], ["Oil", "Tin"], "I have none!", 3]
    found = one(tmp_path, choices=choices, answer=["Oil", "Tin"], kind="lowlevel_rec")
    assert found.question.options == ("Tin, Oil", "Oil, Tin", "I have none!", "3")
    assert found.answer == "Oil, Tin"
    unsorted = {"B": "two", "A": "one"}
    found = one(tmp_path, choices=unsorted, answer="a pair")
    assert found.question.options == ("one", "two")
    assert (found.answer, found.meta["answer"]) == ("two", "a pair")


def test_known_faults_are_noted_and_the_question_stays(tmp_path):
    late = [step("x", 5), step("y", 4), step("z", 6)]
    twice = {"A": "Paper lamps", "B": "Paper lamps", "C": "Oil", "D": "Tin"}
    items = [
        trajectory(0, target_step_id=[0, 3]),  # 3 == the number of steps: official, off by one
        trajectory(1, target_step_id=[]),
        trajectory(2, choices=twice),
        trajectory(3, late),
    ]
    found = examples(tmp_path, items)
    assert [e.meta["faults"] for e in found] == [
        {"evidence that names no message": 1},
        {"no evidence given": 1},
        {"identical options": 2},
        {"times not in order": 1},
    ]
    assert [e.evidence for e in found] == [(0,), (), (2,), (2,)]
    assert [e.answer_index for e in found] == [1] * 4


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (
            "I'm a fan of Emma (1996), but I also like Three Colors: Red.",
            ["emma", "three colors red"],
        ),
        ("I adore Kale besides Duck and Cover from 1951.", ["duck and cover", "kale"]),
        ("I've seen it. Maybe I will. It's fine; What a day.", []),
        ("I’ve got to say, Arugula Salad and I go well together!", ["arugula salad"]),
    ],
)
def test_names_are_told_by_their_capitals(text, names):
    assert sorted(names_in([text])) == names


def test_entities_are_those_of_the_evidence(tmp_path):
    steps = [step("I saw Brazil once.", 0), step("I fold Paper Cranes.", 1, "As in Oslo?")]
    assert one(tmp_path, 0, steps).meta["entities"] == ["paper cranes"]


def test_a_repeated_trajectory_is_dropped_and_counted(tmp_path):
    skipped = collections.Counter()
    found = examples(tmp_path, [trajectory(0), trajectory(0), trajectory(1)], skipped=skipped)
    assert len(found) == 2
    assert skipped == {"duplicate trajectory": 1}


# The prepared layout


def prepared(folder, n=3, level="high", kind="highlevel"):
    sources, targets = [], []
    for i in range(n):
        item = trajectory(i)
        about = {"data_level": kind, "category": "lamp", "tid": i, "qid": 0}
        messages = [
            {"role": role, "content": pair[key]}
            for pair in item["message_list"]
            for role, key in (("user", "user"), ("assistant", "agent"))
        ]
        head = {"source": "membench", "id": i}
        sources.append({**head, "messages": messages, "target_ids": [i], "metadata": about})
        targets.append({**head, **about, **item["QA"]})
    save(folder, level, sources, targets)
    return sources, targets


def save(folder, level, sources, targets):
    for part, rows in (("source", sources), ("target", targets)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        write(folder, f"membench/{level}_{part}.jsonl", text)


def test_both_layouts_give_the_same_examples(tmp_path):
    sources, targets = prepared(tmp_path)
    save(tmp_path, "high", sources, targets[::-1])  # joined by id, not by place
    counter = collections.Counter()
    there = list(membench.read("membench_high", tmp_path, Reading(), counter))
    assert there == examples(tmp_path, [trajectory(i) for i in range(3)])


def test_the_named_split(tmp_path):
    assert membench.named_split("membench_high", tmp_path) == frozenset()
    rows = [
        {"name": "membench-high", "train_source_ids": [0, 2, 77]},
        {"name": "membench-low", "train_source_ids": [1]},
    ]
    write(tmp_path, "membench/split_per20.json", {"datasets": rows})
    prepared(tmp_path)
    want = {"highlevel/lamp/0", "highlevel/lamp/2"}
    assert membench.named_split("membench_high", tmp_path) == want
    write(tmp_path, LOW, {"simple": {"roles": [trajectory(8), trajectory(9)]}})
    assert membench.named_split("membench_low", tmp_path) == {"simple/roles/9"}
    write(tmp_path, LOW, "broken")  # another set's file is not this one's business
    assert membench.named_split("membench_high", tmp_path) == want
    rows[0]["train_source_ids"] = ["0"]
    write(tmp_path, "membench/split_per20.json", {"datasets": rows})
    with pytest.raises(DataError, match=r"split_per20\.json: membench-high: train_source_ids"):
        membench.named_split("membench_high", tmp_path)


# Broken files: one line that names file, record, field and reason


def broken(error):
    [line] = str(error.value).splitlines()
    return line


def changed(**changes):
    return {**trajectory(), **changes}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ('{"highlevel": ', "HighLevel_multiple_0.json: is not JSON"),
        ({"simple": {}}, "HighLevel_multiple_0.json: highlevel: is missing"),
        ({"highlevel": []}, "highlevel: is of the wrong type (list)"),
        ({"highlevel": {"lamp": {}}}, "highlevel: 'lamp': is not a list"),
        ([changed(tid=None)], "'lamp'[0]: tid: is of the wrong type"),
        ([trajectory(0), trajectory(0, answer="Oil lamps", ground_truth="C")], "'lamp'[1]: tid: 0"),
        ({"highlevel": {"a\nb": [changed(tid=1.5)]}}, "'a\\nb'[0]: tid: is of the wrong type"),
        ([changed(message_list="x")], "'lamp'[0]: message_list: is of the wrong type"),
        ([changed(message_list=[])], "'lamp'[0]: turns: is empty"),
        (
            [trajectory(0, [{"user": "a", "agent": None}])],
            "message_list[0]: agent: is of the wrong",
        ),
        ([trajectory(0, [{"user": "a"}])], "'lamp'[0]: message_list[0]: agent: is missing"),
        ([trajectory(0, [[step("a", 0)], "b"])], "message_list[1]: is not a list"),
        ([trajectory(0, ["a", 7])], "message_list[1]: is neither a text nor an object (int)"),
        ([changed(QA=[])], "'lamp'[0]: QA: is of the wrong type (list)"),
        ([trajectory(question="")], "'lamp'[0]: query: is empty"),
        ([trajectory(ground_truth="E")], "ground_truth: is none of the choices A, B, C, D"),
        (
            [trajectory(choices={"A": "x", "B": None})],
            "choices: B: is of the wrong type (NoneType)",
        ),
        ([trajectory(choices={"B": "x"}, answer="x")], "options: needs at least 2"),
        (
            [trajectory(answer="Oil lamps")],
            "answer: is the text of option 2, but answer_index is 1",
        ),
        ([trajectory(target_step_id=["1"])], "target_step_id: must hold step numbers"),
        ([trajectory(target_step_id=None)], "target_step_id: is of the wrong type"),
        ([trajectory(time=9)], "'lamp'[0]: time: is of the wrong type (int)"),
    ],
)
def test_broken_official_files(tmp_path, data, says):
    write(tmp_path, HIGH, {"highlevel": {"lamp": data}} if isinstance(data, list) else data)
    with pytest.raises(DataError) as error:
        list(membench.read("membench_high", tmp_path, Reading(), collections.Counter()))
    assert says in broken(error)
    assert str(tmp_path / HIGH) in broken(error)


def drop_source(sources, targets):
    del sources[1]


def drop_target(sources, targets):
    del targets[1]


def same_source(sources, targets):
    sources[1]["id"] = 0


def same_target(sources, targets):
    targets[1]["id"] = 0


def other_trajectory(sources, targets):
    sources[1]["metadata"]["tid"] = 2


def half_a_pair(sources, targets):
    del sources[1]["messages"][-1]


def wrong_role(sources, targets):
    sources[1]["messages"][0]["role"] = "system"


def null_content(sources, targets):
    sources[1]["messages"][0]["content"] = None


def no_choices(sources, targets):
    del targets[1]["choices"]


def text_id(sources, targets):
    sources[1]["id"] = "1"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (drop_source, "high_target.jsonl: id 1: has no line in high_source.jsonl"),
        (drop_target, "high_source.jsonl: line 2: id: 1 has no line in high_target.jsonl"),
        (same_source, "high_source.jsonl: line 2: id: 0 is already"),
        (same_target, "high_target.jsonl: line 2: id: 0 is already"),
        (other_trajectory, "high_source.jsonl: line 2: tid: differs from that of id 1"),
        (half_a_pair, "high_source.jsonl: line 2: messages: must be pairs"),
        (wrong_role, "high_source.jsonl: line 2: messages: must be pairs"),
        (null_content, "high_source.jsonl: line 2: messages[0]: content: is of the wrong type"),
        (no_choices, "high_source.jsonl: line 2: choices: is missing"),
        (text_id, "high_source.jsonl: line 2: id: is of the wrong type (str)"),
    ],
)
def test_broken_prepared_files(tmp_path, change, says):
    sources, targets = copy.deepcopy(prepared(tmp_path))
    change(sources, targets)
    save(tmp_path, "high", sources, targets)
    with pytest.raises(DataError) as error:
        list(membench.read("membench_high", tmp_path, Reading(), collections.Counter()))
    assert says in broken(error)


def test_missing_files_are_named_with_place_and_size(tmp_path):
    with pytest.raises(DataError) as error:
        membench.read("membench_low", tmp_path, Reading(), collections.Counter())
    line = broken(error)
    assert LOW in line and "about 50 MB" in line and "github.com" in line
    prepared(tmp_path, level="low", kind="simple")
    (tmp_path / "membench" / "low_source.jsonl").unlink()
    with pytest.raises(DataError, match=r"low_target\.jsonl is there, but not low_source\.jsonl"):
        membench.read("membench_low", tmp_path, Reading(), collections.Counter())


# The real files


@needs_data
def test_real_high_has_the_published_counts():
    skipped = collections.Counter()
    found = list(membench.read("membench_high", DATA, Reading(), skipped))
    assert len(found) == 400 and not skipped
    by = collections.defaultdict(list)
    for example in found:
        by[example.meta["category"]].append(example)
        assert all(m.time for m in example.question.messages)
        assert "faults" not in example.meta
    gold = {c: collections.Counter(e.answer_index for e in rows) for c, rows in by.items()}
    assert {c: tuple(n[i] for i in range(4)) for c, n in gold.items()} == {
        "movie": (27, 20, 28, 25),
        "food": (24, 21, 28, 27),
        "book": (16, 32, 23, 29),
        "emotion": (28, 25, 26, 21),
    }
    steps = {c: [len(e.question.messages) // 2 for e in rows] for c, rows in by.items()}
    assert {c: (min(n), round(sum(n) / 100, 1), max(n)) for c, n in steps.items()} == {
        "movie": (10, 15.9, 23),
        "food": (9, 15.3, 24),
        "book": (9, 16.4, 24),
        "emotion": (8, 11.8, 15),
    }
    evidence = {c: {len(e.evidence) for e in rows} for c, rows in by.items()}
    assert evidence.pop("emotion") == {2, 3, 4}
    assert list(evidence.values()) == [{3, 4, 5}] * 3
    assert {c: len({e.question.query for e in rows}) for c, rows in by.items()} == {
        **dict.fromkeys(("movie", "food", "book"), 1),
        "emotion": 10,
    }


@needs_data
def test_real_movies_are_one_component_and_books_are_not():
    found = list(membench.read("membench_high", DATA, KEPT, collections.Counter()))
    made = splits.make([e.meta for e in found], "membench_high", 0)
    parts = {
        part: collections.Counter(found[i].meta["category"] for i in made[f"components_{part}"])
        for part in ("train", "dev", "test")
    }
    assert [sum(part.values()) for part in parts.values()] == [240, 80, 80]
    assert parts["train"]["movie"] == 99  # no split of the movies is free of shared titles
    assert min(part["food"] + part["book"] for part in parts.values()) > 40
    assert len(made["test_seen"]) == 44 and len(made["test_unseen"]) == 36


@needs_data
def test_real_split_has_the_published_parts():
    high = membench.named_split("membench_high", DATA)
    parts = collections.Counter(id_.split("/")[1] for id_ in high)
    assert parts == {"movie": 8, "book": 2, "food": 5, "emotion": 5}
    assert len(membench.named_split("membench_low", DATA)) == 20


@needs_data
def test_real_low_questions_have_the_published_counts(tmp_path):
    """Their histories are not at hand: made ones, long enough, stand in."""
    lines = (DATA / "membench" / "low_target.jsonl").read_text("utf-8").splitlines()
    targets = [json.loads(line) for line in lines if line.strip()]
    talk = [{"role": "user", "content": "It rains."}, {"role": "assistant", "content": "Noted."}]
    sources = [
        {
            "id": row["id"],
            "metadata": {key: row[key] for key in ("data_level", "category", "tid")},
            "messages": talk * (1 + max(row["target_step_id"])),
        }
        for row in targets
    ]
    save(tmp_path, "low", sources, targets)
    found = stats(membench.read("membench_low", tmp_path, KEPT, collections.Counter()), None)
    assert found["examples"] == 100 and found["categories"] == {"events": 50, "roles": 50}
    assert found["gold_positions"] == {"0": 30, "1": 21, "2": 23, "3": 26}
    assert found["distinct_questions"] == 96 and found["faults"] == {"identical options": 5}
    assert found["evidence"]["max"] == 1 and found["turns"]["max"] == 164
