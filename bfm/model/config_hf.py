# SPDX-License-Identifier: Apache-2.0
"""config.json -> ModelConfig, field by field.

Every field of a config is *handled* (it changes the computation here), *ignored* (it cannot change a
log-probability) or *refused* by name, so that a feature of a newer model is never dropped in silence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from bfm.model.config import (
    FAMILIES,
    FULL,
    LINEAR,
    SLIDING,
    ConfigError,
    Delta,
    ModelConfig,
    Rope,
    pattern,
)

# Fields of config.json that cannot move a log-probability of a decoder at inference.
_IGNORED = frozenset({
    "architectures", "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id", "dtype",
    "torch_dtype", "initializer_range", "is_llama_config", "name_or_path", "_name_or_path",
    "transformers_version", "transformers.js_config", "use_cache", "auto_map",
    "_attn_implementation", "output_attentions", "output_hidden_states", "return_dict",
    "problem_type", "id2label", "label2id", "chunk_size_feed_forward", "is_encoder_decoder",
    "tokenizer_class", "unsloth_version", "unsloth_fixed", "cache_implementation",
})  # fmt: skip
# Handled below, in every family.
_HANDLED = frozenset({
    "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size",
    "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
    "max_position_embeddings", "tie_word_embeddings", "rope_theta", "rope_scaling",
    "rope_parameters",
})  # fmt: skip
_NEEDED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Family:
    """What a family adds: fields that are handled, ignored, or have one value that is computed."""

    handled: frozenset[str] = frozenset()
    ignored: frozenset[str] = frozenset()
    only: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    d_head: int = 0  # default of head_dim; 0 is hidden_size / heads
    window: int = 2048  # default of max_position_embeddings


_FAMILY = {
    "llama": _Family(
        only={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1,
              "rope_interleaved": False},
    ),
    "qwen3": _Family(
        handled=frozenset({"layer_types"}),
        ignored=frozenset({"max_window_layers", "sliding_window"}),  # of use_sliding_window only
        only={"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
        d_head=128,
        window=32_768,
    ),
    "qwen3_5_text": _Family(
        handled=frozenset({
            "layer_types", "full_attention_interval", "partial_rotary_factor",
            "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim",
            "linear_num_key_heads", "linear_num_value_heads",
        }),
        # The multi-token prediction head is not part of log p(next token).
        ignored=frozenset({"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"}),
        only={"hidden_act": "silu", "attention_bias": False, "attn_output_gate": True,
              "mamba_ssm_dtype": "float32", "mlp_only_layers": []},
        d_head=256,
        window=32_768,
    ),
    "gemma3_text": _Family(
        handled=frozenset({
            "layer_types", "sliding_window", "sliding_window_pattern", "_sliding_window_pattern",
            "query_pre_attn_scalar", "rope_local_base_freq",
        }),
        only={"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh",
              "attention_bias": False, "final_logit_softcapping": None,
              "attn_logit_softcapping": None, "use_bidirectional_attention": False},
        d_head=256,
        window=131_072,
    ),
}  # fmt: skip
# Of the wrapper of a model that also sees: what concerns images and video only.
_WRAPPER = frozenset({
    "model_type", "text_config", "vision_config", "tie_word_embeddings", "image_token_id",
    "video_token_id", "vision_start_token_id", "vision_end_token_id",
})  # fmt: skip


def from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face `config.json`.

    Raises ConfigError naming every field that is missing, refused or unknown.
    """
    kind = raw.get("model_type")
    if kind == "qwen3_5":
        raw = _unwrapped(raw)
        kind = raw.get("model_type", "qwen3_5_text")
    if kind not in _FAMILY:
        raise ConfigError(f"model_type: {kind!r} is not supported; families: {FAMILIES}")
    family = _FAMILY[kind]
    faults = [
        f"{key}: {raw[key]!r} is not supported (only {value!r})"
        for key, value in family.only.items()
        if raw.get(key, value) not in (value, None)
    ]
    known = _IGNORED | _HANDLED | family.handled | family.ignored | set(family.only)
    faults += [f"{key}: unknown field" for key in sorted(set(raw) - known)]
    faults += [f"{key}: missing" for key in _NEEDED if not isinstance(raw.get(key), int)]
    if faults:
        raise ConfigError("; ".join(faults))
    heads, layers = raw["num_attention_heads"], raw["num_hidden_layers"]
    d_head = raw.get("head_dim") or family.d_head or raw["hidden_size"] // heads
    common = dict(
        vocab=raw["vocab_size"],
        d_model=raw["hidden_size"],
        n_layers=layers,
        d_mlp=raw["intermediate_size"],
        n_heads=heads,
        n_kv=raw.get("num_key_value_heads") or heads,
        d_head=d_head,
        eps=float(raw.get("rms_norm_eps", 1e-6)),
        window=int(raw.get("max_position_embeddings", family.window)),
        tied=bool(raw.get("tie_word_embeddings", kind == "gemma3_text")),
    )
    if kind == "llama":
        return ModelConfig(**common, rope=_rope_from_hf(raw))
    if kind == "qwen3":
        types = _layer_types(raw, layers, FULL, 1)
        if set(types) != {FULL}:
            raise ConfigError(
                "layer_types: only full_attention is supported for model_type 'qwen3'"
            )
        return ModelConfig(**common, rope=_rope_from_hf(raw), family="qwen3", qk_norm=True)
    if kind == "qwen3_5_text":
        return _qwen35(raw, common)
    return _gemma3(raw, common)


