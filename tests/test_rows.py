# SPDX-License-Identifier: Apache-2.0
"""Rows: loss on the answer alone, rendered as at inference, nothing cut."""

import collections
import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from bfm import arch, rows
from bfm.dialogue import parse_example, turns_of
from bfm.heads import controller_prompt, reader_prompt, reader_room
from bfm.prompts import PromptError, Scaffold
from bfm.rows import Labelled, make_rows, silver
from bfm.settings import Settings, TrainSettings

SCAFFOLD = Scaffold.of(arch.byte_tokenizer())
DECODE = SCAFFOLD.tokenizer.decode


def labelled(n=6, sal_q=None, score=None, tau=0.5, **record):
    turns = []
    for i in range(n):
        turns += [
            {"role": "user", "content": f"fact {i}", "time": f"day {i}"},
            {"role": "assistant", "content": f"noted {i}"},
        ]
    record = {
        "id": "x",
        "turns": turns,
        "query": "which?",
        "options": ["red", "blue"],
        "answer": "blue",
    } | record
    sal_q = tuple(float(-i) for i in range(n)) if sal_q is None else sal_q
    score = (0.1, 0.9, 0.2, 2.0, 0.3, 5.0)[:n] if score is None else score
    return Labelled(parse_example(record), sal_q, score, tau)


def run(item, k=4, count=None, **train):
    settings = Settings(prefilter_k=k, train=TrainSettings(**{"noise": 0.0, **train}))
    return make_rows(item, SCAFFOLD, settings, collections.Counter() if count is None else count)


def test_rows_as_a_person_reads_them():
    controller, reader = run(labelled())
    assert DECODE(controller.ids) == (
        "<|im_start|>user\nEarlier exchanges with the user:\n"
        "[1] [day 0] User: fact 0\nAssistant: noted 0\n[2] [day 1] User: fact 1\nAssistant: noted 1\n"
        "[3] [day 2] User: fact 2\nAssistant: noted 2\n[4] [day 3] User: fact 3\nAssistant: noted 3\n"
        "\nQuestion:\nwhich?\nOptions:\nA. red\nB. blue\nDoes the answer depend on any of these "
        "exchanges? Write read and their numbers, most useful first, or none.<|im_end|>\n"
        "<|im_start|>assistant\nread 4, 2<|im_end|>"
    )
    # Turn 5 has the highest score, but the pre-filter does not give it: the target does not name it.
    assert DECODE(controller.ids[controller.start :]) == "read 4, 2<|im_end|>"
    assert DECODE(reader.ids) == (
        "<|im_start|>user\nEarlier conversation with the user:\n"
        "[day 1] User: fact 1\nAssistant: noted 1\n[day 3] User: fact 3\nAssistant: noted 3\n"
        "\nQuestion:\nwhich?\nOptions:\nA. red\nB. blue<|im_end|>\n"
        "<|im_start|>assistant\nblue<|im_end|>"
    )
    assert DECODE(reader.ids[reader.start :]) == "blue<|im_end|>"


def test_a_candidate_stands_at_its_time_under_its_rank():
    controller, reader = run(labelled(sal_q=(0.1, 3.0, 0.2, 2.0, 0.3, 0.0)))
    places = re.findall(r"\[(\d)\] \[day (\d)\]", DECODE(controller.ids))
    assert places == [("1", "1"), ("4", "2"), ("2", "3"), ("3", "4")]
    assert (
        DECODE(controller.ids[controller.start :]) == "read 2, 1<|im_end|>"
    )  # by the labels' order
    assert DECODE(reader.ids).index("fact 1") < DECODE(reader.ids).index("fact 3")


def test_gate_off_and_out_of_reach():
    count = collections.Counter()
    controller, reader = run(labelled(score=(0.0,) * 5 + (9.0,)), count=count)
    assert DECODE(controller.ids[controller.start :]) == "none<|im_end|>"
    assert "Earlier" not in DECODE(reader.ids)
    assert count["focus outside the candidates"] == 1
    separate, _ = run(labelled(score=(0.0, 0.4, 0.0, 0.0, 0.0, 9.0)), gate="separate")
    assert DECODE(separate.ids[separate.start :]) == "none 2<|im_end|>"


def test_training_renders_what_inference_renders():
    item = labelled()
    settings = Settings(prefilter_k=4)
    turns = turns_of(item.example.question.messages)
    prompt = controller_prompt(SCAFFOLD, item.example.question, turns, item.sal_q, settings)
    row = run(item)[0]
    assert row.ids[: row.start] == prompt.ids
    assert silver(item, prompt.candidates, settings.max_focus) == (3, 1)


def test_letters_and_heads():
    item = labelled()
    settings = Settings(label=dataclasses.replace(Settings().label, answer="letter"))
    assert DECODE(rows.answer_ids(item.example, SCAFFOLD, settings.label.answer)) == "B<|im_end|>"
    assert [r.head for r in run(item, heads="reader")] == ["reader"]
    assert [r.head for r in run(item, heads="controller")] == ["controller"]
    with pytest.raises(PromptError, match="missing"):
        rows.answer_ids(labelled(answer=None).example, SCAFFOLD, "text")


@pytest.mark.parametrize("answer", ["red", "a much longer shade of blue"])
@pytest.mark.parametrize("tokens", range(330, 700, 17))
def test_what_is_cut_is_the_same_in_training_and_at_inference(tokens, answer):
    """Whichever option is right: the room that is kept does not tell."""
    item = labelled(options=["red", "a much longer shade of blue"], answer=answer)
    settings = Settings(prefilter_k=4, train=TrainSettings(noise=0.0, tokens=tokens))
    question = item.example.question
    turns = turns_of(question.messages)
    controller, reader = make_rows(item, SCAFFOLD, settings, collections.Counter())
    seen = controller_prompt(SCAFFOLD, question, turns, item.sal_q, settings)
    assert controller.ids[: controller.start] == seen.ids
    room = reader_room(SCAFFOLD, question, settings)
    shown = reader_prompt(SCAFFOLD, turns, (3, 1), settings, room)
    suffix = SCAFFOLD.suffix(question)
    assert reader.ids[: reader.start] == (*SCAFFOLD.head, *shown.prefix, *suffix.ids)


@hypothesis_settings(deadline=None, max_examples=40)
@given(tokens=st.integers(min_value=60, max_value=700), noise=st.sampled_from([0.0, 1.0]))
def test_long_rows_lose_turns_never_question_or_answer(tokens, noise):
    count = collections.Counter()
    try:
        controller, reader = run(labelled(), tokens=tokens, noise=noise, count=count)
    except PromptError as error:
        assert "never cut" in str(error)
        assert tokens < 300
        return
    assert len(controller.ids) <= tokens and len(reader.ids) <= tokens
    shown = DECODE(controller.ids)
    n = shown.count("noted")
    assert [f"fact {i}" in shown for i in range(n)] == [True] * n  # the least salient went first
    assert count["candidates dropped for length"] == 4 - n
    assert shown.count("which?") == 1 and DECODE(reader.ids).endswith("blue<|im_end|>")


def test_noise_depends_on_seed_and_id_only():
    many = [labelled(id=f"r{i}") for i in range(40)]
    one = [run(item, noise=0.5)[1].ids for item in many]
    assert one == [run(item, noise=0.5)[1].ids for item in reversed(many)][::-1]
    plain = [run(item)[1].ids for item in many]
    changed = sum(a != b for a, b in zip(one, plain, strict=True))
    assert 8 <= changed <= 32  # about half of 40
