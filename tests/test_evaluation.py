# SPDX-License-Identifier: Apache-2.0
"""The harness: nothing but the question is read, reruns and resumed runs agree, statistics by hand."""

import dataclasses
import json
import random

import numpy as np
import pytest

from bfm import comparing, selectors, summary
from bfm.dialogue import parse_example, turns_of
from bfm.evaluation import METHODS, parse_methods
from bfm.intervals import contrast, f1, holm, interval, mean
from bfm.labeling import WorkdirError
from bfm.settings import EvalSettings, ModelSettings, Settings, SettingsError, TrainSettings

QUIET = "bfm,tau_q,none,full,random,recency,latest,bm25,bm25+o,sal_q,ebf,evidence,longest,first"


def record(i: int) -> dict:
    rng = random.Random(i)
    turns = []
    for j in range(4):
        turns += [
            {
                "role": "user",
                "content": f"I like {rng.choice(['tea', 'milk'])} {j}",
                "time": f"d{j}",
            }
        ]
    return {
        "id": f"r{i}", "turns": turns, "query": "tea or milk?", "options": ["tea", "milk", "neither"],
        "answer_index": i % 3, "evidence": [i % 4], "meta": {"group": f"g{i // 2}", "stratum": "s"},
    }  # fmt: skip


def settings(path, methods=QUIET) -> Settings:
    return Settings(
        model=ModelSettings(path="", arch="tiny"), data=f"jsonl:{path}", methods=methods,
        prefilter_k=3, max_focus=2, eval=EvalSettings(k=2, budget=64),
        train=TrainSettings(tokens=1024),
    )  # fmt: skip


