# SPDX-License-Identifier: Apache-2.0
"""shifting_prefs: labels by intervention, balance, disjoint splits, minimal pairs, nested lengths."""

import collections
import dataclasses
import hashlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from bfm.datasets import shifting_plot as plot
from bfm.datasets import shifting_prefs as prefs
from bfm.datasets import shifting_words as frames
from bfm.datasets.common import Reading
from bfm.datasets.prepared import load
from bfm.datasets.shifting_state import Ask, Fact, answer, evidence, needs, stale
from bfm.dialogue import parse_example, to_json, turns_of
from bfm.jsonl import DataError
from bfm.shortlist import words

CHANCE = pytest.approx(0.25, abs=0.03)
# Of the examples that `prefs.small` gives: "fixed" means that these bytes change with VERSION only.
SMALL_SHA256 = "457b52667160000e31970a8a055207077f9fa3d6ece49fc854e459caa0c33310"
SMALL = ("shifting_prefs", "small")


@pytest.fixture(scope="module")
def test_set():
    """Six rounds of the languages, about 1,870 of the split's 6,200 examples."""
    return list(prefs.generate("test", users=6 * 28))


@pytest.fixture(scope="module")
def pairs(test_set):
    halves = collections.defaultdict(dict)
    for example in test_set:
        if example.meta["pair"]:
            halves[example.meta["pair"]["id"]][example.meta["pair"]["member"]] = example
    return [(half["a"], half["b"]) for half in halves.values()]


def digest(examples):
    text = "\n".join(json.dumps(to_json(e), ensure_ascii=False) for e in examples)
    return hashlib.sha256(text.encode()).hexdigest()


def facts_of(example):
    """The timeline as facts, and the message index of each."""
    names = [field.name for field in dataclasses.fields(Fact)]
    rows = example.meta["timeline"]
    return [Fact(**{n: row[n] for n in names}) for row in rows], [row["message"] for row in rows]


def exchanges(example):
    return [tuple((m.content, m.time) for m in turn.messages) for turn in
            turns_of(example.question.messages)]  # fmt: skip


# The state


def F(value, start, **more):
    return Fact("drink", value, start, **more)


@pytest.mark.parametrize(
    ("facts", "ask", "expected", "proof", "old"),
    [
        ([F("a", 1)], {}, "a", (0,), ()),
        ([F("a", 1), F("b", 2)], {}, "b", (1,), (0,)),
        ([F("b", 2), F("a", 1)], {}, "b", (0,), (1,)),  # by day, not by place
        ([F("a", 1), F("b", 2, holder="sister")], {}, "a", (0,), ()),
        ([F("a", 1), F("b", 2, holder="sister")], {"holder": "sister"}, "b", (1,), ()),
        ([F("a", 1), F("b", 2, source="hypothetical")], {}, "a", (0,), ()),
        ([F("a", 1), F("b", 2, source="quoted"), F("c", 3, source="suggested")], {}, "a", (0,), ()),
        ([F("a", 1), F("b", 2), F("b", 3, op="not")], {}, "a", (0, 2), (1,)),
        ([F("a", 1), F("b", 2, op="not")], {}, "a", (0,), ()),
        ([F("a", 1, op="pair", other="b"), F("b", 2, op="not")], {}, "a", (0, 1), ()),
        ([F("a", 1, op="pair", other="b")], {}, None, (), ()),
        ([F("a", 1), F("b", 2, holder="s"), F("", 3, op="same", other="s")], {}, "b", (1, 2), (0,)),
        ([F("a", 1), F("b", 2, end=50)], {}, "a", (0,), (1,)),
        ([F("a", 1), F("b", 2, end=200)], {}, "b", (1,), (0,)),
        ([F("a", 1, condition="w"), F("b", 2, condition="s")], {"condition": "w"}, "a", (0,), ()),
        ([F("a", 1), F("b", 101)], {}, "a", (0,), ()),  # said after the question
    ],
)
def test_answer_and_labels_follow_the_facts(facts, ask, expected, proof, old):
    ask = Ask("drink", 100, **ask)
    assert answer(facts, ask) == expected
    assert evidence(facts, ask) == proof
    assert stale(facts, ask) == old


