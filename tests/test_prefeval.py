# SPDX-License-Identifier: Apache-2.0
"""PrefEval: the three forms, the join, the recorded shuffle, the stale copy, padding, broken files."""

import collections
import json
import os
from pathlib import Path

import pytest

from bfm.datasets import load, prefeval
from bfm.datasets.common import Reading
from bfm.dialogue import parse_example, to_json
from bfm.jsonl import DataError

DATA = Path(os.environ.get("BFM_DATA_DIR") or Path(__file__).parents[2] / "shared" / "data")
needs_data = pytest.mark.skipif(
    not (DATA / "prefeval" / "benchmark_dataset" / "mcq_options").is_dir(),
    reason=f"the real PrefEval files are not in {DATA}; set BFM_DATA_DIR to the folder that has them",
)
HOME = "prefeval/benchmark_dataset"
EXPLICIT, OPTIONS = "explicit_preference", "mcq_options"
CHOICE, PERSONA = "implicit_preference/choice-based", "implicit_preference/persona-driven"
TOPICS = ("hobby_kites", "hobby_lamps")
PLAIN = Reading()


def rows(topic, n=3):
    """One topic's records in the four folders, with invented text."""
    tables = {folder: [] for folder in (EXPLICIT, CHOICE, PERSONA, OPTIONS)}
    for i in range(n):
        wish, question = f"I never buy {topic} number {i}.", f"Which of the {topic} ({i})?"
        base = {"preference": wish, "question": question, "explanation": "Because."}
        tables[EXPLICIT].append(base)
        conversation = {
            "query": f"Any {topic}?",
            "assistant_options": "1. red 2. blue",
            "user_selection": "Blue.",
            "assistant_acknowledgment": "Blue it is.",
        }
        tables[CHOICE].append({**base, "conversation": conversation, "aligned_op": "blue"})
        talk = {str(k): {"user": f"u{k}", "assistant": f"a{k}"} for k in (10, 2, 0, 1)}
        tables[PERSONA].append({**base, "persona": "A juggler", "conversation": talk, "fix": "yes"})
        four = [f"{topic} gold {i}", f"{topic} b {i}", f"{topic} c {i}", f"{topic} d {i}"]
        tables[OPTIONS].append({**base, "classification_task_options": four})
    del tables[EXPLICIT][0]["explanation"]  # one published record has none
    return tables


def write(folder, path, data):
    file = folder / HOME / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(data if isinstance(data, str) else json.dumps(data), "utf-8")


def save(folder, topic, tables):
    for place, records in tables.items():
        write(folder, f"{place}/{topic}.json", records)


@pytest.fixture
def layout(tmp_path):
    for topic in TOPICS:
        save(tmp_path, topic, rows(topic))
    return tmp_path


def read(folder, name="prefeval_persona", reading=PLAIN, skipped=None):
    skipped = collections.Counter() if skipped is None else skipped
    return list(prefeval.read(name, folder, reading, skipped))


def texts(example):
    return [(m.role, m.content) for m in example.question.messages]


def test_the_forms_share_everything_but_the_conversation(layout):
    persona, choice, explicit = (read(layout, name) for name in prefeval.NAMES)
    ids = [f"{topic}/{i}" for topic in TOPICS for i in range(3)]
    for form in (persona, choice, explicit):
        assert [e.question.id for e in form] == ids
        assert [e.question.options for e in form] == [e.question.options for e in persona]
        assert [e.meta["group"] for e in form] == [e.meta["group"] for e in persona]
        assert [e.meta["index"] for e in form] == list(range(6))
        assert {e.meta["category"] for e in form} == set(TOPICS)
        assert all(e.meta["topic"] == [e.meta["category"]] for e in form)
        assert all(parse_example(to_json(e)) == e and not e.evidence for e in form)
    talk = [(role, f"{role[0]}{k}") for k in (0, 1, 2, 10) for role in ("user", "assistant")]
    assert texts(persona[0]) == talk  # by number: 10 after 2
    assert persona[0].meta["persona"] == "A juggler"
    assert texts(choice[0]) == [
        ("user", "Any hobby_kites?"),
        ("assistant", "1. red 2. blue"),
        ("user", "Blue."),
        ("assistant", "Blue it is."),
    ]
    assert texts(explicit[4]) == [("user", "I never buy hobby_lamps number 1.")]


def test_gold_is_the_first_option_before_a_recorded_shuffle(layout):
    tables = rows("hobby_kites")
    for example in read(layout)[:3]:
        record = tables[OPTIONS][example.meta["index"]]["classification_task_options"]
        order = example.meta["permutation"]
        assert example.question.options == tuple(record[j] for j in order)
        assert sorted(order) == [0, 1, 2, 3]
        assert order[example.answer_index] == 0
        assert example.answer == record[0]
    other = read(layout, reading=Reading(seed=7))
    assert [e.meta["permutation"] for e in other] != [e.meta["permutation"] for e in read(layout)]
    assert [e.answer for e in other] == [e.answer for e in read(layout)]


