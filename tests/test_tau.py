# SPDX-License-Identifier: Apache-2.0
"""Labels by a fine-tuned reader, in rounds, and the threshold chosen by what the reader makes of it."""

import dataclasses
import json

import numpy as np
import pytest

from bfm import labeling, lm, rounds, tau
from bfm.export import export
from bfm.settings import LabelSettings, Settings, SettingsError
from bfm.tau import Ladder
from tests.test_finetune import made, settings  # noqa: F401  (a fixture)


def read(workdir):
    return [json.loads(line) for line in (workdir / "labels.jsonl").read_text().split("\n")[:-1]]


def test_the_curve_by_hand():
    ladders = [
        Ladder((2.0, 1.0), (0.0, 1.0, 0.0), (-2.0, -0.5, -3.0), (0, 1, 1), 1),
        Ladder((0.5, -1.0), (0.0, 1.0, 1.0), (-1.0, -0.4, -0.3), (0, 0, 1), 1),
    ]
    rows = {row["tau"]: row for row in tau.score(ladders)}
    assert sorted(rows) == [-2.0, -0.25, 0.75, 1.5, 2.0]
    assert [rows[t]["accuracy"] for t in sorted(rows)] == [0.5, 0.5, 0.0, 0.5, 0.0]
    assert [rows[t]["open"] for t in sorted(rows)] == [1.0, 1.0, 0.5, 0.5, 0.0]
    assert rows[1.5]["evidence_f1"] == pytest.approx(2 * 1 / (1 + 2))
    assert rows[1.5]["logp"] == pytest.approx((-0.5 - 1.0) / 2)


def test_auto_chooses_and_writes_labels_whole(made, tmp_path):  # noqa: F811
    auto = dataclasses.replace(settings(made, dev=0.4), tau="auto", label=LabelSettings())
    labeling.run(auto, tmp_path / "w")
    assert all(
        line["tau"] is line["gate"] is line["focus"] is None for line in read(tmp_path / "w")
    )
    choice = tau.choose(auto, tmp_path / "w")
    best = max(row["accuracy"] for row in choice["curve"])
    assert next(r for r in choice["curve"] if r["tau"] == choice["tau"])["accuracy"] == best
    for line in read(tmp_path / "w"):
        over = [i for i, x in enumerate(line["sal_a"]) if x > choice["tau"]]
        assert line["tau"] == choice["tau"] and line["gate"] == bool(over)
        assert sorted(line["focus"]) == over  # four turns, max_focus five
    assert (tmp_path / "w" / "tau.png").stat().st_size > 5000
    before = (tmp_path / "w" / "labels.jsonl").read_bytes()
    labeling.run(auto, tmp_path / "w")
    assert tau.choose(auto, tmp_path / "w") == choice
    assert (tmp_path / "w" / "labels.jsonl").read_bytes() == before
    with pytest.raises(SettingsError, match="needs held-out examples"):
        none = dataclasses.replace(auto, train=dataclasses.replace(auto.train, dev=0.0))
        tau.check(none)


def test_a_judge_scores_answers_and_the_base_questions(made, tmp_path):  # noqa: F811
    other = lm.open_model("", "tiny", 1)
    export(other.load().decoder, tmp_path / "judge", other.scaffold.tokenizer)
    by = dataclasses.replace(
        settings(made), label=LabelSettings(from_checkpoint=str(tmp_path / "judge"))
    )
    labeling.run(by, tmp_path / "by")
    model = dataclasses.replace(by.model, path=str(tmp_path / "judge"), arch="")
    alone = dataclasses.replace(by, model=model, label=LabelSettings())
    labeling.run(alone, tmp_path / "alone")
    workdirs = (tmp_path / "by", made / "labels", tmp_path / "alone")
    for judged, base, judge in zip(*map(read, workdirs), strict=True):
        np.testing.assert_allclose(judged["sal_q"], base["sal_q"], atol=1e-4)
        np.testing.assert_allclose(judged["sal_a"], judge["sal_a"], atol=1e-4)
        assert not np.allclose(judged["sal_a"], base["sal_a"], atol=1e-3)


def test_rounds_label_each_fold_by_a_reader_of_the_others(made, tmp_path):  # noqa: F811
    label = LabelSettings(rounds=1, folds=2)
    twice = dataclasses.replace(settings(made, steps=1, dev=0.0), labels="", label=label)
    meta = rounds.run(twice, tmp_path / "w")
    lines = read(tmp_path / "w")
    assert [line["id"] for line in lines] == [f"r{i}" for i in range(12)] and meta["records"] == 12
    assert len(set(meta["identity"]["judge"])) == 2
    parts = [read(tmp_path / "w" / "rounds" / "0" / str(k) / "labels") for k in range(2)]
    groups = [{int(line["id"][1:]) // 2 for line in part} for part in parts]
    assert not groups[0] & groups[1] and groups[0] | groups[1] == set(range(6))
    by_id = {line["id"]: line for part in parts for line in part}
    assert lines == [by_id[line["id"]] for line in lines]


@pytest.mark.parametrize("text", ["5/5", "a/2", "1", "-1", "1/0", "--1/5"])
def test_a_fold_that_is_none_is_refused(text):
    with pytest.raises(SettingsError, match="fold"):
        Settings.of({"fold": text})
