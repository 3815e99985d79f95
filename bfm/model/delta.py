# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet: a causal convolution and the gated delta rule, in chunks, from and to a state.

Shapes: B rows, T tokens, C convolution channels, K key heads, g value heads a key head, d key width,
v value width; b state rows, each serving B // b rows of tokens. Everything is fp32 at the highest
precision: the recurrence multiplies its own errors. Source: arXiv 2412.06464; transformers
`modeling_qwen3_5.py`. A *run* is the part of a row that belongs to one segment: it starts from the
earlier state (or from nothing), as packed documents and padded rows need.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

CHUNK = 64  # tokens whose mutual influence is one triangular matrix
_einsum = functools.partial(jnp.einsum, precision="highest", preferred_element_type=jnp.float32)


class Runs(NamedTuple):
    """Where segments begin and end in a block; padding (segment 0) belongs to the run before it."""

    active_BT: jax.Array  # bool, not padding
    run_BT: jax.Array  # int32, number of starts so far; 0 before the first
    place_BT: jax.Array  # int32, index within the run, padding counted
    last_B: jax.Array  # int32, index of the last token that is not padding, or -1


def runs(segments_BT: jax.Array) -> Runs:
    """Find the runs of a block from its segment ids (padding to the right of a run, never inside).

    >>> runs(jnp.array([[7, 7, 0, 9, 0]])).run_BT.tolist()
    [[1, 1, 1, 2, 2]]
    """
    t = jnp.arange(segments_BT.shape[1])
    active_BT = segments_BT > 0
    seen_BT = jax.lax.cummax(jnp.where(active_BT, t, -1), axis=1)  # latest token so far
    filled_BT = jnp.where(
        seen_BT < 0, 0, jnp.take_along_axis(segments_BT, jnp.maximum(seen_BT, 0), axis=1)
    )
    before_BT = jnp.pad(filled_BT, ((0, 0), (1, 0)))[:, :-1]
    start_BT = active_BT & (segments_BT != before_BT)
    began_BT = jax.lax.cummax(jnp.where(start_BT, t, -1), axis=1)
    run_BT = jnp.cumsum(start_BT, axis=1, dtype=jnp.int32)
    return Runs(active_BT, run_BT, t - began_BT, seen_BT[:, -1])