def test_gold_stands_everywhere_about_equally_often(tmp_path):
    save(tmp_path, "hobby_kites", rows("hobby_kites", 400))
    places = collections.Counter(e.answer_index for e in read(tmp_path))
    assert all(70 <= places[i] <= 130 for i in range(4))


def test_the_shuffle_is_the_same_in_every_process(layout):
    # Written down once: neither the process, its hash seed nor the release of numpy may move them.
    want = [[3, 1, 2, 0], [1, 2, 3, 0], [1, 3, 0, 2], [0, 3, 1, 2], [1, 2, 0, 3], [0, 1, 2, 3]]
    assert [e.meta["permutation"] for e in read(layout)] == want


def test_a_file_of_one_folder_only_is_never_read(layout):
    write(layout, f"{OPTIONS}/hobby_kites copy.json", "not even JSON")
    skipped = collections.Counter()
    assert len(read(layout, skipped=skipped)) == 6
    assert skipped == {"file that is in one folder only": 1}


def test_duplicates_of_a_preference_are_one_group(layout):
    tables = rows("hobby_kites")
    tables[EXPLICIT][1]["preference"] = "i never buy  hobby_kites, number 0"  # as record 0
    tables[PERSONA][1]["preference"] = "I absolutely never buy hobby_kites number 0."
    save(layout, "hobby_kites", tables)
    first, second, third = read(layout)[:3]
    assert first.meta["group"] == second.meta["group"] != third.meta["group"]
    assert second.meta["preference"] == tables[PERSONA][1]["preference"]


def test_a_topic_is_left_out_with_the_preferences_it_shares(layout):
    tables = rows("hobby_lamps")
    tables[EXPLICIT][2]["preference"] = "I never buy hobby_kites number 1!"
    save(layout, "hobby_lamps", tables)
    places = {"data_dir": layout, "prepared_dir": layout / "p"}
    rest = load("prefeval_choice", "topic!=hobby_kites", **places)
    assert [e.question.id for e in rest] == ["hobby_lamps/0", "hobby_lamps/1"]
    held = load("prefeval_choice", "category=hobby_kites", **places)
    assert [e.meta["topic"] for e in held] == [
        ["hobby_kites"], ["hobby_kites", "hobby_lamps"], ["hobby_kites"],
    ]  # fmt: skip


def test_no_preference_or_gold_in_what_a_method_reads(layout):
    for name in ("prefeval_persona", "prefeval_choice"):
        for example in read(layout, name):
            assert "never buy" not in repr(example.question)


def chats():
    exchange = [("user", "Hm?"), ("assistant", "Ah.")]
    chat = [{"role": role, "content": text} for role, text in exchange * 2]
    return [{"conversation": chat}, {"conversation": chat}]


def test_padding_stands_between_conversation_and_question(layout):
    padded = Reading(padding_turns=3)
    with pytest.raises(DataError) as error:
        read(layout, reading=padded)
    [line] = str(error.value).splitlines()
    assert prefeval.PADDING.path in line and "0.6 MB" in line and "padding_turns is 3" in line
    write(layout, "filtered_inter_turns.json", chats())
    for name, own in (("prefeval_choice", 4), ("prefeval_explicit", 1)):
        for plain, long in zip(read(layout, name), read(layout, name, padded), strict=True):
            messages = long.question.messages
            assert messages[:own] == plain.question.messages
            assert [m.session for m in messages[own:]] == ["padding 0"] * 4 + ["padding 1"] * 2
            assert long.question.query == plain.question.query
            assert long.question.options == plain.question.options
    with pytest.raises(DataError, match="holds 4 exchanges, but padding_turns is 5"):
        read(layout, reading=Reading(padding_turns=5))
    write(layout, "filtered_inter_turns.json", [{"conversation": chats()[0]["conversation"][1:]}])
    with pytest.raises(DataError, match=r"record 0: conversation\[0\]: role: must be 'user'"):
        read(layout, reading=padded)


def test_the_named_split(layout):
    assert prefeval.named_split("prefeval_choice", layout) == frozenset()
    file = layout / "membench" / "split_per20.json"
    file.parent.mkdir()
    row = {"name": "prefeval-mcq", "train_source_ids": [0, 4, 99]}
    file.write_text(json.dumps({"datasets": [row]}), "utf-8")
    assert prefeval.named_split("prefeval_choice", layout) == {"hobby_kites/0", "hobby_lamps/1"}


# Broken files: one line that names file, record, field and reason


