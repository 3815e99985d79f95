# SPDX-License-Identifier: Apache-2.0
"""Attention over the block itself and over earlier states, merged by log-sum-exp; chunked queries.

Shapes: B rows, T queries, S keys, K key heads, G query heads a key head, h head width. Heads stand
before time, so that both products are plain batched matmuls (three times as fast on a CPU).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from bfm.model.matmul import batched

Kernel = Callable[..., tuple[jax.Array, jax.Array]]
# Finite, so that a row with no key (padding) stays finite: exp(-1e30 + 1e30) = 1, never nan.
MASKED = -1e30
# Longest run of queries whose scores exist at once; more are mapped over in chunks.
QUERY_CHUNK = 256


def attend(
    q_BKGTh: jax.Array,
    k_BKTh: jax.Array,
    v_BKTh: jax.Array,
    segments_BT: jax.Array,
    positions_BT: jax.Array,
    past: tuple[tuple[jax.Array, jax.Array, jax.Array], ...] = (),
    *,
    scale: float,
    window: jax.Array | None = None,
    kernel: Kernel | None = None,
) -> jax.Array:
    """Return softmax(scale q k) v in fp32, [B, K, G, T, h].

    A query sees a key of its own block when both have the same segment (0 is padding) and the key's
    position is not later. It sees every key of `past`: (k_bKPh, v_bKPh, position_bP) of earlier
    blocks, position -1 at padding, whose b rows serve B rows in groups of B // b. With a window it sees
    only keys less than `window` positions before it. Operands keep the keys' dtype, products accumulate
    in fp32, softmax is fp32. Merging: arXiv 2205.14135, section 3.1. kernel: computes the block's
    attention over itself instead (`bfm.model.kernels`; for the positions of a segment in order).
    """
    q_BKGTh = (q_BKGTh.astype(jnp.float32) * scale).astype(k_BKTh.dtype)
    given = kernel(q_BKGTh, k_BKTh, v_BKTh, segments_BT) if kernel else ()
    if given and not past:
        return given[0]

    def own(q_BKGth: jax.Array, segments_Bt: jax.Array, positions_Bt: jax.Array):
        ago_BtS = positions_Bt[:, :, None] - positions_BT[:, None, :]
        allow_BtS = (segments_Bt[:, :, None] == segments_BT[:, None, :]) & (ago_BtS >= 0)
        allow_BtS &= (segments_BT > 0)[:, None, :]
        if window is not None:
            allow_BtS &= ago_BtS < window
        return _part(q_BKGth, k_BKTh, v_BKTh, allow_BtS[:, None, None])

    def chunk(q_BKGth, segments_Bt, positions_Bt, *given) -> jax.Array:
        first = (
            (*given, jnp.ones_like(given[1])) if given else own(q_BKGth, segments_Bt, positions_Bt)
        )
        return _merge([first, *(_past_part(q_BKGth, *keys, positions_Bt, window) for keys in past)])

    chunk = jax.checkpoint(chunk)  # a gradient computes scores again rather than keep T x S of them
    h, T = q_BKGTh.shape[-1], segments_BT.shape[1]
    if T <= QUERY_CHUNK:
        return chunk(q_BKGTh, segments_BT, positions_BT, *given)
    n = -(-T // QUERY_CHUNK)

    def split(x: jax.Array, axis: int) -> jax.Array:  # time -> leading chunks
        pads = [(0, n * QUERY_CHUNK - T if i == axis else 0) for i in range(x.ndim)]
        x = jnp.pad(x, pads)
        x = x.reshape(*x.shape[:axis], n, QUERY_CHUNK, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)

    chunks = split(q_BKGTh, 3), split(segments_BT, 1), split(positions_BT, 1)
    chunks += tuple(split(x, 3) for x in given)
    out = jnp.moveaxis(jax.lax.map(lambda args: chunk(*args), chunks), 0, 3)
    return out.reshape(*out.shape[:3], n * QUERY_CHUNK, h)[..., :T, :]


def _part(q_BKGTh, k_BKSh, v_BKSh, allow):
    """Unnormalised attention over one set of keys: (output, running maximum, normaliser).

    allow: bool, broadcastable to [B, K, G, T, S].
    """
    B, K, G, T, h = q_BKGTh.shape
    q_BKNh = q_BKGTh.reshape(B, K, G * T, h)
    s_BKNS = batched("bknh,bksh->bkns", q_BKNh, k_BKSh)
    s_BKGTS = jnp.where(allow, s_BKNS.reshape(B, K, G, T, -1), MASKED)
    m_BKGT = s_BKGTS.max(-1)
    p_BKGTS = jnp.exp(s_BKGTS - m_BKGT[..., None])
    o_BKNh = batched("bkns,bksh->bknh", p_BKGTS.reshape(s_BKNS.shape), v_BKSh)
    return o_BKNh.reshape(q_BKGTh.shape), m_BKGT, p_BKGTS.sum(-1)


def _past_part(q_BKGTh, k_bKPh, v_bKPh, position_bP, positions_BT, window):
    """Fold the rows that share a state row into its queries, so that no key is copied."""
    B, K, G, T, h = q_BKGTh.shape
    b = position_bP.shape[0]
    r = B // b
    folded = q_BKGTh.reshape(b, r, K, G, T, h).swapaxes(1, 2).reshape(b, K, r * G, T, h)
    allow = (position_bP >= 0)[:, None, None, None, :]
    if window is not None:
        near_brTP = positions_BT.reshape(b, r, T, 1) - position_bP[:, None, None, :] < window
        allow = allow & jnp.repeat(near_brTP, G, axis=1)[:, None]
    part = _part(folded, k_bKPh, v_bKPh, allow)

    def unfold(x: jax.Array) -> jax.Array:
        return x.reshape(b, K, r, G, *x.shape[3:]).swapaxes(1, 2).reshape(B, K, G, *x.shape[3:])

    return tuple(unfold(x) for x in part)


def _merge(parts):
    top = jnp.stack([m for _, m, _ in parts]).max(0)
    scale = [jnp.exp(m - top) for _, m, _ in parts]
    total = sum(l * w for (_, _, l), w in zip(parts, scale, strict=True))
    out = sum(o * w[..., None] for (o, _, _), w in zip(parts, scale, strict=True))
    return out / total[..., None]
