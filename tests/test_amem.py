# SPDX-License-Identifier: Apache-2.0
"""A-MEM: notes, links and evolution by scripted replies; what is not linked stays as it was."""

import dataclasses
import json

import numpy as np
import pytest

from bfm import baselines
from bfm.baselines import amem
from bfm.baselines.amem import AMem
from bfm.baselines.tasks import DESCRIBE, EVOLVE, KEYWORDS, LINK
from tests.scripted import Script, embed, events, question, turn

TASKS = {"describe": DESCRIBE, "link": LINK, "evolve": EVOLVE, "keywords": KEYWORDS}
NOTE = "KEYWORDS: tea, milk, cup\nCONTEXT: The user talks about tea.\nTAGS: drinks, habits, food"


def made(replies, room=3000, **options):
    base = {"describe": [NOTE], "link": ["LINKS: none\nTAGS: drinks"], "evolve": ["0: KEEP"]}
    script = Script({**base, **replies}, TASKS, room)
    return script, AMem(script.backend, **options)


def bytes_of(note) -> bytes:
    return json.dumps(dataclasses.asdict(note)).encode()


def test_a_note_holds_its_metadata_and_they_are_embedded():
    _, system = made({})
    system.add(turn(3, "I like tea", "Noted.", "2023-05-07"))
    [note] = system.notes
    assert note.content == "Speaker User says: I like tea\nSpeaker Assistant says: Noted."
    assert (note.keywords, note.context, note.tags, note.links, note.turns) == (
        ["tea", "milk", "cup"], "The user talks about tea.", ["drinks", "habits", "food"], [], (3,),
    )  # fmt: skip
    wanted = f"{note.content}\n{note.context}\ntea, milk, cup\ndrinks, habits, food"
    np.testing.assert_allclose(system.index.vector(0), embed([wanted])[0], atol=1e-6)
    [found] = system.search(question("anything"))
    assert (found.time, found.turns) == ("2023-05-07", (3,))
    assert all(part in found.text for part in ("I like tea", "talks about tea", "milk", "habits"))


def test_links_go_to_the_notes_that_were_shown_and_evolution_to_those_alone():  # 9, 8
    """Ten unrelated notes, then one near note 9: notes 0-8 stay byte-identical."""
    _script, system = made({
        "describe": [f"KEYWORDS: k{i}\nCONTEXT: Context {i}.\nTAGS: t{i}" for i in range(10)] + [NOTE],
        "link": ["LINKS: none\nTAGS: -"] * 9 + ["LINKS: 0\nTAGS: travel, trips"],
        "evolve": ["0: CONTEXT: The user went back to Oslo | TAGS: travel, return"],
    })  # fmt: skip
    for i in range(10):
        system.add(turn(i, f"alpha{i} beta{i} gamma{i} delta{i}"))
    before = [bytes_of(note) for note in system.notes]
    vectors = [system.index.vector(i).copy() for i in range(10)]
    system.add(turn(10, "alpha9 beta9 gamma9 delta9"))
    assert [bytes_of(note) for note in system.notes[:9]] == before[:9]
    assert all((system.index.vector(i) == vectors[i]).all() for i in range(9))
    old, new = system.notes[9], system.notes[10]
    assert (old.context, old.tags) == ("The user went back to Oslo", ["travel", "return"])
    assert (old.content, old.keywords, old.turns) == (
        "Speaker User says: alpha9 beta9 gamma9 delta9", ["k9"], (9,),
    )  # fmt: skip
    assert (new.links, new.tags) == ([9], ["travel", "trips"])
    # Every way to read it agrees: the note is found by its new words.
    assert (system.index.vector(9) != vectors[9]).any()
    np.testing.assert_allclose(system.index.vector(9), embed([amem._embedded(old)])[0], atol=1e-6)
    entry = next(entry for entry in system.log if entry.event == "EVOLVE")
    assert (entry.turns, entry.kind) == ((10,), "reply")
    assert "Context 9." in entry.before and "back to Oslo" in entry.after
    counts = system.client.ledger.add
    assert counts.calls == 10 + 1 + 9 + 1 + 1 and counts.fallbacks == 0  # DESCRIBE, LINK, EVOLVE


def test_five_neighbours_are_shown():
    script, system = made({})
    for i in range(8):
        system.add(turn(i, f"tea number {i}"))
    shown = script.of("link")[-1].split("OLD NOTES:")[1]
    assert "0. Speaker" in shown and "4. Speaker" in shown and "5. Speaker" not in shown
    assert "keywords: tea, milk, cup" in shown


def test_linked_notes_are_read_after_the_note_that_links_them():
    _, system = made({"link": ["LINKS: 0\nTAGS: x"], "evolve": ["0: KEEP"]}, k=1)
    system.add(turn(0, "one two three"))
    system.add(turn(1, "one four five"))
    assert system.notes[1].links == [0]
    found = system.search(question("four five"))
    assert [note.turns for note in found] == [(1,), (0,)]
    system.expand = False
    assert [note.turns for note in system.search(question("four five"))] == [(1,)]


