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
from bfm.model.state import State

# Positions whose logits exist at once: 128 x 49,152 fp32 logits are 24 MiB.
LOGIT_CHUNK = 128


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
) -> tuple[jax.Array, jax.Array]:
    """Score the spans of a block that continues from `past`.

    Returns logp_BnC (nats, fp32; 0 at padding) and sum_Bs (nats, fp32, candidate 0 summed by span).
    """
    x_BTD, _ = decode(model, tokens_BT, positions_BT, segments_BT, past)
    x_BnD = jnp.take_along_axis(x_BTD, spans.index_Bn[..., None], axis=1)
    logp_BnC = token_logprobs(x_BnD, model.unembed_VD, spans.target_BnC)
    logp_BnC = jnp.where(spans.span_Bn[..., None] >= 0, logp_BnC, 0.0)
    member_Bns = jax.nn.one_hot(spans.span_Bn, n_spans, dtype=jnp.float32)  # -1 is all zero
    return logp_BnC, jnp.einsum("bn,bns->bs", logp_BnC[..., 0], member_Bns, precision="highest")


def token_logprobs(x_BnD: jax.Array, unembed_VD: jax.Array, target_BnC: jax.Array) -> jax.Array:
    """Return log softmax(x W^T) at the target tokens, fp32 [B, n, C], a chunk of rows at a time.

    Peak memory is LOGIT_CHUNK x V logits whatever the number of positions; softmax is fp32.
    """
    B, n, C = target_BnC.shape
    rows = B * n
    chunk = min(LOGIT_CHUNK, rows)
    pad = -rows % chunk
    x_MD = jnp.pad(x_BnD.reshape(rows, -1), ((0, pad), (0, 0)))
    target_MC = jnp.pad(target_BnC.reshape(rows, C), ((0, pad), (0, 0)))

    def score(args):
        x_mD, target_mC = args
        logits_mV = dot(x_mD, unembed_VD.T)
        picked_mC = jnp.take_along_axis(logits_mV, target_mC, axis=-1)
        return picked_mC - jax.nn.logsumexp(logits_mV, axis=-1, keepdims=True)

    out = jax.lax.map(
        score, (x_MD.reshape(-1, chunk, x_MD.shape[-1]), target_MC.reshape(-1, chunk, C))
    )
    return out.reshape(-1, C)[:rows].reshape(B, n, C)
