# SPDX-License-Identifier: Apache-2.0
"""The matrix products of this project: operands in the narrow dtype, sums in fp32."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowRank:
    """A weight w + scale a b that is never formed (LoRA, arXiv 2106.09685): stands where w stands.

    frozen: (inputs.., outputs..), a: (inputs.., r), b: (r, outputs..), perhaps behind a layer axis.
    """

    frozen: jax.Array
    a: jax.Array
    b: jax.Array
    scale: float = dataclasses.field(metadata={"static": True})

    @property
    def dtype(self) -> jnp.dtype:
        return self.frozen.dtype

    def __getitem__(self, key: object) -> LowRank:
        """Return itself for [...], by which a module reads its parameter."""
        return self

    def merged(self) -> jax.Array:
        """Return w + scale a b of a stack of layers, summed in fp32, in w's dtype."""
        a_LIr = self.a.reshape(self.a.shape[0], -1, self.a.shape[-1]).astype(jnp.float32)
        b_LrO = self.b.reshape(self.b.shape[0], self.b.shape[1], -1).astype(jnp.float32)
        change = jnp.einsum("lir,lro->lio", a_LIr, b_LrO, precision="highest")
        summed = self.frozen.astype(jnp.float32) + self.scale * change.reshape(self.frozen.shape)
        return summed.astype(self.frozen.dtype)


def dot(x: jax.Array, w: jax.Array | LowRank, n: int = 1) -> jax.Array:
    """Contract the last `n` axes of x with the first `n` of w: w's dtype in, fp32 out."""
    if isinstance(w, LowRank):
        return dot(x, w.frozen, n) + w.scale * dot(dot(x, w.a, n), w.b)
    rows, inner = x.shape[: x.ndim - n], w.shape[n:]
    size = math.prod(w.shape[:n])
    y = _product(x.astype(w.dtype).reshape(-1, size), w.reshape(size, -1))
    return y.reshape(*rows, *inner)


@jax.custom_vjp
def _product(x_MI: jax.Array, w_IO: jax.Array) -> jax.Array:
    """x w of operands of one dtype, fp32 out.

    Its gradients are products of the narrow dtype too, with fp32 sums, and each has its operands in the
    order in which they lie: the transposition that autodiff would choose copies large activations.
    """
    return _contract(x_MI, w_IO, 1, 0)


def _contract(x: jax.Array, y: jax.Array, i: int, j: int) -> jax.Array:
    axes = (((i,), (j,)), ((), ()))
    return jax.lax.dot_general(x, y, axes, preferred_element_type=jnp.float32)


def _forward(x_MI, w_IO):
    return _contract(x_MI, w_IO, 1, 0), (x_MI, w_IO)


def _backward(kept, dy_MO):
    x_MI, w_IO = kept
    dy_MO = dy_MO.astype(w_IO.dtype)
    dx_MI, dw_IO = _contract(dy_MO, w_IO, 1, 1), _contract(x_MI, dy_MO, 0, 0)
    return dx_MI.astype(x_MI.dtype), dw_IO.astype(w_IO.dtype)


_product.defvjp(_forward, _backward)


def batched(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return einsum(spec, x, y) of operands in y's dtype, fp32 out."""
    return jnp.einsum(spec, x.astype(y.dtype), y, preferred_element_type=jnp.float32)


@functools.cache
def bf16_pays() -> bool:
    """Say whether the default backend multiplies bf16 faster than fp32.

    Every accelerator does; a CPU only with bf16 matrix instructions (x86: AMX or AVX-512), and without
    them at about half its fp32 rate.
    """
    if jax.default_backend() != "cpu":
        return True
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "amx_bf16" in flags or "avx512_bf16" in flags
