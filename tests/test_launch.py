# SPDX-License-Identifier: Apache-2.0
"""The doors: help, exit codes, one line on stderr, nothing written on bad input."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bfm.settings import Settings, SettingsError, default_config, describe
from tests import models
from tests.test_labeling import record, write

ROOT = Path(__file__).parents[1]
CONFIG = str(ROOT / "configs" / "smollm2_135m.py")


def launch(*args, script="label.py", cwd=None, **env):
    """Run a script as a user does."""
    return subprocess.run(
        [sys.executable, str(ROOT / "launch" / script), *map(str, args)],
        capture_output=True, text=True, cwd=cwd, env={**os.environ, **env}, check=False,
    )  # fmt: skip


@pytest.fixture
def refused(monkeypatch, capfd):
    """Run a script in this process, which takes no seconds to start: for what never gets to work."""
    monkeypatch.syspath_prepend(str(ROOT / "launch"))
    monkeypatch.setenv("XDG_CACHE_HOME", "/nonexistent")  # nothing may be kept or obtained

    def run(*args, script="label.py"):
        monkeypatch.setattr(sys, "argv", [script, *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / "launch" / script), run_name="__main__")
        out, err = capfd.readouterr()
        return SimpleNamespace(returncode=ended.value.code, stdout=out, stderr=err)

    return run


@pytest.fixture
def args(tiny_folder, tmp_path):
    data = write(tmp_path / "data.jsonl", [record(0, n=2)])
    return [
        "--config", CONFIG, "--workdir", tmp_path / "w",
        f"--config.model.path={tiny_folder}", f"--config.data={data}",
    ]  # fmt: skip


def test_label_from_another_folder(args, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    done = launch(*args, cwd=tmp_path / "elsewhere")
    assert done.returncode == 0, done.stderr
    assert "1 records" in done.stdout and "tokens/s" in done.stdout
    assert "ETA" in done.stderr
    assert json.loads((tmp_path / "w" / "labels.jsonl").read_text())["n_turns"] == 2


def test_bench_measures_itself(args, tmp_path):
    """No figure is checked, only that each is measured: time never decides a test."""
    small = ["--config.bench.history=2", "--config.bench.turns=2,4", "--config.bench.peer=none"]
    done = launch(*args, *small, "--config.bench.questions=1,2", script="bench.py")
    assert done.returncode == 0, done.stderr
    figures = {f["name"]: f for f in json.loads((tmp_path / "w" / "bench.json").read_text())}
    assert {"share of that peak", "questions: 2", "turns: 4"} < figures.keys()
    assert all(f["value"] > 0 for name, f in figures.items() if "programs" not in name)
    assert (tmp_path / "w" / "scaling.png").stat().st_size > 10_000
    assert "share of that peak" in done.stdout and "ETA" in done.stderr


def test_help_explains_every_setting(refused):
    done = refused("--help")
    assert done.returncode == 0
    for name, _, text in describe():
        assert name in done.stdout and text.split()[0] in done.stdout


BAD = {
    "unknown key": (["--config.batchsize=3"], "batchsize"),
    "unknown group key": (["--config.label.form=3"], "form"),
    "ill-typed": (["--config.batch_size=many"], "many"),
    "out of range": (["--config.batch_size=0"], "batch_size: must be at least 1"),
    "negative": (["--config.limit=-1"], "limit: must be at least 0"),
    "not among": (["--config.label.answer=words"], "label.answer: 'words'"),
    "tau": (["--config.tau=nan"], "tau: 'nan'"),
    "shards": (["--config.mesh.fsdp=0"], "mesh.fsdp: must be at least 1"),
    "steps": (["--config.train.steps=-1"], "train.steps: must be at least 0"),
    "rate": (["--config.train.learning_rate=nan"], "train.learning_rate: must be between"),
    "missing data": (["--config.data=jsonl:/no/such/file"], "cannot be read"),
    "unknown data": (["--config.data=nothing"], "data: 'nothing' is unknown"),
    "missing model": (["--config.model.path=/no/such/folder"], "no such file or folder"),
    "missing config": (["--config", "/no/config.py"], "/no/config.py"),
    "a stray word": (["word"], "'word'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_code_2(args, tmp_path, refused, name):
    extra, named = BAD[name]
    done = refused(*args, *extra)
    assert done.returncode == 2, done.stderr
    assert named in done.stderr
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize(
    ("config", "named"),
    [("nothere.py", "No such file or directory"), (".", "Is a directory")],
)
def test_a_config_that_is_no_file_is_one_line_and_code_2(config, named, tmp_path, refused):
    """Without an override nothing looks inside while flags are read."""
    done = refused("--config", tmp_path / config, "--workdir", tmp_path / "w")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert named in done.stderr and str(tmp_path) in done.stderr
    assert not (tmp_path / "w").exists()


def test_a_file_given_as_a_benchmark_is_told_how_to_be_read(args, tmp_path, refused):
    place = tmp_path / "data.jsonl"
    done = refused(*args, f"--config.data={place}")
    assert done.returncode == 2 and f"give jsonl:{place}" in done.stderr
    assert done.stderr.count("\n") == 1 and not (tmp_path / "w").exists()


@pytest.mark.parametrize("content", [b"", b"\n\n", b"{\n", b'{"id": "a"}\n', b"\xff\n"])
def test_bad_data_is_one_line_and_code_2(args, tmp_path, refused, content):
    (tmp_path / "data.jsonl").write_bytes(content)
    done = refused(*args)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "data.jsonl" in done.stderr and not (tmp_path / "w").exists()


def test_a_model_of_another_architecture_is_refused(args, tmp_path):
    folder = models.llama_folder(tmp_path / "other")
    (folder / "config.json").write_text(json.dumps(models.LLAMA | {"model_type": "gpt2"}))
    done = launch(*args, f"--config.model.path={folder}")
    assert done.returncode == 2 and "model_type: 'gpt2'" in done.stderr
    assert done.stderr.count("\n") == 1 and "Llama" in done.stderr


def test_a_config_file_with_a_misspelt_key_is_refused(args, tmp_path, refused):
    config = tmp_path / "mine.py"
    config.write_text(
        "from bfm.settings import default_config\n"
        "def get_config():\n    c = default_config()\n    c.taw = '1'\n    return c\n"
    )
    done = refused("--config", config, *args[2:])
    assert done.returncode == 2 and "taw" in done.stderr and done.stderr.count("\n") == 1


def test_settings_and_the_config_dict_are_the_same():
    assert Settings.of(default_config()) == Settings()
    with pytest.raises(SettingsError, match="batch_size: must be int, not True"):
        Settings.of({"batch_size": True})
    with pytest.raises(SettingsError, match="label: must be a group"):
        Settings.of({"label": 3})


def test_every_config_builds():
    for path in sorted((ROOT / "configs").glob("*.py")):
        Settings.of(runpy.run_path(str(path))["get_config"]())
        assert "python launch/" in path.read_text()


def test_importing_the_kernel_loads_nothing_else():
    code = (
        "import sys, bfm, bfm.saliency\n"
        "heavy = {'transformers', 'tokenizers', 'torch', 'ml_collections', 'gguf'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
        "from jax._src import xla_bridge\n"
        "print(xla_bridge.backends_are_initialized())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split("\n")[1] == "False", done.stderr
    assert done.stdout.split("\n")[0] == "[]", done.stdout
