# SPDX-License-Identifier: Apache-2.0
"""Attention kernels against XLA's attention: packed, padded, continued, with gradients, on a mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bfm import lora, sharding
from bfm.model import kernels
from bfm.model.attention import attend
from bfm.model.config import SLIDING, ModelConfig, Rope
from bfm.model.decoder import Decoder, decode

B, K, G, T, h = 2, 2, 2, 256, 64
CONFIG = ModelConfig(
    vocab=64, d_model=64, n_layers=2, d_mlp=64, n_heads=4, n_kv=2, d_head=64, eps=1e-5, rope=Rope(),
    window=1024, tied=True, attention="xla",
)  # fmt: skip
SPLASH = dataclasses.replace(CONFIG, attention="splash")


def operands(seed: int = 0):
    rng = np.random.default_rng(seed)
    shapes = ((B, K, G, T, h), (B, K, T, h), (B, K, T, h))
    return tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)


def layout(kind: str):
    """Segments and positions: rows of one segment, or packed with padding behind."""
    lengths = {
        "whole": [[T], [T]],
        "padded": [[T - 100], [7]],
        "packed": [[90, 60, 50], [130, 126]],
    }
    segments, positions = np.zeros((B, T), np.int32), np.zeros((B, T), np.int32)
    for row, own in enumerate(lengths[kind]):
        at = 0
        for i, n in enumerate(own, start=1):
            segments[row, at : at + n] = i
            positions[row, at : at + n] = np.arange(n)
            at += n
    return jnp.asarray(segments), jnp.asarray(positions)


def kernel_of(name: str, past: bool):
    if name == "jax_nn":  # what calls cuDNN, by jax's own XLA path
        return lambda *args: kernels.by_jax_nn(*args, implementation="xla")
    return kernels.choose("splash", (B, K, G, T, h), jnp.float32, past, None)


@pytest.mark.parametrize("kind", ["whole", "padded", "packed"])
@pytest.mark.parametrize("name", ["splash", "jax_nn"])
def test_a_kernel_gives_what_xla_gives_and_its_gradient(name, kind):
    q, k, v = operands()
    segments, positions = layout(kind)
    real = (segments > 0)[:, None, None, :, None]

    def loss(q, k, v, kernel):
        out = attend(q, k, v, segments, positions, scale=0.1, kernel=kernel)
        return (jnp.sin(out) * real).sum(), out

    (_, want), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, k, v, None)
    kernel = kernel_of(name, past=False)
    (_, got), found = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, k, v, kernel)
    np.testing.assert_allclose(np.where(real, got, 0), np.where(real, want, 0), atol=2e-5)
    for one, other in zip(found, gradients, strict=True):
        np.testing.assert_allclose(one, other, atol=5e-5)


def state_of(n: int, rows: int):
    rng = np.random.default_rng(n)
    k, v = (jnp.asarray(rng.standard_normal((rows, K, n, h)), jnp.float32) for _ in range(2))
    return k, v, jnp.tile(jnp.arange(n), (rows, 1)).at[:, -3:].set(-1)


def test_a_kernel_merges_with_what_came_before():
    q, k, v = operands()
    segments, positions = layout("padded")
    past = state_of(40, 1), state_of(72, B)
    want = attend(q, k, v, segments, positions + 100, past, scale=0.1)
    kernel = kernel_of("splash", past=True)
    got = attend(q, k, v, segments, positions + 100, past, scale=0.1, kernel=kernel)
    real = (np.asarray(segments) > 0)[:, None, None, :, None]
    np.testing.assert_allclose(np.where(real, got, 0), np.where(real, want, 0), atol=2e-5)


@pytest.mark.parametrize("mesh", [None, (2, 2, 2)], ids=str)
def test_the_decoder_is_the_same_by_either(mesh, monkeypatch):
    """A prefix, then a block that continues it; on a mesh each device has its rows and heads."""
    params = lora.flatten(Decoder(CONFIG, nnx.Rngs(0)))
    rows = 4 if mesh else 2
    ids = np.random.default_rng(0).integers(0, CONFIG.vocab, (rows, 2 * 128)).astype(np.int32)
    made = sharding.make_mesh(*mesh) if mesh else None

    def run(config):
        @jax.jit
        def both(params, ids):
            given = sharding.spread(params, made) if made else params
            model = lora.assemble(config, given)
            at = jnp.tile(jnp.arange(128), (rows, 1))
            one = jnp.ones_like(at)
            x, state = decode(model, ids[:, :128], at, one)
            y, _ = decode(model, ids[:, 128:], at + 128, one, (state,))
            return x, y

        if not made:
            return both(params, ids)
        places = sharding.shardings({n: x.shape for n, x in params.items()}, made)
        placed = {n: jax.device_put(x, places[n]) for n, x in params.items()}
        return both(placed, sharding.place_rows(ids, made))

    taken = []
    choose = kernels.choose
    monkeypatch.setattr(kernels, "choose", lambda *args: taken.append(args[-1]) or choose(*args))
    for want, got in zip(run(CONFIG), run(SPLASH), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)
    assert taken and set(taken) == {made}


def test_where_a_kernel_does_not_fit_xla_computes():
    shape, f32, bf16 = (B, K, G, T, h), jnp.float32, jnp.bfloat16
    choose = kernels.choose
    assert choose("auto", shape, f32, False, None) is None  # a CPU has none of its own
    assert choose("xla", shape, f32, False, None) is None
    assert choose("splash", shape, f32, True, None)
    assert choose("splash", (B, K, G, 200, h), f32, False, None) is None
    assert choose("splash", (B, K, G, T, 48), f32, False, None) is None
    mesh = sharding.make_mesh(8, 1, 1)
    assert choose("splash", shape, f32, False, mesh) is None  # two rows over eight devices
    assert choose("splash", (8, *shape[1:]), f32, False, mesh)
    assert choose("cudnn", shape, bf16, False, None) is None  # there is no GPU here
    kinds = (SLIDING,) * 2
    near = dataclasses.replace(
        SPLASH, layer_types=kinds, sliding=8, rope_local=Rope(), family="gemma3"
    )
    model, far = (
        Decoder(c, nnx.Rngs(0)) for c in (near, dataclasses.replace(near, attention="xla"))
    )
    ids = jnp.ones((1, 128), jnp.int32)
    at = jnp.arange(128)[None]
    assert jnp.array_equal(decode(model, ids, at, ids)[0], decode(far, ids, at, ids)[0])
