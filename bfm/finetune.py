# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning from a labels file: rows, steps, checkpoints, measurements, and an export to serve.

Started again after a kill it goes on from its newest checkpoint with the same numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils

from bfm import checkpoint, export, lora, sharding, training, weights
from bfm.dev import measure
from bfm.jsonl import read_lines, whole
from bfm.lm import LM, ModelFiles
from bfm.material import Material, prepare
from bfm.model.matmul import bf16_pays
from bfm.model.state import fetch
from bfm.opening import open_base
from bfm.progress import Meter
from bfm.settings import Settings, SettingsError
from bfm.workdir import make_workdir

METRICS, DEV, EXPORT, CHECKPOINTS = "metrics.jsonl", "dev.jsonl", "export", "checkpoints"
ADAPTER = "adapter.safetensors"


def run(settings: Settings, workdir: Path) -> dict[str, Any]:
    """Fine-tune into `workdir` and return a summary: steps, loss, measurements before and after.

    Everything that can be wrong with settings, model, labels and data is found before the workdir is
    touched. Raises SettingsError, DataError, ShardingError, CheckpointError, WorkdirError or the errors
    of `open_model`.
    """
    train = settings.train
    if needs_labels(settings):
        raise SettingsError("labels: missing; give the labels.jsonl of launch/label.py")
    files = open_base(settings)
    mesh = check(settings, files)
    material = prepare(settings, files)
    if train.batch_size > len(material.rows):
        raise SettingsError(
            f"train.batch_size: {train.batch_size} rows, but there are only {len(material.rows)}"
        )
    steps = train.steps or max(1, round(train.epochs * len(material.rows) / train.batch_size))
    make_workdir(workdir)
    export.check_target(workdir / EXPORT)
    identity = {
        **files.identity(settings.model.dtype), **material.identity, "steps": steps,
        "train": dataclasses.asdict(train), "heads": _heads(settings),
    }  # fmt: skip
    ignored = ("checkpoint_every", "keep", "eval_every", "dev_limit")  # move no parameter
    for name in ignored:
        del identity["train"][name]
    best = "score" if train.eval_every else ""
    with (
        checkpoint.Checkpoints(workdir / CHECKPOINTS, train.keep, identity, best) as checkpoints,
        _sigterm() as stopped,
    ):
        learner = Learner(settings, files, mesh, steps)
        return _loop(learner, material, checkpoints, stopped, workdir, steps)


def _heads(settings: Settings) -> dict[str, Any]:
    names = ("unit", "context_turns", "max_focus", "prefilter_k", "seed")
    heads = {name: getattr(settings, name) for name in names} | dataclasses.asdict(settings.label)
    return heads | {"k": settings.eval.k, "budget": settings.eval.budget}


# --- checks ------------------------------------------------------------------------------------


def needs_labels(settings: Settings) -> bool:
    """Say whether a run needs labels that no setting names: all do but a reader's without silver."""
    alone = settings.train.heads == "reader" and settings.train.evidence != "silver"
    return not settings.labels and not alone


def check(settings: Settings, files: ModelFiles) -> jax.sharding.Mesh:
    """Compare settings, model and mesh before any data or weight is read; return the mesh.

    Raises SettingsError or ShardingError (one line).
    """
    train, config = settings.train, files.config
    if train.batch_size % train.accumulation:
        raise SettingsError(
            f"train.accumulation: {train.accumulation} does not divide "
            f"train.batch_size={train.batch_size}"
        )
    if train.tokens > config.window:
        raise SettingsError(
            f"train.tokens: {train.tokens} is over the model's window of {config.window}"
        )
    mesh = sharding.make_mesh(settings.mesh.data, settings.mesh.fsdp, settings.mesh.tensor)
    shards = sharding.row_shards(mesh)
    if not train.packing and (train.batch_size // train.accumulation) % shards:
        raise SettingsError(
            f"train.batch_size: {train.batch_size} rows in {train.accumulation} part(s) do not divide "
            f"over mesh.data x mesh.fsdp = {shards}"
        )
    sharding.shardings(lora.base_shapes(config), mesh)
    return mesh


# --- the learner -------------------------------------------------------------------------------


class Learner:
    """A model on a mesh while it is trained: frozen weights, the step, and views of a state."""

    def __init__(self, settings: Settings, files: ModelFiles, mesh, steps: int):
        self.settings, self.files, self.mesh = settings, files, mesh
        train, config = settings.train, files.config
        wide = settings.model.dtype == "bfloat16" and not bf16_pays()
        self.dtype = "float32" if wide else settings.model.dtype
        scale = train.lora_alpha / train.lora_rank if train.lora_rank else 1.0
        self.model = training.Model(config, self.dtype, scale, train.remat)
        self.optimizer = training.make_optimizer(train, steps)
        self.schedule = training.make_schedule(train, steps)
        abstract = jax.eval_shape(lambda: training.new_state(self._shapes(), self.optimizer))
        self.shardings = training.state_shardings(abstract, mesh)
        self.abstract = jax.tree.map(
            lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s),
            abstract, self.shardings,
        )  # fmt: skip
        self.placed = sharding.shardings(lora.base_shapes(config), mesh)
        self.frozen: dict[str, jax.Array] = {}
        if train.lora_rank:
            self.frozen = self._weights(settings.model.dtype, self.dtype)
        self.step = training.Step(self.model, self.optimizer, mesh, self.shardings)

    def _shapes(self) -> dict[str, jax.Array]:
        train, config = self.settings.train, self.files.config
        rank = train.lora_rank
        shapes = lora.adapter_shapes(config, rank) if rank else lora.base_shapes(config)
        return {name: jnp.zeros(shape, train.master) for name, shape in shapes.items()}

    def _weights(self, rounded: str, held: str) -> dict[str, jax.Array]:
        """Read the model's weights onto the mesh, rounded to one dtype and held in another."""
        decoder = weights.read(self.files.source, rounded, sharding=self.placed.__getitem__)
        params = lora.flatten(decoder)
        return {name: x if x.dtype == jnp.float32 else x.astype(held) for name, x in params.items()}

    def start(self) -> dict:
        """Return the state before the first update."""
        train = self.settings.train
        if train.lora_rank:
            params = lora.init_adapters(
                self.files.config, train.lora_rank, self.settings.seed, train.master
            )
        else:
            params = self._weights(self.settings.model.dtype, train.master)
        state = training.new_state(params, self.optimizer)
        return jax.tree.map(jax.device_put, state, self.shardings)

    def lm(self, state: dict) -> LM:
        """Return the model of a state, for scoring (adapters applied, not merged)."""
        narrow = {
            name: x.astype(training.product_dtype(name, self.model))
            for name, x in state["params"].items()
        }
        decoder = lora.assemble(self.files.config, {**self.frozen, **narrow}, self.model.scale)
        return LM(decoder, self.files.scaffold, "")

    def export(self, state: dict, workdir: Path) -> None:
        """Write the model of a state (all processes call).

        As a Hugging Face folder with adapters merged, and the adapters by themselves in bf16.
        """
        decoder = jax.jit(lora.merge)(self.lm(state).decoder)
        adapters = state["params"] if self.settings.train.lora_rank else {}
        if jax.process_count() > 1:  # each holds a part; the first writes
            decoder, adapters = jax.tree.map(fetch, (decoder, adapters))
        if jax.process_index():
            return
        if adapters:
            base, scale = self.files.source.sha256(), self.model.scale
            lora.write(workdir / ADAPTER, adapters, scale, base, "bfloat16")
        tokenizer, dtype = self.files.scaffold.tokenizer, self.settings.model.dtype
        export.export(decoder, workdir / EXPORT, tokenizer, dtype)


