# SPDX-License-Identifier: Apache-2.0
"""Memory systems in the harness: stores built once, provenance kept, failures told apart."""

import dataclasses
import json

import pytest

from bfm import comparing, systems
from bfm.baselines import Note, StoreError
from bfm.baselines.tasks import ADD_ONLY, CITE, DECIDE, FACTS, MERGE, TOPICS
from bfm.dialogue import parse_example, turns_of
from bfm.harness import Harness
from bfm.settings import ModelSettings, SettingsError
from tests import test_evaluation as small
from tests.scripted import Script
from tests.test_embed import write_folder

TASKS = {"facts": FACTS, "decide": DECIDE}


def exchange(prompt: str) -> str:
    return prompt.split("NEW EXCHANGE:\n")[1].split("\n\n")[0]


@pytest.fixture
def scripted(tmp_path, monkeypatch):
    folder = tmp_path / "encoder"
    folder.mkdir()
    write_folder(folder)
    monkeypatch.setenv("BFM_EMBED", str(folder))

    def use(facts, decide="ADD"):
        script = Script({"facts": [facts], "decide": [decide]}, TASKS)
        monkeypatch.setattr(Harness, "backend", lambda self, lm, encoder: script.backend)
        return script

    return use


def records(n=3):
    return [small.record(i) for i in range(n)]


def test_notes_are_read_like_turns_and_keep_their_sources(scripted, tmp_path):
    script = scripted(lambda prompt: f"- {exchange(prompt)}")
    data = small.write(tmp_path / "data.jsonl", records())
    asked = small.settings(
        data, "none,mem0", sal_a=False, budget=300, stores=str(tmp_path / "stores")
    )
    found = comparing.run(asked, tmp_path / "w")
    lines = [x for x in small.read(tmp_path / "w") if x["method"] == "mem0"]
    for line in lines:
        assert line["gate"] == 1 and line["evidence"] and set(line["evidence"]) <= {0, 1, 2, 3}
        assert line["memory_tokens"] > 0 and line["recall"] is not None
    [row] = found["systems"]
    assert row["system"] == "mem0" and row["measured"] and row["histories"] == 3
    assert row["add_calls"] == (12 + 9) / 12  # a call a turn for facts, one for each but the first
    assert "mem0" in (tmp_path / "w" / "report.md").read_text()
    # The stores serve another run, which asks for nothing to be written.
    before = len(script.asked)
    comparing.run(dataclasses.replace(asked, methods="mem0,recency"), tmp_path / "again")
    assert len(script.asked) == before
    kept = [x for x in small.read(tmp_path / "again") if x["method"] == "mem0"]
    assert [x["probs"] for x in kept] == [x["probs"] for x in lines]
    stores = (tmp_path / "stores" / "mem0.jsonl").read_text("utf-8").split("\n")[:-1]
    names = [json.loads(x)["user"] for x in stores]
    assert len(set(names)) == 3


def test_a_model_that_cannot_do_it_is_not_measured(scripted, tmp_path):
    scripted("I am sorry, that is hard to say in general.", decide="maybe")
    data = small.write(tmp_path / "data.jsonl", records(2))
    found = comparing.run(small.settings(data, "mem0", sal_a=False), tmp_path / "w")
    row = found["systems"][0]
    assert not row["measured"]
    assert any(
        note.startswith("mem0 was not measured with this model")
        and f"of the {row['asked']} replies" in note and f" {row['fallbacks']} could" in note
        for note in found["notes"]
    )  # fmt: skip
    assert "not measured with this model" in (tmp_path / "w" / "report.md").read_text()


def test_gold_moves_no_store(scripted, tmp_path):
    scripted(lambda prompt: f"- {exchange(prompt)}")
    runs = {}
    for name in ("plain", "scrambled"):
        own = records()
        if name == "scrambled":
            for i, r in enumerate(own):
                r |= {"answer_index": (i + 1) % 3, "evidence": [(i + 2) % 4]}
        data = small.write(tmp_path / f"{name}.jsonl", own)
        comparing.run(small.settings(data, "mem0", sal_a=False), tmp_path / name)
        stores = (tmp_path / name / "stores" / "mem0.jsonl").read_text()
        runs[name] = [json.loads(x)["store"]["facts"] for x in stores.split("\n")[:-1]]
    assert runs["plain"] == runs["scrambled"]


