# SPDX-License-Identifier: Apache-2.0
"""launch/sweep.py: every entry trained, evaluated by its own reader, compared; finished ones stay."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

CONFIG = """
import runpy
SWEEP = {sweep}
EVALUATE = {{"split": "small_test", "limit": 3, "methods": "none,sal_a,evidence", "train.steps": 1}}
get_config = runpy.run_path({tiny!r})["get_config"]
"""
FLAGS = ["--config.train.steps=1", "--config.train.dev=0.0", "--config.train.heads=reader"]


def launch(script, *args):
    command = [sys.executable, str(ROOT / "launch" / script), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture
def config(tmp_path):
    def write(sweep, evaluate=True):
        text = CONFIG.format(sweep=sweep, tiny=str(ROOT / "configs" / "tiny.py"))
        path = tmp_path / "config.py"
        path.write_text(text if evaluate else text.replace("EVALUATE", "_"))
        return str(path)

    return write


@pytest.mark.slow
def test_each_entry_is_evaluated_with_its_own_reader(config, tmp_path):
    place = tmp_path / "runs"
    args = ("--config", config([{}, {"train.evidence": "chance"}]), "--workdir", str(place), *FLAGS)
    out = launch("sweep.py", *args)
    assert out.returncode == 0, out.stderr
    assert "sal_a" in out.stdout and "accuracy" in out.stdout and "untrained" in out.stdout
    found = [place / name / "eval" / "summary.json" for name in ("untrained", "evidence=chance")]
    models = [json.loads(path.read_text())["identity"]["models"]["reader"] for path in found]
    assert models[0] == "" and models[1]  # the base model, and the export of the run
    kept = json.loads((place / "sweep.json").read_text())["runs"]
    assert list(kept) == ["untrained", "evidence=chance"]
    for own in kept.values():
        assert own["n"] == 3 and own["rows"] and own["separation"] and "eval.py" in own["command"]
    before = [path.stat().st_mtime_ns for path in found]
    again = launch("sweep.py", *args)
    assert again.returncode == 0 and "==" not in again.stdout  # nothing ran
    assert [path.stat().st_mtime_ns for path in found] == before
    assert again.stdout.split() == [w for w in again.stdout.split() if w in out.stdout.split()]


def test_a_fault_stops_the_sweep_with_its_line(config, tmp_path):
    args = ("--workdir", str(tmp_path / "runs"), *FLAGS)
    out = launch("sweep.py", "--config", config([{"train.evidence": "tea"}], False), *args)
    assert out.returncode == 2 and "train.evidence" in out.stderr and "Traceback" not in out.stderr
    twice = config([{"methods": "none"}, {"methods": "full"}])
    out = launch("sweep.py", "--config", twice, *args)
    assert out.returncode == 2 and "two entries of SWEEP named 'untrained'" in out.stderr
    out = launch("sweep.py", "--config", str(tmp_path / "none.py"), *args)
    assert out.returncode == 2 and out.stderr.startswith("error: --config")
