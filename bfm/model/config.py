# SPDX-License-Identifier: Apache-2.0
"""What a model is: one frozen config, read from Hugging Face or GGUF metadata field by field.

Every field of a config is *handled* (it changes the computation here), *ignored* (it cannot change a
log-probability) or *refused* by name, so that a feature of a newer model is never dropped in silence.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

FAMILIES = "Llama 2/3.x and SmolLM2 (model_type 'llama')"


class ConfigError(ValueError):
    """A model that cannot be computed exactly here; the message is one line and names the field."""


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary embedding: base, and the long-context scaling of Llama 3.1 or a constant factor."""

    theta: float = 10_000.0
    kind: str = "default"  # default | linear | llama3 | factors
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192
    factors: tuple[float, ...] = ()  # one divisor a frequency (GGUF's rope_freqs tensor)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of a decoder. Shapes in names: D model, N query heads, K key heads, h head, F mlp."""

    vocab: int
    d_model: int
    n_layers: int
    d_mlp: int
    n_heads: int
    n_kv: int
    d_head: int
    eps: float
    rope: Rope
    window: int  # longest sequence, tokens
    tied: bool

    def __post_init__(self) -> None:
        for field in ("vocab", "d_model", "n_layers", "d_mlp", "n_heads", "n_kv", "d_head"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field}: {getattr(self, field)} is not a positive size")
        if self.n_heads % self.n_kv:
            raise ConfigError(f"n_heads: {self.n_heads} is no multiple of n_kv {self.n_kv}")
        if self.d_head % 2:
            raise ConfigError(f"d_head: {self.d_head} is odd, rotary embedding needs pairs")


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """Return the rotary frequencies of one head, fp32 [d_head // 2], in radians a token.

    Source: transformers `modeling_rope_utils` (default, linear, llama3); llama.cpp for `factors`.
    """
    rope, half = config.rope, config.d_head // 2
    exponent = np.arange(0, config.d_head, 2, dtype=np.float32) / np.float32(config.d_head)
    inv = (1.0 / np.float32(rope.theta) ** exponent).astype(np.float32)
    if rope.kind == "linear":
        inv = inv / np.float32(rope.factor)
    elif rope.kind == "factors":
        if len(rope.factors) != half:
            raise ConfigError(f"rope_freqs: {len(rope.factors)} factors for {half} frequencies")
        inv = inv / np.asarray(rope.factors, np.float32)
    elif rope.kind == "llama3":
        wavelength = 2 * math.pi / inv
        smooth = (rope.original / wavelength - rope.low) / (rope.high - rope.low)
        blend = (1 - smooth) * inv / rope.factor + smooth * inv
        scaled = np.where(wavelength > rope.original / rope.low, inv / rope.factor, blend)
        inv = np.where(wavelength < rope.original / rope.high, inv, scaled)
    return inv.astype(np.float32)


# Hugging Face config.json: fields that cannot move a log-probability of this decoder at inference.
_IGNORED = frozenset({
    "architectures", "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id", "dtype",
    "torch_dtype", "initializer_range", "is_llama_config", "name_or_path", "_name_or_path",
    "transformers_version", "transformers.js_config", "use_cache", "auto_map",
    "_attn_implementation", "output_attentions", "output_hidden_states", "return_dict",
    "problem_type", "id2label", "label2id", "chunk_size_feed_forward", "is_encoder_decoder",
    "tokenizer_class", "unsloth_version",
})  # fmt: skip
# Handled below.
_HANDLED = frozenset({
    "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size",
    "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
    "max_position_embeddings", "tie_word_embeddings", "rope_theta", "rope_scaling",
    "rope_parameters",
})  # fmt: skip
# Fields with one value that this decoder computes; any other value is refused by name.
_ONLY = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "rope_interleaved": False,
}


