# SPDX-License-Identifier: Apache-2.0
"""What a model is: one frozen config, read from Hugging Face or GGUF metadata field by field.

Every field of a config is *handled* (it changes the computation here), *ignored* (it cannot change a
log-probability) or *refused* by name, so that a feature of a newer model is never dropped in silence.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

FAMILIES = (
    "Llama 2/3.x and SmolLM2 ('llama'), Qwen3 dense ('qwen3'), Qwen3.5 dense text ('qwen3_5', "
    "'qwen3_5_text'), Gemma 3 text ('gemma3_text')"
)
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


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
class Delta:
    """Sizes of a Gated DeltaNet layer: key heads, value heads (a multiple), widths, filter taps."""

    n_keys: int
    n_values: int
    d_key: int
    d_value: int
    taps: int

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.n_keys * self.d_key + self.n_values * self.d_value


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
    family: str = "llama"  # llama | qwen3 | qwen3_5 | gemma3
    layer_types: tuple[str, ...] = ()  # FULL, SLIDING or LINEAR a layer; () is all FULL
    d_rope: int = 0  # leading part of a head that is rotated; 0 is all of it
    query_scale: float = 0.0  # of scores before softmax; 0 is d_head ** -0.5
    qk_norm: bool = False  # RMS norm over each query and key head
    gated: bool = False  # attention output times sigmoid of a gate, packed beside each query head
    norm_offset: float = 0.0  # norms multiply by offset + weight
    post_norms: bool = False  # norms after attention and mlp too (Gemma 3)
    activation: str = "silu"  # silu | gelu_tanh
    embed_scale: float = 1.0
    sliding: int = 0  # keys that a SLIDING layer sees, itself included
    rope_local: Rope | None = None  # of SLIDING layers
    delta: Delta | None = None  # of LINEAR layers

    def __post_init__(self) -> None:
        for field in (
            "vocab",
            "d_model",
            "n_layers",
            "d_mlp",
            "n_heads",
            "n_kv",
            "d_head",
            "window",
        ):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field}: {getattr(self, field)} is not a positive size")
        if self.n_heads % self.n_kv:
            raise ConfigError(f"n_heads: {self.n_heads} is no multiple of n_kv {self.n_kv}")
        object.__setattr__(self, "layer_types", self.layer_types or (FULL,) * self.n_layers)
        object.__setattr__(self, "d_rope", self.d_rope or self.d_head)
        object.__setattr__(self, "query_scale", self.query_scale or self.d_head**-0.5)
        if self.d_rope % 2 or self.d_rope > self.d_head:
            raise ConfigError(
                f"d_head: rotary embedding of {self.d_rope} of {self.d_head} needs pairs"
            )
        if len(self.layer_types) != self.n_layers:
            raise ConfigError(f"layer_types: {len(self.layer_types)} for {self.n_layers} layers")
        if unknown := set(self.layer_types) - {FULL, SLIDING, LINEAR}:
            raise ConfigError(f"layer_types: {min(unknown)!r} is not supported")
        if SLIDING in self.layer_types and (self.sliding < 1 or self.rope_local is None):
            raise ConfigError("sliding_window: missing, but layer_types has sliding_attention")
        if LINEAR in self.layer_types:
            sizes = dataclasses.astuple(self.delta) if self.delta else (0,)
            if min(sizes) < 1 or self.delta.n_values % self.delta.n_keys:
                raise ConfigError(
                    "linear_*: linear attention needs sizes, value heads a multiple of key"
                )

    def layers_of(self, linear: bool) -> list[int]:
        """Indices of the layers with a recurrent (linear) or a softmax mixer, in order."""
        return [i for i, kind in enumerate(self.layer_types) if (kind == LINEAR) == linear]

    @property
    def superblock(self) -> int:
        """Layers of the shortest pattern of mixers that repeats through the whole depth."""
        linear = [kind == LINEAR for kind in self.layer_types]
        periods = (p for p in range(1, self.n_layers + 1) if self.n_layers % p == 0)
        return next(p for p in periods if linear == linear[:p] * (self.n_layers // p))


def inverse_frequencies(config: ModelConfig, rope: Rope | None = None) -> np.ndarray:
    """Return the rotary frequencies of one head, fp32 [d_rope // 2], in radians a token.

    Source: transformers `modeling_rope_utils` (default, linear, llama3); llama.cpp for `factors`.
    """
    rope, half = rope or config.rope, config.d_rope // 2
    exponent = np.arange(0, config.d_rope, 2, dtype=np.float32) / np.float32(config.d_rope)
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


# --- Hugging Face ------------------------------------------------------------------------------

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
    pattern = raw.get("sliding_window_pattern", raw.get("_sliding_window_pattern", 6))
    types = _layer_types(raw, common["n_layers"], SLIDING, int(pattern))
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
    """Return `layer_types`, or its default: every `interval`-th layer full attention, else `most`."""
    if (types := raw.get("layer_types")) is not None:
        return tuple(types)
    return tuple(FULL if (i + 1) % interval == 0 else most for i in range(n))


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


def to_hf(c: ModelConfig) -> dict[str, Any]:
    """Write the `config.json` (transformers 5) of a text model: the inverse of `from_hf`.

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


# --- GGUF --------------------------------------------------------------------------------------

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
            layer_types=_layer_types({}, layers, LINEAR, interval),
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
    pattern = int(fields.get("attention.sliding_window_pattern", 6))
    # The scale of scores is in no field: llama.cpp takes the head's width, and d_model / heads for
    # the 27B model, which it knows by its 62 layers.
    scalar = d_model // heads if layers == 62 else d_head
    return ModelConfig(
        **common,
        n_layers=layers,
        rope=rope,
        family="gemma3",
        layer_types=_layer_types({}, layers, SLIDING, pattern),
        rope_local=Rope(theta=float(fields.get("rope.freq_base_swa", 10_000.0))),
        sliding=int(fields["attention.sliding_window"]),
        query_scale=scalar**-0.5,
        qk_norm=True,
        norm_offset=1.0,
        post_norms=True,
        activation="gelu_tanh",
        embed_scale=d_model**0.5,
    )
