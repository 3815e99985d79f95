# SPDX-License-Identifier: Apache-2.0
"""BM25 against its formula; the shortlist unites the best and the most recent."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bfm import labeling
from bfm.labeling import LABELS, TOKENS
from bfm.settings import Settings
from bfm.shortlist import bm25, shortlist, words
from tests.test_labeling import lines, record, write

DOCS = ["Green tea", "black coffee, no tea", "tea tea tea", "a walk", ""]


def test_bm25_is_the_formula():
    scores = bm25("TEA please", DOCS)
    idf = math.log(1 + (5 - 3 + 0.5) / (3 + 0.5))
    sizes, mean = [2, 4, 3, 2, 0], 11 / 5
    for score, f, size in zip(scores, [1, 1, 3, 0, 0], sizes, strict=True):
        expected = idf * f * 2.5 / (f + 1.5 * (0.25 + 0.75 * size / mean))
        assert score == pytest.approx(expected)


def test_words_of_scripts_without_spaces():
    assert words("Ich mag 茶です, I_like tea2!") == [
        "ich", "mag", "茶", "で", "す", "i", "like", "tea2",
    ]  # fmt: skip


def test_best_and_most_recent_in_turn():
    assert shortlist("tea", DOCS, 1) == [2]
    assert shortlist("tea", DOCS, 2) == [2, 4]
    assert shortlist("tea", DOCS, 4) == [0, 2, 3, 4]
    assert shortlist("nothing", DOCS, 2) == [3, 4]


@given(st.lists(st.text(max_size=20), max_size=12), st.text(max_size=20), st.integers(0, 15))
def test_a_shortlist_has_n_turns_in_order(documents, query, n):
    chosen = shortlist(query, documents, n)
    assert len(chosen) == min(n, len(documents)) and chosen == sorted(set(chosen))


def test_labels_of_a_shortlist_equal_those_of_all(tiny_folder, tmp_path):
    source = record(0, n=6, evidence=[0, 11])
    config = {"data": write(tmp_path / "d.jsonl", [source]), "dump_tokens": True}
    config["model"] = {"path": str(tiny_folder)}
    labeling.run(Settings.of(config), tmp_path / "all")
    meta = labeling.run(Settings.of(config | {"shortlist": 2}), tmp_path / "two")
    [a], [b] = lines(tmp_path / "all" / LABELS), lines(tmp_path / "two" / LABELS)
    scored = [i for i, value in enumerate(b["sal_q"]) if value is not None]
    assert len(scored) == 2 and 5 in scored and b["n_turns"] == 6
    for i in scored:
        assert b["sal_a"][i] == pytest.approx(a["sal_a"][i], abs=1e-4)
    assert [t["turn"] for t in lines(tmp_path / "two" / TOKENS)] == [-1, *scored]
    assert set(b["focus"]) <= set(scored)
    assert meta["shortlist"] == {"evidence_kept": 1 + (0 in scored), "evidence": 2}
    assert json.loads((tmp_path / "two" / "labels.meta.json").read_text())["shortlist"]
