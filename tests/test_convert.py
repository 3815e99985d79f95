# SPDX-License-Identifier: Apache-2.0
"""launch/convert.py: what it prints, what it writes, and its exit codes."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests import models
from tests.test_export import gguf_file

SCRIPT = Path(__file__).parents[1] / "launch" / "convert.py"


@pytest.fixture
def convert(monkeypatch, capsys):
    """Run the script in this process; return its exit code, stdout and stderr."""

    def run(*args):
        monkeypatch.syspath_prepend(str(SCRIPT.parent))
        monkeypatch.setattr(sys, "argv", ["convert.py", *map(str, args)])
        with pytest.raises(SystemExit) as caught:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        return caught.value.code, *capsys.readouterr()

    return run


def test_help_explains():
    done = subprocess.run(
        [sys.executable, SCRIPT, "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "usage: convert.py" in done.stdout
    for word in ("--model", "--out", "--dtype", ".gguf", "transformers", "Exit code 1"):
        assert word in done.stdout


def test_a_gguf_without_torch(tmp_path):
    code = f"import runpy, sys; sys.modules['torch'] = None; sys.path[0] = {str(SCRIPT.parent)!r}; "
    code += f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    command = [sys.executable, "-c", code, "--model", gguf_file(tmp_path), "--out", "out"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    out, err = done.stdout, done.stderr
    assert done.returncode == 0, err
    assert "llama, float32 (stored: float32)" in out
    assert "the export against the model: " in out and "of the largest logit, within 1e-05" in out
    assert "the same ids for 3 of 3 texts" in out
    assert "transformers on the export: not compared, torch is not installed" in out
    assert "reading m.gguf" in err and "writing" in err and "(100%)" in err
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_the_default_dtype_is_the_stored_one(convert, tmp_path):
    folder = models.llama_folder(tmp_path / "in")
    stored = load_file(folder / "model.safetensors")
    narrow = {name: array.astype("bfloat16") for name, array in stored.items()}
    save_file(narrow, folder / "model.safetensors", {"format": "pt"})
    code, out, _ = convert("--model", folder, "--out", tmp_path / "out")
    assert code == 0 and "bfloat16 (stored: bfloat16)" in out and "rounding" not in out
    again = load_file(tmp_path / "out" / "model.safetensors")
    assert all((again[name].view(np.int16) == narrow[name].view(np.int16)).all() for name in stored)
    code, out, _ = convert("--model", folder, "--out", tmp_path / "wide", "--dtype", "float32")
    assert code == 0 and "float32 (stored: bfloat16)" in out and "0.0e+00" in out


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_agrees(convert, tmp_path, dtype):
    pytest.importorskip("torch")
    folder = models.folder(tmp_path / "in", models.FAMILIES["qwen3"])
    code, out, _ = convert("--model", folder, "--out", tmp_path / "out", "--dtype", dtype)
    assert code == 0 and "the export against transformers:" in out and "NOT" not in out
    if dtype == "bfloat16":
        moved = float(out.split("moved logits by ")[1].split()[0])
        assert 1e-4 < moved < 0.1  # 2**-9 a weight, over three layers


@pytest.mark.torch
def test_a_disagreement_is_code_1(convert, tmp_path, monkeypatch):
    """transformers reads another rope base than the one that was written."""
    pytest.importorskip("torch")
    import transformers

    load = transformers.AutoModelForCausalLM.from_pretrained

    def other(folder, **options):
        config = json.loads((Path(folder) / "config.json").read_text())
        config["rope_parameters"]["rope_theta"] = 77.0
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return load(folder, **options)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", other)
    folder = models.folder(tmp_path / "in", models.FAMILIES["qwen3"])
    code, out, _ = convert("--model", folder, "--out", tmp_path / "out")
    assert code == 1 and "transformers: " in out and "NOT within 0.0001" in out
    assert "the export against the model: 0.0e+00" in out


def test_bits_that_differ_are_code_1(convert, tmp_path, monkeypatch):
    """A disk that returns another weight than was written."""
    from bfm import export as module

    write = module.export

    def spoiled(decoder, folder, *rest, **options):
        write(decoder, folder, *rest, **options)
        tensors = load_file(Path(folder) / "model.safetensors")
        tensors["model.norm.weight"] = np.nextafter(tensors["model.norm.weight"], 9)
        save_file(tensors, Path(folder) / "model.safetensors", {"format": "pt"})

    monkeypatch.setattr(module, "export", spoiled)
    folder = models.llama_folder(tmp_path / "in")
    code, out, _ = convert("--model", folder, "--out", tmp_path / "out")
    assert code == 1 and "NOT within 0\n" in out


BAD = {
    "no model": (["--model", "{tmp}/none", "--out", "{tmp}/o"], "no such file or folder"),
    "no flag": (["--model", "{model}"], "--out"),
    "a dtype": (["--model", "{model}", "--out", "{tmp}/o", "--dtype", "int8"], "'int8'"),
    "not empty": (["--model", "{model}", "--out", "{tmp}"], "holds x.gguf, which no export wrote"),
    "a file": (["--model", "{model}", "--out", "{tmp}/x.gguf"], "is a file"),
    "below a file": (["--model", "{model}", "--out", "{tmp}/x.gguf/o"], "no folder to write to"),
    "no GGUF": (["--model", "{tmp}/x.gguf", "--out", "{tmp}/o"], "not GGUF"),
    "itself": (["--model", "{model}", "--out", "{model}"], "config.json, which no export wrote"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_code_2(convert, tiny_folder, tmp_path, case):
    args, named = BAD[case]
    (tmp_path / "x.gguf").write_text("no model")
    code, out, err = convert(*(a.format(model=tiny_folder, tmp=tmp_path) for a in args))
    assert code == 2 and named in err and err.count("\n") == 1 and not out
    assert [path.name for path in tmp_path.iterdir()] == ["x.gguf"]


def test_an_export_is_not_converted_onto_itself(convert, tiny_folder, tmp_path):
    assert convert("--model", tiny_folder, "--out", tmp_path / "out")[0] == 0
    code, _, err = convert("--model", tmp_path / "out", "--out", tmp_path / "out")
    assert code == 2 and "is the model itself" in err
