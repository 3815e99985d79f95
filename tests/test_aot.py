# SPDX-License-Identifier: Apache-2.0
"""Compiling for slices that are not there: topologies, costs of programs, the JSON line, real steps."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from bfm import aot, hlo, likelihood, lora, sharding, steps
from bfm.model.split import Table
from bfm.settings import MeshSettings, ModelSettings, Settings, SettingsError, TrainSettings

ROOT = Path(__file__).parents[1]
TINY = Settings(
    model=ModelSettings(path="", arch="tiny"), mesh=MeshSettings(fsdp=4),
    train=TrainSettings(lora_rank=0, tokens=64, accumulation=2, batch_size=8),
)  # fmt: skip
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (jax's extra `tpu`)"
)


@pytest.fixture
def mesh():
    return sharding.make_mesh(0, 4, 1, jax.devices()[:8])


def test_topologies():
    assert aot.parse_topologies("v5e:4x4, v5p:2x2x1") == ["v5e:4x4", "v5p:2x2x1"]


@pytest.mark.parametrize(
    "text", ["", "v5e", "v5e:4", "v9:2x2", "v5e:0x2", "v5e:2x2,v5e:2x2", "v5e:2x2;x"]
)
def test_topologies_that_are_none(text):
    with pytest.raises(SettingsError, match="topology"):
        aot.parse_topologies(text)


@pytest.mark.parametrize(
    ("chips", "tensor", "shape"),
    [(2, 1, (1, 2, 1)), (4, 1, (1, 4, 1)), (8, 1, (2, 4, 1)), (8, 2, (1, 4, 2))],
)
def test_fsdp_gives_way_to_a_smaller_slice(chips, tensor, shape):
    settings = dataclasses.replace(TINY, mesh=MeshSettings(fsdp=4, tensor=tensor))
    assert tuple(aot.mesh_of(settings, jax.devices()[:chips]).shape.values()) == shape


def test_collectives_and_products_of_a_loop(mesh):
    """Eight layers, gathered one at a time: a collective counts eight times, no stack is gathered."""
    row = NamedSharding(mesh, sharding.ROWS)
    weights = NamedSharding(mesh, PartitionSpec(None, "fsdp"))

    def run(w_LDD, x_BD):
        def layer(x_BD, w_DD):
            whole = sharding.spread({"full.w_DE": w_DD}, mesh)["full.w_DE"][...]
            return jnp.tanh(x_BD @ whole), None

        return jax.lax.scan(layer, x_BD, w_LDD)[0]

    function = jax.jit(run, in_shardings=(weights, row), out_shardings=row)
    args = (
        jax.ShapeDtypeStruct((8, 32, 32), jnp.float32, sharding=weights),
        jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=row),
    )
    cost = aot.measure(steps.Part("layers", function, args, 1, 0), mesh.size)
    assert [(c.kind, c.size, c.times) for c in cost.collectives] == [("all-gather", 4 * 32 * 32, 8)]
    assert cost.flops == 8 * 2 * 16 * 32 * 32 / 8
    assert cost.bytes >= 8 * 4 * 32 * 32
    # a quarter of the weights, an eighth of the rows in and out
    assert cost.peak >= 4 * (8 * 32 * 32 / 4 + 2 * 16 * 32 / 8)


def test_the_line(mesh):
    gathered = hlo.Collective("all-gather", "bf16", (1024,), 3)
    parts = [
        aot.Cost("gradients", 2, 15.0 * aot.GIB, 100e12, 10**9, [gathered], 1.0),
        aot.Cost("update", 1, 7.0 * aot.GIB, 0.0, 10**8, [], 1.0),
    ]
    made = aot.Report("sft", "v5e:4x2", dict(mesh.shape), aot.CHIPS["v5e"], 4096, parts)
    assert json.loads(json.dumps(made.line())) == {
        "job": "sft", "topology": "v5e:4x2", "chips": 8, "hbm_peak_gib": 15.0, "hbm_limit_gib": 15.75,
        "fits": True, "flops": 200 * 10**12, "bytes": 2_100_000_000, "tokens_per_step": 4096,
    }  # fmt: skip
    assert made.times["products"] == 200e12 / 197e12
    assert made.moved == 2 * 3 * 2048
    parts[1] = dataclasses.replace(parts[1], peak=15.8 * aot.GIB)
    assert not made.fits
    parts[1] = dataclasses.replace(parts[1], peak=1.0, bytes=None)  # refused by the compiler
    assert not made.fits and made.bytes is None


def test_what_lies_on_a_chip(mesh):
    """An update of all parameters holds masters, gradients and AdamW's two moments, split in four."""
    config = aot.config_of(TINY)
    parts, tokens = steps.step_of(TINY, config, mesh)
    n = sum(int(np.prod(shape)) for shape in lora.base_shapes(config).values())
    by_name = {part.name: part for part in parts}
    assert tokens == 8 * 64 * 2 and by_name["gradients"].times == 2
    for part in parts:
        assert part.held + steps.on_chip(part.args) >= 4 * 4 * n / 4 - (part.name == "zero") * n
    # norms are whole everywhere, so a little more
    assert 16 * n / 4 <= steps.on_chip(by_name["update"].args) < 16 * n / 4 * 1.1


