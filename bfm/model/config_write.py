# SPDX-License-Identifier: Apache-2.0
"""ModelConfig -> config.json, for an export."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from bfm.model.config import FULL, SLIDING, ConfigError, ModelConfig, Rope, inverse_frequencies


def to_hf(c: ModelConfig) -> dict[str, Any]:
    """Write the `config.json` (transformers 5) of a text model: the inverse of `config_hf.from_hf`.

    Raises ConfigError for GGUF rope factors that are no published Llama 3 scaling.
    """
    family = {"qwen3_5": "qwen3_5_text", "gemma3": "gemma3_text"}.get(c.family, c.family)
    names = {
        "llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM",
        "qwen3_5_text": "Qwen3_5ForCausalLM", "gemma3_text": "Gemma3ForCausalLM",
    }  # fmt: skip
    raw: dict[str, Any] = {
        "architectures": [names[family]],
        "model_type": family,
        "vocab_size": c.vocab,
        "hidden_size": c.d_model,
        "num_hidden_layers": c.n_layers,
        "intermediate_size": c.d_mlp,
        "num_attention_heads": c.n_heads,
        "num_key_value_heads": c.n_kv,
        "head_dim": c.d_head,
        "rms_norm_eps": c.eps,
        "max_position_embeddings": c.window,
        "tie_word_embeddings": c.tied,
    }
    rope = _rope_to_hf(c, c.rope)
    if family == "gemma3_text":
        raw |= {
            "hidden_activation": "gelu_pytorch_tanh",
            "rope_parameters": {FULL: rope, SLIDING: _rope_to_hf(c, c.rope_local)},
            "sliding_window": c.sliding,
            "query_pre_attn_scalar": round(c.query_scale**-2),
        }
    else:
        raw |= {"hidden_act": "silu", "rope_parameters": rope}
    if family != "llama":
        raw["layer_types"] = list(c.layer_types)
    if family == "qwen3_5_text":
        raw["rope_parameters"]["partial_rotary_factor"] = c.d_rope / c.d_head
        raw |= {
            "linear_num_key_heads": c.delta.n_keys,
            "linear_num_value_heads": c.delta.n_values,
            "linear_key_head_dim": c.delta.d_key,
            "linear_value_head_dim": c.delta.d_value,
            "linear_conv_kernel_dim": c.delta.taps,
        }
    return raw


def _rope_to_hf(c: ModelConfig, rope: Rope) -> dict[str, Any]:
    if rope.kind == "factors":
        # GGUF keeps divisors only: find the scaling that gives them (Llama 3.1 has 8, 3.2 has 32).
        known = (dataclasses.replace(rope, kind="llama3", factor=f) for f in (8.0, 32.0))
        wanted = inverse_frequencies(c, rope)
        same = (r for r in known if np.allclose(inverse_frequencies(c, r), wanted, rtol=1e-5))
        if (rope := next(same, None)) is None:
            raise ConfigError("rope_freqs: no llama3 scaling of 8 or 32 gives these factors")
    raw: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind in ("linear", "llama3"):
        raw["factor"] = rope.factor
    if rope.kind == "llama3":
        raw |= {
            "low_freq_factor": rope.low,
            "high_freq_factor": rope.high,
            "original_max_position_embeddings": rope.original,
        }
    return raw