def write(path, records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def read(workdir):
    lines = (workdir / "results.jsonl").read_text().split("\n")[:-1]
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval")
    data = write(folder / "data.jsonl", [record(i) for i in range(10)])
    found = comparing.run(settings(data), folder / "w")
    return data, folder / "w", found


def test_a_run_is_whole(done):
    _, workdir, found = done
    lines = read(workdir)
    methods = QUIET.split(",")
    assert [(x["id"], x["method"]) for x in lines] == [
        (f"r{i}", m) for i in range(10) for m in methods
    ]
    for line in lines:
        assert abs(sum(line["probs"]) - 1) < 1e-4
        assert line["status"] in ("ok", "truncated")
        if line["method"] in ("none", "longest", "first"):
            assert not line["evidence"]
        if line["method"] == "evidence":
            assert line["recall"] == 1.0
        if line["method"] in ("bm25", "recency", "random", "sal_q", "ebf"):
            assert 1 <= len(line["evidence"]) <= 2  # two turns, within 64 tokens
    rows = {row["method"]: row for row in found["rows"]}
    for method, row in rows.items():
        right = [line["correct"] for line in lines if line["method"] == method]
        assert row["accuracy"] == pytest.approx(np.mean(right)) and row["n"] == 10
        assert row["low"] <= row["accuracy"] <= row["high"]
    assert {c["a"] for c in found["contrasts"]} == {"bfm"} and found["valid"]
    assert any("Uninformative" in note for note in found["notes"])  # random weights tell nothing
    assert (workdir / "report.md").exists() and "<script src" not in (
        workdir / "report.html"
    ).read_text()


def test_gold_moves_no_prediction(done, tmp_path):
    _, workdir, _ = done
    scrambled = []
    for i in range(10):
        r = record(i)
        r |= {"answer_index": (i + 1) % 3, "evidence": [(i + 2) % 4]}
        r["meta"] = {"group": f"other{i}", "stratum": "t", "category": "c"}
        scrambled.append(r)
    comparing.run(settings(write(tmp_path / "data.jsonl", scrambled)), tmp_path / "w")
    names = ("prediction", "probs", "gate", "open_probability", "focus", "evidence", "tokens")
    for a, b in zip(read(workdir), read(tmp_path / "w"), strict=True):
        if a["method"] != "evidence":
            assert [a[n] for n in names] == [b[n] for n in names], a["method"]


def test_a_torn_run_goes_on_to_the_same(done, tmp_path):
    data, workdir, found = done
    torn = tmp_path / "torn"
    torn.mkdir()
    for name in ("eval.meta.json", "results.jsonl", "saliency.jsonl"):
        (torn / name).write_bytes((workdir / name).read_bytes())
    whole = (torn / "results.jsonl").read_bytes()
    (torn / "results.jsonl").write_bytes(whole[: int(len(whole) * 0.9)])
    again = comparing.run(settings(data), torn)
    assert read(torn) == read(workdir)
    assert [r["accuracy"] for r in again["rows"]] == [r["accuracy"] for r in found["rows"]]
    with pytest.raises(WorkdirError, match="settings differ"):
        other = dataclasses.replace(settings(data), eval=EvalSettings(k=1))
        comparing.run(other, torn)


def test_selectors_by_hand():
    turns = [
        {"role": "user", "content": text} for text in ("green tea", "a cat", "milk", "the tea cup")
    ]
    example = parse_example(
        {"id": "x", "turns": turns, "query": "which tea?", "options": ["milk", "ale"]}
    )
    question, own = example.question, turns_of(example.question.messages)
    assert selectors.recency(question, own) == (3, 2, 1, 0)
    assert selectors.latest(question, own) == ()  # tea stands in half of the turns
    assert selectors.lexical(question, own, with_options=False)[:2] == (0, 3)
    assert 2 in selectors.lexical(question, own, with_options=True)[:3]
    assert sorted(selectors.random(question, own, 0)) == [0, 1, 2, 3]
    assert selectors.by_score([0.5, None, 0.5, 1.0]) == (3, 0, 2)
    before = np.log([0.5, 0.5])
    after = [np.log([0.9, 0.1]), before, np.log([0.1, 0.9])]
    by_hand = 0.9 * np.log(1.8) + 0.1 * np.log(0.2)
    np.testing.assert_allclose(
        selectors.expected_bayes_factor(before, after), [by_hand, 0.0, by_hand], atol=1e-12
    )


def test_statistics_by_hand():
    assert holm([0.01, 0.04, 0.03]) == [0.03, 0.06, 0.06]
    assert holm([]) == []
    groups = ["a", "a", "b", "c"]
    value, low, high = interval(groups, mean(np.array([1.0, 1.0, 0.0, 0.0])))
    assert value == 0.5 and low == 0.0 and high == 1.0
    assert interval(["a", "a"], mean(np.array([1.0, 0.0]))) == (0.5, None, None)
    assert interval(groups, lambda index: float("nan")) == (None, None, None)
    alone = contrast(["a", "a"], np.ones(2), np.zeros(2))
    assert (alone.difference, alone.low, alone.p) == (1.0, None, 1.0)
    hits, found, wanted = (np.array(x) for x in ([1, 0], [2, 0], [1, 1]))
    assert f1(hits, found, wanted)(np.array([0, 1])) == pytest.approx(2 / 4)
    many = [f"u{i}" for i in range(200)]
    rng = np.random.default_rng(0)
    b = rng.random(200)
    better = contrast(many, b + 0.3, b)
    assert better.difference == pytest.approx(0.3) and better.p < 0.01 and better.low > 0.29
    same = contrast(many, b, rng.permutation(b))
    assert same.low < 0 < same.high and same.p > 0.05 and 0.05 < same.detectable < 0.2


def test_reliability_and_notes():
    assert summary.reliability([(0.1, False), (0.15, True), (0.95, True)]) == [
        [pytest.approx(0.125), 0.5, 2], [0.95, 1.0, 1],
    ]  # fmt: skip
    lines = [
        {"method": m, "group": str(i), "correct": float(m == "evidence"), "status": "ok"}
        for i in range(20) for m in ("none", "evidence")
    ]  # fmt: skip
    assert summary.notes(lines, [{"errors": 0}]) == ([], True)
    assert not summary.notes(lines, [{"errors": 1}])[1] and len(lines) == 40  # 2.5 %


def test_bins_by_hand():
    own = [{"group": str(i), "correct": float(i > 3)} for i in range(7)]
    rows = summary.binned({"bfm": own, "first": own}, [1, 1, 2, None, 3, 9, 9], "turns ago")
    assert [(r["bin"], r["n"], r["accuracy"]) for r in rows] == [
        ("1 turns ago", 2, 0.0), ("2 to 3 turns ago", 2, 0.5), ("9 turns ago", 2, 1.0),
    ]  # fmt: skip
    assert summary.binned({"bfm": own}, [None] * 7, "") == []


@pytest.mark.parametrize("text", ["", "bfm,bfm", "bfm,magic", ","])
def test_methods_that_are_none_are_refused(text):
    with pytest.raises(SettingsError, match="methods"):
        parse_methods(text)
    assert parse_methods("bfm, full") == ("bfm", "full") and set(QUIET.split(",")) < set(METHODS)


def test_contrasts_are_declared(done):
    assert comparing.parse_contrasts("bfm-full, sal_q-bm25", QUIET.split(",")) == [
        ("bfm", "full"), ("sal_q", "bm25"),
    ]  # fmt: skip
    for text in ("bfm-bfm", "bfm-magic", "bfm"):
        with pytest.raises(SettingsError, match="contrasts"):
            comparing.parse_contrasts(text, QUIET.split(","))
