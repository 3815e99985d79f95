# SPDX-License-Identifier: Apache-2.0
"""GGUF metadata -> ModelConfig, field by field: handled, or refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bfm.model.config import (
    FAMILIES,
    LINEAR,
    SLIDING,
    ConfigError,
    Delta,
    ModelConfig,
    Rope,
    pattern,
)

_GGUF_HANDLED = frozenset({
    "block_count", "context_length", "embedding_length", "feed_forward_length",
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", "attention.layer_norm_rms_epsilon", "rope.freq_base",
    "rope.dimension_count", "vocab_size",
})  # fmt: skip
_GGUF_FAMILY = {
    "llama": frozenset(),
    "qwen3": frozenset(),
    "gemma3": frozenset({
        "attention.sliding_window", "attention.sliding_window_pattern", "rope.scaling.type",
        "rope.scaling.factor", "rope.freq_base_swa",
    }),
    "qwen35": frozenset({
        "ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank",
        "ssm.inner_size", "full_attention_interval", "rope.dimension_sections",
        "nextn_predict_layers",
    }),
}  # fmt: skip


def from_gguf(meta: Mapping[str, Any], vocab: int, tied: bool, factors: Sequence) -> ModelConfig:
    """Read the metadata of a GGUF file (keys as in the file; source: gguf `constants.py`).

    `vocab` is the row count of `token_embd`, `tied` whether `output` is absent, `factors` the tensor
    `rope_freqs` (the only place where GGUF keeps Llama 3.1's scaling), empty when absent.
    """
    arch = meta.get("general.architecture")
    if arch not in _GGUF_FAMILY:
        raise ConfigError(f"general.architecture: {arch!r} is not supported; families: {FAMILIES}")
    fields = {k[len(arch) + 1 :]: v for k, v in meta.items() if k.startswith(f"{arch}.")}
    if unknown := sorted(set(fields) - _GGUF_HANDLED - _GGUF_FAMILY[arch]):
        raise ConfigError("; ".join(f"{arch}.{key}: unknown field" for key in unknown))
    try:
        return _from_gguf(arch, fields, vocab, tied, tuple(factors))
    except KeyError as error:
        raise ConfigError(f"{arch}.{error.args[0]}: missing") from None


def _from_gguf(
    arch: str, fields: Mapping[str, Any], vocab: int, tied: bool, factors
) -> ModelConfig:
    heads = int(fields["attention.head_count"])
    d_model, layers = int(fields["embedding_length"]), int(fields["block_count"])
    d_head = int(fields.get("attention.key_length", d_model // heads))
    d_rope = int(fields.get("rope.dimension_count", d_head))
    for key, value in (("attention.value_length", d_head), ("rope.dimension_count", d_head)):
        if fields.get(key, value) != value and (arch, key) != ("qwen35", "rope.dimension_count"):
            raise ConfigError(f"{arch}.{key}: {fields[key]} is not supported (only {value})")
    common = dict(
        vocab=vocab,
        d_model=d_model,
        d_mlp=int(fields["feed_forward_length"]),
        n_heads=heads,
        n_kv=int(fields.get("attention.head_count_kv", heads)),
        d_head=d_head,
        eps=float(str(np.float32(fields["attention.layer_norm_rms_epsilon"]))),  # 1e-6, as it was
        window=int(fields["context_length"]),
        tied=tied,
    )
    rope = Rope(
        theta=float(fields.get("rope.freq_base", 10_000.0)),
        kind="factors" if factors else "default",
        factors=factors,
    )
    if arch == "llama":
        return ModelConfig(**common, n_layers=layers, rope=rope)
    if arch == "qwen3":
        return ModelConfig(**common, n_layers=layers, rope=rope, family="qwen3", qk_norm=True)
    if arch == "qwen35":
        layers -= int(fields.get("nextn_predict_layers", 0))
        interval = int(fields.get("full_attention_interval", 4))
        values = int(fields["ssm.time_step_rank"])
        return ModelConfig(
            **common,
            n_layers=layers,
            rope=rope,
            family="qwen3_5",
            layer_types=pattern(layers, LINEAR, interval),
            d_rope=d_rope,
            qk_norm=True,
            gated=True,
            norm_offset=1.0,
            delta=Delta(
                n_keys=int(fields["ssm.group_count"]),
                n_values=values,
                d_key=int(fields["ssm.state_size"]),
                d_value=int(fields["ssm.inner_size"]) // values,
                taps=int(fields["ssm.conv_kernel"]),
            ),
        )
    scaling = fields.get("rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise ConfigError(f"gemma3.rope.scaling.type: {scaling!r} is not supported (only 'linear')")
    if scaling == "linear":
        rope = dataclasses.replace(rope, kind="linear", factor=float(fields["rope.scaling.factor"]))
    every = int(fields.get("attention.sliding_window_pattern", 6))
    # The scale of scores is in no field: llama.cpp takes the head's width, and d_model / heads for
    # the 27B model, which it knows by its 62 layers.
    scalar = d_model // heads if layers == 62 else d_head
    return ModelConfig(
        **common,
        n_layers=layers,
        rope=rope,
        family="gemma3",
        layer_types=pattern(layers, SLIDING, every),
        rope_local=Rope(theta=float(fields.get("rope.freq_base_swa", 10_000.0))),
        sliding=int(fields["attention.sliding_window"]),
        query_scale=scalar**-0.5,
        qk_norm=True,
        norm_offset=1.0,
        post_norms=True,
        activation="gelu_tanh",
        embed_scale=d_model**0.5,
    )
