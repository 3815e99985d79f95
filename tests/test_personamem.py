# SPDX-License-Identifier: Apache-2.0
"""PersonaMem v1 and v2 in their official layouts, with invented text and upstream's traps."""

import collections
import csv
import json
import os
from pathlib import Path

import pytest

from bfm.datasets import personamem
from bfm.datasets.common import Reading
from bfm.datasets.personamem_chat import NO_HISTORY, NULLS, REPEATED
from bfm.datasets.stats import stats
from bfm.dialogue import Message
from bfm.jsonl import DataError

REAL = Path(os.environ.get("BFM_DATA_DIR") or Path(__file__).parents[2] / "shared" / "data")


def message(role, content):
    return {"role": role, "content": content}


# v1: two sessions; the second chat has a null card and a null message.
CARD = "Persona: Ines Bo.\n\nInes, 40, keeps bees."
CHAT = [
    message("system", CARD),
    message("user", "User: I keep bees.\u2028User: two hives."),
    message("assistant", "Assistant: How nice."),
    message("user", "Assistant: is what you are."),  # not this role's prefix: stays
    message("system", CARD + " She sold a hive."),
    message("user", "User: I sold a hive."),
    message("assistant", ""),
    message("user", "User: After the question: I have no bees."),
]
NULL_CHAT = [message("system", None), None, *CHAT[1:]]
NUMBERS = {
    "context_length_in_tokens": "120",
    "context_length_in_letters": "600",
    "distance_to_ref_in_blocks": "2",
    "distance_to_ref_in_tokens": "90.5",
    "num_irrelevant_tokens": "",
    "distance_to_ref_proportion_in_context": "91.5%",
}
OPTIONS = ['(a) Honey, "dark".', "(b) It's (b) wax.", "(c) Bees\u2028fly.", "(d)  Two spaces."]


def question(id_, **fields):
    return {
        "persona_id": "7",
        "question_id": id_,
        "question_type": "recalling_facts_mentioned_by_the_user",
        "topic": "hobby",
        **NUMBERS,
        "user_question_or_message": 'What do I keep, "at home"?\nTell me.',
        "correct_answer": "(c)",
        "all_options": repr(OPTIONS),
        "shared_context_id": "aa11",
        "end_index_in_shared_context": "7",
        **fields,
    }


QUESTIONS = [
    question("q1"),
    question("q2"),  # the same in full
    question("q3", shared_context_id="bb22", end_index_in_shared_context="8"),  # another history
    question("q4", shared_context_id="absent"),
    question("q5", all_options=repr(["(a) x", "(b) y", "(c) x", "(d) z"]), correct_answer="(a)"),
    question("q6", question_type="suggest_new_ideas", end_index_in_shared_context="3"),
]


