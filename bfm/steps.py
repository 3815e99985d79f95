# SPDX-License-Identifier: Apache-2.0
"""The real programs of a job's step with abstract arguments on a mesh: what `bfm.aot` compiles."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bfm import generate, lora, saliency, sharding, training
from bfm.batching import bucket
from bfm.likelihood import Spans
from bfm.model.config import ModelConfig
from bfm.model.state import State
from bfm.settings import Settings


@dataclasses.dataclass(frozen=True)
class Part:
    """One compiled program of a step: `times` runs, beside `held` bytes a chip that it is not given."""

    name: str
    function: Any  # jitted
    args: tuple
    times: int
    held: int


class Arrays(NamedTuple):
    """Makes abstract arrays on a mesh."""

    mesh: Mesh

    def at(self, spec: PartitionSpec, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, spec))

    def rows(self, *shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return self.at(sharding.ROWS, shape, dtype)

    def params(self, shapes: Mapping[str, tuple[int, ...]], dtype: Callable[[str], Any]) -> dict:
        places = sharding.shardings(shapes, self.mesh)
        return {name: jax.ShapeDtypeStruct(shape, dtype(name), sharding=places[name])
                for name, shape in shapes.items()}  # fmt: skip

    def state(self, state: State) -> State:
        """Place a turn state: rows behind the layer axis."""
        behind = PartitionSpec(None, *sharding.ROWS)
        return jax.tree.map(
            lambda x: self.at(sharding.ROWS if x.ndim == 2 else behind, x.shape, x.dtype), state
        )


def step_of(settings: Settings, config: ModelConfig, mesh: Mesh) -> tuple[list[Part], int]:
    """Return the programs of a job's step and the tokens that it takes over all chips."""
    make = {"sft": _sft, "label": _label, "eval": _eval}[settings.job]
    return make(settings, config, Arrays(mesh))


def _sft(settings: Settings, config: ModelConfig, arrays: Arrays) -> tuple[list[Part], int]:
    """An update: zero, a part of the batch at a time (one row of train.tokens a chip), AdamW.

    Every position counts as an answer token: what the loss can ask for at most.
    """
    train, mesh = settings.train, arrays.mesh
    scale = train.lora_alpha / train.lora_rank if train.lora_rank else 1.0
    model = training.Model(config, settings.model.dtype, scale, train.remat)
    optimizer = training.make_optimizer(train, max(1, train.steps))
    base = lora.base_shapes(config)
    shapes = lora.adapter_shapes(config, train.lora_rank) if train.lora_rank else base
    state = jax.eval_shape(lambda: training.new_state(
        {name: jnp.zeros(shape, train.master) for name, shape in shapes.items()}, optimizer
    ))  # fmt: skip
    places = training.state_shardings(state, mesh)
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, places
    )
    frozen = {}
    if train.lora_rank:
        frozen = arrays.params(base, lambda name: training.product_dtype(name, model))
    height, T = sharding.row_shards(mesh), train.tokens
    rows = arrays.rows
    spans = Spans(rows(height, T), rows(height, T, 1), rows(height, T))
    batch = training.Batch(
        rows(height, T), rows(height, T), rows(height, T), spans, rows(height, T, dtype=jnp.float32)
    )
    zero = arrays.at(PartitionSpec(), (), jnp.float32)
    sums = {n: jax.ShapeDtypeStruct(p.shape, jnp.float32, sharding=p.sharding)
            for n, p in state["params"].items()}, zero, zero  # fmt: skip
    step = training.Step(model, optimizer, mesh, places)
    programs = step.programs(state, frozen, batch, sums)
    everything = on_chip((state, frozen))
    parts = [
        Part(name, function, args, train.accumulation if name == "gradients" else 1,
             everything - on_chip(args[0] if name == "update" else args[:2]))
        for name, function, args in programs
    ]  # fmt: skip
    return parts, height * T * train.accumulation


