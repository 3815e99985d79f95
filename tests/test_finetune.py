# SPDX-License-Identifier: Apache-2.0
"""A fine-tuning run as a user runs it: whole, killed, stopped, on another mesh, refused."""

import dataclasses
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from bfm import finetune, labeling, lm, material, opening
from bfm.jsonl import DataError, read_lines
from bfm.model.decoder import decode
from bfm.model.matmul import dot
from bfm.settings import (
    MeshSettings,
    ModelSettings,
    Settings,
    SettingsError,
    TrainSettings,
)
from bfm.sharding import ShardingError
from bfm.weights import WeightsError

ROOT = Path(__file__).parents[1]
STEPS = Path(__file__).with_name("steps.txt")
COLORS = ("red", "blue", "green")


def record(i: int) -> dict:
    color, place = COLORS[i % 3], i % 4
    turns = [
        {"role": "user", "content": f"hm {j}" if j != place else f"I like {color}"}
        for j in range(4)
    ]
    record = {"id": f"r{i}", "turns": turns, "query": "color?", "options": list(COLORS)}
    return record | {"answer": color, "evidence": [place], "meta": {"group": f"g{i // 2}"}}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make(tmp_path_factory.mktemp("finetune"))


def make(folder: Path) -> Path:
    """Fill a folder with data.jsonl and labels of a tiny model."""
    lines = [json.dumps(record(i)) + "\n" for i in range(12)]
    (folder / "data.jsonl").write_text("".join(lines))
    labeling.run(settings(folder), folder / "labels")
    return folder


def settings(folder: Path, **train) -> Settings:
    train = {
        "batch_size": 4,
        "tokens": 640,
        "lora_rank": 0,
        "steps": 6,
        "learning_rate": 5e-3,
    } | train
    mesh = train.pop("mesh", MeshSettings(data=1, fsdp=4, tensor=2))
    return Settings(
        model=ModelSettings(path="", arch="tiny"),
        data=f"jsonl:{folder / 'data.jsonl'}",
        labels=str(folder / "labels" / "labels.jsonl"),
        tau="0.0",
        prefilter_k=3,
        mesh=mesh,
        train=TrainSettings(**train),
    )


def command(folder: Path, workdir: Path, *flags: str) -> list[str]:
    return [
        *(
            sys.executable,
            str(ROOT / "launch" / "sft.py"),
            "--config",
            str(ROOT / "configs" / "tiny.py"),
        ),
        *("--workdir", str(workdir), f"--config.data=jsonl:{folder / 'data.jsonl'}"),
        f"--config.labels={folder / 'labels' / 'labels.jsonl'}",
        *("--config.split=all", "--config.limit=0"),
        *("--config.prefilter_k=3", "--config.train.batch_size=4", "--config.train.tokens=640"),
        *(
            "--config.train.steps=20",
            "--config.train.checkpoint_every=3",
            "--config.train.dev=0.3",
            *flags,
        ),
    ]


def environment(devices: int) -> dict[str, str]:
    # Compiled once and kept, so worth the compiler's time.
    flags = os.environ.get("XLA_FLAGS", "").replace("--xla_backend_optimization_level=0", "")
    return os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "XLA_FLAGS": flags}