# Labels


def test_removing_evidence_changes_the_answer_and_removing_anything_else_does_not(test_set):
    seen = collections.Counter()
    for example in test_set:
        facts, places = facts_of(example)
        if not example.meta["ask"]:
            assert not example.evidence and example.meta["needs"] == "none"
            continue
        ask = Ask(**example.meta["ask"])
        assert answer(facts, ask) == example.answer
        for i, place in enumerate(places):
            now = answer([*facts[:i], *facts[i + 1 :]], ask)
            assert (now != example.answer) == (place in example.evidence)
            seen[place in example.evidence] += 1
        at = [places.index(e) for e in example.evidence]
        assert example.meta["needs"] == needs(at, stale(facts, ask))
        assert not set(example.evidence) & set(example.meta["stale"])
    assert min(seen.values()) > 1000  # slots that are evidence, slots that are not


def test_the_words_say_what_the_facts_say(test_set):
    """Each fact's value, or its sign, stands in its own exchange and nobody else's does."""
    for example in test_set:
        topics = frames.TOPICS["test"][example.meta["language"]]
        topic = next(t for t in topics if t.label == example.meta["topic"])
        for row in example.meta["timeline"]:
            said = " ".join(m.content for m in example.question.messages[row["message"] :][:2])
            values = {v for v in (row["value"], row["other"]) if v in topic.values}
            words = {topic.signs[v] if row["form"] == "dis" else v for v in values}
            for word in words:
                assert word.casefold() in said.casefold()
            if row["holder"]:
                assert row["holder"].casefold() in said.casefold()


def test_evidence_of_a_dissimilar_stratum_names_no_option_and_no_topic(test_set):
    for example in test_set:
        if example.meta["stratum"] != "dissimilar_useful":
            continue
        topics = frames.TOPICS["test"][example.meta["language"]]
        area = next(t.area for t in topics if t.label == example.meta["topic"])
        for index in example.evidence:
            text = example.question.messages[index].content
            assert area not in text
            if example.meta["language"] == "en":
                assert not any(f" {option} " in text for option in example.question.options)


def test_every_example_holds_what_its_stratum_promises(test_set):
    """Halves of pairs included: what flips an answer must not carry an example into another cell."""
    wording = {"dissimilar_useful": "dis", "similar_useful": "sim", "adverse": "sim"}
    wording |= {"dissimilar_useless": "sim", "placebo": "sim"}  # of what tells the answer
    seen = collections.Counter()
    for example in test_set:
        meta, rows = example.meta, example.meta["timeline"]
        useful = not meta["stratum"].endswith("useless")
        assert meta["probe_useful"] == useful == (meta["probe"] in example.evidence)
        assert not set(meta["distractors"]) & set(example.evidence)
        for row in rows:
            told = row["message"] in example.evidence
            if told:
                assert row["form"] == wording[meta["stratum"]]
            elif meta["stratum"] == "placebo":  # so similarity suffices
                assert row["form"] == "dis"
            seen[meta["stratum"], bool(meta["pair"]), told] += 1
    assert len(seen) == 6 * 2 * 2 - 2  # similar_useless: no evidence, alone or in a pair


def test_roles_and_the_permutation_describe_the_options(test_set):
    for example in test_set:
        roles, meta = example.meta["roles"], example.meta
        assert len(set(example.question.options)) == len(roles) == 4
        assert roles.count("gold") == 1 and roles[example.answer_index] == "gold"
        assert sorted(meta["permutation"]) == [0, 1, 2, 3] and "unmentioned" in roles
        if not (meta["pair"] and meta["pair"]["member"] == "b"):
            assert meta["permutation"][example.answer_index] == 0


def test_every_example_passes_the_schema_and_gold_is_in_no_question_field(test_set):
    ids = [example.question.id for example in test_set]
    assert len(set(ids)) == len(ids)
    for example in test_set[:300]:
        assert parse_example(to_json(example)) == example


