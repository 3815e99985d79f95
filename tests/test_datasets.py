# SPDX-License-Identifier: Apache-2.0
"""Prepared sets: whole or not there, the same examples back, splits, one line for what is wrong."""

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from bfm import labeling, opening
from bfm.datasets import NAMES, Reading, build, load, prepare
from bfm.datasets.stats import stats
from bfm.dialogue import RecordError
from bfm.jsonl import DataError, JsonlSource
from bfm.settings import Settings, SettingsError
from tests.test_membench import HIGH, LOW, trajectory, write

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


def test_every_source_and_setting_is_in_the_identity(tmp_path, monkeypatch):
    package = Path(build.__file__).parents[1]
    shutil.copytree(package / "datasets", tmp_path / "datasets")
    shutil.copy(package / "dialogue.py", tmp_path)
    real = build.code_hash()
    monkeypatch.setattr(build, "__file__", str(tmp_path / "datasets" / "build.py"))
    assert build.code_hash() == real
    sources = [*(tmp_path / "datasets").glob("*.py"), tmp_path / "dialogue.py"]
    assert len(sources) > 20
    for path in sources:
        with open(path, "a", encoding="utf-8") as file:
            file.write("#")
        assert build.code_hash() != real
        real = build.code_hash()
    small = [load("shifting_prefs", "small", reading=Reading(seed=s)) for s in (0, 1)]
    assert [s.source["reading"]["seed"] for s in small] == [0, 1]
    assert {s.source["code"] for s in small} == {real} and small[0].source["generator"]
    assert small[0].source["version"] != small[1].source["version"]


def test_what_is_wrong_is_one_line(raw, tmp_path):
    with pytest.raises(
        DataError, match=r"'membench': |data: 'membench' is unknown; known: membench"
    ):
        load("membench")
    with pytest.raises(DataError, match=r"locomo: not prepared yet; .*from http.* \(2\.8 MB\)"):
        load("locomo", prepared_dir=tmp_path / "p", download=False)
    places = {"data_dir": raw, "prepared_dir": tmp_path / "p"}
    with pytest.raises(DataError, match="no split 'tests'; there are all, "):
        load("membench_high", "tests", **places)
    with pytest.raises(DataError, match="no example has a field 'topic'"):
        load("membench_high", "topic=x", **places)
    write(raw, LOW, {"simple": {"roles": [trajectory(0)]}})  # no file of this set
    assert load("membench_high", **places)
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
    [left] = (tmp_path / "p" / "membench_high").iterdir()
    assert left.suffix == ".part"
    os.utime(left, (0, 0))  # long ago
    assert not list((tmp_path / "p").rglob(build.SOURCE))
    found = load("membench_high", data_dir=raw, prepared_dir=tmp_path / "p")
    assert len(found) == 15 and list(found.folder.parent.iterdir()) == [found.folder]


def test_a_folder_that_cannot_be_written_is_one_line(raw, tmp_path):
    (tmp_path / "file").write_text("", "utf-8")
    with pytest.raises(DataError, match=r"membench_high.*: cannot be written: "):
        prepare("membench_high", data_dir=raw, prepared_dir=tmp_path / "file")


def test_the_writer_holds_one_record(tmp_path):
    """40 MB of records of 1 MB: what is held at once is a few of them."""
    tracemalloc.start()
    try:
        records = ({"id": str(i), "record": "x" * (1 << 20)} for i in range(40))
        build._write(tmp_path, "big", "1.0.0", records)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20


def test_labels_over_a_split(raw, tiny_folder, tmp_path):
    settings = {"model": {"path": str(tiny_folder)}, "data": "membench_high", "split": "dev",
                "data_dir": str(raw), "prepared_dir": str(tmp_path / "p")}  # fmt: skip
    dev = load("membench_high", "dev", prepared_dir=tmp_path / "p", data_dir=raw)
    assert list(opening.open_data(Settings.of(settings))) == list(dev)
    meta = labeling.run(Settings.of({**settings, "limit": 1}), tmp_path / "w")  # compiles, so one
    [line] = (tmp_path / "w" / labeling.LABELS).read_text("utf-8").splitlines()
    assert json.loads(line)["id"] == dev[0].question.id and meta["records"] == 1


def test_a_setting_of_a_run_reads_otherwise(raw, tmp_path):
    config = {"data": "membench_high", "data_dir": str(raw), "prepared_dir": str(tmp_path / "p")}
    as_is = opening.open_data(Settings.of(config))
    removed = opening.open_data(Settings.of(config | {"reading": {"time_suffix": "remove"}}))
    assert as_is.sha256 != removed.sha256
    assert list(removed) == list(
        load("membench_high", data_dir=raw, prepared_dir=tmp_path / "p",
             reading=Reading(time_suffix="remove"))
    )  # fmt: skip
    with pytest.raises(SettingsError, match=r"reading\.length"):
        Settings.of({"reading": {"length": 11}})


