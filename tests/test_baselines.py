# SPDX-License-Identifier: Apache-2.0
"""What the memory systems share: lenient readers, backends, batching, costs, saved stores."""

import dataclasses
import http.server
import json
import threading
import time

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bfm import baselines
from bfm.baselines import backend, replies, store, turns
from bfm.baselines.backend import Backend, BackendError, Cut, side_by_side
from bfm.baselines.ledger import Client, Counts, Ledger, unmeasured
from bfm.baselines.replies import Decision
from bfm.baselines.tasks import Task
from bfm.baselines.vectors import Index, VectorError
from bfm.dialogue import Message, Turn
from bfm.shortlist import words
from tests.scripted import count, embed, question, turn

# --- readers


FACTS = [
    ("- likes tea\n* has a boat\n• is 30", ["likes tea", "has a boat", "is 30"]),
    ("1. likes tea\n2) has a boat\n(3) is 30", ["likes tea", "has a boat", "is 30"]),
    ("Sure! Here are the facts:\n\n- likes tea\n\nLet me know!", ["likes tea"]),
    ("```\n- likes tea\n```", ["likes tea"]),
    ("```json\n{\"facts\": [\"likes tea\"]}\n```", ["likes tea"]),
    ('Here you go: {"facts": [{"fact": "likes tea"}, {"text": "is 30"}]}', ["likes tea", "is 30"]),
    ("{'facts': ['likes tea', 'has a friend\\'s boat', 'it's 30',]}",
     ["likes tea", "has a friend's boat", "it's 30"]),
    ('["likes tea", "is 30"]', ["likes tea", "is 30"]),
    ('{"facts": ["likes tea", "has a bo', ["likes tea"]),
    ('{"memory": [{"id": "0", "text": "likes tea"}, {"id": "1", "te', ["likes tea"]),
    ("<think>- a thought\n</think>- likes tea", ["likes tea"]),
    ("a thought</think>\n- likes tea\n- likes tea", ["likes tea"]),
    ("- **likes tea**\n- \"is 30\"\n---", ["likes tea", "is 30"]),
    ("NONE", []), ("none.", []), ("- NONE", []), ('{"facts": []}', []), ("[]", []),
    ("NO_TRAIT", []),
    ("NONE\nNothing lasting was said.", []),
    ("", None), ("likes tea", None), ("I cannot help with that.", None),
    ("<think>- likes tea", None),
    ("None of this is lasting, I think", None), ('{"facts": "likes tea"}', None), ("{", None),
]  # fmt: skip


@pytest.mark.parametrize("text, wanted", FACTS)
def test_facts(text, wanted):
    assert replies.facts(replies.clean(text)) == wanted


DECISIONS = [
    ("ADD", Decision("ADD")), ("add", Decision("ADD")), ("Add()", Decision("ADD")),
    ("**ADD**", Decision("ADD")), ("Decision: ADD - no note says this", Decision("ADD")),
    ("NOOP", Decision("NOOP")), ("none.", Decision("NOOP")), ("No-op", Decision("NOOP")),
    ("UPDATE 2: likes green tea", Decision("UPDATE", 1, "likes green tea")),
    ("update #2 - likes green tea", Decision("UPDATE", 1, "likes green tea")),
    ('UPDATE note 2: "likes green tea"', Decision("UPDATE", 1, "likes green tea")),
    ("1. UPDATE [2]: to add milk", Decision("UPDATE", 1, "to add milk")),
    ("DELETE 3", Decision("DELETE", 2)), ("delete: 3.", Decision("DELETE", 2)),
    ("Merge(1, likes tea (green))", Decision("MERGE", 0, "likes tea (green)")),
    ("I looked at it.\nDELETE 1\nADD", Decision("DELETE", 0)),
    ('{"event": "update", "id": 2, "text": "to delete"}', Decision("UPDATE", 1, "to delete")),
    ('{"memory": [{"id": "9", "event": "DELETE"}, {"id": "1", "event": "DELETE"}]}',
     Decision("DELETE", 0)),
    ('```json\n{"event": "ADD", "text": "please update"}\n```', Decision("ADD")),
    ('{"event": "NONE", "id": "1", "text": "x"}', Decision("NOOP")),
    ("", None), ("yes", None), ("UPDATE 4: x", None), ("UPDATE 0: x", None), ("UPDATE 1:", None),
    ("UPDATE: likes tea", None), ("DELETE", None), ("DELETE all", None),
    ("ADD or UPDATE 1: x", None),
    ("None of them", None), ("UPDATE 99999999999999999999: x", None), ('{"event": 3}', None),
]  # fmt: skip