def _unwrapped(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the text config of a model with a vision tower, which text alone never enters."""
    if unknown := sorted(set(raw) - _WRAPPER - _IGNORED):
        raise ConfigError("; ".join(f"{key}: unknown field" for key in unknown))
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        raise ConfigError("text_config: missing")
    # The head belongs to the wrapper, and so does the word on whether it is tied.
    tied = (
        {"tie_word_embeddings": raw["tie_word_embeddings"]} if "tie_word_embeddings" in raw else {}
    )
    return {**text, **tied}


def _qwen35(raw: Mapping[str, Any], common: dict[str, Any]) -> ModelConfig:
    layers = common["n_layers"]
    types = _layer_types(raw, layers, LINEAR, int(raw.get("full_attention_interval", 4)))
    if SLIDING in types:
        raise ConfigError("layer_types: sliding_attention is not supported for 'qwen3_5_text'")
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    part = float(rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 0.25)))
    # For text the three position rows of mrope are equal, so that it is ordinary rotary embedding.
    for key in ("mrope_section", "mrope_interleaved", "partial_rotary_factor"):
        rope.pop(key, None)
    return ModelConfig(
        **common,
        family="qwen3_5",
        layer_types=types,
        rope=_rope(rope, float(raw.get("rope_theta", 10_000.0))),
        d_rope=int(common["d_head"] * part),
        qk_norm=True,
        gated=True,
        norm_offset=1.0,
        delta=Delta(
            n_keys=int(raw.get("linear_num_key_heads", 16)),
            n_values=int(raw.get("linear_num_value_heads", 32)),
            d_key=int(raw.get("linear_key_head_dim", 128)),
            d_value=int(raw.get("linear_value_head_dim", 128)),
            taps=int(raw.get("linear_conv_kernel_dim", 4)),
        ),
    )


def _gemma3(raw: Mapping[str, Any], common: dict[str, Any]) -> ModelConfig:
    every = raw.get("sliding_window_pattern", raw.get("_sliding_window_pattern", 6))
    types = _layer_types(raw, common["n_layers"], SLIDING, int(every))
    if LINEAR in types:
        raise ConfigError("layer_types: linear_attention is not supported for 'gemma3_text'")
    # transformers 5 writes one set of rope parameters a layer type; 4 wrote two bases.
    rope = raw.get("rope_parameters") or {}
    full = dict(raw.get("rope_scaling") or {}) | dict(rope.get(FULL) or {})
    local = dict(rope.get(SLIDING) or {})
    if extra := sorted(set(rope) - {FULL, SLIDING}):
        raise ConfigError(f"rope_parameters: unknown field {extra[0]!r}")
    return ModelConfig(
        **common,
        family="gemma3",
        layer_types=types,
        rope=_rope(full, float(raw.get("rope_theta", 1_000_000.0))),
        rope_local=_rope(local, float(raw.get("rope_local_base_freq", 10_000.0))),
        sliding=int(raw.get("sliding_window") or 4096),
        query_scale=float(raw.get("query_pre_attn_scalar", 256)) ** -0.5,
        qk_norm=True,
        norm_offset=1.0,
        post_norms=True,
        activation="gelu_tanh",
        embed_scale=common["d_model"] ** 0.5,
    )


def _layer_types(raw: Mapping[str, Any], n: int, most: str, interval: int) -> tuple[str, ...]:
    types = raw.get("layer_types")
    return pattern(n, most, interval) if types is None else tuple(types)


def _rope_from_hf(raw: Mapping[str, Any]) -> Rope:
    # transformers 5 writes rope_parameters; 4 wrote rope_theta beside rope_scaling.
    rope = dict(raw.get("rope_scaling") or {}) | dict(raw.get("rope_parameters") or {})
    if rope.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(
            f"partial_rotary_factor: only 1.0 is supported for model_type {raw['model_type']!r}"
        )
    return _rope(rope, float(raw.get("rope_theta", 10_000.0)))


_ROPE_FIELDS = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}


def _rope(rope: Mapping[str, Any], theta: float) -> Rope:
    """Read one set of rope parameters; `theta` is the base where the set names none."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _ROPE_FIELDS:
        raise ConfigError(f"rope_type: {kind!r} is not supported (only default, linear and llama3)")
    needed = _ROPE_FIELDS[kind]
    if extra := sorted(set(rope) - needed - {"rope_theta", "rope_type", "type"}):
        raise ConfigError(f"rope_parameters: unknown field {extra[0]!r} for rope_type {kind!r}")
    if missing := sorted(needed - set(rope)):
        raise ConfigError(f"rope_parameters: missing {missing[0]!r} for rope_type {kind!r}")
    return Rope(
        theta=float(rope.get("rope_theta", theta)),
        kind=kind,
        factor=float(rope.get("factor", 1.0)),
        low=float(rope.get("low_freq_factor", 1.0)),
        high=float(rope.get("high_freq_factor", 4.0)),
        original=int(rope.get("original_max_position_embeddings", 8192)),
    )
