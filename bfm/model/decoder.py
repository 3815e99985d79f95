# SPDX-License-Identifier: Apache-2.0
"""The decoder: tokens in, hidden states and a turn state out. `flax.nnx` modules used as pytrees.

Shapes: B rows, T tokens, L layers, D model, N query heads, K key heads, G = N / K, h head width,
F mlp width, V vocabulary, P tokens of an earlier state. The residual stream, norms and softmax are
fp32; every matrix product takes operands in the weights' dtype and accumulates in fp32. A linear layer
adds: C convolution channels, W taps, g value heads a key head, d and v key and value widths.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from bfm.model import kernels
from bfm.model.attention import attend
from bfm.model.config import SLIDING, ModelConfig, inverse_frequencies
from bfm.model.delta import Runs, convolve, delta_rule, l2_norm, runs
from bfm.model.matmul import dot
from bfm.model.split import mesh_of
from bfm.model.state import State

# Farther than any position: the window of a layer that sees everything.
EVERYTHING = 1 << 30


class Block(nnx.Module):
    """One layer: x + mixer(norm(x)), then x + mlp(norm(x)); no biases.

    The mixer is softmax attention, or a Gated DeltaNet in a linear layer.
    """

    def __init__(self, c: ModelConfig, linear: bool, rngs: nnx.Rngs, dtype: jnp.dtype):
        def weight(*shape: int, dtype: jnp.dtype = dtype) -> nnx.Param:
            return nnx.Param(0.02 * jax.random.normal(rngs.params(), shape, dtype))

        def norm(width: int = c.d_model) -> nnx.Param:
            return nnx.Param(jnp.full((width,), 1.0 - c.norm_offset, dtype))

        self.is_linear = linear
        self.mixer_norm_D = norm()
        if linear:
            d = c.delta
            self.qkv_DC = weight(c.d_model, d.channels)
            self.z_DHv = weight(c.d_model, d.n_values, d.d_value)
            self.beta_DH = weight(c.d_model, d.n_values)
            self.step_DH = weight(c.d_model, d.n_values)
            self.conv_CW = weight(d.channels, d.taps)
            # Published in fp32 beside bf16 weights, because a decay is an exponential of them.
            self.log_rate_H = weight(d.n_values, dtype=jnp.float32)
            self.step_bias_H = nnx.Param(jnp.ones((d.n_values,), dtype))
            self.out_norm_v = nnx.Param(jnp.ones((d.d_value,), jnp.float32))
            self.out_HvD = weight(d.n_values, d.d_value, c.d_model)
        else:
            self.q_DNh = weight(c.d_model, c.n_heads, c.d_head * (2 if c.gated else 1))
            self.k_DKh = weight(c.d_model, c.n_kv, c.d_head)
            self.v_DKh = weight(c.d_model, c.n_kv, c.d_head)
            self.o_NhD = weight(c.n_heads, c.d_head, c.d_model)
            self.q_norm_h = norm(c.d_head) if c.qk_norm else None
            self.k_norm_h = norm(c.d_head) if c.qk_norm else None
        self.mixer_post_norm_D = norm() if c.post_norms else None
        self.mlp_norm_D = norm()
        self.gate_DF = weight(c.d_model, c.d_mlp)
        self.up_DF = weight(c.d_model, c.d_mlp)
        self.down_FD = weight(c.d_mlp, c.d_model)
        self.mlp_post_norm_D = norm() if c.post_norms else None

    def __call__(self, x_BTD: jax.Array, at: Place, past: tuple) -> tuple[jax.Array, tuple]:
        """Return the new residual stream and what this layer leaves in the state."""
        mixer = self.delta if self.is_linear else self.attention
        y_BTD, left = mixer(at.norm(x_BTD, self.mixer_norm_D), at, past)
        x_BTD = x_BTD + at.norm(y_BTD, self.mixer_post_norm_D)
        y_BTD = at.norm(x_BTD, self.mlp_norm_D)
        f_BTF = at.activation(dot(y_BTD, self.gate_DF[...])) * dot(y_BTD, self.up_DF[...])
        return x_BTD + at.norm(dot(f_BTF, self.down_FD[...]), self.mlp_post_norm_D), left

    def attention(self, y_BTD: jax.Array, at: Place, past: tuple) -> tuple[jax.Array, tuple]:
        """Softmax attention; `past` holds (k_bKPh, v_bKPh, position_bP) of every earlier block."""
        dtype = self.k_DKh.dtype
        q_BNTh = dot(y_BTD, self.q_DNh[...]).swapaxes(1, 2)
        gate = 1.0
        if at.config.gated:
            q_BNTh, gate_BNTh = jnp.split(q_BNTh, 2, axis=-1)
            gate = jax.nn.sigmoid(gate_BNTh)
        k_BKTh = dot(y_BTD, self.k_DKh[...]).swapaxes(1, 2)
        q_BNTh = rotate(at.norm(q_BNTh, self.q_norm_h), at.rope)
        k_BKTh = rotate(at.norm(k_BKTh, self.k_norm_h), at.rope).astype(dtype)
        v_BKTh = dot(y_BTD, self.v_DKh[...]).swapaxes(1, 2).astype(dtype)
        B, K, T, h = k_BKTh.shape
        q_BKGTh = q_BNTh.reshape(B, K, -1, T, h)
        kernel = None
        if at.window is None:
            kernel = kernels.choose(at.config.attention, q_BKGTh.shape, dtype, bool(past), at.mesh)
        a_BKGTh = attend(
            q_BKGTh, k_BKTh, v_BKTh, at.segments_BT, at.positions_BT, past,
            scale=at.config.query_scale, window=at.window, kernel=kernel,
        )  # fmt: skip
        a_BNTh = a_BKGTh.reshape(B, -1, T, h) * gate
        return dot(a_BNTh.swapaxes(1, 2), self.o_NhD[...], n=2), (k_BKTh, v_BKTh)

    def delta(self, y_BTD: jax.Array, at: Place, past: tuple) -> tuple[jax.Array, tuple]:
        """Gated DeltaNet; `past` is the newest block's (inputs_bWC, state_bKgdv), or nothing."""
        d, (B, T, _) = at.config.delta, y_BTD.shape
        inputs, state = past or (None, None)
        mixed_BTC, inputs = convolve(
            dot(y_BTD, self.qkv_DC[...]), self.conv_CW[...], at.runs, inputs
        )
        mixed_BTC = jax.nn.silu(mixed_BTC)
        width = d.n_keys * d.d_key
        q_BKTd, k_BKTd = (
            l2_norm(x.reshape(B, T, d.n_keys, d.d_key).swapaxes(1, 2))
            for x in (mixed_BTC[..., :width], mixed_BTC[..., width : 2 * width])
        )

        def heads(x_BTH: jax.Array) -> jax.Array:  # value head j reads key head j // g
            x = x_BTH.reshape(B, T, d.n_keys, d.n_values // d.n_keys, *x_BTH.shape[3:])
            return jnp.moveaxis(x, 1, 3)

        v_BKgTv = heads(mixed_BTC[..., 2 * width :].reshape(B, T, d.n_values, d.d_value))
        active_BT1 = at.runs.active_BT[..., None]
        beta_BTH = jnp.where(active_BT1, jax.nn.sigmoid(dot(y_BTD, self.beta_DH[...])), 0.0)
        step_BTH = jax.nn.softplus(
            dot(y_BTD, self.step_DH[...]) + self.step_bias_H[...].astype(jnp.float32)
        )
        decay_BTH = jnp.where(active_BT1, -jnp.exp(self.log_rate_H[...]) * step_BTH, 0.0)
        o_BKgTv, state = delta_rule(
            q_BKTd * d.d_key**-0.5,
            k_BKTd,
            v_BKgTv,
            heads(decay_BTH),
            heads(beta_BTH),
            at.runs,
            state,
        )
        o_BTHv = jnp.moveaxis(o_BKgTv, 3, 1).reshape(B, T, d.n_values, d.d_value)
        # This norm multiplies by the weight itself, whatever the others add to theirs.
        o_BTHv = rms_norm(o_BTHv, self.out_norm_v[...], at.config.eps)
        o_BTHv = o_BTHv * jax.nn.silu(dot(y_BTD, self.z_DHv[...]))
        return dot(o_BTHv, self.out_HvD[...], n=2), (inputs, state)


class Place(NamedTuple):
    """What every layer is told: where its tokens stand, and the config."""

    config: ModelConfig
    rope: tuple[jax.Array, jax.Array]
    segments_BT: jax.Array
    positions_BT: jax.Array
    mesh: Mesh | None = None
    runs: Runs | None = None
    window: jax.Array | None = None

    def norm(self, x: jax.Array, weight: nnx.Param | None) -> jax.Array:
        """RMS norm by the model's convention; none where the layer has no such norm."""
        if weight is None:
            return x
        return rms_norm(
            x, self.config.norm_offset + weight[...].astype(jnp.float32), self.config.eps
        )

    def activation(self, x: jax.Array) -> jax.Array:
        return jax.nn.silu(x) if self.config.activation == "silu" else jax.nn.gelu(x)


class Decoder(nnx.Module):
    """Embedding, stacked blocks (softmax and linear apart), final norm, head (None when tied)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype: jnp.dtype = jnp.float32):
        def table() -> nnx.Param:
            shape = (config.vocab, config.d_model)
            return nnx.Param(0.02 * jax.random.normal(rngs.params(), shape, dtype))

        def stack(linear: bool) -> Block | None:
            if not (n := len(config.layers_of(linear))):
                return None
            keys = jax.random.split(rngs.params(), n)
            return jax.vmap(lambda key: Block(config, linear, nnx.Rngs(params=key), dtype))(keys)

        self.config = config
        self.embed_VD = table()
        self.full = stack(linear=False)
        self.linear = stack(linear=True)
        self.norm_D = nnx.Param(jnp.full((config.d_model,), 1.0 - config.norm_offset, dtype))
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
    remat: bool = False,
) -> tuple[jax.Array, State]:
    """Run the decoder over a block that continues from `past`.

    tokens_BT, positions_BT, segments_BT: int32; segment 0 is padding (to the right of a segment, never
    inside), tokens of one segment see each other causally and everything in `past`; positions count
    real tokens from 0 over the whole sequence. Returns the hidden states after the final norm (fp32
    [B, T, D]) and the block's own state. Rows of `past` may be fewer than B by a factor (see
    `bfm.model.state`). Layers run as one scan over the pattern of mixers that repeats; with `remat` a
    gradient keeps only the residual stream between them.
    """
    c = model.config
    scale = jnp.asarray(c.embed_scale, model.embed_VD.dtype).astype(jnp.float32)
    x_BTD = model.embed_VD[...][tokens_BT].astype(jnp.float32) * scale
    rope = rotary(positions_BT, jnp.asarray(inverse_frequencies(c)))
    place = Place(c, rope, segments_BT, positions_BT, mesh_of(model))
    local = None
    if SLIDING in c.layer_types:
        near = rotary(positions_BT, jnp.asarray(inverse_frequencies(c, c.rope_local)))
        local = jnp.asarray([kind == SLIDING for kind in c.layer_types])
    if model.linear is not None:
        place = place._replace(runs=runs(segments_BT))

    blocks = c.n_layers // c.superblock
    is_linear = [i in c.layers_of(linear=True) for i in range(c.superblock)]
    newest = past[-1:]  # a recurrent state includes all before it
    stacks = {
        False: (model.full, tuple((s.k_LbKPh, s.v_LbKPh) for s in past), local),
        True: (model.linear, tuple((s.inputs_LbWC, s.state_LbKgdv) for s in newest), None),
    }
    # Leading axis of layers of a kind -> superblocks, layers of that kind in one. Not where that is one
    # layer: XLA would copy every weight at every call to be rid of an axis of one.
    several = {k for k in stacks if is_linear.count(k) > 1}
    xs = {k: jax.tree.map(lambda a, k=k: a.reshape(blocks, -1, *a.shape[1:]) if k in several else a, v)
          for k, v in stacks.items() if v[0] is not None}  # fmt: skip

    def layer(x_BTD, stack, j, linear):
        block, held, is_local = jax.tree.map(lambda a: a[j], stack) if linear in several else stack
        at = place
        if is_local is not None:
            at = at._replace(
                rope=tuple(jnp.where(is_local, n, f) for n, f in zip(near, rope, strict=True)),
                window=jnp.where(is_local, c.sliding, EVERYTHING),
            )
        if linear:
            held = held[0] if held else ()
        else:
            held = tuple((*kv, s.position_bP) for kv, s in zip(held, past, strict=True))
        return block(x_BTD, at, held)

    def superblock(x_BTD, xs):
        left = {False: [], True: []}
        for linear in is_linear:
            run = functools.partial(layer, j=len(left[linear]), linear=linear)
            # A layer at a time: the backward pass holds the activations of one, not of the pattern.
            x_BTD, new = (jax.checkpoint(run) if remat else run)(x_BTD, xs[linear])
            left[linear].append(new)
        return x_BTD, {k: jax.tree.map(lambda *a: jnp.stack(a), *v) if k in several else v[0]
                       for k, v in left.items() if v}  # fmt: skip

    x_BTD, left = jax.lax.scan(superblock, x_BTD, xs)
    for k in several:
        left[k] = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), left[k])
    k_LBKTh, v_LBKTh = left.get(False, (None, None))
    inputs_LBWC, state_LBKgdv = left.get(True, (None, None))
    position_BT = jnp.where(segments_BT > 0, positions_BT, -1)
    x_BTD = place.norm(x_BTD, model.norm_D)
    return x_BTD, State(k_LBKTh, v_LBKTh, position_BT, inputs_LBWC, state_LBKgdv)


def rms_norm(x_BTD: jax.Array, scale_D: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * scale, in fp32 (arXiv 1910.07467)."""
    mean = jnp.mean(x_BTD * x_BTD, axis=-1, keepdims=True)
    return x_BTD * jax.lax.rsqrt(mean + eps) * scale_D.astype(jnp.float32)


def rotary(positions_BT: jax.Array, inv_h: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return cos and sin of position x frequency, fp32 [B, 1, T, d_rope / 2]."""
    angle = positions_BT.astype(jnp.float32)[:, None, :, None] * inv_h
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x_BNTh: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate pairs (i, i + d_rope / 2) of the first d_rope entries of each head; the rest passes.

    Half-split form of arXiv 2104.09864, as in transformers.
    """
    cos, sin = rope
    half = cos.shape[-1]
    a, b, rest = x_BNTh[..., :half], x_BNTh[..., half : 2 * half], x_BNTh[..., 2 * half :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)