def test_a_run_can_name_the_small_part():
    settings = Settings.of({"data": "shifting_prefs", "split": "small_dev", "limit": 3})
    found = opening.open_data(settings)
    assert list(found) == list(load("shifting_prefs", "small_dev"))[:3]


def test_a_sample_is_drawn_by_seed_and_keeps_the_order():
    def ids(**given):
        settings = Settings.of({"data": "shifting_prefs", "split": "small_dev", **given})
        source = opening.open_data(settings)
        return [source[i].question.id for i in range(len(source))], source.sha256

    whole, _ = ids()
    drawn, named = ids(sample=9)
    assert len(drawn) == 9 and drawn == sorted(drawn, key=whole.index) and drawn != whole[:9]
    assert (drawn, named) == ids(sample=9) and drawn != ids(sample=9, seed=1)[0]
    assert named not in (ids()[1], ids(sample=8)[1], ids(sample=9, fold="0/2")[1])
    parts = [set(ids(fold=f"{k}/3", sample=30)[0]) for k in range(3)]  # as out-of-fold runs need
    assert set().union(*parts) == set(ids(sample=30)[0]) and sum(map(len, parts)) == 30
    assert all(part < set(ids(fold=f"{k}/3")[0]) for k, part in enumerate(parts))
    assert ids(sample=10**6)[0] == whole


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
    counted = []
    stats(
        [load("membench_high", prepared_dir=tmp_path / "p")[0]] * 9,
        lambda t: counted.append(t) or 1,
    )
    assert (
        len(counted) == len(set(counted)) == 6
    )  # a message that comes again is not tokenized again
    assert found["gold_longest"] == 1.0 and found["gold_shortest"] == 0.0


@pytest.fixture
def launch(monkeypatch, capsys):
    """Call launch/data.py as __main__ in this process: (exit code, stdout, stderr)."""
    monkeypatch.syspath_prepend(ROOT / "launch")

    def call(*args):
        monkeypatch.setattr(sys, "argv", ["data.py", *map(str, args)])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(ROOT / "launch" / "data.py"), run_name="__main__")
        return end.value.code, *capsys.readouterr()

    return call


def test_the_door(raw, launch, tiny_folder, tmp_path):
    where = ["--data_dir", raw, "--prepared_dir", tmp_path / "p"]
    command = [sys.executable, ROOT / "launch" / "data.py", "prepare", "membench_high", *where]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "15 examples" in done.stdout, done.stderr
    assert "writing membench_high: 15 of 15 examples" in done.stderr
    code, out, err = launch("stats", "membench_high", *where, "--json", "--model", tiny_folder)
    assert code == 0 and json.loads(out)["examples"] == 15, err
    file = tmp_path / "out.jsonl"
    code, out, err = launch("export", "membench_high", *where, "--split", "dev", "--out", file)
    assert code == 0 and "3 examples" in out, err
    dev = load("membench_high", "dev", prepared_dir=tmp_path / "p")
    assert list(JsonlSource.open(file)) == list(dev)
    code, out, err = launch("export", "membench_high", *where, "--out", tmp_path / "no" / "file")
    assert code == 2 and "cannot be written: No such file or directory" in err
    code, out, err = launch("peek", "membench_high", *where, "--n", 1)
    assert code == 0 and "highlevel/lamp/0" in out and "paper lamps" in out, err


@pytest.mark.parametrize(
    "arguments",
    [
        ("nothing",),
        *(("membench_high", *flag) for flag in (("--length", 7), ("--seed", "x"))),
        *(("membench_high", flag, "maybe") for flag in ("--persona_card", "--download")),
    ],
)
def test_what_the_door_refuses_is_one_line(raw, launch, tmp_path, arguments):
    code, out, err = launch("stats", *arguments, "--data_dir", raw, "--prepared_dir", tmp_path)
    assert code == 2 and not out
    assert err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read: Is a directory"),
        (b"[" * 200_000, "is not JSON"),
        (b'{"highlevel": "\xff"}', "is not JSON"),
        (b"\x00" * 9, "is not JSON"),
        (b'{"highlevel": {"lamp": [{"tid": ' + b"9" * 5000 + b"}]}}", "is not JSON"),
    ],
)
def test_what_is_no_file_of_records_is_one_line(launch, tmp_path, content, says):
    file = tmp_path / HIGH
    if content is None:
        file.mkdir(parents=True)
    else:
        file.parent.mkdir(parents=True)
        file.write_bytes(content)
    where = ["--data_dir", tmp_path, "--prepared_dir", tmp_path / "p"]
    code, out, err = launch("prepare", "membench_high", *where)
    lines = [line for line in err.splitlines() if not line.startswith("checking")]
    assert code == 2 and not out and len(lines) == 1
    assert lines[0].startswith(f"error: {file}: {says}")
    assert not list((tmp_path / "p").rglob(build.SOURCE))


def test_missing_files_without_the_network_are_one_line(launch, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code, out, err = launch("prepare", "longmemeval", "--download", "false")
    assert code == 2 and not out and err.count("\n") == 1
    assert "longmemeval_s_cleaned.json: is missing" in err and "277 MB" in err
