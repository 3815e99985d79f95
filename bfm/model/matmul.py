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
    return jax.lax.dot_general(
        x.astype(w.dtype), w, (axes, ((), ())), preferred_element_type=jnp.float32
    )


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