@pytest.mark.parametrize(
    "reply",
    ["", "Of course!", "KEYWORDS: a, b", "<think>hm", '{"keywords": ["a"]}', "TAGS:\nCONTEXT:"],
)
def test_metadata_that_cannot_be_read_fall_back_to_words(reply):
    _script, system = made({"describe": [reply]})
    said = "My zeppelin zeppelin sank near Oslo. It was sad."
    system.add(turn(0, said))
    [note] = system.notes
    assert note.keywords == ["zeppelin", "my", "sank", "near", "oslo"]
    assert (note.context, note.tags) == ("My zeppelin zeppelin sank near Oslo.", note.keywords[:3])
    counts = system.client.ledger.add
    assert (counts.asked, counts.fallbacks, counts.calls) == (1, 1, 2)
    assert events(system) == [("NOTE", (0,), "fallback")]


def test_rarer_words_come_first_and_no_language_is_left_out():
    _, system = made({"describe": [""], "link": ["none"]})
    for i in range(3):
        system.add(turn(i, "my house"))
    system.add(turn(3, "my house glows"))
    assert system.notes[3].keywords[0] == "glows"
    system.add(turn(4, "我喜欢绿茶"))
    assert system.notes[4].keywords == [*"我喜欢绿茶"]


@pytest.mark.parametrize("reply", ["", "hello", "LINKS: 7, 9", "LINKS: yes", "TAGS: a"])
def test_links_that_cannot_be_read_are_none_not_a_threshold(reply):
    script, system = made({"link": [reply]})
    for i in range(2):
        system.add(turn(i, "the very same words"))
    assert system.notes[1].links == [] and system.notes[1].tags == ["drinks", "habits", "food"]
    assert events(system)[-1] == ("LINK", (1,), "fallback") and not script.of("evolve")
    assert system.client.ledger.add.fallbacks == 1


def test_invented_numbers_are_dropped_beside_real_ones():
    _, system = made({"link": ["links: 0, 8, 12\ntags: a, b"]})
    for i in range(2):
        system.add(turn(i, "same words"))
    assert (system.notes[1].links, system.notes[1].tags) == ([0], ["a", "b"])


@pytest.mark.parametrize("reply", ["", "No.", "5: CONTEXT: x | TAGS: y", "0:", "CONTEXT: whose?"])
def test_evolution_that_cannot_be_read_keeps_everything(reply):
    _, system = made({"link": ["LINKS: 0\nTAGS: t"], "evolve": [reply]})
    system.add(turn(0, "one two"))
    before = bytes_of(system.notes[0])
    system.add(turn(1, "one two"))
    assert bytes_of(system.notes[0]) == before
    assert events(system)[-1] == ("KEEP", (1,), "fallback")


@pytest.mark.parametrize(
    "reply",
    ["0: CONTEXT: New. | TAGS: a, b", "Note 0: context: New. | tags: a, b\n1: KEEP",
     "**0.** CONTEXT: New. | TAGS: a; b", '{"0": {"context": "New.", "tags": ["a", "b"]}}',
     '{"0": {"CONTEXT": "New.", "TAGS": "a, b"}, "1": "KEEP"}'],
)  # fmt: skip
def test_evolution_in_many_forms(reply):
    assert amem._evolution(reply, 2) == {0: ("New.", ["a", "b"])}


def test_keep_in_many_forms():
    for reply in ("0: KEEP\n1: KEEP", "KEEP", "keep all.", "0 - keep", '{"0": "KEEP"}'):
        assert amem._evolution(reply, 2) == {}


def test_the_literal_threshold_embeds_evolved_notes_later():
    replies = {"link": ["LINKS: 0\nTAGS: t"], "evolve": ["0: CONTEXT: Changed entirely"]}
    _, system = made(replies, evo_threshold=2)
    system.add(turn(0, "one two"))
    before = system.index.vector(0).copy()
    system.add(turn(1, "one two"))
    assert (system.index.vector(0) == before).all() and system.notes[
        0
    ].context == "Changed entirely"
    back = AMem.from_json(json.loads(json.dumps(system.to_json())), system.client.backend)
    for held in (system, back):
        held.add(turn(2, "one two"))
        assert (held.index.vector(0) != before).any() and not held.evolved


@pytest.mark.parametrize("reply, found", [("boat, harbour", (1,)), ("", (0,))])
def test_keywords_of_the_question_find_when_they_are_asked_for(reply, found):
    _, system = made({"keywords": [reply]}, query="keywords", k=1)
    system.add(turn(0, "car garage"))
    system.add(turn(1, "boat harbour"))
    assert system.search(question("car garage"))[0].turns == found
    counts = system.client.ledger.ask
    assert (counts.asked, counts.fallbacks) == (1, int(not reply))


def test_empty_turns_make_no_note_and_long_ones_fit():
    _script, system = made({}, room=700)
    system.add(turn(0, ""))
    assert not system.notes and system.search(question("x")) == []
    for i in range(7):
        system.add(turn(i, "many words here " * 2000, time="t" * 500))
    assert len(system.notes) == 7 and system.client.ledger.add.cut_tokens > 6 * 5000
    assert system.notes[0].content.count("many") == 2000  # stored whole
    assert not baselines.unmeasured(system.client.ledger)
