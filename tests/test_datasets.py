# SPDX-License-Identifier: Apache-2.0
"""Prepared sets: whole or not there, the same examples back, splits, one line for what is wrong."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bfm import labeling
from bfm.datasets import NAMES, Reading, load, prepare, prepared
from bfm.datasets.stats import stats
from bfm.dialogue import RecordError
from bfm.jsonl import DataError
from bfm.settings import Settings
from tests.test_membench import HIGH, trajectory, write

ROOT = Path(__file__).parents[1]


@pytest.fixture
def raw(tmp_path):
    items = [trajectory(i, target_step_id=[i % 3]) for i in range(10)]
    write(tmp_path / "raw", HIGH, {"highlevel": {"lamp": items, "kite": items[:5]}})
    return tmp_path / "raw"


def test_what_is_read_comes_back(raw, tmp_path):
    examples = list(NAMES["membench_high"].read("membench_high", raw, Reading(), {}))
    source = load("membench_high", data_dir=raw, prepared_dir=tmp_path / "p")
    assert list(source) == examples and len(source) == 15
    assert source[14] == examples[14] and source[-1] == examples[-1]
    # Prepared once, the raw files are not needed again.
    assert list(load("membench_high", "dev", prepared_dir=tmp_path / "p"))
    parts = [
        load("membench_high", s, prepared_dir=tmp_path / "p") for s in ("train", "dev", "test")
    ]
    ids = [e.question.id for part in parts for e in part]
    assert sorted(ids) == sorted(e.question.id for e in examples)
    kites = load("membench_high", "category=kite", prepared_dir=tmp_path / "p")
    assert [e.meta["category"] for e in kites] == ["kite"] * 5
    rest = load("membench_high", "category!=kite", prepared_dir=tmp_path / "p")
    assert len(rest) == 10 and rest.sha256 != kites.sha256
    assert "tensorflow" not in sys.modules


def test_another_reading_is_another_set(raw, tmp_path):
    places = {"data_dir": raw, "prepared_dir": tmp_path / "p"}
    kept = load("membench_high", **places)
    removed = load("membench_high", **places, reading=Reading(time_suffix="remove"))
    assert "(place" in kept[0].question.messages[0].content
    assert "(place" not in removed[0].question.messages[0].content
    assert kept.sha256 != removed.sha256


def test_what_is_wrong_is_one_line(raw, tmp_path):
    with pytest.raises(
        DataError, match=r"'membench': |data: 'membench' is unknown; known: membench"
    ):
        load("membench")
    with pytest.raises(
        DataError, match=r"locomo: not prepared yet; .*locomo10\.json \(2\.8 MB\) from"
    ):
        load("locomo", prepared_dir=tmp_path / "p")
    places = {"data_dir": raw, "prepared_dir": tmp_path / "p"}
    with pytest.raises(DataError, match="no split 'tests'; there are all, "):
        load("membench_high", "tests", **places)
    with pytest.raises(DataError, match="no example has a field 'topic'"):
        load("membench_high", "topic=x", **places)
    write(raw, HIGH, {"highlevel": {"lamp": [trajectory(0)]}})
    with pytest.raises(DataError, match="was prepared from other raw files"):
        load("membench_high", **places)


def test_a_broken_record_leaves_nothing_behind(raw, tmp_path):
    broken = trajectory(3)
    del broken["QA"]["question"]
    write(raw, HIGH, {"highlevel": {"lamp": [trajectory(0), broken]}})
    with pytest.raises(
        DataError, match=r"lamp'\[1\]: QA: question: is missing|question: is missing"
    ):
        prepare("membench_high", data_dir=raw, prepared_dir=tmp_path / "p")
    assert not list((tmp_path / "p").rglob("*.json"))


def test_killed_half_way_nothing_looks_finished(raw, tmp_path):
    """SIGKILL while records are written: no folder under the final name, and the next run succeeds."""
    code = (
        "import sys, time; from bfm import datasets\n"
        "def slow(done, total):\n"
        "    if total and done == 5: print('half', file=sys.stderr); time.sleep(60)\n"
        "datasets.prepare('membench_high', data_dir=sys.argv[1], prepared_dir=sys.argv[2],"
        " on_example=slow)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(
        [sys.executable, "-c", code, raw, tmp_path / "p"], stderr=subprocess.PIPE, env=env
    )
    assert child.stderr.readline() == b"half\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not list((tmp_path / "p").rglob(prepared.SOURCE))
    assert len(load("membench_high", data_dir=raw, prepared_dir=tmp_path / "p")) == 15


def test_labels_over_a_split(raw, tiny_folder, tmp_path):
    settings = {"model": {"path": str(tiny_folder)}, "data": "membench_high", "split": "dev",
                "data_dir": str(raw), "prepared_dir": str(tmp_path / "p")}  # fmt: skip
    meta = labeling.run(Settings.of(settings), tmp_path / "w")
    dev = load("membench_high", "dev", prepared_dir=tmp_path / "p")
    written = (tmp_path / "w" / labeling.LABELS).read_text("utf-8").splitlines()
    found = [json.loads(line)["id"] for line in written]
    assert found == [e.question.id for e in dev] and meta["records"] == len(dev)


def test_a_check_stops_or_skips(raw, tmp_path):
    source = load("membench_high", data_dir=raw, prepared_dir=tmp_path / "p")

    def no_kites(example):
        if example.meta["category"] == "kite":
            raise RecordError("meta", "is a kite")

    with pytest.raises(DataError, match="id 'highlevel/kite/0': meta: is a kite"):
        source.checked(no_kites)
    left = source.checked(no_kites, "skip", limit=3)
    assert len(left) == 3 and left.skipped == 5 and "kite" in left.skipped_messages[0]


def test_stats_count(raw, tmp_path):
    found = stats(load("membench_high", data_dir=raw, prepared_dir=tmp_path / "p"), str.__len__)
    assert found["examples"] == 15 and found["categories"] == {"kite": 5, "lamp": 10}
    assert found["gold_positions"] == {"1": 15} and found["turns"]["max"] == 3
    assert found["with_evidence"] == 15 and found["evidence_density"] == pytest.approx(1 / 3)
    assert found["gold_longest"] == 1.0 and found["gold_shortest"] == 0.0


def launch(*args):
    return subprocess.run(
        [sys.executable, ROOT / "launch" / "data.py", *map(str, args)], capture_output=True,
        text=True, check=False,
    )  # fmt: skip


def test_the_door(raw, tiny_folder, tmp_path):
    where = ["--data_dir", raw, "--prepared_dir", tmp_path / "p"]
    done = launch("prepare", "membench_high", *where)
    assert done.returncode == 0 and "15 examples" in done.stdout, done.stderr
    assert "writing membench_high: 15 of 15 examples" in done.stderr
    done = launch("stats", "membench_high", *where, "--json", "--model", tiny_folder)
    assert json.loads(done.stdout)["examples"] == 15, done.stderr
    done = launch("peek", "membench_high", *where, "--n", 1)
    assert "highlevel/lamp/0" in done.stdout and "paper lamps" in done.stdout, done.stderr
    flags = (("--length", 7), ("--seed", "x"), ("--persona_card", "maybe"))
    for arguments in (("nothing",), *(("membench_high", *flag) for flag in flags)):
        done = launch("stats", *arguments, *where)
        assert done.returncode == 2 and done.stderr.startswith("error: ") and not done.stdout
        assert done.stderr.count("\n") == 1
