# SPDX-License-Identifier: Apache-2.0
"""What the model reads, character for character, and where the spans lie."""

import dataclasses

import pytest

from bfm.dialogue import Example, Message, Question, Turn, parse_example
from bfm.prompts import NEUTRAL, PromptError, has_answer, rotate, turn_messages

HISTORY = (
    Message("user", "I like tea.", time="2024-01-01"),
    Message("assistant", "Noted!", time="2024-01-01"),
    Message("user", "", name="Ana"),
)
QUESTION = Question("q", HISTORY, "What now?", "2024-02-02", ("tea", "rum", "tea"))


@pytest.fixture
def scaffold(tiny):
    return tiny.scaffold


def text(scaffold, ids):
    return scaffold.tokenizer.decode(ids)


def test_the_memory_block_character_for_character(scaffold):
    ids, cut = scaffold.prefix(HISTORY)
    assert cut == 0
    assert text(scaffold, ids) == (
        "Earlier conversation with the user:\n"
        "[2024-01-01] User: I like tea.\n"
        "Assistant: Noted!\n"
        "Ana: \n"
        "\n"
    )


def test_the_whole_sequence_character_for_character(scaffold):
    [suffix] = scaffold.suffixes(Example(QUESTION, "rum", 1), "text")
    ids = (*scaffold.head, *scaffold.prefix(HISTORY[:1])[0], *suffix.ids)
    assert text(scaffold, ids) == (
        "<|im_start|>user\n"
        "Earlier conversation with the user:\n"
        "[2024-01-01] User: I like tea.\n"
        "\n"
        "[2024-02-02] Question:\n"
        "What now?\n"
        "Options:\nA. tea\nB. rum\nC. tea<|im_end|>\n"
        "<|im_start|>assistant\n"
        "rum<|im_end|>"
    )
    assert text(scaffold, suffix.ids[slice(*suffix.q)]) == "What now?"
    assert text(scaffold, suffix.ids[slice(*suffix.a)]) == "rum<|im_end|>"


def test_letters_and_cyclic_orders(scaffold):
    example = Example(QUESTION, "rum", 1)
    suffixes = scaffold.suffixes(example, "options", permutations=9)
    assert len(suffixes) == 3
    for shift, suffix in enumerate(suffixes):
        shown = text(scaffold, suffix.ids)
        options = rotate(QUESTION.options, shift)
        assert "A. {}\nB. {}\nC. {}\n".format(*options) in shown
        letter = text(scaffold, suffix.ids[slice(*suffix.a)])
        assert options["ABC".index(letter)] == "rum"
        assert suffix.choices[suffix.right] == suffix.ids[suffix.a[0]]
        assert suffix.q == suffixes[0].q and suffix.a[1] == len(suffix.ids)
    [letter] = scaffold.suffixes(example, "letter")
    assert letter.ids == suffixes[0].ids and letter.choices == ()


def test_without_an_answer_the_suffix_ends_with_the_generation_header(scaffold):
    [suffix] = scaffold.suffixes(Example(QUESTION), "text")
    assert suffix.a is None and suffix.ids[-len(scaffold.tail) :] == scaffold.tail


def test_cutting_drops_the_oldest_tokens_and_keeps_the_marker(scaffold):
    whole, _ = scaffold.prefix(HISTORY)
    ids, cut = scaffold.prefix(HISTORY, room=len(whole) - 10)
    marker = len(scaffold.tokenizer.encode("Earlier conversation with the user:\n"))
    assert cut == 10
    assert ids == whole[:marker] + whole[marker + 10 :]
    assert scaffold.prefix(HISTORY, room=len(whole)) == (whole, 0)
    with pytest.raises(PromptError, match="no room"):
        scaffold.prefix(HISTORY, room=marker - 1)


def test_more_options_than_letters_are_refused(scaffold):
    question = Question("q", HISTORY, "?", "", tuple(map(str, range(27))))
    with pytest.raises(PromptError, match="27 options"):
        scaffold.suffixes(Example(question, "3", 3), "options")


def test_context_turns_come_before():
    turns = [Turn(i, (Message("user", str(i)),)) for i in range(3)]
    assert [m.content for m in turn_messages(turns, 2, 1)] == ["1", "2"]
    assert [m.content for m in turn_messages(turns, 0, 1)] == ["0"]
    assert [m.content for m in turn_messages(turns, 1, 0)] == ["1"]


def test_the_neutral_turn_states_no_preference():
    assert [m.role for m in NEUTRAL.messages] == ["user", "assistant"]
    assert has_answer(Example(QUESTION, "x"), "text") and not has_answer(Example(QUESTION), "text")


def test_the_wall_between_what_is_asked_and_what_is_gold(scaffold):
    """A Question has no gold, by type; what is rendered for prediction does not move with the gold."""
    fields = {field.name for field in dataclasses.fields(Question)}
    assert fields == {"id", "messages", "query", "query_time", "options"}
    history = [{"role": "user", "content": "I moved to Oslo."}]
    base = {"id": "1", "turns": history, "query": "Where?", "options": ["Oslo", "Rome"]}
    golds = [
        {"answer_index": 0, "evidence": [0], "meta": {"category": "x"}},
        {"answer_index": 1},
        {},
    ]
    examples = [parse_example(base | gold) for gold in golds]
    assert len({scaffold.suffix(e.question) for e in examples}) == 1
    assert len({e.question for e in examples}) == 1
    with pytest.raises(AttributeError):
        examples[0].question.answer  # noqa: B018