def test_an_embedding_and_a_head_that_are_split(mesh):
    """Rows, log-probabilities and gradients are those of a whole table, and no device holds one."""
    V, D = 96, 16
    key = jax.random.key(0)
    table_VD = jax.random.normal(key, (V, D))
    tokens_BT = jax.random.randint(key, (8, 300), 0, V)

    def loss(held, split: bool):
        table = Table(held, mesh) if split else held
        x_BTD = jnp.tanh(table[tokens_BT])
        logp_BTC = likelihood.token_logprobs(x_BTD, table, tokens_BT[..., None])
        return (logp_BTC**2).sum(), logp_BTC

    def run(split: bool):
        where = NamedSharding(mesh, sharding.spec("embed_VD", 2) if split else PartitionSpec())
        function = jax.jit(jax.value_and_grad(lambda x: loss(x, split), has_aux=True),
                           in_shardings=where, out_shardings=(None, where))  # fmt: skip
        return function(jax.device_put(table_VD, where)), function, where

    ((_, expected), wanted), _, _ = run(split=False)
    ((_, found), gradient), function, where = run(split=True)
    np.testing.assert_allclose(found, expected, atol=2e-5)
    np.testing.assert_allclose(gradient, wanted, atol=1e-5 * float(jnp.abs(wanted).max()))
    assert gradient.sharding.shard_shape(gradient.shape) == (V / 4, D)
    abstract = jax.ShapeDtypeStruct((V, D), jnp.float32, sharding=where)
    made = hlo.Program.of(function.lower(abstract).compile().as_text()).collectives()
    assert made and not [c for c in made if c.size == 4 * V * D]


def launch(*args):
    return subprocess.run(
        [sys.executable, str(ROOT / "launch" / "aot.py"), *args],
        capture_output=True, text=True, check=False, env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip


@needs_libtpu
@pytest.mark.parametrize("job", ["sft", "label", "eval"])
def test_a_step_for_a_tpu(job):
    done = launch(
        "--config", str(ROOT / "configs" / "tiny.py"), "--config.topology=v5e:2x2",
        f"--config.job={job}", "--config.mesh.fsdp=4", "--config.train.tokens=256",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert (line["job"], line["topology"], line["chips"], line["fits"]) == (job, "v5e:2x2", 4, True)
    assert 0 < line["hbm_peak_gib"] < 1 and line["hbm_limit_gib"] == 15.75
    assert line["flops"] > 0 and line["bytes"] > 0 and line["tokens_per_step"] > 0
    assert "all-gather" in done.stderr and "share of peak" in done.stderr


@needs_libtpu
def test_a_program_that_the_compiler_refuses_does_not_fit():
    one = NamedSharding(sharding.make_mesh(1, 1, 1, aot.devices("v5e:2x2")[:1]), PartitionSpec())
    large = jax.ShapeDtypeStruct((40, 1024, 1024, 1024), jnp.int8, sharding=one)
    function = jax.jit(lambda x: x + 1, in_shardings=one, out_shardings=one)
    cost = aot.measure(steps.Part("too much", function, (large,), 1, 0), 1)
    assert cost.bytes is None and cost.peak > 40 * aot.GIB
    made = aot.Report("sft", "v5e:1x1", {"data": 1}, aot.CHIPS["v5e"], 1, [cost])
    assert made.line()["fits"] is False


def test_a_topology_that_is_none_ends_with_2():
    done = launch("--config", str(ROOT / "configs" / "tiny.py"), "--config.topology=v5e:lots")
    assert done.returncode == 2 and done.stderr.startswith("error: topology: 'v5e:lots'")