@pytest.mark.parametrize(
    ("place", "change", "says"),
    [
        (EXPLICIT, {"question": "Another?"}, "record 1: question: differs from that of"),
        (CHOICE, {"question": "Another?"}, "record 1: question: differs from that of"),
        (PERSONA, {"question": None}, "record 1: question: is of the wrong type"),
        (OPTIONS, {"question": ""}, "record 1: question: differs"),
        (EXPLICIT, {"preference": 3}, "record 1: preference: is of the wrong type (int)"),
        (PERSONA, {"conversation": []}, "record 1: conversation: is of the wrong type (list)"),
        (PERSONA, {"conversation": {}}, "record 1: turns: is empty"),
        (PERSONA, {"conversation": {"turn1": {}}}, "conversation: its keys must be numbers"),
        (PERSONA, {"conversation": {"0": {"user": "u"}}}, "conversation 0: assistant: is missing"),
        (PERSONA, {"conversation": {"0": None}}, "record 1: conversation 0: user: is missing"),
        (PERSONA, {"persona": 1}, "record 1: persona: is of the wrong type"),
        (OPTIONS, {"classification_task_options": ["a", "b", "c"]}, "must be 4 different texts"),
        (OPTIONS, {"classification_task_options": list("aabc")}, "must be 4 different texts"),
        (OPTIONS, {"classification_task_options": ["a", "b", 1, " "]}, "must be 4 different texts"),
        (OPTIONS, {"classification_task_options": "abcd"}, "options: is of the wrong type (str)"),
    ],
)
def test_broken_records(layout, place, change, says):
    tables = rows("hobby_kites")
    tables[place][1] |= change
    save(layout, "hobby_kites", tables)
    with pytest.raises(DataError) as error:
        read(layout)
    [line] = str(error.value).splitlines()
    assert says in line
    assert "hobby_kites.json: record 1: " in line


@pytest.mark.parametrize("key", ["query", "user_selection", "assistant_acknowledgment"])
def test_a_choice_conversation_must_be_whole(layout, key):
    tables = rows("hobby_kites")
    del tables[CHOICE][2]["conversation"][key]
    save(layout, "hobby_kites", tables)
    with pytest.raises(DataError, match=f"record 2: conversation: {key}: is missing"):
        read(layout, "prefeval_choice")


def test_broken_files_and_folders(layout):
    write(layout, f"{PERSONA}/hobby_kites.json", "[{]")
    with pytest.raises(DataError, match=r"persona-driven/hobby_kites\.json: is not JSON"):
        read(layout)
    write(layout, f"{PERSONA}/hobby_kites.json", {"0": {}})
    with pytest.raises(DataError, match=r"hobby_kites\.json: is not a list of records"):
        read(layout)
    write(layout, f"{PERSONA}/hobby_kites.json", rows("hobby_kites")[PERSONA][:2])
    with pytest.raises(DataError, match=r"differ in records .*2 in .*persona-driven"):
        read(layout)
    (layout / HOME / PERSONA / "hobby_kites.json").unlink()  # a hole, not a stale copy
    with pytest.raises(DataError, match=r"persona-driven/hobby_kites\.json: is missing"):
        read(layout)
    (layout / HOME / PERSONA / "hobby_lamps.json").unlink()
    with pytest.raises(DataError, match=r"has no topic files; put 20 files .* from https://"):
        read(layout)


def test_missing_data_is_named_with_place_and_size(tmp_path):
    with pytest.raises(DataError) as error:
        prefeval.read("prefeval_choice", tmp_path, PLAIN, collections.Counter())
    [line] = str(error.value).splitlines()
    assert HOME in line and "KB" in line and "amazon-science/PrefEval" in line
    assert len(prefeval.FILES["prefeval_choice"]) == 4 * 20 + 1  # the padding too


# The real files


@needs_data
@pytest.mark.parametrize("name", prefeval.NAMES)
def test_real_files_have_the_published_counts(name):
    skipped = collections.Counter()
    found = read(DATA, name, skipped=skipped)
    assert len(found) == 1000 == len({e.question.id for e in found})
    assert skipped == {"file that is in one folder only": 1}  # the stale copy
    assert {e.meta["category"] for e in found} == set(prefeval.TOPICS)
    shared = [set(e.meta["topic"]) for e in found if len(e.meta["topic"]) > 1]
    assert len(shared) == 8
    assert shared.count({"education_learning_styles", "education_resources"}) == 6
    assert len({e.question.query for e in found}) == 1000 - 6
    assert len({e.meta["group"] for e in found}) == 1000 - 12
    lengths = [[len(option) for option in e.question.options] for e in found]
    golds = [n[e.answer_index] for n, e in zip(lengths, found, strict=True)]
    longest = [g == max(n) and n.count(g) == 1 for n, g in zip(lengths, golds, strict=True)]
    assert sum(longest) == 392
    turns = collections.Counter(len(e.question.messages) for e in found)
    assert (
        turns
        == {
            "prefeval_persona": {10: 637, 12: 327, 8: 27, 14: 7, 6: 2},
            "prefeval_choice": {4: 1000},
            "prefeval_explicit": {1: 1000},
        }[name]
    )


@needs_data
def test_real_joins_are_right():
    home = DATA / HOME
    for example in read(DATA, "prefeval_choice")[::97]:
        topic, _, i = example.question.id.partition("/")
        tables = [json.loads((home / f / f"{topic}.json").read_text()) for f in (OPTIONS, CHOICE)]
        options, choice = (table[int(i)] for table in tables)
        assert example.answer == options["classification_task_options"][0]
        assert texts(example)[0] == ("user", choice["conversation"]["query"])
        assert example.question.query == options["question"] == choice["question"]