@pytest.mark.parametrize("text, wanted", DECISIONS)
def test_decisions(text, wanted):
    assert replies.decision(replies.clean(text), 3) == wanted


@pytest.mark.parametrize(
    "text, wanted",
    [("Tea. [0, 2]", [0, 2]), ("Tea [2][0]", [0, 2]), ("[ 1 ; 7 ]", [1]),
     ("I do not know [NO_CITE]", []),
     ("no cite", []), ("Tea.", None), ("", None), ("[9]", None), ("[a]", None)],
)  # fmt: skip
def test_citations(text, wanted):
    assert replies.citations(text, 3) == wanted


@pytest.mark.parametrize(
    "text, wanted",
    [("likes tea | 0, 2", [("likes tea", [0, 2])]), ("- a | b | [1]", [("a | b", [1])]),
     ("| likes tea | 1 |\n|---|---|", [("likes tea", [1])]),
     ("likes tea | turn 1, 9", [("likes tea", [1])]),
     ('{"extracted_memories": [{"summary": "likes tea", "reference": [0, 2]}]}',
      [("likes tea", [0, 2])]),
     ("NO_TRAIT", []), ("None", []), ("likes tea", None), ("likes tea | 9", None), ("| 1", None),
     ("", None)],
)  # fmt: skip
def test_topics(text, wanted):
    assert replies.topics(replies.clean(text), 3) == wanted


def test_labels():
    text = "**Keywords:** a, b\n- CONTEXT: c: d\ntags = e | LINKS: 1\nTAGS: late\nContext matters"
    assert replies.labelled(text, "KEYWORDS", "CONTEXT", "TAGS", "LINKS") == {
        "KEYWORDS": "a, b", "CONTEXT": "c: d", "TAGS": "e", "LINKS": "1",
    }  # fmt: skip
    as_json = '{"keywords": ["a", "b"], "context": "c", "tags": "e", "links": 1, "other": null}'
    assert replies.labelled(as_json, "KEYWORDS", "TAGS", "LINKS") == {
        "KEYWORDS": "a, b", "TAGS": "e", "LINKS": "1",
    }  # fmt: skip
    assert replies.items("a; b、c, a,, [d]") == ["a", "b", "c", "d"]


SNIPPETS = st.sampled_from([
    "{", "}", "[", "]", '"', "'", ",", ":", "|", "\n", "- ", "1. ", "ADD", "update 2: ",
    "DELETE 1", "NONE",
    "<think>", "</think>", "```json\n", '{"facts": ["a"', "[0, 1]", "\\", "TAGS: ",
    "9" * 30, "\ud800", "é", "[[[[",
])  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(SNIPPETS | st.text(max_size=8), max_size=25).map("".join), st.integers(0, 4))
@example("[" * 20_000, 1)
@example("{'a':" * 4_000, 1)
@example('"' * 20_000, 1)
def test_no_reply_breaks_a_reader_and_no_number_leaves_the_range(text, shown):
    for cut in (False, True):
        for prose in (False, True):
            clean = replies.clean(text, cut, prose)
            assert replies.clean(clean) is not None and len(clean) <= len(text)
    clean = replies.clean(text)
    found = replies.facts(clean)
    assert found is None or all(f.strip() and "\n" not in f for f in found)
    made = replies.decision(clean, shown)
    assert made is None or (made.event in ("ADD", "NOOP") and made.at == -1) or 0 <= made.at < shown
    assert made is None or made.event != "UPDATE" or made.text
    for numbers in (replies.numbers(clean, shown), replies.citations(clean, shown)):
        assert numbers is None or all(0 <= n < shown for n in numbers)
    for summary, refs in replies.topics(clean, shown) or []:
        assert summary and refs and all(0 <= n < shown for n in refs)
    assert all(replies.labelled(clean, "TAGS", "CONTEXT").values())
    assert replies.prose(clean) is None or "\n" not in replies.prose(clean)