def test_a_reranker_reaches_stores_that_were_built_after_it(tmp_path):
    tasks = {"topics": TOPICS, "merge": MERGE, "cite": CITE}
    script = Script({"topics": ["likes tea | 0"], "merge": ["ADD"], "cite": ["Tea. [0]"]}, tasks)
    made = systems.Systems(["rmm"], script.backend, tmp_path, 0)
    first, later = (parse_example(small.record(i)).question for i in range(2))
    updates = made.teach([first], "exchange")
    assert updates and made.reranker is not None
    made.search("rmm", [later], [turns_of(later.messages)])
    own = made.stores["rmm"]
    assert own[systems.history_key(turns_of(later.messages))].reranker is made.reranker
    # A run without training does not take over what another run's stores were saved with.
    again = systems.Systems(["rmm"], script.backend, tmp_path, 0)
    again.search("rmm", [first], [turns_of(first.messages)])
    assert all(system.reranker is None for system in again.stores["rmm"].values())


def test_stores_serve_another_chat_model_but_are_never_continued_by_it(tmp_path):
    def systems_of(name):
        script = Script({"facts": [lambda prompt: "- likes tea"]}, {"facts": ADD_ONLY})
        backend = dataclasses.replace(script.backend, name=name)
        return systems.Systems(["mem0_add"], backend, tmp_path, 0)

    questions = [parse_example(small.record(i)).question for i in range(2)]
    histories = [turns_of(question.messages) for question in questions]
    first = systems_of("large").search("mem0_add", questions[:1], histories[:1])
    later = systems_of("small")
    assert later.search("mem0_add", questions[:1], histories[:1]) == first
    assert [row["chat"] for row in later.costs()] == ["large"]
    before = (tmp_path / "mem0_add.jsonl").read_bytes()
    with pytest.raises(StoreError, match=r"1 histories are missing.*'large', not by 'small'"):
        later.search("mem0_add", questions, histories)
    assert (tmp_path / "mem0_add.jsonl").read_bytes() == before


def test_out_of_fold_runs_keep_what_systems_cost(scripted, tmp_path, tiny_folder):
    scripted("I am sorry, that is hard to say in general.", decide="maybe")
    data = small.write(tmp_path / "data.jsonl", [small.record(i) for i in (0, 2)])
    asked = small.settings(data, "mem0", sal_a=False, folds=2)
    for k in range(2):
        (tmp_path / f"m{k}").symlink_to(tiny_folder)
    asked = dataclasses.replace(
        asked, model=ModelSettings(path=str(tiny_folder)),
        eval=dataclasses.replace(asked.eval, reader=str(tmp_path / "m{k}")),
    )  # fmt: skip
    found = comparing.run(asked, tmp_path / "w")
    assert [row["measured"] for row in found["systems"]] == [False, False]
    assert "not measured with this model" in (tmp_path / "w" / "report.md").read_text()


def test_notes_stand_in_the_order_of_their_turns():
    notes = [Note("late", "d9", (5, 7)), Note("whole life", "", ()), Note("early", "d1", (1,))]
    turns, ranked = systems.as_turns(notes)
    assert [turn.messages[0].content for turn in turns] == ["whole life", "early", "late"]
    assert [turns[place].messages[0].content for place in ranked] == ["late", "whole life", "early"]
    assert turns[2].messages[0].time == "d9" and turns[0].messages[0].name == systems.LABEL


def test_a_history_is_named_by_all_that_it_says():
    def key(**changes):
        turn = {"role": "user", "content": "I like tea", "time": "d1"} | changes
        example = parse_example({"id": "x", "turns": [turn], "query": "q?", "answer": "a"})
        return systems.history_key(turns_of(example.question.messages))

    assert key() == key()
    assert len({key(), key(time="d2"), key(content="I like Tea"), key(name="Ann")}) == 4


def test_an_endpoint_needs_a_model(tmp_path):
    data = small.write(tmp_path / "data.jsonl", records(1))
    with pytest.raises(SettingsError, match="chat_model"):
        comparing.run(
            small.settings(data, "mem0", chat_url="http://localhost:1/v1"), tmp_path / "w"
        )