# Balance


def test_size_and_equal_strata(test_set):
    assert prefs.USERS["test"] >= 500
    topics = {language: len(of) for language, of in frames.TOPICS["test"].items()}
    asked = [topics[prefs._language("test", index)] for index in range(prefs.USERS["test"])]
    assert sum(asked) >= 5000
    apart = [e for e in test_set if not e.question.id.endswith("-b")]
    assert len(apart) == sum(asked[: 6 * 28])  # a question for every topic of every user
    strata = collections.Counter(e.meta["stratum"] for e in test_set)
    assert len(strata) == 6
    assert max(strata.values()) - min(strata.values()) < 0.02 * len(test_set)
    need = collections.Counter(e.meta["needs"] for e in test_set)
    for share in need.values():
        assert share / len(test_set) == CHANCE
    languages = collections.Counter(e.meta["language"] for e in test_set)
    assert languages["en"] > 0.8 * len(test_set) and min(languages.values()) > 75


def test_rules_without_a_history_are_at_chance(test_set):
    n = len(test_set)
    positions = collections.Counter(e.answer_index for e in test_set)
    longest = shortest = 0.0
    for example in test_set:
        sizes = [len(option) for option in example.question.options]
        gold = len(example.answer)
        longest += (gold == max(sizes)) / sizes.count(max(sizes))
        shortest += (gold == min(sizes)) / sizes.count(min(sizes))
    for share in (*positions.values(), longest, shortest):
        assert share / n == CHANCE
    roles = collections.Counter()
    for example in test_set:
        roles.update((role, i) for i, role in enumerate(example.meta["roles"]))
    for role, total in collections.Counter(
        role for e in test_set for role in e.meta["roles"]
    ).items():
        assert all(roles[role, i] / total == pytest.approx(0.25, abs=0.05) for i in range(4))


def test_which_value_is_right_cannot_be_learned_from_other_questions(test_set):
    """Neither what was right most often so far nor (counting cards) what was right least often."""
    right, shown = collections.Counter(), collections.Counter()
    most = least = 0.0
    for example in test_set:
        options = example.question.options
        rates = [right[o] / shown[o] if shown[o] else 0.25 for o in options]
        gold = rates[example.answer_index]
        most += (gold == max(rates)) / rates.count(max(rates))
        least += (gold == min(rates)) / rates.count(min(rates))
        right[example.answer] += 1
        shown.update(options)
    assert [most / len(test_set), least / len(test_set)] == [CHANCE, CHANCE]
    english = [value for topic in frames.TOPICS["test"]["en"] for value in topic.values]
    assert max(shown[v] for v in english) < 1.3 * min(shown[v] for v in english)
    assert max(abs(right[v] / shown[v] - 0.25) for v in english) < 0.165  # four standard errors


def test_measured_rules_are_far_from_solving_it(test_set):
    found = prefs.measure(test_set)
    assert found["all"]["n"] == len(test_set)
    for rule in ("options_prior", "majority_letter", "longest", "shortest"):
        assert found["all"][rule] == CHANCE
    assert found["all"]["gate_off"] == CHANCE
    for rule in ("latest_mention", "earliest_mention", "most_frequent", "bm25"):
        assert found["all"][rule] < 0.5
    strata = found["strata"]
    assert strata["placebo"]["bm25"] > 0.7  # similarity suffices there, and nowhere else
    assert max(v["bm25"] for k, v in strata.items() if k != "placebo") < 0.5
    close = {name: row["bm25_percentile"] for name, row in strata.items()}
    assert close["similar_useful"] > close["dissimilar_useful"] + 0.05
    assert close["similar_useless"] > close["dissimilar_useless"] + 0.1