@given(st.lists(st.text("abc xyz?.,'", min_size=1).filter(lambda s: s.strip(" .,?'")), min_size=1))
def test_facts_in_json_survive_any_frame(facts):
    wanted = replies.facts(json.dumps({"facts": facts}))
    assert wanted and len(wanted) <= len(facts)
    assert (
        replies.facts(replies.clean(f"Sure:\n```json\n{json.dumps(facts)}\n```\nDone.")) == wanted
    )
    half = json.dumps({"facts": [*facts, "unfinished"]})[:-6]
    assert replies.facts(half) == wanted


# --- turns


@pytest.mark.parametrize(
    "time, wanted",
    [("2023-05-07", "2023-05-07"), ("2023/05/07 (Sun) 02:21", "2023-05-07"),
     ("1:56 pm on 7 May, 2023", "2023-05-07"),
     ("May 7th, 2023", "2023-05-07"), ("'2023-05-07 08:00' Sunday", "2023-05-07"),
     ("2023-05-07T02:00:00Z", "2023-05-07"),
     ("2023-02-31", None), ("yesterday", None), ("", None), ("12", None), ("20230-05-07", None)],
)  # fmt: skip
def test_days_are_read_as_written(time, wanted):
    assert turns.day_number(time) == (wanted and turns.day_number(wanted))
    assert (turns.day_number(time) is None) == (wanted is None)


@settings(deadline=None)
@given(st.text(), st.integers(1, 30))
def test_a_text_is_split_without_loss(text, room):
    parts = turns.split(text, room, len)
    assert "".join(parts) == text and all(len(part) <= room for part in parts)
    short = turns.first_words(text, room)
    assert len(words(short)) <= room and " ".join(text.split()).startswith(short)


def test_what_people_state():
    messages = [
        Message("user", "I moved to Oslo. Why not? 你喜欢茶吗？我喜欢茶。Ok."),
        Message("assistant", "You moved to Oslo again."),
        Message("assistant", "I have two cats.", "Bo"),
    ]
    assert [s for _, s in turns.statements(messages)] == [
        "I moved to Oslo.", "我喜欢茶。", "I have two cats.",
    ]  # fmt: skip


# --- vectors


def test_equal_vectors_tie_to_the_lower_row_and_removed_rows_are_gone():
    rng, index = np.random.default_rng(0), Index()
    base = embed(["a b c"])[0]
    for i in range(37):
        index.add(base if i % 3 else rng.standard_normal(64).astype(np.float32) / 20)
    assert [row for row, _ in index.nearest(base, 5)] == [1, 2, 4, 5, 7]
    index.remove(1)
    assert index.nearest(base, 1)[0][0] == 2 and len(index) == 36
    back = Index.from_json(json.loads(json.dumps(index.to_json())))
    assert back.nearest(base, 40) == index.nearest(base, 40)
    with pytest.raises(VectorError, match="holds vectors of 64 numbers, the embedder gives 3"):
        index.add(np.ones(3, np.float32))


# --- the client: costs, limits, broken models


TASK = Task("What?", "Say:", "Again:", 50)


def client(reply, room=400, embedder=embed):
    return Client(Backend(lambda messages, most: reply, embedder, count, room))


