# SPDX-License-Identifier: Apache-2.0
"""The figures in results/: what their commands would run today is what they say was run."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from bfm.settings import Settings
from launch import _door

ROOT = Path(__file__).parents[1]
RECORDS = {
    path.stem: json.loads(path.read_text("utf-8")) for path in (ROOT / "results").glob("*.json")
}
RUNS = [(name, run) for name, record in sorted(RECORDS.items()) for run in record.get("runs", ())]
TRAINED = [
    (name, one) for name, record in sorted(RECORDS.items()) for one in record.get("trained", ())
]


def settings_of(command: str, monkeypatch) -> tuple[str, Settings, Path]:
    """Return script, settings and workdir of a command line, as the script itself would read it."""
    python, script, *flags = shlex.split(command)
    assert python == "python" and (ROOT / script).exists()
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [script, *flags])
    monkeypatch.setattr(_door, "enable_compile_cache", lambda: None)
    return script, *_door._parse("", True)


@pytest.mark.parametrize(("name", "run"), RUNS, ids=lambda value: value)
def test_a_command_runs_what_the_figures_are_of(name, run, monkeypatch):
    record = RECORDS[name]["runs"][run]
    script, settings, _ = settings_of(record["command"], monkeypatch)
    read = [settings.label.from_checkpoint, settings.policy, settings.eval.reader]
    read += [pair.partition("=")[2] for pair in settings.eval.readers.split(",")]
    made = RECORDS[name].get("trained", {})
    assert all(path in made for path in read if path.startswith("runs/"))
    if script != "launch/eval.py":
        return
    identity, label, train = record["identity"], settings.label, settings.train
    assert identity["dtype"] == settings.model.dtype
    assert ",".join(identity["methods"]) == settings.methods
    assert record["split"] == settings.split
    assert record["n"] == (settings.sample or settings.limit or record["n"])
    now = {
        "answer_form": label.answer,
        "norm": label.norm,
        "tokens": train.tokens,
        "gate": train.gate,
    }
    for key, value in identity["settings"].items():
        place = settings if hasattr(settings, key) else settings.eval
        assert value == now.get(key, getattr(place, key, None)), key


@pytest.mark.parametrize(("name", "one"), TRAINED, ids=lambda value: value)
def test_a_reader_is_made_where_it_is_read(name, one, monkeypatch):
    made = RECORDS[name]["trained"][one]
    script, settings, workdir = settings_of(made["command"], monkeypatch)
    assert script == "launch/sft.py" and str(workdir / "export") == one
    assert not settings.labels or settings.labels.startswith("runs/")