def write_csv(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_v1(root, rows=QUESTIONS, contexts=None, size="32k", name="shared_contexts_{}.jsonl"):
    write_csv(root / "personamem_v1" / f"questions_{size}.csv", rows)
    contexts = {"aa11": CHAT, "bb22": NULL_CHAT} if contexts is None else contexts
    lines = [json.dumps({key: chat}, ensure_ascii=False) + "\n" for key, chat in contexts.items()]
    path = root / "personamem_v1" / name.format(size)
    path.write_text("".join(lines), "utf-8")
    return path


def load(root, name="personamem_32k", reading=Reading()):  # noqa: B008
    skipped = collections.Counter()
    return {e.question.id: e for e in personamem.read(name, root, reading, skipped)}, skipped


def test_v1_reads_history_up_to_the_question(tmp_path):
    write_v1(tmp_path)
    examples, skipped = load(tmp_path)
    assert list(examples) == ["q1", "q3", "q5", "q6"]
    assert skipped == {REPEATED: 1, NO_HISTORY: 1, NULLS: 2}
    first = examples["q1"]
    assert first.question.messages == (
        Message("user", CARD, name="persona", session="0"),
        Message("user", "I keep bees.\u2028User: two hives.", session="0"),
        Message("assistant", "How nice.", session="0"),
        Message("user", "Assistant: is what you are.", session="0"),
        Message("user", CARD + " She sold a hive.", name="persona", session="1"),
        Message("user", "I sold a hive.", session="1"),
        Message("assistant", "", session="1"),
    )
    assert first.question.query == 'What do I keep, "at home"?\nTell me.'
    assert first.question.options == (
        'Honey, "dark".', "It's (b) wax.", "Bees\u2028fly.", " Two spaces.",
    )  # fmt: skip
    assert (first.answer, first.answer_index, first.evidence) == ("Bees\u2028fly.", 2, ())
    assert first.meta == {
        "group": "7",
        "category": "recall_user_shared_facts",
        "question_type": "recalling_facts_mentioned_by_the_user",
        "topic": "hobby",
        "context_length_in_tokens": 120,
        "context_length_in_letters": 600,
        "distance_to_ref_in_blocks": 2,
        "distance_to_ref_in_tokens": 90.5,
        "num_irrelevant_tokens": None,
        "distance_to_ref_proportion_in_context": 0.915,
    }
    assert len(examples["q6"].question.messages) == 3


def test_v1_names_the_faults_of_rows_that_are_kept(tmp_path):
    write_v1(tmp_path)
    examples, _ = load(tmp_path)
    assert examples["q5"].meta["faults"] == {"identical options": 2}
    null = examples["q3"]
    assert null.meta["faults"] == {"null messages": 2} and null.meta["repeats"] == "q1"
    assert [(m.name, m.session) for m in null.question.messages] == [
        *[("", "0")] * 3, ("persona", "1"), ("", "1"), ("", "1"),
    ]  # fmt: skip


def test_v1_persona_card_out(tmp_path):
    write_v1(tmp_path)
    examples, _ = load(tmp_path, reading=Reading(persona_card=False))
    messages = examples["q1"].question.messages
    assert [m.session for m in messages] == ["0"] * 3 + ["1"] * 2
    assert not any(m.name or "Persona" in m.content for m in messages)


def test_v1_finds_each_size_and_partial_contexts(tmp_path):
    write_v1(tmp_path, name="shared_contexts_{}.two_of_37.jsonl", contexts={"aa11": CHAT})
    assert load(tmp_path)[1][NO_HISTORY] == 2
    write_v1(tmp_path, name="shared_contexts_{}.more.jsonl", contexts={"bb22": NULL_CHAT})
    assert load(tmp_path)[1][NO_HISTORY] == 1
    for name, size in (("personamem_128k", "128k"), ("personamem_1m", "1M")):
        write_v1(tmp_path, rows=QUESTIONS[:1], size=size)
        assert list(load(tmp_path, name)[0]) == ["q1"]
    with pytest.raises(ValueError, match="name"):
        load(tmp_path, "personamem")


def one(**fields):
    return lambda root: write_v1(root, [question("q1", **fields)])


def chat(*messages):
    return lambda root: write_v1(root, QUESTIONS[:1], {"aa11": list(messages)})


def context_text(text):
    return lambda root: write_v1(root, QUESTIONS[:1]).write_bytes(text)


def no_column(root):
    write_v1(root, [{k: v for k, v in question("q1").items() if k != "correct_answer"}])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda root: None, "questions_32k.csv (1.3 MB) from https"),
        (no_column, "lacks the column(s) correct_answer"),
        (one(all_options="['(a) x'"), "record 1: all_options: cannot be parsed"),
        (one(all_options="'(a) x'"), "record 1: all_options: is not a list of texts"),
        (one(all_options="['(a) x', '(c) y']"), "all_options: option 1 does not start with '(b) '"),
        (one(correct_answer="(e)"), "record 1: correct_answer: is not one of (a), (b), (c), (d)"),
        (one(end_index_in_shared_context="9"), "must be from 1 to 8, not 9"),
        (one(end_index_in_shared_context="x"), "end_index_in_shared_context: is not a number"),
        (one(end_index_in_shared_context="2.5"), "must be from 1 to 8, not 2.5"),
        (one(distance_to_ref_in_tokens="far"), "distance_to_ref_in_tokens: is not a number"),
        (one(user_question_or_message=" "), "record 1: query: is only white space"),
        (one(shared_context_id="zz"), "no question has its history there"),
        (lambda root: write_v1(root, [question("q1"), question("q1", topic="b", correct_answer="(a)")]),
         "record 2: question_id: is already that of an earlier record"),
        (chat(message("user", 5)), "'aa11': message 0: content: is not text"),
        (chat(message("tool", "x")), "'aa11': message 0: role: must be system, user or assistant"),
        (chat({"role": "user"}), "'aa11': message 0: is not an object with role and content"),
        (chat(None), "'aa11': holds no message with text"),
        (context_text(b'["aa11"]\n'), "line 1: is not {"),
        (context_text(b'{"aa11": [\n'), "'aa11': is not JSON"),
        (context_text(b'{"aa11": [], "x": 1}\n'), "'aa11': its line holds other fields too"),
        (context_text(b'{"aa11": []}\n{"aa11": []}\n'), "line 2: shared_context_id: is that of"),
    ],
)  # fmt: skip
def test_v1_broken_files_say_what_is_wrong(tmp_path, make, says):
    make(tmp_path)
    with pytest.raises(DataError) as error:
        load(tmp_path)
    assert says in str(error.value) and "\n" not in str(error.value)