def test_costs_are_counted_by_phase():
    made = client("one two three")
    with made.counting("ask"):
        made.ask(TASK, "data here", lambda text: text)
    made.ask(TASK, "data", lambda text: None)
    ask, add = made.ledger.ask, made.ledger.add
    assert (ask.units, ask.calls, ask.asked, ask.fallbacks, ask.generated_tokens) == (1, 1, 1, 0, 3)
    assert (add.units, add.calls, add.asked, add.fallbacks, add.generated_tokens) == (0, 2, 1, 1, 6)
    assert ask.prompt_tokens == count("What?\n\ndata here\n\nSay:")
    both = made.ledger + made.ledger
    assert both.add.calls == 4 and Ledger.from_json(json.loads(json.dumps(both.to_json()))) == both


@pytest.mark.parametrize("fallbacks, wanted", [(0, False), (20, False), (21, True), (100, True)])
def test_a_fifth_of_fallbacks_is_too_many(fallbacks, wanted):
    split = Ledger(Counts(asked=60, fallbacks=fallbacks), Counts(asked=40))
    assert unmeasured(split) is wanted
    assert unmeasured(Ledger()) is False


def test_a_text_is_cut_visibly_and_counted():
    made = client("")
    assert made.clip("a b c", 5) == "a b c" and made.counts.cut_tokens == 0
    assert made.clip("word " * 100, 12) == ("word " * 10).strip() + " ..."
    assert made.counts.cut_tokens == 90
    with pytest.raises(BackendError, match="a prompt of 401 tokens; the room is 400"):
        made.generate("x " * 401, 5)
    with pytest.raises(BackendError, match="room: 100 tokens leave"):
        client("", 100).left(TASK)


@pytest.mark.parametrize(
    "vectors, fault",
    [(np.full((1, 4), np.nan), "text 0 is not finite"),
     (np.ones((2, 4)), r"1 texts gave .* \(2, 4\)"),
     (np.ones(4), r"shape \(4,\)"), (np.ones((1, 0)), r"shape \(1, 0\)")],
)  # fmt: skip
def test_a_broken_encoder_is_one_clear_line_and_the_store_stays(vectors, fault):
    for name in baselines.MAKERS:
        encoder = [embed]
        model = Backend(parrot, lambda texts, encoder=encoder: encoder[0](texts), count)
        system = baselines.make(name, model)
        system.add(turn(0, "I like green tea a lot.", session="1"))
        system.end()
        held, size = json.dumps(system.to_json()["index"]), system.size()
        encoder[0] = lambda texts: vectors
        with pytest.raises(BackendError, match=fault):
            system.add(turn(1, "I like black tea, too.", session="2"))
            system.end()
        encoder[0] = embed
        assert json.dumps(system.to_json()["index"]) == held
        assert system.size()["records"] == size["records"]


def test_a_zero_vector_and_a_lone_surrogate_do_no_harm():
    made = client("a \ud800 b", embedder=lambda texts: np.zeros((len(texts), 4)))
    assert not made.embed(["", "x"]).any()
    assert made.generate("x", 5) == "a ? b"


# --- every system


def parrot(messages, max_tokens):
    """Replies that fit no system and some systems, chosen by the prompt alone."""
    prompt = messages[0]["content"]
    return ["- User likes tea", "ADD", "", "LINKS: 0\nTAGS: a", "A day. | 0", "[0]"][
        len(prompt) % 6
    ]


