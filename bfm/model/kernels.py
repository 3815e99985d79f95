# SPDX-License-Identifier: Apache-2.0
"""Kernels for the attention of a block over itself: splash on TPU, cuDNN on GPU (where asked for).

Each gives what `attention.attend` computes itself where none fits: the output [B, K, G, T, h] and the
log of its normaliser [B, K, G, T], both fp32, by which it merges with attention over earlier states.
Padding (segment 0) sees padding, so that nothing is divided by zero; nobody reads what it gives.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention
from jax.sharding import Mesh, PartitionSpec

from bfm.model.attention import Kernel
from bfm.model.split import ROWS, row_shards

BLOCKS = (512, 256, 128)  # of queries and keys: the largest that divides their number
HEADS = PartitionSpec(*ROWS, "tensor")  # of [B, K, ..]

Part = tuple[jax.Array, jax.Array]


def choose(
    name: str, shape: tuple[int, ...], dtype: jnp.dtype, past: bool, mesh: Mesh | None
) -> Kernel | None:
    """Return the kernel (scaled q_BKGTh, k_BKTh, v_BKTh, segments_BT) -> part; None where none fits.

    name: xla, splash, cudnn, or auto: splash on a TPU, XLA elsewhere (cuDNN has not been run). shape:
    of the queries. past: whether earlier states come before; splash then has no gradient. splash: T a
    multiple of 128, h of 64, rows and heads that the mesh divides; off a TPU it is interpreted. cuDNN:
    bf16, h up to 128, one device, no past (its log-normaliser is rounded to bf16).
    """
    B, K, _, T, h = shape
    platform = (mesh.devices.flat[0] if mesh else jax.devices()[0]).platform
    if name == "auto":
        name = "splash" if platform == "tpu" else "xla"
    rows, heads = row_shards(mesh), mesh.shape["tensor"] if mesh else 1
    if not mesh and platform != "cpu" and jax.device_count() > 1:
        return None  # a kernel is not partitioned by itself, and where the arrays lie is not told
    if name == "splash" and not (T % BLOCKS[-1] or h % 64 or B % rows or K % heads):
        return functools.partial(_splash, past=past, mesh=mesh, interpret=platform != "tpu")
    fits = dtype == jnp.bfloat16 and h <= 128 and not mesh and not past
    if name == "cudnn" and platform == "gpu" and fits:
        return functools.partial(by_jax_nn, implementation="cudnn")
    return None


def _splash(q_BKGTh, k_BKTh, v_BKTh, segments_BT, past: bool, mesh, interpret: bool) -> Part:
    """Run splash attention (jax.experimental.pallas), each device on its own rows and heads."""

    def rows(q_BKGTh, k_BKTh, v_BKTh, segments_BT) -> Part:
        _, K, G, T, h = q_BKGTh.shape
        kernel = _kernel(K * G, T, past, interpret)

        def row(q_KGTh, k_KTh, v_KTh, segments_T):
            ids = splash_attention.SegmentIds(segments_T, segments_T)
            return kernel(q_KGTh.reshape(K * G, T, h), k_KTh, v_KTh, segment_ids=ids)

        found = jax.vmap(row)(q_BKGTh, k_BKTh, v_BKTh, segments_BT)
        out, log = (found[0], found[1][0]) if past else (found, jnp.zeros(found.shape[:3]))
        shape = q_BKGTh.shape
        return out.reshape(shape).astype(jnp.float32), log.reshape(shape[:-1]).astype(jnp.float32)

    if mesh:
        rows = jax.shard_map(
            rows, mesh=mesh, in_specs=(HEADS, HEADS, HEADS, ROWS), out_specs=(HEADS, HEADS),
            check_vma=False,
        )  # fmt: skip
    return rows(q_BKGTh, k_BKTh, v_BKTh, segments_BT)


def _kernel(heads: int, T: int, past: bool, interpret: bool):
    block = next(b for b in BLOCKS if T % b == 0)
    mask = splash_attention.CausalMask((T, T))
    sizes = splash_attention.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=block, block_q_dkv=block,
        block_kv_dkv=block, block_kv_dkv_compute=block, block_q_dq=block, block_kv_dq=block,
    )  # fmt: skip
    return splash_attention.make_splash_mha(
        splash_attention.MultiHeadMask([mask] * heads), block_sizes=sizes, head_shards=1,
        q_seq_shards=1, save_residuals=past, interpret=interpret,
    )  # fmt: skip


def by_jax_nn(q_BKGTh, k_BKTh, v_BKTh, segments_BT, implementation: str) -> Part:
    """Run jax.nn's attention with the mask of segments and order, by cuDNN or by XLA (for tests)."""
    B, K, G, T, h = q_BKGTh.shape
    same_BTS = segments_BT[:, :, None] == segments_BT[:, None, :]
    out_BTNh = jax.nn.dot_product_attention(
        q_BKGTh.reshape(B, K * G, T, h).swapaxes(1, 2), k_BKTh.swapaxes(1, 2),
        v_BKTh.swapaxes(1, 2), mask=(same_BTS & jnp.tri(T, dtype=bool))[:, None], scale=1.0,
        implementation=implementation,
    )  # fmt: skip
    out_BKGTh = out_BTNh.swapaxes(1, 2).reshape(q_BKGTh.shape).astype(jnp.float32)
    return out_BKGTh, jnp.zeros((B, K, G, T))