# v2

STORY = [
    message("system", "You are a helpful assistant. Persona: {'name': 'Olu Tan'}"),
    message("user", "Please shorten this mail: I cannot eat peanuts, so ..."),
    message("assistant", "Here it is."),
    message("user", "User: stays, since v2 has no prefixes"),
    message("assistant", None),
    message("user", "Please forget that I like jazz."),
    message("assistant", "Forgotten."),
]


def row(**fields):
    return {
        "persona_id": "12",
        "chat_history_32k_link": "data/chat_history_32k/chat_history_persona12.json",
        "chat_history_128k_link": "",
        "raw_persona_file": "",
        "short_persona": "",
        "expanded_persona": "",
        "user_query": str(message("user", "What's a good snack?")),
        "correct_answer": "Dried mango.",
        "incorrect_answers": json.dumps(["Peanuts.", "Peanut bar.", "Satay."]),
        "topic_query": "food",
        "preference": "cannot eat peanuts",
        "topic_preference": "food",
        "conversation_scenario": "email",
        "pref_type": "health_and_medical_conditions",
        "related_conversation_snippet": json.dumps(STORY[1:3]),
        "who": "self",
        "updated": "False",
        "prev_pref": "",
        "sensitive_info": "False",
        **{f"total_tokens_in_chat_history_{size}": "31000" for size in ("32k", "128k")},
        **{f"distance_from_related_snippet_to_query_{size}": "900" for size in ("32k", "128k")},
        **{f"num_persona_relevant_tokens_{size}": "9" for size in ("32k", "128k")},
        **{f"num_persona_irrelevant_tokens_{size}": "0" for size in ("32k", "128k")},
        **fields,
    }


SKIPPING = json.dumps([STORY[1], STORY[3]])  # its turns are there, but not in a row
ROWS = [
    row(),
    row(persona_id="12"),
    row(
        user_query=json.dumps(message("user", "And a drink?")),
        related_conversation_snippet=SKIPPING,
    ),
    row(user_query=str(message("user", "Jazz?")), related_conversation_snippet=str(STORY[5:7])),
    row(
        user_query=str(message("user", "Card?")), related_conversation_snippet=json.dumps(STORY[:2])
    ),
    row(user_query=str(message("user", "None?")), related_conversation_snippet=""),
    row(user_query=str(message("user", "Same?")), correct_answer="Satay."),
    row(persona_id="13", chat_history_32k_link="chat_history_persona13.json"),
]