def history(user: int, n: int = 12) -> list[Turn]:
    return [
        turn(i, f"I like thing{(user * 7 + i) % 5} and place{i}.",
        "Ok.", f"2023-05-{1 + i // 4:02d}", session=str(i // 3))
        for i in range(n)
    ]  # fmt: skip


@pytest.mark.parametrize("name", baselines.MAKERS)
def test_a_saved_store_goes_on_as_if_it_had_never_been_saved(name, tmp_path):  # 24
    model = Backend(parrot, embed, count)
    whole, half = baselines.make(name, model, 3), baselines.make(name, model, 3)
    for one in history(0):
        whole.add(one)
    for one in history(0)[:5]:
        half.add(one)
    store.save(tmp_path / "s.jsonl", {"../é\n": half})
    half = store.load(tmp_path / "s.jsonl", lambda data: baselines.restore(data, model))["../é\n"]
    for one in history(0)[5:]:
        half.add(one)
    asked = question("Which thing3?", "2023-05-04")
    assert half.search(asked) == whole.search(asked) and half.log == whole.log

    def quiet(system):  # everything but the time it took
        data = json.dumps(system.to_json())
        return [part for part in data.split(", ") if '"seconds"' not in part]

    assert quiet(half) == quiet(whole)
    assert half.size() == whole.size() and half.size()["records"] > 0


@pytest.mark.parametrize("name", baselines.MAKERS)
def test_notes_name_real_turns_and_searches_do_not_move_each_other(name):
    system = baselines.make(name, Backend(parrot, embed, count))
    for one in history(1):
        system.add(one)
    first = system.search(question("thing1", "2023-05-04"))
    system.search(question("place7", "2023-05-04"))
    assert system.search(question("thing1", "2023-05-04")) == first and first
    for note in first:
        assert set(note.turns) <= set(range(12)) and note.text.strip()
        assert note.turns or name.startswith("memorybank")
    for entry in system.log:
        assert entry.kind in ("reply", "retry", "fallback", "rule")
        assert set(entry.turns) <= set(range(12))


PIECES = st.sampled_from(
    ["a", "word ", "é", "绿茶。", "No! ", "\n", "x" * 60, "I like tea. ", "1. ADD\n"]
)
FRAMES = st.sampled_from(
    ["- {}", "ADD", "UPDATE 1: {}", "{}", "{} | 0", "MERGE 1: {}", "LINKS: 0, 1",
     "KEYWORDS: {}\nCONTEXT: {}\nTAGS: {}"]
)  # fmt: skip


@pytest.mark.parametrize("name", ["mem0", "mem0_add", "amem", "memorybank", "rmm"])
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_no_text_of_a_user_or_of_the_model_overflows_a_prompt(name, data):  # 26, 29
    def draw():
        return data.draw(PIECES) * data.draw(st.sampled_from([1, 7, 300]))

    def generate(messages, max_tokens):
        assert len(messages[0]["content"].encode()) <= 2400
        return data.draw(FRAMES).replace("{}", draw())

    system = baselines.make(name, Backend(generate, embed, lambda text: len(text.encode()), 2400))
    for i in range(12):
        who = data.draw(st.sampled_from(["", "n" * 99]))
        system.add(turn(i, draw(), draw(), f"2023-05-{1 + i // 3:02d}", name=who))
    asked = question(draw() + "?", options=(draw(), "b"))
    notes = system.search(asked)
    if name == "rmm" and notes:
        system.cite(asked, [*range(min(5, len(system.topics)))])


@pytest.mark.parametrize("name", baselines.MAKERS)
def test_empty_histories_give_nothing(name):
    system = baselines.make(name, Backend(parrot, embed, count))
    system.add(Turn(0, ()))
    system.add(turn(1, "  "))
    assert system.search(question("x")) == [] and system.size()["records"] == 0
    assert not system.client.ledger.add.calls


@pytest.mark.parametrize("name", baselines.MAKERS)
def test_two_users_never_meet(name):  # 14, 18, rules 34 and 35
    model = Backend(parrot, embed, count)
    alone, a, b = (baselines.make(name, model) for _ in range(3))
    for mine, theirs in zip(history(2), history(3), strict=True):
        alone.add(mine)
        a.add(mine)
        b.add(theirs)
    asked = question("thing2", "2023-05-04")
    assert a.search(asked) == alone.search(asked)


@pytest.mark.parametrize("name", ["mem0", "amem", "memorybank_c5", "rmm"])
def test_two_thousand_turns_take_linear_time(name):  # 27
    system = baselines.make(name, Backend(lambda m, n: "", embed, count))
    spent = []
    for i in range(2000):
        started = time.process_time()
        system.add(
            turn(i, f"I bought item{i} in town{i}.", time=f"20{10 + i // 300}-01-{1 + i % 28:02d}")
        )
        spent.append(time.process_time() - started)
    system.search(question("item1999 town1999"))
    early, late = (float(np.median(part)) for part in (spent[200:600], spent[-400:]))
    assert late < 4 * early + 2e-3, (early, late)
    assert system.size()["records"] >= 1500  # mem0: equal hashes count as stored


def test_a_name_that_is_none_is_one_clear_line():
    with pytest.raises(
        ValueError, match="memory system 'mem1': must be one of mem0, mem0_add, amem"
    ):
        baselines.make("mem1", Backend(parrot, embed, count))
    with pytest.raises(baselines.StoreError, match="system: 'x'"):
        baselines.restore({"system": "x"}, Backend(parrot, embed, count))


# --- stores


@pytest.fixture
def saved(tmp_path):
    model = Backend(parrot, embed, count)
    systems = {}
    for user in ("ann", "ann ", "bob"):
        systems[user] = baselines.make("mem0", model)
        systems[user].add(turn(0, f"I am {user} and like tea."))
    store.save(tmp_path / "s.jsonl", systems)
    return tmp_path / "s.jsonl", lambda data: baselines.restore(data, model)


def test_deleting_a_user_deletes_that_user_only_and_wholly(saved):  # 14, 15, rule 34
    path, restore = saved
    before = path.read_bytes().splitlines()
    assert b"I am ann and" in before[0]
    store.delete(path, "ann")
    assert b"I am ann and" not in path.read_bytes()
    assert path.read_bytes().splitlines() == before[1:] and [*store.load(path, restore)] == [
        "ann ",
        "bob",
    ]
    with pytest.raises(baselines.StoreError, match="no user 'ann'"):
        store.delete(path, "ann")


@pytest.mark.parametrize(
    "change, fault",
    [(lambda d: d["store"].pop("facts"),
     "line 2, user 'ann ': not a store of this version .*facts"),
     (lambda d: d["store"].update(probe=[0.5, 0.5]),
     "built with another sentence encoder .2 numbers"),
     (lambda d: d["store"]["index"]["vectors"].update(shape=[3, 5]), "not an array of a store"),
     (lambda d: d["store"].update(system="amem"), "not a store of this version"),
     (lambda d: d.update(version=7), "line 2: not a store of version 1"),
     (lambda d: d.clear(), "line 2: not a store"),
     (lambda d: d.update(user="ann"), "line 2: user 'ann' is there twice")],
)  # fmt: skip
def test_a_damaged_store_is_one_clear_line(saved, change, fault):
    path, restore = saved
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines[1])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(baselines.StoreError, match=fault) as caught:
        store.load(path, restore)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    with pytest.raises(baselines.StoreError, match="cannot be read"):
        store.load(path.parent / "none.jsonl", restore)


# --- side by side


def batched(sizes=None, fail=None):
    def many(requests):
        if sizes is not None:
            sizes.append([messages[0]["content"][-40:] for messages, _ in requests])
        if fail is not None and any(fail in messages[0]["content"] for messages, _ in requests):
            raise BackendError("the model is gone")
        return [parrot(*request) for request in requests]

    return Backend(parrot, embed, count, generate_many=many)


@pytest.mark.parametrize("name", baselines.MAKERS)
def test_side_by_side_is_the_same_as_one_by_one_in_any_timing(name):
    def job(system, user, wait):
        def run():
            for one in history(user, 6):
                if wait:
                    time.sleep(0.0005 * ((user * 5 + one.index) % 4))
                system.add(one)
            return system.search(question("thing2", "2023-05-04"))

        return run

    runs, batches = [], []
    for wait in (False, True):
        sizes = []
        model = batched(sizes)
        jobs = [job(baselines.make(name, model), user, wait) for user in range(9)]
        runs.append(side_by_side(jobs, model, width=4))
        batches.append(sizes)
    model = Backend(parrot, embed, count)
    alone = [job(baselines.make(name, model), user, False)() for user in range(9)]
    assert runs[0] == runs[1] == alone
    assert batches[0] == batches[1] and max(map(len, batches[0])) == 4


def test_costs_of_a_batch_are_shared_and_a_system_goes_on_afterwards():
    def many(requests):
        time.sleep(0.05)
        return ["- User likes tea" for _ in requests]

    model = Backend(lambda messages, most: "NONE", embed, count, generate_many=many)
    systems = [baselines.make("mem0", model) for _ in range(5)]
    side_by_side([lambda s=s: s.add(turn(0, "I like tea")) for s in systems], model)
    spent = [system.client.ledger.add.seconds for system in systems]
    assert sum(spent) < 0.2 and min(spent) >= 0.01  # 0.05 s in all, not in each
    systems[0].add(turn(1, "I like milk"))
    assert systems[0].log[-1].reply == "NONE"


def test_an_error_stops_all_and_the_first_one_is_raised():
    model = batched(fail="bad")

    def job(i):
        def run():
            system = baselines.make("mem0", model)
            for k in range(50):
                system.add(turn(k, f"I like {'bad' if (i, k) == (2, 3) else 'good'} tea and more"))

        return run

    with pytest.raises(BackendError, match="the model is gone"):
        side_by_side([job(i) for i in range(6)], model)

    def broken(i):
        def run():
            baselines.make("mem0", model).add(turn(0, "I like green tea"))
            if i:
                raise KeyError(f"job {i}")

        return run

    with pytest.raises(KeyError, match="job 1"):
        side_by_side([broken(i) for i in range(6)], model, width=6)
    assert side_by_side([], model) == []
    assert side_by_side([lambda: 1, lambda: 2, lambda: 3], model, width=2) == [1, 2, 3]


def test_a_model_that_loses_a_reply_is_an_error():
    model = dataclasses.replace(batched(), generate_many=lambda requests: [])
    system = baselines.make("mem0", model)
    with pytest.raises(BackendError, match="1 requests got 0 replies"):
        side_by_side([lambda: system.add(turn(0, "I like tea"))], model)


# --- a model of ours


def test_a_local_model_answers_alike_alone_and_in_a_batch(tiny):
    model = backend.local(tiny, None)
    requests = [([{"role": "user", "content": "I like <|im_end|> tea" * n}], 5 + n) for n in (1, 2)]
    together = model.generate_many(requests)
    assert [model.generate(*request) for request in requests] == together
    for text, (_, most) in zip(together, requests, strict=True):
        assert isinstance(text, Cut) and len(text) <= most  # a byte a token, and no end in sight
    assert model.count_tokens("tea") == 3 and model.room == 2048 - 512
    with pytest.raises(BackendError, match="do not fit the window of 2048"):
        model.generate([{"role": "user", "content": "x" * 2100}], 5)


def test_systems_run_side_by_side_on_a_real_decoder_and_fall_back(tiny):
    model = dataclasses.replace(backend.local(tiny, None), embed=embed)
    systems = [baselines.make(name, model) for name in ("mem0", "rmm")]

    def job(system):
        def run():
            system.add(turn(0, "I like my green tea."))
            return system.search(question("tea"))

        return run

    found = side_by_side([job(system) for system in systems], model)
    total = baselines.merged(system.client.ledger for system in systems)
    assert total.add.asked >= 2 and total.add.calls > 2 and total.add.generated_tokens
    assert total.add.truncated and unmeasured(total)  # random weights write nothing readable
    assert all(note.turns == (0,) for notes in found for note in notes)


# --- an endpoint


class Server:
    """A chat server on this machine: answers by script, keeps what it was sent."""

    def __init__(self):
        self.answers, self.seen = [], []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.seen.append((self.path, self.headers.get("Authorization"), body))
                status, reply = outer.answers.pop(0) if outer.answers else (200, chat("ok"))
                raw = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
                self.send_response(status)
                if status in (302, 307):
                    self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *args):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"