def run_until(lines: int, number: int, args: list[str], workdir: Path, devices: int = 1) -> str:
    """Start a run, send it a signal once it has written so many metrics lines; return its output."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(args, env=environment(devices), stdout=pipe, stderr=pipe, text=True)
    metrics, deadline = workdir / "metrics.jsonl", time.monotonic() + 300
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= lines):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.002)
    process.send_signal(number)
    out, err = process.communicate()
    assert process.returncode == (0 if number == signal.SIGTERM else -number), err
    return out


def finish(args: list[str], devices: int = 1) -> None:
    done = subprocess.run(args, env=environment(devices), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def read(workdir: Path) -> list[tuple]:
    lines = read_lines(workdir / "metrics.jsonl")
    return [(m["step"], m["loss"], m["grad_norm"], m["learning_rate"], m["tokens"]) for m in lines]


@pytest.fixture(scope="module")
def whole(made):
    workdir = made / "whole"
    finish(command(made, workdir))
    return workdir


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 4])
def test_processes_train_as_one(made, whole, tmp_path, n):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    pipe, running = subprocess.PIPE, []
    for k in range(n):
        env = environment(1) | {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(n)}
        args = command(made, tmp_path / "many", f"--config.mesh.fsdp={n}")
        env |= {"JAX_PROCESS_ID": str(k)}
        running.append(subprocess.Popen(args, env=env, stdout=pipe, stderr=pipe, text=True))
    for process in running:
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
    many, one = np.array(read(tmp_path / "many")), np.array(read(whole))
    np.testing.assert_array_equal(many[:, [0, 3, 4]], one[:, [0, 3, 4]])
    np.testing.assert_allclose(many[:10, 1], one[:10, 1], rtol=1e-4)
    ours, alone = (read_lines(path / "dev.jsonl")[0] for path in (tmp_path / "many", whole))
    assert ours.keys() == alone.keys() and ours["logp_none"] == pytest.approx(
        alone["logp_none"], abs=1e-3
    )  # measured by all, written once
    assert lm.open_model(str(tmp_path / "many" / "export")).config.d_model == 64


@pytest.mark.slow
def test_killed_and_stopped_runs_end_as_a_whole_one(made, whole, tmp_path):
    killed, stopped = (tmp_path / name for name in ("killed", "stopped"))
    run_until(7, signal.SIGKILL, command(made, killed), killed)
    finish(command(made, killed))
    assert read(killed) == read(whole)
    assert (killed / "dev.jsonl").read_bytes() == (whole / "dev.jsonl").read_bytes()
    one, two = (load_file(w / "export" / "model.safetensors") for w in (whole, killed))
    assert one.keys() == two.keys() and all((one[n] == two[n]).all() for n in one)
    # Stopped by SIGTERM on two devices, gone on with on one: the same order, nearly the same numbers.
    out = run_until(6, signal.SIGTERM, command(made, stopped, "--config.mesh.fsdp=2"), stopped, 2)
    assert "checkpoint saved" in out
    at = len(read(stopped))
    assert 6 <= at < 20 and not (stopped / "export").exists()
    finish(command(made, stopped))
    moved, plain = np.array(read(stopped)), np.array(read(whole))
    np.testing.assert_array_equal(moved[:, [0, 3, 4]], plain[:, [0, 3, 4]])
    np.testing.assert_allclose(moved[: at + 1, 1], plain[: at + 1, 1], rtol=1e-4)


def steps(workdir: Path) -> str:
    """Write the first ten updates as a table: step, loss, norm of the gradient, rate, tokens."""
    return "".join("{} {:.6f} {:.6f} {:.9f} {}\n".format(*line) for line in read(workdir)[:10])


def test_updates_are_those_on_record(whole):
    """Ten updates, computed one after the other, stay what they were when somebody last looked.

    `python -m tests.test_finetune` writes tests/steps.txt anew; a change of numbers shows in review.
    """
    found, known = (
        np.array([line.split() for line in text.splitlines()], float)
        for text in (steps(whole), STEPS.read_text())
    )
    np.testing.assert_allclose(found[:, 1:3], known[:, 1:3], rtol=1e-3)
    np.testing.assert_array_equal(found[:, [0, 3, 4]], known[:, [0, 3, 4]])


def test_a_whole_run(made, whole, monkeypatch, capfd):
    workdir = whole
    losses = [m[1] for m in read(workdir)]
    assert len(losses) == 20 and np.mean(losses[-10:]) < 0.8 * np.mean(losses[:3])
    dev = read_lines(workdir / "dev.jsonl")
    assert [line["step"] for line in dev] == [0, 20]
    assert dev[-1]["n"] == dev[-1]["n_options"] == 4  # two groups of two
    for name in ("gate_f1", "gate_accuracy", "focus_f1", "accuracy_none", "accuracy_policy"):
        value, low, high = dev[-1][name]
        assert value is None or 0 <= low <= value <= high <= 1
    assert (workdir / "curves.png").stat().st_size > 5000
    policy = lm.load(str(workdir / "export"))
    base = lm.open_model("", "tiny", 0).load()
    assert policy.scaffold.tokenizer.encode("read 2") == base.scaffold.tokenizer.encode("read 2")
    changed = jax.tree.map(lambda a, b: float(abs(a - b).max()), policy.decoder, base.decoder)
    assert min(jax.tree.leaves(changed)) > 0  # full fine-tuning moves everything
    # Under other settings its folder is refused in one line.
    monkeypatch.syspath_prepend(str(ROOT / "launch"))
    mesh = ("--config.mesh.data=1", "--config.mesh.fsdp=4", "--config.mesh.tensor=2")
    argv = command(made, workdir, "--config.train.learning_rate=1e-4", *mesh)[1:]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(argv[0], run_name="__main__")
    assert ended.value.code == 2 and "learning_rate is 0.003 there" in capfd.readouterr().err


def test_a_reader_needs_no_labels(made, tmp_path):
    base = dataclasses.replace(settings(made, heads="reader", steps=2, dev=0.3), labels="")
    files = lm.open_model("", "tiny", 0)

    def showing(evidence, **changes):
        train = dataclasses.replace(base.train, evidence=evidence, **changes)
        return dataclasses.replace(base, train=train, max_focus=2)

    by_evidence = showing("evidence")
    for row in material.prepare(by_evidence, files).rows:
        text = files.scaffold.tokenizer.decode(row.ids)
        assert row.head == "reader" and text.count("I like") == 1 and "hm" not in text
    by_chance = showing("chance")
    found = finetune.run(showing("chance", dev=0.0), tmp_path / "run")
    assert found["rows"] == 12 and len(found["metrics"]) == 2 and not found["dev"]
    shown = [files.scaffold.tokenizer.decode(row.ids).count("User: ")
             for row in material.prepare(by_chance, files).rows]  # fmt: skip
    assert set(shown) == {1, 2}


def test_adapters_stand_in_for_the_export(made, tmp_path):
    asked = settings(made, heads="reader", evidence="chance", steps=2, dev=0.0, lora_rank=2)
    finetune.run(asked, tmp_path / "run")
    path, base = tmp_path / "run" / finetune.ADAPTER, lm.open_model("", "tiny", 0)
    tuned = opening.open_tuned(str(path), "policy", base)
    exported = lm.load(str(tmp_path / "run" / "export"))
    plain, ours = base.load(), tuned.load()
    moved = 0
    for w, a, b in zip(
        *map(jax.tree.leaves, (plain.decoder, ours.decoder, exported.decoder)), strict=True
    ):
        change = np.abs(b - w).max()
        moved += change > 0
        # The file holds both factors in bf16: each is off by at most 2^-9 of itself.
        assert np.abs(a - b).max() <= 2**-7 * change
    assert moved > 5 and ours.identity != plain.identity and tuned.sha256() != base.sha256()
    with pytest.raises(lm.ModelError, match=r"policy: .*adapters of other weights"):
        opening.open_tuned(str(path), "policy", lm.open_model("", "tiny", 1))
    with pytest.raises(lm.ModelError, match="other weights"):
        lm.adapted(exported, tuned.adapter)
    for content, reason in ((b"", "cannot be read as adapters"), (None, "holds no adapters")):
        other = tmp_path / "other.safetensors"
        if content is None:
            other = tmp_path / "run" / "export" / "model.safetensors"
        else:
            other.write_bytes(content)
        with pytest.raises(WeightsError, match=reason):
            opening.open_tuned(str(other), "policy", base)


BAD = {
    "does not divide train.batch_size=4": {"accumulation": 3},
    "there are only 12": {"batch_size": 200, "mesh": MeshSettings(data=8)},
    "do not divide over mesh.data x mesh.fsdp = 8": {"mesh": MeshSettings(data=8)},
    "is not a multiple of tensor=8": {"mesh": MeshSettings(data=1, fsdp=1, tensor=8)},
    "over the model's window": {"tokens": 100_000},
    "never cut": {"tokens": 60},
}


@pytest.mark.parametrize("reason", BAD)
def test_what_cannot_work_is_refused_before_the_workdir(made, tmp_path, reason):
    bad = settings(made, dev=0.0, heads="reader", **BAD[reason])
    with pytest.raises((SettingsError, DataError, ShardingError), match=reason):
        finetune.run(bad, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_labels_of_something_else_are_refused(made, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "data.jsonl").write_text("".join(json.dumps(record(i)) + "\n" for i in range(11)))
    mixed = dataclasses.replace(settings(other), labels=settings(made).labels)
    with pytest.raises(DataError, match="made with another data"):
        finetune.run(mixed, tmp_path / "run")
    with pytest.raises(DataError, match="made with another weights"):
        finetune.run(dataclasses.replace(settings(made), seed=1), tmp_path / "run")
    torn = tmp_path / "torn"
    torn.mkdir()
    whole = (made / "labels" / "labels.jsonl").read_bytes()
    (torn / "labels.meta.json").write_bytes((made / "labels" / "labels.meta.json").read_bytes())
    for content, reason in (
        (whole[:-5], "torn"),
        (whole[: whole.index(b"\n") + 1], "holds 1 labels of 12"),
    ):
        (torn / "labels.jsonl").write_bytes(content)
        bad = dataclasses.replace(settings(made), labels=str(torn / "labels.jsonl"))
        with pytest.raises(DataError, match=reason):
            finetune.run(bad, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.torch
def test_transformers_computes_what_was_trained(whole):
    """Logits of the export after training agree within 1e-4 of the largest."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    policy = lm.load(str(whole / "export"))
    ids = policy.scaffold.tokenizer.encode("read 2, 1. I like blue. color?")
    at = jnp.arange(len(ids))[None]
    x_BTD, _ = decode(policy.decoder, jnp.array([ids]), at, jnp.ones_like(at))
    ours = np.asarray(dot(x_BTD, policy.decoder.unembed_VD.T))[0]
    theirs = AutoModelForCausalLM.from_pretrained(whole / "export", dtype=torch.float32)
    with torch.no_grad():
        logits = theirs(torch.tensor([ids])).logits[0].numpy()
    assert np.abs(ours - logits).max() < 1e-4 * np.abs(logits).max()


if __name__ == "__main__":
    import tests.conftest  # noqa: F401  eight devices

    with tempfile.TemporaryDirectory() as scratch:
        made = make(Path(scratch))
        finish(command(made, made / "whole"))
        STEPS.write_text(steps(made / "whole"))