def write_v2(root, rows=ROWS, split="benchmark", story=None, folder="data/chat_history_32k"):
    assert len(rows[0]) == 27
    write_csv(root / "personamem_v2" / f"{split}.csv", rows)
    path = root / "personamem_v2" / folder / "chat_history_persona12.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    story = {"metadata": {"total_messages": 7}, "chat_history": STORY} if story is None else story
    path.write_text(json.dumps(story), "utf-8")
    return path


def test_v2_shuffles_with_a_record_and_finds_evidence(tmp_path):
    write_v2(tmp_path)
    examples, skipped = load(tmp_path, "personamem_v2")
    assert list(examples) == [f"benchmark/{i}" for i in (0, 2, 3, 4, 5, 6)]
    assert skipped == {REPEATED: 1, NO_HISTORY: 1, NULLS: 1}
    first = examples["benchmark/0"]
    original = ["Dried mango.", "Peanuts.", "Peanut bar.", "Satay."]
    assert [original[i] for i in first.meta["permutation"]] == list(first.question.options)
    assert first.answer == "Dried mango." == first.question.options[first.answer_index]
    assert first.question.query == "What's a good snack?"
    assert first.question.messages[0] == Message("user", STORY[0]["content"], "persona", "", "0")
    assert first.question.messages[3].content.startswith("User: stays")
    assert {m.session for m in first.question.messages} == {"0"}
    assert first.evidence == (1, 2) and first.meta["snippet"] == "matched"
    keys = ("group", "category", "split", "who", "total_tokens_in_chat_history_32k")
    assert [first.meta[k] for k in keys] == [
        "12", "health_and_medical_conditions", "benchmark", "self", 31000,
    ]  # fmt: skip
    assert [(e.evidence, e.meta["snippet"]) for e in examples.values()][1:5] == [
        ((), "unmatched"), ((4, 5), "matched"), ((), "unmatched"), ((), "none"),
    ]  # fmt: skip
    assert examples["benchmark/6"].meta["faults"]["identical options"] == 2


def test_v2_persona_card_out_moves_evidence_along(tmp_path):
    write_v2(tmp_path)
    examples, _ = load(tmp_path, "personamem_v2", Reading(persona_card=False))
    first = examples["benchmark/0"]
    assert first.evidence == (0, 1)
    assert first.question.messages[0].content == STORY[1]["content"]


def test_v2_gold_stands_everywhere_and_follows_the_seed(tmp_path):
    rows = [row(user_query=str(message("user", f"Snack {i}?"))) for i in range(200)]
    write_v2(tmp_path, rows)
    golds = [e.answer_index for e in load(tmp_path, "personamem_v2")[0].values()]
    assert min(collections.Counter(golds).values()) > 30 and len(set(golds)) == 4
    assert golds == [e.answer_index for e in load(tmp_path, "personamem_v2")[0].values()]
    other = load(tmp_path, "personamem_v2", Reading(seed=1))[0].values()
    assert golds != [e.answer_index for e in other]


def test_v2_reads_every_split_that_is_there_in_either_layout(tmp_path):
    write_v2(tmp_path, ROWS[:1], "val", folder="chat_history_32k")
    write_v2(tmp_path, ROWS[:1], "train", story=STORY)
    (tmp_path / "personamem_v2" / "benchmark" / "text").mkdir(parents=True)
    table = tmp_path / "personamem_v2" / "train.csv"
    table.rename(tmp_path / "personamem_v2" / "benchmark" / "text" / "train.csv")
    examples, _ = load(tmp_path, "personamem_v2")
    assert [e.meta["split"] for e in examples.values()] == ["train", "val"]


def test_v2_never_follows_a_link_out_of_its_folder(tmp_path):
    for link in ("../../secret.json", "/etc/hostname", "..\\secret.json", "C:\\secret.json"):
        write_v2(tmp_path, [row(chat_history_32k_link=link), *ROWS[2:3]])
        (tmp_path / "secret.json").write_text(json.dumps(STORY))
        examples, skipped = load(tmp_path, "personamem_v2")
        assert list(examples) == ["benchmark/1"] and skipped[NO_HISTORY] == 1