def chat(text, reason="stop"):
    return {"choices": [{"message": {"content": text}, "finish_reason": reason}]}


@pytest.fixture
def server():
    made = Server()
    yield made
    made.server.shutdown()
    made.server.server_close()


ASKED = [{"role": "user", "content": "Hi é"}]


def test_an_endpoint_is_asked_as_the_protocol_says(server, monkeypatch):
    monkeypatch.setenv("BFM_API_KEY", "sk-secret")
    model = backend.endpoint(server.url, "some-model", embed_model="some-encoder")
    server.answers = [(200, chat("One.")), (200, chat("One. Tw", "length")), (200, chat(None))]
    one, two, none = (model.generate(ASKED, 7) for _ in range(3))
    assert (one, isinstance(one, Cut), two, isinstance(two, Cut), none) == (
        "One.",
        False,
        "One. Tw",
        True,
        "",
    )
    assert server.seen[0] == (
        "/v1/chat/completions", "Bearer sk-secret",
        {"model": "some-model", "messages": ASKED, "max_tokens": 7, "temperature": 0},
    )  # fmt: skip
    rows = [{"index": 1, "embedding": [0, 2]}, {"index": 0, "embedding": [3, 4]}]
    server.answers = [(200, {"data": rows})]
    found = Client(model).embed(["a", "b"])
    np.testing.assert_allclose(found, [[0.6, 0.8], [0.0, 1.0]], atol=1e-7)
    server.answers = []
    assert model.generate_many([(ASKED, 5)] * 20) == ["ok"] * 20