def convolve(
    x_BTC: jax.Array, w_CW: jax.Array, r: Runs, past_bPC: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Depthwise causal convolution of each run, continued from the last W - 1 inputs before it.

    y_t = sum_j w_j x_(t - W + 1 + j). Returns y_BTC and the last W - 1 inputs of each row's last run
    ([B, W - 1, C]), fp32. Inputs before everything are zeros.
    """
    B, T, C = x_BTC.shape
    P = w_CW.shape[1] - 1
    if past_bPC is None:
        past_BPC = jnp.zeros((B, P, C), jnp.float32)
    else:
        past_BPC = jnp.repeat(past_bPC, B // past_bPC.shape[0], axis=0)
    w_WC = w_CW.astype(jnp.float32).T
    y_BTC = x_BTC * w_WC[P]
    for back in range(1, P + 1):
        from_BTC = jnp.pad(x_BTC, ((0, 0), (back, 0), (0, 0)))[:, :T]
        for place in range(back):  # a run's first tokens reach into what was before it
            early_BT1 = (r.place_BT == place)[..., None]
            from_BTC = jnp.where(early_BT1, past_BPC[:, P - back + place, None], from_BTC)
        y_BTC = y_BTC + from_BTC * w_WC[P - back]
    # The last P inputs, of the past where the run is shorter than that.
    end_B1 = r.last_B[:, None]
    place_B1 = jnp.where(
        end_B1 < 0, -1, jnp.take_along_axis(r.place_BT, jnp.maximum(end_B1, 0), axis=1)
    )
    ago_P = jnp.arange(P) - (P - 1)
    index_BP, place_BP = end_B1 + ago_P, place_B1 + ago_P
    own_BPC = jnp.take_along_axis(x_BTC, jnp.clip(index_BP, 0)[..., None], axis=1)
    old_BPC = jnp.take_along_axis(past_BPC, jnp.clip(P + place_BP, 0, P - 1)[..., None], axis=1)
    return y_BTC, jnp.where(place_BP[..., None] >= 0, own_BPC, old_BPC)


def delta_rule(
    q_BKTd: jax.Array,
    k_BKTd: jax.Array,
    v_BKgTv: jax.Array,
    log_decay_BKgT: jax.Array,
    beta_BKgT: jax.Array,
    r: Runs,
    past_bKgdv: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Apply the gated delta rule to each run: outputs [B, K, g, T, v] and states [B, K, g, d, v].

        S <- exp(log_decay_t) S;   S <- S + k_t beta_t (v_t - S^T k_t)^T;   o_t = S^T q_t

    Padding must have log_decay 0 and beta 0; it then leaves the state untouched. The state returned is
    that of each row's last run. Chunks of CHUNK tokens are exact matrix forms (WY representation).
    Rows that share a state row read it without copying; only what is written is a row's own.
    """
    T = q_BKTd.shape[2]
    C = min(CHUNK, T)
    n = -(-T // C)

    def split(
        x: jax.Array, axis: int, mode: str = "constant"
    ) -> jax.Array:  # time -> leading chunks
        x = jnp.pad(x, [(0, n * C - T if i == axis else 0) for i in range(x.ndim)], mode=mode)
        return jnp.moveaxis(x.reshape(*x.shape[:axis], n, C, *x.shape[axis + 1 :]), axis, 0)

    q, k = split(q_BKTd, 2), split(k_BKTd, 2)
    v, g, beta = split(v_BKgTv, 3), split(log_decay_BKgT, 3), split(beta_BKgT, 3)
    run = split(r.run_BT, 1, "edge")

    # Within chunks, all at once. A gap between two tokens is the sum of the decays between them and not
    # a difference of sums from the start, which loses its digits where decay is fast.
    run_i, run_j = run[:, :, None, None, :, None], run[:, :, None, None, None, :]
    i = jnp.arange(C)
    same = (run_i == run_j) & (i[:, None] >= i)
    later = (run_i == run_j) & (i[:, None] > i)
    gap = jnp.cumsum(jnp.where(later, g[..., :, None], 0.0), axis=-2)
    decay = jnp.where(same, jnp.exp(gap), 0.0)
    since = jnp.exp(jnp.sum(jnp.where(same, g[..., None, :], 0.0), axis=-1))  # the run began
    kk = _einsum("nbkid,nbkjd->nbkij", k, k)[:, :, :, None]
    qk = _einsum("nbkid,nbkjd->nbkij", q, k)[:, :, :, None] * decay
    inverse = _unit_lower_inverse(jnp.where(i[:, None] > i, kk * decay * beta[..., None], 0.0))
    u = _einsum("nbkgij,nbkgjv->nbkgiv", inverse, v * beta[..., None])
    kg, qg = (x[:, :, :, None] * since[..., None] for x in (k, q))
    w = _einsum("nbkgij,nbkgjd->nbkgid", inverse, kg * beta[..., None])
    ahead = k[:, :, :, None] * decay[..., -1, :, None]
    chunks = (u, w, qg, qk, ahead, since[..., -1], run)

    def output(chunk, held_w, held_q):
        u, _, _, qk, _, _, _ = chunk
        new = u - held_w
        return new, held_q + _einsum("bkgij,bkgjv->bkgiv", qk, new)

    def first(chunk):
        # Every run of the first chunk begins here, so all of it continues from the past.
        _, w, qg, _, ahead, kept, _ = chunk
        if past_bKgdv is None:
            new, out = output(chunk, 0.0, 0.0)
            return out, _einsum("bkgid,bkgiv->bkgdv", ahead, new)
        new, out = output(chunk, _shared(w, past_bKgdv), _shared(qg, past_bKgdv))
        own = _einsum("bkgid,bkgiv->bkgdv", ahead, new)
        past = jnp.repeat(past_bKgdv, own.shape[0] // past_bKgdv.shape[0], axis=0)
        return out, past * kept[..., None, None] + own

    @jax.checkpoint
    def step(carry, chunk):
        state, last = carry
        _, w, qg, _, ahead, kept, run = chunk
        carried = (run == last[:, None])[:, None, None, :, None]
        held = [_einsum("bkgid,bkgdv->bkgiv", x, state) for x in (w, qg)]
        if past_bKgdv is None:
            held = [jnp.where(carried, x, 0.0) for x in held]
            base = jnp.zeros_like(state)
        else:
            fresh = [_shared(x, past_bKgdv) for x in (w, qg)]
            held = [jnp.where(carried, x, y) for x, y in zip(held, fresh, strict=True)]
            base = jnp.repeat(past_bKgdv, state.shape[0] // past_bKgdv.shape[0], axis=0)
        new, out = output(chunk, *held)
        own = _einsum("bkgid,bkgiv->bkgdv", ahead, new)
        base = jnp.where((run[:, -1] == last)[:, None, None, None, None], state, base)
        return (base * kept[..., None, None] + own, run[:, -1]), out

    out, state = first(jax.tree.map(lambda x: x[0], chunks))
    if n == 1:
        return out[..., :T, :], state
    rest = jax.tree.map(lambda x: x[1:], chunks)
    (state, _), outs = jax.lax.scan(step, (state, run[0, :, -1]), rest)
    out = jnp.moveaxis(jnp.concatenate([out[None], outs]), 0, 3)
    return out.reshape(*out.shape[:3], n * C, -1)[..., :T, :], state


def _shared(x_BKgCd: jax.Array, state_bKgdv: jax.Array) -> jax.Array:
    """Multiply rows by the state that they share in groups, without copying it."""
    b = state_bKgdv.shape[0]
    folded = x_BKgCd.reshape(b, -1, *x_BKgCd.shape[1:])
    out = _einsum("brkgid,bkgdv->brkgiv", folded, state_bKgdv)
    return out.reshape(*x_BKgCd.shape[:-1], -1)


def _unit_lower_inverse(l_CC: jax.Array) -> jax.Array:
    """Invert I + l for strictly lower l, block by block: exact, log2(C) steps, no powers of l."""
    C = l_CC.shape[-1]
    i = jnp.arange(C)
    x_CC = jnp.broadcast_to(jnp.eye(C, dtype=l_CC.dtype), l_CC.shape)
    size = 1
    while size < C:
        block = i // size
        lower = (block[:, None] == block + 1) & (block[:, None] % 2 == 1)
        part = _einsum("...ij,...jk->...ik", x_CC, jnp.where(lower, l_CC, 0.0))
        x_CC = x_CC - _einsum("...ij,...jk->...ik", part, x_CC)
        size *= 2
    return x_CC


def l2_norm(x: jax.Array) -> jax.Array:
    """x / sqrt(sum(x^2) + 1e-6) over the last axis (the sum, not the mean), fp32."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
