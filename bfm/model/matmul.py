# SPDX-License-Identifier: Apache-2.0
"""The two matrix products of this project: operands in the narrow dtype, sums in fp32."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp


def dot(x: jax.Array, w: jax.Array, n: int = 1) -> jax.Array:
    """Contract the last `n` axes of x with the first `n` of w: w's dtype in, fp32 out."""
    axes = tuple(range(x.ndim - n, x.ndim)), tuple(range(n))

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.dot_general(x, w, (axes, ((), ())), preferred_element_type=jnp.float32)

    return _at_best_rate(product, x.astype(w.dtype), w)


def batched(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return einsum(spec, x, y) of operands in y's dtype, fp32 out."""
    product = functools.partial(jnp.einsum, spec, preferred_element_type=jnp.float32)
    return _at_best_rate(product, x.astype(y.dtype), y)


def _at_best_rate(product, x: jax.Array, w: jax.Array) -> jax.Array:
    # A CPU without bf16 units multiplies bf16 at half its fp32 rate. Products of bf16 values are
    # exact in fp32, so widening the rounded operands first computes the same sums.
    if x.dtype != jnp.bfloat16 or cpu_multiplies_bf16():
        return product(x, w)

    def widened(x: jax.Array, w: jax.Array) -> jax.Array:
        return product(x.astype(jnp.float32), w.astype(jnp.float32))

    return jax.lax.platform_dependent(x, w, cpu=widened, default=product)


@functools.cache
def cpu_multiplies_bf16() -> bool:
    """Say whether this machine's CPU has bf16 matrix instructions (x86: AMX or AVX-512)."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "amx_bf16" in flags or "avx512_bf16" in flags