def from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face `config.json`.

    Raises ConfigError naming every field that is missing, refused or unknown.
    """
    kind = raw.get("model_type")
    if kind != "llama":
        raise ConfigError(f"model_type: {kind!r} is not supported; families: {FAMILIES}")
    faults = [
        f"{key}: {raw[key]!r} is not supported (only {value!r})"
        for key, value in _ONLY.items()
        if raw.get(key, value) not in (value, None)
    ]
    unknown = set(raw) - _IGNORED - _HANDLED - set(_ONLY)
    faults += [f"{key}: unknown field" for key in sorted(unknown)]
    needed = (
        "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size",
        "num_attention_heads",
    )  # fmt: skip
    faults += [f"{key}: missing" for key in needed if not isinstance(raw.get(key), int)]
    if faults:
        raise ConfigError("; ".join(faults))
    heads = raw["num_attention_heads"]
    return ModelConfig(
        vocab=raw["vocab_size"],
        d_model=raw["hidden_size"],
        n_layers=raw["num_hidden_layers"],
        d_mlp=raw["intermediate_size"],
        n_heads=heads,
        n_kv=raw.get("num_key_value_heads") or heads,
        d_head=raw.get("head_dim") or raw["hidden_size"] // heads,
        eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_rope_from_hf(raw),
        window=int(raw.get("max_position_embeddings", 2048)),
        tied=bool(raw.get("tie_word_embeddings", False)),
    )


def _rope_from_hf(raw: Mapping[str, Any]) -> Rope:
    # transformers 5 writes rope_parameters; 4 wrote rope_theta beside rope_scaling.
    rope = dict(raw.get("rope_scaling") or {}) | dict(raw.get("rope_parameters") or {})
    theta = float(rope.get("rope_theta", raw.get("rope_theta", 10_000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    allowed = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
    if kind == "llama3":
        allowed |= {
            "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
        }  # fmt: skip
    elif kind == "linear":
        allowed |= {"factor"}
    elif kind != "default":
        raise ConfigError(f"rope_type: {kind!r} is not supported (only default, linear and llama3)")
    if extra := sorted(set(rope) - allowed):
        raise ConfigError(f"rope_parameters: unknown field {extra[0]!r} for rope_type {kind!r}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError("partial_rotary_factor: only 1.0 is supported for model_type 'llama'")
    missing = sorted(allowed - {"rope_theta", "type", "partial_rotary_factor"} - set(rope))
    if missing and kind != "default":
        raise ConfigError(f"rope_parameters: missing {missing[0]!r} for rope_type {kind!r}")
    return Rope(
        theta=theta,
        kind=kind,
        factor=float(rope.get("factor", 1.0)),
        low=float(rope.get("low_freq_factor", 1.0)),
        high=float(rope.get("high_freq_factor", 4.0)),
        original=int(rope.get("original_max_position_embeddings", 8192)),
    )


def from_gguf(meta: Mapping[str, Any], vocab: int, tied: bool, factors: tuple) -> ModelConfig:
    """Read the metadata of a GGUF file (keys as in the file; source: gguf `constants.py`).

    `vocab` is the row count of `token_embd`, `tied` whether `output` is absent, `factors` the tensor
    `rope_freqs` (the only place where GGUF keeps Llama 3.1's scaling), empty when absent.
    """
    arch = meta.get("general.architecture")
    if arch != "llama":
        raise ConfigError(f"general.architecture: {arch!r} is not supported; families: {FAMILIES}")
    fields = {k[len(arch) + 1 :]: v for k, v in meta.items() if k.startswith(f"{arch}.")}
    handled = {
        "block_count", "context_length", "embedding_length", "feed_forward_length",
        "attention.head_count", "attention.head_count_kv", "attention.key_length",
        "attention.value_length", "attention.layer_norm_rms_epsilon", "rope.freq_base",
        "rope.dimension_count", "vocab_size",
    }  # fmt: skip
    if unknown := sorted(set(fields) - handled):
        raise ConfigError("; ".join(f"{arch}.{key}: unknown field" for key in unknown))
    try:
        heads = int(fields["attention.head_count"])
        d_model = int(fields["embedding_length"])
        d_head = int(fields.get("attention.key_length", d_model // heads))
        config = ModelConfig(
            vocab=vocab,
            d_model=d_model,
            n_layers=int(fields["block_count"]),
            d_mlp=int(fields["feed_forward_length"]),
            n_heads=heads,
            n_kv=int(fields.get("attention.head_count_kv", heads)),
            d_head=d_head,
            eps=float(fields["attention.layer_norm_rms_epsilon"]),
            rope=Rope(
                theta=float(fields.get("rope.freq_base", 10_000.0)),
                kind="factors" if factors else "default",
                factors=factors,
            ),
            window=int(fields["context_length"]),
            tied=tied,
        )
    except KeyError as error:
        raise ConfigError(f"{arch}.{error.args[0]}: missing") from None
    for key in ("rope.dimension_count", "attention.value_length"):
        if fields.get(key, d_head) != d_head:
            raise ConfigError(f"{arch}.{key}: {fields[key]} is not supported (only {d_head})")
    return config
