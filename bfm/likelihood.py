# SPDX-License-Identifier: Apache-2.0
"""The kernel: log-probabilities of chosen tokens, and their sums over spans. Pure and jittable.

Training loss, labels, pre-filter, letter scores and the gate's probability all come from here.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from bfm.model.decoder import Decoder, decode
from bfm.model.matmul import dot
from bfm.model.split import Table
from bfm.model.state import State

# Vocabulary entries whose logits exist at once: small enough that they stay in a CPU's cache (here 1.2
# to 2 times as fast as whole rows of 49,152), large enough for a full-rate product elsewhere.
VOCAB_CHUNK = 2048
# Positions a row whose hidden states are gathered at once, where the head is split over devices.
POSITION_CHUNK = 256


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Spans:
    """Which tokens to score: n positions a row, C candidate tokens at each.

    index_Bn: int32, the position whose hidden state predicts (target position - 1).
    target_BnC: int32, the token(s) to score there; candidate 0 is the one that is summed.
    span_Bn: int32, 0 .. spans - 1, or -1 where the entry is padding.

    Scoring "b c" (span 0) and "d" (span 1) of the row `a b c d`:

        tokens  a  b  c  d        index  0  1  2
                                  target b  c  d
                                  span   0  0  1
    """

    index_Bn: jax.Array
    target_BnC: jax.Array
    span_Bn: jax.Array


def span_logprobs(
    model: Decoder,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    segments_BT: jax.Array,
    spans: Spans,
    past: tuple[State, ...] = (),
    n_spans: int = 2,
    remat: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Score the spans of a block that continues from `past`.

    Returns logp_BnC (nats, fp32; 0 at padding) and sum_Bs (nats, fp32, candidate 0 summed by span).
    """
    x_BTD, _ = decode(model, tokens_BT, positions_BT, segments_BT, past, remat)
    x_BnD = jnp.take_along_axis(x_BTD, spans.index_Bn[..., None], axis=1)
    logp_BnC = token_logprobs(x_BnD, model.unembed_VD, spans.target_BnC)
    logp_BnC = jnp.where(spans.span_Bn[..., None] >= 0, logp_BnC, 0.0)
    member_Bns = jax.nn.one_hot(spans.span_Bn, n_spans, dtype=jnp.float32)  # -1 is all zero
    return logp_BnC, jnp.einsum("bn,bns->bs", logp_BnC[..., 0], member_Bns, precision="highest")


def token_logprobs(
    x_BnD: jax.Array, unembed_VD: jax.Array | Table, target_BnC: jax.Array
) -> jax.Array:
    """Return log softmax(x W^T) at the target tokens, fp32 [B, n, C], by chunks of the vocabulary.

    Peak memory is VOCAB_CHUNK logits a position, whatever the vocabulary; maximum, sum and logits are
    fp32. Running maximum and sum: arXiv 1805.02867. Where the head is split over devices each takes
    its own part of the vocabulary, for the rows of all.
    """
    if isinstance(unembed_VD, Table):
        return _logprobs_by_part(x_BnD, unembed_VD, target_BnC)
    top_Bn, sum_Bn, picked_BnC = _running(x_BnD, unembed_VD, target_BnC)
    return picked_BnC - (top_Bn + jnp.log(sum_Bn))[..., None]


def logits(x_BD: jax.Array, unembed_VD: jax.Array | Table) -> jax.Array:
    """Return x W^T of a row's last token, fp32 [B, V]; of a split head each device makes its part."""
    if not isinstance(unembed_VD, Table):
        return dot(x_BD, unembed_VD.T)
    x_BD = unembed_VD.everywhere(x_BD)
    parts_SBv = jax.vmap(lambda w_vD: dot(x_BD, w_vD.T))(unembed_VD.blocks())
    return unembed_VD.home(jnp.moveaxis(parts_SBv, 0, 1).reshape(x_BD.shape[0], -1))


def _logprobs_by_part(x_BnD: jax.Array, table: Table, target_BnC: jax.Array) -> jax.Array:
    w_SVD = table.blocks()
    parts, size, _ = w_SVD.shape
    n = x_BnD.shape[1]
    width = min(POSITION_CHUNK, n)

    @jax.checkpoint
    def chunk(rows: tuple[jax.Array, jax.Array]) -> jax.Array:
        x_BtD, target_BtC = (table.everywhere(x) for x in rows)
        local_SBtC = target_BtC - (jnp.arange(parts) * size)[:, None, None, None]
        top_SBt, sum_SBt, picked_SBtC = jax.vmap(_running, (None, 0, 0))(x_BtD, w_SVD, local_SBtC)
        top_Bt = jax.lax.stop_gradient(top_SBt.max(0))
        sum_Bt = (sum_SBt * jnp.exp(top_SBt - top_Bt)).sum(0)
        # A target lies in one part; the others picked 0.
        return table.home(picked_SBtC.sum(0) - (top_Bt + jnp.log(sum_Bt))[..., None])

    def split(x: jax.Array) -> jax.Array:  # positions -> leading chunks
        x = jnp.pad(x, ((0, 0), (0, -n % width), (0, 0)))
        return jnp.moveaxis(x.reshape(x.shape[0], -1, width, x.shape[-1]), 1, 0)

    logp_kBtC = jax.lax.map(chunk, (split(x_BnD), split(target_BnC)))
    return jnp.moveaxis(logp_kBtC, 0, 1).reshape(x_BnD.shape[0], -1, target_BnC.shape[-1])[:, :n]


def _running(x_BnD: jax.Array, unembed_VD: jax.Array, target_BnC: jax.Array):
    """Return maximum and sum [B, n] of exp(logit - maximum), and the targets' logits (0 outside V)."""
    V = unembed_VD.shape[0]
    size = min(VOCAB_CHUNK, V)

    def chunk(carry, i):
        top_Bn, sum_Bn, picked_BnC = carry
        start = jnp.minimum(i * size, V - size)  # the last chunk reaches back: no padded copy of W
        w_vD = jax.lax.dynamic_slice_in_dim(unembed_VD, start, size)
        logits_Bnv = dot(x_BnD, w_vD.T)
        local_BnC = target_BnC - start
        here_BnC = (local_BnC >= 0) & (local_BnC < size)
        found_BnC = jnp.take_along_axis(logits_Bnv, jnp.clip(local_BnC, 0, size - 1), axis=-1)
        picked_BnC = jnp.where(here_BnC, found_BnC, picked_BnC)
        fresh_v = start + jnp.arange(size) >= i * size
        logits_Bnv = jnp.where(fresh_v, logits_Bnv, -jnp.inf)
        # The maximum only scales: the result does not depend on it, and neither does the gradient.
        new_Bn = jax.lax.stop_gradient(jnp.maximum(top_Bn, logits_Bnv.max(-1)))
        sum_Bn = sum_Bn * jnp.exp(top_Bn - new_Bn) + jnp.exp(logits_Bnv - new_Bn[..., None]).sum(-1)
        return (new_Bn, sum_Bn, picked_BnC), None

    zero_Bn = jnp.zeros(x_BnD.shape[:2], jnp.float32)
    start = (jnp.full_like(zero_Bn, -jnp.inf), zero_Bn, jnp.zeros(target_BnC.shape, jnp.float32))
    # A gradient computes a chunk's logits again rather than keep those of the whole vocabulary.
    chunks = jnp.arange(-(-V // size))
    return jax.lax.scan(jax.checkpoint(chunk), start, chunks)[0]