def test_a_sentence_encoder_is_measured_where_there_is_one(test_set):
    """Vectors of two texts are as close as they share words: similar strata must come out so."""
    vocabulary: dict[str, int] = {}

    def embed(texts):
        vectors = np.zeros((len(texts), 4096))
        for vector, text in zip(vectors, texts, strict=True):
            for word in words(text):
                vector[vocabulary.setdefault(word, len(vocabulary)) % 4096] += 1
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    found = prefs.measure(test_set[:300], embed)["strata"]
    close = {name: row["minilm_percentile"] for name, row in found.items()}
    assert close["similar_useful"] > close["dissimilar_useful"] + 0.05
    assert close["similar_useless"] > close["dissimilar_useless"] + 0.1
    assert found["placebo"]["minilm"] > 0.7 and found["placebo"]["n_minilm"] > 30
    assert "minilm" not in prefs.measure(test_set[:30])["all"]


def test_cues_of_the_present_are_equally_frequent_in_evidence_and_distractors(test_set):
    seen = collections.defaultdict(list)
    for example in test_set:
        cues = frames.LANGUAGES[example.meta["language"]].cues
        for index in example.evidence:
            seen["evidence"].append(_cued(example, index, cues))
        for index in example.meta["distractors"]:
            seen["distractor"].append(_cued(example, index, cues))
    shares = [sum(v) / len(v) for v in seen.values()]
    assert shares == pytest.approx([0.5, 0.5], abs=0.03)


def _cued(example, index, cues):
    said = " ".join(m.content for m in example.question.messages[index : index + 2])
    return any(cue.strip() in said for cue in cues)


def test_every_kind_of_distractor_can_be_the_latest_mention(test_set):
    last = collections.Counter()
    for example in test_set:
        row = max(example.meta["timeline"], key=lambda row: row["start"])
        last[row["source"] if row["message"] not in example.evidence else "evidence"] += 1
    for source in ("hypothetical", "quoted", "suggested", "evidence"):
        assert last[source] > 0.08 * len(test_set)


def test_questions_that_need_no_memory_have_topical_histories(test_set):
    for example in test_set:
        if example.meta["needs"] == "none":
            assert len(example.meta["timeline"]) >= 3 and example.evidence == ()


# Splits


def test_users_values_topics_and_frames_of_train_and_test_are_disjoint():
    def words(split):
        topics = [t for of in frames.TOPICS[split].values() for t in of]
        families = {f for of in frames.SPLIT_FAMILIES[split].values() for f in of}
        return (
            {t.label for t in topics},
            {v for t in topics for v in t.values},
            {sign for t in topics for sign in t.signs.values()},
            families,
        )

    for part, (train, test) in enumerate(zip(words("train"), words("test"), strict=True)):
        assert not train & test, part
    of = {s: {x for n in words(s)[3] for v in frames.FAMILIES[n].values() for x in v}
          for s in ("train", "test")}  # fmt: skip
    assert not of["train"] & of["test"]
    assert "es" in frames.TOPICS["test"] and "es" not in frames.TOPICS["train"]
    assert not words("dev")[1] & (words("train")[1] | words("test")[1])
    users = {s: {e.meta["group"] for e in prefs.generate(s, users=8)} for s in frames.TOPICS}
    assert len(set().union(*users.values())) == 24


@pytest.mark.parametrize("family", frames.FAMILIES)
def test_every_family_can_say_everything_with_a_place_for_the_cue(family):
    said = frames.FAMILIES[family]
    assert set(said) == set(frames.FAMILIES["en_plain"])
    silent = {"ask", "guest", "shop", "today", "know", "ack", "suggest.sim", "suggest.dis"}
    for key, texts in said.items():
        assert key in silent or all(text.count("{cue}") == 1 for text in texts), key


def test_the_reader_yields_all_splits_with_their_names(monkeypatch):
    monkeypatch.setattr(prefs, "USERS", {"train": 2, "dev": 2, "test": 3})
    skipped = collections.Counter()
    examples = list(prefs.read("shifting_prefs", None, Reading(), skipped))
    assert [k for k, _ in collections.Counter(e.meta["split"] for e in examples).items()] == [
        "train", "dev", "test",
    ]  # fmt: skip
    assert not skipped and all(e.meta["category"] for e in examples)


# Pairs and lengths