def _label(settings: Settings, config: ModelConfig, arrays: Arrays) -> tuple[list[Part], int]:
    """A batch of turns, and a batch of suffixes that continue from them, at the token budget."""
    height, width = _shape(settings.batch_size, saliency.TOKEN_BUDGET, arrays.mesh)
    return _scoring(settings, config, arrays, height, width, width)


def _eval(settings: Settings, config: ModelConfig, arrays: Arrays) -> tuple[list[Part], int]:
    """What answers a batch of questions: the controller's prompt and a token of it, and the reader.

    The controller's prompts have train.tokens, the reader's memory eval.budget.
    """
    mesh, T = arrays.mesh, settings.train.tokens
    shards = sharding.row_shards(mesh)
    parts, tokens = _scoring(settings, config, arrays, shards, settings.eval.budget, 128)
    model = _model(settings, config, arrays)
    rows = arrays.rows
    slots = bucket(3 * settings.max_focus)
    prefill = _on(mesh, config, lambda m, t, n: generate._prefill(m, t, n, slots=slots))
    args = model, rows(shards, T), rows(shards)
    prompt, made = (arrays.state(s) for s in jax.eval_shape(prefill, *args))
    step = _on(mesh, config, lambda m, *rest: generate._step(m, *rest))
    rest = (
        prompt, made, rows(shards), rows(shards), rows(shards),
        arrays.at(PartitionSpec(), (), jnp.int32), rows(shards, 1, 16),
    )  # fmt: skip
    parts += [
        Part("controller, prompt", jax.jit(prefill), args, 1, 0),
        Part("controller, a token", jax.jit(step, donate_argnums=2), (model, *rest), slots, 0),
    ]
    return parts, tokens + shards * (T + slots)


def _scoring(settings, config, arrays, height: int, width: int, asked: int):
    """Turns of `width` tokens and suffixes of `asked`, half of them scored, `height` rows each."""
    mesh, rows = arrays.mesh, arrays.rows
    model = _model(settings, config, arrays)
    prefill = _on(mesh, config, saliency._prefill)
    base = arrays.at(PartitionSpec(), (), jnp.int32)
    # The head that all turns share: one row, on every chip.
    alone = (
        arrays.at(PartitionSpec(), (1, 64), jnp.int32),
        arrays.at(PartitionSpec(), (1,), jnp.int32),
    )
    head = jax.eval_shape(prefill, model, (), *alone, base)
    head = jax.tree.map(lambda x: arrays.at(PartitionSpec(), x.shape, x.dtype), head)
    first = model, (head,), rows(height, width), rows(height), base
    turns = arrays.state(jax.eval_shape(prefill, *first))
    n = bucket(asked // 2)
    second = (
        model, (head, turns), rows(height, asked), rows(height), rows(height),
        rows(height, n), rows(height, n, 1),
    )  # fmt: skip
    score = _on(mesh, config, saliency._score)
    parts = [
        Part("turns", jax.jit(prefill), first, 1, 0),
        Part("suffixes", jax.jit(score), second, 1, 0),
    ]
    return parts, height * (width + asked)


def _model(settings: Settings, config: ModelConfig, arrays: Arrays) -> dict:
    """Return the weights as they lie on the mesh."""
    plain = training.Model(config, settings.model.dtype, 1.0, False)
    shapes = lora.base_shapes(config)
    return arrays.params(shapes, lambda name: training.product_dtype(name, plain))


def _on(mesh: Mesh, config: ModelConfig, function: Callable) -> Callable:
    """Return a function of named parameters that reads them where the rows are."""

    def run(params, *rest):
        return function(lora.assemble(config, sharding.spread(params, mesh)), *rest)

    return run


def _shape(rows: int, budget: int, mesh: Mesh) -> tuple[int, int]:
    shards = sharding.row_shards(mesh)
    height = -(-rows // shards) * shards
    return height, max(8, budget // height)


def on_chip(tree: Any) -> int:
    """Return the bytes of placed abstract arrays that lie on one chip."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )
