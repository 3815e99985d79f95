# SPDX-License-Identifier: Apache-2.0
"""MemoryBank: days, summaries, portrait; forgetting in the data's time, by seed."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bfm.baselines.memorybank import DRAW, RECALLED, STRENGTH, MemoryBank
from bfm.baselines.tasks import ALL_EVENTS, ALL_PERSON, EVENTS, PERSON
from tests.scripted import Script, events, question, turn

TASKS = {"events": EVENTS, "person": PERSON, "all_events": ALL_EVENTS, "all_person": ALL_PERSON}
REPLIES = {
    "events": ["They spoke of tea."], "person": ["A calm person."],
    "all_events": ["All spoke of tea."], "all_person": ["Calm all along."],
}  # fmt: skip


def made(replies=None, room=3000, seed=0, **options):
    script = Script(REPLIES | (replies or {}), TASKS, room)
    return script, MemoryBank(script.backend, seed, **options)


def test_days_are_summarised_when_they_end_and_the_globals_at_the_end():
    script, system = made()
    system.add(turn(0, "I like tea", "Fine.", "2023-05-07 09:00"))
    system.add(turn(1, "And milk", "Good.", "7 May, 2023"))
    assert not script.asked
    system.add(turn(2, "I like coffee", "Oh.", "2023-05-08"))
    assert [task for task, _, _ in script.asked] == ["events", "person"]
    assert "I like tea" in script.of("events")[0] and "And milk" in script.of("events")[0]
    found = system.search(question("tea?", "2023-06-01"))
    assert [task for task, _, _ in script.asked][2:] == [
        "events",
        "person",
        "all_events",
        "all_person",
    ]
    assert [(d.pair, d.turns) for d in system.documents] == [
        (True, (0,)), (True, (1,)), (False, (0, 1)), (True, (2,)), (False, (2,)),
    ]  # fmt: skip
    assert [note.text for note in found[:2]] == [
        "The user: Calm all along.",
        "Earlier: All spoke of tea.",
    ]
    assert found[0].turns == found[1].turns == ()
    assert {note.turns for note in found[2:]} >= {(0, 1), (2,)}
    assert "[2023-05-07 09:00] They spoke of tea." in script.of("all_events")[0]
    calls = len(script.asked)
    assert system.search(question("tea?", "2023-06-01")) == found and len(script.asked) == calls


def test_the_globals_roll_on_from_the_last_ones():
    script, system = made({"all_events": ["First.", "Second."]})
    system.add(turn(0, "I like tea", time="2023-05-07"))
    system.end()
    system.add(turn(1, "I like milk", time="2023-05-09"))
    system.end()
    assert "EARLIER: First." in script.of("all_events")[1] and system.summary == "Second."
    assert script.of("all_events")[1].count("Day: ") == 1


@pytest.mark.parametrize("reply", ["", "   ", "<think>only thought", "```\n```", "None."])
def test_empty_replies_fall_back_to_the_users_sentences(reply):
    _script, system = made({key: [reply] for key in REPLIES})
    system.add(turn(0, "I like green tea a lot. It is late.", "You do.", "2023-05-07"))
    system.add(turn(1, "My boat is red. Is yours?", "No.", "2023-05-07"))
    system.end()
    day = next(d for d in system.documents if not d.pair)
    assert day.text == "I like green tea a lot. My boat is red."
    assert system.portrait == "I like green tea a lot. My boat is red."
    assert system.summary == day.text
    counts = system.client.ledger.add
    assert (counts.asked, counts.fallbacks, counts.calls) == (4, 4, 8)
    assert {kind for event, _, kind in events(system) if event != "STORE"} == {"fallback"}


def test_survival_is_the_papers_and_rises_with_strength():
    _, system = made(forget=5.0)
    system.add(turn(0, "I like tea", time="2023-05-07"))
    day = system.number
    assert system.survival(0, day) == 1.0
    assert system.survival(0, day + 5) == pytest.approx(math.exp(-1))
    curve = []
    for strength in range(1, 9):
        system.memory.rows[0, STRENGTH] = strength
        curve.append(system.survival(0, day + 5))
    assert curve == sorted(curve) and curve[4] == pytest.approx(math.exp(-1 / 5))
    assert curve[4] > 0.8  # the public code's slip gives 0.007 here


@given(st.floats(0.1, 50), st.floats(0, 400), st.floats(0, 400), st.integers(1, 30))
def test_stronger_or_fresher_never_dies_sooner(c, age, more, strength):
    _, system = made(forget=c)
    system.memory.append(np.array([0.0, 1, strength, 0, 0.5]))
    system.memory.append(np.array([0.0, 1, strength + 1, 0, 0.5]))
    assert system.survival(1, age) >= system.survival(0, age) >= system.survival(0, age + more)


def test_what_is_forgotten_is_not_found_and_a_day_goes_with_its_last_exchange():
    _, system = made(forget=1.0, k=1)
    for i in range(40):
        system.add(turn(i, f"word{i} other{i}", time=f"2023-05-{1 + i // 20:02d}"))
    system.end()
    system.k = 50
    now = system.number
    assert system.remembered(now)[system.memory.rows[:, RECALLED] == now].all()
    share = [system.remembered(now + t).mean() for t in (0, 1, 2, 3, 60)]
    assert share == sorted(share, reverse=True) and share[-1] == 0.0
    assert 0.2 < share[1] < 0.8  # exp(-1) and exp(-2), and some were recalled
    kept = system.remembered(now + 1)
    found = system.search(question("word3 other3", "2023-05-03"))
    gone = {
        d.turns for d, alive in zip(system.documents, kept, strict=True) if not alive and d.pair
    }
    assert gone and not gone & {note.turns for note in found if len(note.turns) == 1}
    assert len(system.search(question("word3 other3", "2024-05-02"))) == 2  # the globals remain
    summaries = [i for i, d in enumerate(system.documents) if not d.pair]
    for i in summaries:
        day = system.documents[i].day
        same = [j for j, d in enumerate(system.documents) if d.day == day and d.pair]
        assert kept[i] == kept[same].any()


def test_forgetting_off_keeps_everything_for_ever():
    _, system = made()
    system.add(turn(0, "I like tea", time="2023-05-07"))
    assert len(system.search(question("tea", "2099-01-01"))) == 4  # globals, exchange, day


def test_a_users_message_strengthens_what_it_recalls_and_a_question_does_not():
    _, system = made(forget=5.0, k=1)
    system.add(turn(0, "green tea in the morning", time="2023-05-07"))
    system.add(turn(1, "a red bicycle", time="2023-05-07"))
    draw = system.memory.rows[0, DRAW]
    system.add(turn(2, "green tea in the morning", time="2023-05-08"))
    assert (
        system.memory.rows[:, STRENGTH].tolist() == [3, 1, 1, 1]
        and system.memory.rows[0, DRAW] != draw
    )
    assert system.memory.rows[0, RECALLED] == system.number
    system.end()
    before = system.memory.rows.copy()
    for _ in range(3):
        system.search(question("red bicycle", "2023-05-09"))
    assert (system.memory.rows == before).all()


def test_draws_depend_on_the_seed_alone():
    def kept(seed):
        _, system = made(forget=1.0, seed=seed)
        for i in range(30):
            system.add(turn(i, f"word{i}", time="2023-05-07"))
        return system.remembered(system.number + 1).tolist()

    assert kept(0) == kept(0) != kept(1)


def test_time_is_the_datas_as_written():  # 21
    _, system = made(forget=1.0)
    system.add(turn(0, "I like tea", time="2023-05-08T02:00:00Z"))
    system.add(turn(1, "I like milk", time="2023-05-08T23:59:00+09:00"))
    assert len({d.day for d in system.documents}) == 1
    assert system.search(question("tea", "2023-05-08"))[2].time.startswith("2023-05-08")


def test_sessions_stand_for_days_where_there_are_no_dates():
    script, system = made(forget=5.0)
    for i in range(6):
        system.add(turn(i, f"said {i}", session=str(i // 2)))
    assert len(script.of("events")) == 2 and system.number == 3.0
    # A dated question to an undated history does not make it a thousand years old.
    assert len(system.search(question("said", "2023-05-07"))) > 2


def test_short_neighbours_of_a_day_come_along():
    _, system = made(k=1)
    for i, said in enumerate(["aa", "bb", "cc " * 80, "dd"]):
        system.add(turn(i, said, time="2023-05-07"))
    found = system.search(question("bb"))
    assert [note.turns for note in found[2:]] == [(0, 1)]


def test_a_long_day_is_summarised_in_portions():
    script, system = made(room=600)
    for i in range(40):
        system.add(turn(i, f"topic{i} " + "word " * 30, time="2023-05-07"))
    system.end()
    prompts = script.of("events")
    assert len(prompts) > 3 and "SO FAR: They spoke of tea." in prompts[1]
    assert all(f"topic{i} " in "".join(prompts) for i in range(40))
    assert sum(not d.pair for d in system.documents) == 1


def test_empty_histories_and_turns():
    script, system = made()
    system.add(turn(0, "  "))
    assert system.search(question("x")) == [] and not script.asked


def test_a_store_in_the_middle_of_a_day_goes_on():
    def turns():
        return [turn(i, f"I like thing{i}", "Ok.", f"2023-05-{7 + i // 3:02d}") for i in range(9)]

    _, whole = made(forget=5.0)
    script, half = made(forget=5.0)
    for one in turns():
        whole.add(one)
    for one in turns()[:4]:
        half.add(one)
    half = MemoryBank.from_json(json.loads(json.dumps(half.to_json())), script.backend)
    for one in turns()[4:]:
        half.add(one)
    asked = question("thing3", "2023-05-12")
    assert half.search(asked) == whole.search(asked)
    assert (half.memory.rows == whole.memory.rows).all() and half.log == whole.log