@pytest.mark.parametrize(
    "answers, fault, requests",
    [([(401, {"error": "bad key sk-secret"})], r"/v1/chat/completions: status 401 \(1 of 2", 1),
     ([(404, b"")], "status 404", 1), ([(302, b"")], "status 302", 1),
     ([(307, b"")], "status 307", 1),
     ([(500, b""), (429, b"sk-secret")], r"status 429 \(2 of 2 tries\)", 2),
     ([(200, b"<html>")], "is not JSON", 1), ([(200, {"choices": []})], "no chat completion", 1),
     ([(200, [1])], "no chat completion", 1),
     ([(200, chat(["a"]))], "no chat completion", 1)],
)  # fmt: skip
def test_what_an_endpoint_does_wrong_is_one_line_without_the_key(
    server, monkeypatch, answers, fault, requests
):
    monkeypatch.setattr(backend.time, "sleep", lambda seconds: None)
    model = backend.endpoint(server.url, "m", "sk-secret", embed=embed, tries=2)
    server.answers = list(answers)
    with pytest.raises(BackendError, match=fault) as caught:
        model.generate(ASKED, 5)
    assert "secret" not in repr(caught.value) and "\n" not in str(caught.value)
    assert server.url in str(caught.value) and len(server.seen) == requests


def test_a_busy_endpoint_is_asked_again(server, monkeypatch):
    waits = []
    monkeypatch.setattr(backend.time, "sleep", waits.append)
    server.answers = [(503, b""), (429, b""), (200, chat("at last"))]
    model = backend.endpoint(server.url, "m", "", embed=embed)
    assert model.generate(ASKED, 5) == "at last" and waits == [1, 2]
    assert server.seen[0][1] is None  # no key, no header
    server.server.shutdown()
    server.server.server_close()
    with pytest.raises(BackendError, match=r"127\.0\.0\.1.*3 of 3 tries"):
        model.generate(ASKED, 5)


@pytest.mark.parametrize(
    "url, key, fault",
    [("http://[", "k", "url: Invalid"),
     ("file:///etc/passwd", "k", "begins with http"), ("localhost:80", "k", "begins with http"),
     ("http://", "k", "begins"),
     ("http://sk-secret@host/v1", "", "belongs in BFM_API_KEY"),
     ("http://host/v1?key=sk-secret", "", "belongs in"),
     ("http://host/v1", "sk-secret\r\nX: y", "no key holds"),
     ("http://host/v1", "sk-sécret", "no key holds")],
)  # fmt: skip
def test_a_bad_address_or_key_fails_at_once_and_is_not_shown(url, key, fault):
    with pytest.raises(BackendError, match=fault) as caught:
        backend.endpoint(url, "m", key, embed=embed)
    assert "cret" not in str(caught.value)
    with pytest.raises(BackendError, match="either `embed` or `embed_model`"):
        backend.endpoint("http://host/v1", "m", "")
