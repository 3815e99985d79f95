# SPDX-License-Identifier: Apache-2.0
"""The decoder: tokens in, hidden states and a turn state out. `flax.nnx` modules used as pytrees.

Shapes: B rows, T tokens, L layers, D model, N query heads, K key heads, G = N / K, h head width,
F mlp width, V vocabulary, P tokens of an earlier state. The residual stream, norms and softmax are
fp32; every matrix product takes operands in the weights' dtype and accumulates in fp32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from bfm.model.attention import attend
from bfm.model.config import ModelConfig, inverse_frequencies
from bfm.model.matmul import dot
from bfm.model.state import State


class Block(nnx.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x)); no biases."""

    def __init__(self, c: ModelConfig, rngs: nnx.Rngs, dtype: jnp.dtype):
        def weight(*shape: int) -> nnx.Param:
            return nnx.Param(0.02 * jax.random.normal(rngs.params(), shape, dtype))

        self.attn_norm_D = nnx.Param(jnp.ones((c.d_model,), dtype))
        self.q_DNh = weight(c.d_model, c.n_heads, c.d_head)
        self.k_DKh = weight(c.d_model, c.n_kv, c.d_head)
        self.v_DKh = weight(c.d_model, c.n_kv, c.d_head)
        self.o_NhD = weight(c.n_heads, c.d_head, c.d_model)
        self.mlp_norm_D = nnx.Param(jnp.ones((c.d_model,), dtype))
        self.gate_DF = weight(c.d_model, c.d_mlp)
        self.up_DF = weight(c.d_model, c.d_mlp)
        self.down_FD = weight(c.d_mlp, c.d_model)

    def __call__(self, x_BTD, eps, rope_BTh, segments_BT, positions_BT, past):
        y_BTD = rms_norm(x_BTD, self.attn_norm_D[...], eps)
        q_BNTh = rotate(dot(y_BTD, self.q_DNh[...]).swapaxes(1, 2), rope_BTh)
        k_BKTh = rotate(dot(y_BTD, self.k_DKh[...]).swapaxes(1, 2), rope_BTh)
        k_BKTh = k_BKTh.astype(self.k_DKh.dtype)
        v_BKTh = dot(y_BTD, self.v_DKh[...]).swapaxes(1, 2).astype(self.v_DKh.dtype)
        B, K, T, h = k_BKTh.shape
        q_BKGTh = q_BNTh.reshape(B, K, -1, T, h)
        a_BKGTh = attend(q_BKGTh, k_BKTh, v_BKTh, segments_BT, positions_BT, past)
        a_BTNh = a_BKGTh.reshape(B, -1, T, h).swapaxes(1, 2)
        x_BTD = x_BTD + dot(a_BTNh, self.o_NhD[...], n=2)
        y_BTD = rms_norm(x_BTD, self.mlp_norm_D[...], eps)
        f_BTF = jax.nn.silu(dot(y_BTD, self.gate_DF[...])) * dot(y_BTD, self.up_DF[...])
        return x_BTD + dot(f_BTF, self.down_FD[...]), (k_BKTh, v_BKTh)


class Decoder(nnx.Module):
    """Embedding, L stacked blocks, final norm, head (None when tied to the embedding)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype: jnp.dtype = jnp.float32):
        def table() -> nnx.Param:
            shape = (config.vocab, config.d_model)
            return nnx.Param(0.02 * jax.random.normal(rngs.params(), shape, dtype))

        self.config = config
        self.embed_VD = table()
        keys = jax.random.split(rngs.params(), config.n_layers)
        self.layers = jax.vmap(lambda key: Block(config, nnx.Rngs(params=key), dtype))(keys)
        self.norm_D = nnx.Param(jnp.ones((config.d_model,), dtype))
        self.head_VD = None if config.tied else table()

    @property
    def unembed_VD(self) -> jax.Array:
        return (self.embed_VD if self.head_VD is None else self.head_VD)[...]


def decode(
    model: Decoder,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    segments_BT: jax.Array,
    past: tuple[State, ...] = (),
) -> tuple[jax.Array, State]:
    """Run the decoder over a block that continues from `past`.

    tokens_BT, positions_BT, segments_BT: int32; segment 0 is padding, tokens of one segment attend
    to each other causally and to everything in `past`; positions count real tokens from 0 over the
    whole sequence. Returns the hidden states after the final norm (fp32 [B, T, D]) and the block's
    own state. Rows of `past` may be fewer than B by a factor (see `bfm.model.state`).
    """
    c = model.config
    x_BTD = model.embed_VD[...][tokens_BT].astype(jnp.float32)
    rope_BTh = rotary(positions_BT, jnp.asarray(inverse_frequencies(c)))

    def layer(x_BTD, block_and_past):
        block, kv = block_and_past
        keys = tuple((k, v, s.valid_bP) for (k, v), s in zip(kv, past, strict=True))
        return block(x_BTD, c.eps, rope_BTh, segments_BT, positions_BT, keys)

    kv = tuple((s.k_LbKPh, s.v_LbKPh) for s in past)
    x_BTD, (k_LBKTh, v_LBKTh) = jax.lax.scan(layer, x_BTD, (model.layers, kv))
    x_BTD = rms_norm(x_BTD, model.norm_D[...], c.eps)
    return x_BTD, State(k_LBKTh, v_LBKTh, segments_BT > 0)


def rms_norm(x_BTD: jax.Array, scale_D: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * scale, in fp32 (arXiv 1910.07467)."""
    mean = jnp.mean(x_BTD * x_BTD, axis=-1, keepdims=True)
    return x_BTD * jax.lax.rsqrt(mean + eps) * scale_D.astype(jnp.float32)


def rotary(positions_BT: jax.Array, inv_h: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return cos and sin of position x frequency, fp32 [B, 1, T, h / 2]."""
    angle = positions_BT.astype(jnp.float32)[:, None, :, None] * inv_h
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x_BNTh: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate pairs (i, i + h / 2) (half-split form of arXiv 2104.09864, as in transformers)."""
    cos, sin = rope
    a, b = jnp.split(x_BNTh, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
