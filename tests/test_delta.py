# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule in chunks against the recurrence in float64, from and to states."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bfm.model.delta import convolve, delta_rule, runs
from tests import reference

K, G, D, V = 2, 3, 8, 5  # key heads, value heads a key head, widths
rule = jax.jit(delta_rule)


def draw(T, seed=0, decay=1.0):
    """One row: q, k [T, K, D] of unit length, v, log decay and beta [T, K G, ..], float64 of fp32."""
    rng = np.random.default_rng(seed)
    unit = [
        x / np.linalg.norm(x, axis=-1, keepdims=True) for x in rng.standard_normal((2, T, K, D))
    ]
    v = rng.standard_normal((T, K * G, V))
    g = -decay * rng.exponential(size=(T, K * G))
    beta = reference.sigmoid(2 * rng.standard_normal((T, K * G)))
    return [x.astype(np.float32).astype(np.float64) for x in (*unit, v, g, beta)]


def ours(row, segments=None, past=None, function=rule):
    q, k, v, g, beta = (jnp.asarray(np.moveaxis(x, 0, 1)[None], jnp.float32) for x in row)
    T = q.shape[2]
    segments = np.ones(T, int) if segments is None else segments
    r = runs(jnp.asarray(segments)[None])
    g, beta = (jnp.where(r.active_BT[:, None], x, 0.0).reshape(1, K, G, T) for x in (g, beta))
    out, state = function(q, k, v.reshape(1, K, G, T, V), g, beta, r, past)
    return np.asarray(out)[0].reshape(K * G, T, V).swapaxes(0, 1), state


def oracle(row, state=None):
    q, k, *rest = row
    return reference.delta_rule(np.repeat(q, G, 1), np.repeat(k, G, 1), *rest, state)


def near(got, expected, tolerance=3e-6):
    expected = np.asarray(expected).reshape(np.shape(got))
    assert np.abs(np.asarray(got) - expected).max() <= tolerance * max(1, np.abs(expected).max())


@pytest.mark.parametrize("decay", [0.0, 0.1, 30.0])
@pytest.mark.parametrize("T", [1, 63, 64, 65, 150])
def test_chunks_equal_the_recurrence(T, decay):
    row = draw(T, decay=decay)
    out, state = ours(row)
    expected, last = oracle(row)
    near(out, expected)
    near(state, last)


@pytest.mark.parametrize("cut", [1, 64, 100])
def test_a_state_is_continued_and_shared(cut):
    """Three rows continue one state without its being copied to them."""
    row = draw(150)
    expected, last = oracle(row)
    _, state = ours([x[:cut] for x in row])
    out, end = ours([x[cut:] for x in row], past=state)
    near(out, expected[cut:])
    near(end, last)

    def thrice(*args):
        *rows, r, past = args
        rows = [jnp.repeat(x, 3, 0) for x in rows]
        out, state = delta_rule(*rows, jax.tree.map(lambda x: jnp.repeat(x, 3, 0), r), past)
        return out[2:], state[2:]

    out, end = ours([x[cut:] for x in row], past=state, function=jax.jit(thrice))
    near(out, expected[cut:])
    near(end, last)


@pytest.mark.parametrize("sizes", [(3, 61, 1, 70), (64, 64), (1, 1, 1, 130)])
@pytest.mark.parametrize("past", [False, True])
def test_packed_segments_do_not_touch(sizes, past):
    """Every segment begins from the past; the padding behind each leaves its state as it was."""
    rows = [draw(n, seed=n) for n in sizes]
    before, start = None, None
    if past:
        _, before = ours(draw(20, seed=99))
        start = np.asarray(before, np.float64)[0].reshape(K * G, D, V)
    gap = draw(4, seed=7)
    packed = [np.concatenate([x for row in rows for x in (row[i], gap[i])]) for i in range(5)]
    segments = np.concatenate([[n + 1] * size + [0] * 4 for n, size in enumerate(sizes)])
    out, state = ours(packed, segments, before)
    at = 0
    for row, size in zip(rows, sizes, strict=True):
        expected, last = oracle(row, start)
        near(out[at : at + size], expected)
        at += size + 4
    near(state, last)


@pytest.mark.parametrize("decay", [1.0, 1e4])
def test_gradients_are_finite_where_decay_is_violent_and_rows_are_padding(decay):
    row = draw(140, decay=decay)
    segments = np.array([1] * 30 + [0] * 110)

    def loss(scale):
        scaled = [x if i == 0 else x * scale for i, x in enumerate(map(jnp.asarray, row))]
        moved = (jnp.moveaxis(x, 0, 1)[None].astype(jnp.float32) for x in scaled)
        q, k, v, g, beta = moved
        r = runs(jnp.asarray(segments)[None])
        g, beta = (jnp.where(r.active_BT[:, None], x, 0.0) for x in (g, beta))
        shape = (1, K, G, 140)
        out, state = delta_rule(
            q, k, v.reshape(*shape, V), g.reshape(shape), beta.reshape(shape), r, None
        )
        return out[..., :30, :].sum() + state.sum()

    assert np.isfinite(jax.jit(jax.grad(loss))(1.0))


@pytest.mark.parametrize("past", [False, True])
def test_the_convolution_of_each_run(past):
    """Runs shorter and longer than the filter, padding behind; the last inputs reach into the past."""
    rng = np.random.default_rng(0)
    taps, channels = 4, 3
    w = rng.standard_normal((channels, taps))
    before = rng.standard_normal((taps - 1, channels)) if past else np.zeros((taps - 1, channels))
    for sizes in ((1, 2, 9), (5,), (6, 2), (3, 1)):
        parts = [rng.standard_normal((n, channels)) for n in sizes]
        x = np.concatenate([np.concatenate([part, np.full((2, channels), 9.0)]) for part in parts])
        segments = np.concatenate([[n + 1] * size + [0, 0] for n, size in enumerate(sizes)])
        y, left = jax.jit(convolve)(
            jnp.asarray(x[None], jnp.float32), jnp.asarray(w, jnp.float32),
            runs(jnp.asarray(segments)[None]),
            jnp.asarray(before[None], jnp.float32) if past else None,
        )  # fmt: skip
        at = 0
        for part in parts:
            whole = np.concatenate([before, part])
            n = len(part)
            expected = sum(whole[j : j + n] * w[:, j] for j in range(taps))
            near(y[0, at : at + n], expected)
            at += n + 2
        near(left[0], whole[-(taps - 1) :])
