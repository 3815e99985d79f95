# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning: loss over the kernel, gradients by parts, AdamW, all as pure functions of named arrays.

The loss of an update is a weighted sum of -log p over answer tokens divided by the sum of weights of
the whole batch, so it does not depend on how the batch is cut into parts, rows or devices.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bfm import sharding
from bfm.batching import bucket
from bfm.likelihood import Spans, span_logprobs
from bfm.lora import assemble
from bfm.rows import Row
from bfm.settings import TrainSettings


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows as arrays: B sequences of T tokens, n answer tokens each (padded), C = 1 target.

    tokens_BT, positions_BT, segments_BT: int32 as `decode` takes them; several rows may share a
    sequence as segments 1, 2, .. spans: where the answer tokens are predicted. weight_Bn: fp32, 0 at
    padding.
    """

    tokens_BT: Any
    positions_BT: Any
    segments_BT: Any
    spans: Spans
    weight_Bn: Any


@dataclasses.dataclass(frozen=True)
class Model:
    """What a step needs besides arrays: hashable, so that one program serves every call."""

    config: Any
    dtype: str  # of products
    scale: float  # of adapters
    remat: bool
    mesh: jax.sharding.Mesh | None = None  # over which parameters are split


# --- batches -----------------------------------------------------------------------------------


def make_batch(
    bins: Sequence[Sequence[Row]], height: int, width: int, controller_weight: float
) -> Batch:
    """Lay rows out as arrays of height x width: `bins[i]` are the rows that share sequence i."""
    # At least 32 answer tokens and half-octave widths: few programs for rows of all lengths.
    n = bucket(max(32, *(sum(len(r.ids) - r.start for r in rows) for rows in bins)))
    tokens, positions, segments = (np.zeros((height, width), np.int32) for _ in range(3))
    index, span = np.zeros((height, n), np.int32), np.full((height, n), -1, np.int32)
    target, weight = np.zeros((height, n, 1), np.int32), np.zeros((height, n), np.float32)
    for i, rows in enumerate(bins):
        at = place = 0
        for segment, row in enumerate(rows, start=1):
            end, answers = at + len(row.ids), len(row.ids) - row.start
            tokens[i, at:end] = row.ids
            positions[i, at:end] = np.arange(len(row.ids))
            segments[i, at:end] = segment
            here = slice(place, place + answers)
            index[i, here] = np.arange(at + row.start - 1, end - 1)
            target[i, here, 0] = row.ids[row.start :]
            span[i, here] = 0
            weight[i, here] = controller_weight if row.head == "controller" else 1.0
            at, place = end, place + answers
    return Batch(tokens, positions, segments, Spans(index, target, span), weight)


def pack(lengths: Sequence[int], width: int) -> list[list[int]]:
    """Put rows into sequences of `width` tokens: longest first, each into the first that has room."""
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = next((b for b, left in enumerate(room) if left >= lengths[i]), len(bins))
        if fits == len(bins):
            bins.append([])
            room.append(width)
        bins[fits].append(i)
        room[fits] -= lengths[i]
    return bins


def split_batch(rows: Sequence[Row], train: TrainSettings, shards: int) -> list[Batch]:
    """Cut the rows of an update into its parts (`accumulation`), each with rows for every shard.

    Rows of like length share a part, so that padding is small; packing fills sequences of
    `train.tokens`. Missing rows are empty sequences of weight 0.
    """
    order = sorted(range(len(rows)), key=lambda i: (-len(rows[i].ids), i))
    per_part = train.batch_size // train.accumulation
    parts = [order[i : i + per_part] for i in range(0, len(order), per_part)]
    batches = []
    for part in parts:
        chosen = [rows[i] for i in part]
        if train.packing:
            packed = pack([len(row.ids) for row in chosen], train.tokens)
            bins = [[chosen[k] for k in members] for members in packed]
            height, width = -(-len(bins) // shards) * shards, train.tokens
        else:
            bins = [[row] for row in chosen]
            height, width = per_part, bucket(len(chosen[0].ids), parts=2)
        batches.append(make_batch(bins, height, width, train.controller_weight))
    return batches


# --- loss and gradients ------------------------------------------------------------------------


def loss_sum(
    params: Mapping[str, jax.Array], frozen: Mapping[str, jax.Array], batch: Batch, model: Model
) -> jax.Array:
    """Return the weighted sum of -log p of the answer tokens of a batch: nats, fp32."""
    narrow = {name: x.astype(product_dtype(name, model)) for name, x in params.items()}
    named = {**frozen, **narrow}
    if model.mesh is not None:
        named = sharding.spread(named, model.mesh)
    decoder = assemble(model.config, named, model.scale)
    logp_BnC, _ = span_logprobs(
        decoder, batch.tokens_BT, batch.positions_BT, batch.segments_BT, batch.spans,
        remat=model.remat,
    )  # fmt: skip
    return -jnp.sum(logp_BnC[..., 0] * batch.weight_Bn)


def product_dtype(name: str, model: Model) -> str:
    # Decay rates and the norm behind them are published in fp32 and stay so.
    return "float32" if name.endswith(("log_rate_H", "out_norm_v")) else model.dtype


def add_gradients(params, frozen, batch: Batch, sums, model: Model):
    """Return `sums` = (gradients, loss, weight) with one part of a batch added, fp32."""
    loss, grads = jax.value_and_grad(loss_sum)(params, frozen, batch, model)
    total, loss_total, weight = sums
    total = jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total, grads)
    return total, loss_total + loss, weight + batch.weight_Bn.sum()


def update(state: dict, sums, optimizer: optax.GradientTransformation) -> tuple[dict, dict]:
    """Return the next state and the metrics of an update: loss (nats a token), gradient norm."""
    total, loss, weight = sums
    grads = jax.tree.map(lambda g: g / weight, total)
    changes, opt = optimizer.update(grads, state["opt"], state["params"])
    params = jax.tree.map(
        lambda p, c: (p.astype(jnp.float32) + c).astype(p.dtype), state["params"], changes
    )
    metrics = {"loss": loss / weight, "grad_norm": optax.tree.norm(grads), "weight": weight}
    return {"step": state["step"] + 1, "params": params, "opt": opt}, metrics


def make_optimizer(train: TrainSettings, steps: int) -> optax.GradientTransformation:
    """Return AdamW (betas 0.9, 0.95) with clipping and the schedule of `make_schedule`.

    Weight decay falls on matrices only (arXiv 1711.05101), not on norms, biases and rates.
    """
    return optax.chain(
        optax.clip_by_global_norm(train.clip),
        optax.adamw(
            make_schedule(train, steps), b1=0.9, b2=0.95, weight_decay=train.weight_decay,
            mask=decayed, mu_dtype=train.master,
        ),
    )  # fmt: skip


def make_schedule(train: TrainSettings, steps: int) -> optax.Schedule:
    """Return the learning rate by update (from 0): warm-up, then decay to a tenth over `steps`."""
    rise = round(train.warmup * steps)
    fall = max(1, steps - rise)
    height = train.learning_rate
    after = {
        "cosine": lambda: optax.cosine_decay_schedule(height, fall, alpha=0.1),
        "linear": lambda: optax.linear_schedule(height, 0.1 * height, fall),
        "constant": lambda: optax.constant_schedule(height),
    }[train.schedule]()
    # The first update already moves: its rate is height / (rise + 1), not 0.
    warm = optax.linear_schedule(height / (rise + 1), height, max(1, rise))
    return optax.join_schedules([warm, after], [rise])


def decayed(params: Mapping[str, jax.Array]) -> dict[str, bool]:
    """Say of each parameter whether weight decay falls on it: those with two axes or more a layer."""
    return {name: len(name.rpartition("_")[2]) > 1 for name in params}


class Step:
    """One update of a state on a mesh: compiled once a shape, buffers of the old state reused."""

    def __init__(self, model: Model, optimizer: optax.GradientTransformation, mesh, shardings):
        """shardings: of the state, a tree like it (`state_shardings`)."""
        self.mesh = mesh
        model = dataclasses.replace(model, mesh=mesh)
        plain = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        sums = shardings["params"], plain, plain
        self._zero = jax.jit(_zeros, out_shardings=sums)
        self._add = jax.jit(
            functools.partial(add_gradients, model=model), donate_argnums=3, out_shardings=sums
        )
        self._update = jax.jit(
            functools.partial(update, optimizer=optimizer), donate_argnums=0,
            out_shardings=(shardings, plain),
        )  # fmt: skip

    def __call__(self, state: dict, frozen: Mapping, parts: Sequence[Batch]) -> tuple[dict, dict]:
        """Return the next state and the metrics (device scalars); `state` is used up."""
        sums = self._zero(state["params"])
        for part in parts:
            sums = self._add(state["params"], frozen, sharding.place_batch(part, self.mesh), sums)
        return self._update(state, sums)

    def programs(self, state, frozen, part: Batch, sums) -> list[tuple[str, Any, tuple]]:
        """Return the jitted functions of an update with their (abstract) arguments, by name."""
        return [
            ("zero", self._zero, (state["params"],)),
            ("gradients", self._add, (state["params"], frozen, part, sums)),
            ("update", self._update, (state, sums)),
        ]


def _zeros(params):
    zero = jnp.zeros((), jnp.float32)
    return jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params), zero, zero


def new_state(params: Mapping[str, jax.Array], optimizer: optax.GradientTransformation) -> dict:
    """Return the state of a run before its first update."""
    return {"step": jnp.zeros((), jnp.int32), "params": dict(params), "opt": optimizer.init(params)}


def state_shardings(abstract_state: dict, mesh) -> dict:
    """Return the sharding of every leaf of a state; optimizer state lies where its parameter lies."""
    shapes = {name: leaf.shape for name, leaf in abstract_state["params"].items()}
    return sharding.like(abstract_state, sharding.shardings(shapes, mesh), mesh)