def v2(**fields):
    return lambda root: write_v2(root, [row(**fields)])


def story(value):
    return lambda root: write_v2(root, ROWS[:1], story=value)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda root: None, "val.csv (17.5 MB) from https"),
        (v2(user_query="{'role': 'user'"), "record 1: user_query: cannot be parsed"),
        (v2(user_query="{'role': 'user'}"), "record 1: user_query: is not a message with content"),
        (v2(incorrect_answers='["a", "b"]'), "incorrect_answers: must be exactly 3, not 2"),
        (v2(incorrect_answers='["a", "b", 3]'), "incorrect_answers: is not a list of texts"),
        (v2(correct_answer=""), "is empty"),
        (v2(chat_history_32k_link=" "), "chat_history_32k_link: names no file"),
        (v2(chat_history_32k_link=".."), "chat_history_32k_link: names no file"),
        (v2(chat_history_32k_link="x.json"), "no question has its history there"),
        (v2(related_conversation_snippet="[1]"), "conversation_snippet: is not a list of turns"),
        (v2(total_tokens_in_chat_history_32k="?"), "total_tokens_in_chat_history_32k: is not a number"),
        (story({"metadata": {}}), "chat_history: is not a list of messages"),
        (story([message("user", ["x"])]), "message 0: content: is not text"),
        (lambda root: write_v2(root).write_text("{"), "chat_history_persona12.json: is not JSON"),
    ],
)  # fmt: skip
def test_v2_broken_files_say_what_is_wrong(tmp_path, make, says):
    make(tmp_path)
    with pytest.raises(DataError) as error:
        load(tmp_path, "personamem_v2")
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.skipif(
    not (REAL / "personamem_v1").is_dir(),
    reason="needs the real files: set BFM_DATA_DIR or put them into ../shared/data",
)
def test_v1_real_files_have_the_known_counts():
    examples, skipped = load(REAL)
    assert len(examples) + skipped[REPEATED] + skipped[NO_HISTORY] == 589
    assert skipped[REPEATED] == 3  # of six repeated (question, options): three have another history
    if skipped[NO_HISTORY]:
        assert len(examples) == 17 and skipped[NULLS] == 1
    assert all(e.question.messages[0].session == "0" for e in examples.values())
    assert all({m.session for m in e.question.messages} == set("01234") for e in examples.values())
    assert not any(m.content.startswith(("User: ", "Assistant: ")) for e in examples.values()
                   for m in e.question.messages)  # fmt: skip


@pytest.mark.skipif(
    not (REAL / "personamem_v1" / "questions_32k.csv").is_file(),
    reason="needs the real files: set BFM_DATA_DIR or put them into ../shared/data",
)
def test_v1_real_questions_have_the_published_counts(tmp_path):
    """Most of their histories are not at hand: one made message, repeated, stands in for each."""
    with open(REAL / "personamem_v1" / "questions_32k.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    contexts = {row["shared_context_id"]: [message("user", "User: Hm.")] * 240 for row in rows}
    assert len(contexts) == 37
    write_v1(tmp_path, rows, contexts)
    skipped = collections.Counter()
    found = stats(personamem.read("personamem_32k", tmp_path, Reading(), skipped), None)
    assert found["examples"] == 589 - 3 and skipped == {REPEATED: 3}
    assert found["groups"] == 20 and (found["turns"]["min"], found["turns"]["max"]) == (96, 237)
    assert found["faults"] == {"identical options": 17}
    assert found["distinct_questions"] == 589 - 189
    assert found["gold_positions"] == {"0": 143, "1": 146 - 1, "2": 158 - 2, "3": 142}
    assert found["categories"]["recall_user_shared_facts"] == 129 + 17 - 1
    assert found["categories"]["track_full_preference_evolution"] == 139
    assert found["gold_longest"] == pytest.approx(0.49, abs=0.005)