def test_minimal_pairs_differ_in_one_exchange_and_do_as_they_say(pairs):
    kinds = collections.Counter()
    for a, b in pairs:
        assert a.question.query == b.question.query and a.question.options == b.question.options
        left, right = collections.Counter(exchanges(a)), collections.Counter(exchanges(b))
        assert sum((left - right).values()) == sum((right - left).values()) == 1
        assert a.meta["pair"]["flips"] == (a.answer != b.answer)
        if a.meta["pair"]["change"] == "order":  # the same words on another day
            (old,), (new,) = (left - right), (right - left)
            assert [text for text, _ in old] == [text for text, _ in new]
        kinds[a.meta["pair"]["change"], a.meta["pair"]["flips"]] += 1
    assert len(pairs) > 300
    for change in ("holder", "negation", "order", "date", "source", "condition"):
        assert kinds[change, True] > 3
    assert {change for change, flips in kinds if not flips} == set(plot.CHANGES)


def test_longer_histories_hold_the_shorter_and_the_same_labels():
    short = list(prefs.generate("test", users=2))
    middle = list(prefs.generate("test", users=2, length=100))
    long = list(prefs.generate("test", users=1, length=1000))
    for small, large in (*zip(short, middle, strict=True), *zip(middle, long, strict=False)):
        assert small.question.id == large.question.id
        assert len(exchanges(small)) < len(exchanges(large)) in (100, 1000)
        assert small.question.options == large.question.options and small.answer == large.answer
        rest = iter(exchanges(large))
        assert all(exchange in rest for exchange in exchanges(small))  # in the same order
        for of in ("evidence", "stale"):
            texts = [
                [e.question.messages[i] for i in (e.evidence if of == "evidence" else e.meta[of])]
                for e in (small, large)
            ]
            assert texts[0] == texts[1]
    assert {len(exchanges(e)) for e in short} == {10}


# Repeatability


def test_the_same_over_processes_and_hash_seeds():
    script = (
        "import sys, tests.test_shifting_prefs as t;"
        "print(t.digest(t.prefs.generate('test', seed=3, users=4)), len(t.load(*t.SMALL)),"
        "'tensorflow_datasets' in sys.modules)"
    )
    env = {**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": os.pathsep.join(sys.path)}
    made = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    same = digest(prefs.generate("test", seed=3, users=4))
    assert made.stdout.split() == [same, str(len(load(*SMALL))), "False"], made.stderr


def test_seeds_and_user_counts():
    first = list(prefs.generate("test", users=3))
    assert digest(first[:20]) == digest(list(prefs.generate("test", users=5))[:20])
    assert digest(first) != digest(prefs.generate("test", seed=1, users=3))


def test_a_wrong_split_or_length_is_named():
    with pytest.raises(ValueError, match="split"):
        next(prefs.generate("valid"))
    with pytest.raises(ValueError, match="length"):
        next(prefs.generate("test", length=11))


# The small part


def test_the_small_part_is_fixed_and_needs_no_preparation(tmp_path):
    small = load(*SMALL, prepared_dir=tmp_path)
    assert list(small) == prefs.small(Reading()) and digest(small) == SMALL_SHA256
    assert not list(tmp_path.iterdir())
    parts = {}
    for split in frames.TOPICS:
        parts[split] = load("shifting_prefs", f"small_{split}")
        assert {e.meta["split"] for e in parts[split]} == {split}
        assert 60 < len(parts[split]) < 140
        assert len({e.meta["stratum"] for e in parts[split]}) == 6
    assert sum(map(len, parts.values())) == len(small)
    assert len({part.sha256 for part in (small, *parts.values())}) == 4
    with pytest.raises(DataError, match="no split 'small_x'; there are small, small_dev"):
        load("shifting_prefs", "small_x")
    another = load(*SMALL, reading=Reading(seed=1))
    assert another.sha256 != small.sha256 and another[0] != small[0]
    left = small.checked(lambda example: None, limit=3)
    assert [e.question.id for e in left] == [e.question.id for e in small][:3]