# --- the loop ----------------------------------------------------------------------------------


def _loop(learner: Learner, material: Material, checkpoints, stopped, workdir, steps: int) -> dict:
    settings, train = learner.settings, learner.settings.train
    done = checkpoints.latest() or 0
    if done:
        state, _ = checkpoints.restore(done, learner.abstract)
    else:
        state = learner.start()
    if writes := jax.process_index() == 0:
        _drop_after(workdir / METRICS, done)
        _drop_after(workdir / DEV, done if done else -1)
    # Random access by place: where a run goes on follows from its step alone.
    order = grain.MapDataset.range(len(material.rows)).seed(settings.seed).shuffle().repeat()
    shards = sharding.row_shards(learner.mesh)

    def look(step: int) -> dict[str, float] | None:
        """Measure on held-out examples; return what checkpoints are ranked by."""
        if not material.dev:
            return None
        # Every process does the same work, each on its part of the model.
        found = measure(learner.lm(state), material.dev[: train.dev_limit], settings)
        if writes:
            _append(workdir / DEV, {"step": step, **found})
        return {"score": found["score"]}

    if not done:
        look(0)
    with Meter("training", steps, "steps") as meter:
        meter.skip(done)
        for step in range(done, steps):
            started = time.perf_counter()
            places = range(step * train.batch_size, (step + 1) * train.batch_size)
            rows = [material.rows[order[i]] for i in places]
            parts = training.split_batch(rows, train, shards)
            state, metrics = learner.step(state, learner.frozen, parts)
            loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
            if not math.isfinite(loss + norm):
                raise ArithmeticError(
                    f"step {step + 1}: loss {loss}, gradient norm {norm}: a lower train.learning_rate "
                    "or train.clip may help"
                )
            if writes:
                _append(workdir / METRICS, {
                    "step": step + 1, "loss": loss, "grad_norm": norm,
                    "learning_rate": float(learner.schedule(step)),
                    "tokens": sum(len(row.ids) for row in rows),
                    "seconds": round(time.perf_counter() - started, 4),
                })  # fmt: skip
            meter.add(1)
            last = step + 1 == steps
            due = bool(train.eval_every) and (step + 1) % train.eval_every == 0
            ranked = look(step + 1) if due or last else None
            stop = stopped(step + 1)
            if last or due or stop or (step + 1) % train.checkpoint_every == 0:
                position = {"next_row": (step + 1) * train.batch_size}
                checkpoints.save(step + 1, state, position, ranked if train.eval_every else None)
            if stop and not last:
                return {"stopped": step + 1, "steps": steps}
    checkpoints.close()
    learner.export(state, workdir)
    return {
        "stopped": 0, "steps": steps, "rows": len(material.rows), "counts": material.counts,
        "metrics": read_lines(workdir / METRICS), "dev": read_lines(workdir / DEV),
    }  # fmt: skip


@contextlib.contextmanager
def _sigterm() -> Iterator[Any]:
    """Give a function that says after a step whether SIGTERM has come: the run then saves and ends.

    Several processes agree on the step; jax's own handler listens for them.
    """
    if jax.process_count() > 1:
        yield multihost_utils.reached_preemption_sync_point
        return
    came = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        yield lambda step: bool(came)
    finally:
        signal.signal(signal.SIGTERM, before)


def _append(path: Path, line: dict[str, Any]) -> None:
    with open(path, "a", encoding="utf-8", newline="\n") as file:
        file.write(json.dumps(line) + "\n")


def _drop_after(path: Path, step: int) -> None:
    """Keep the lines up to a step: those after it are computed again."""
    if path.exists():
        kept = [line for line in read_lines(path) if line["step"] <= step]
        with whole(path) as file:
            file.writelines(json.dumps(line) + "\n" for line in kept)
