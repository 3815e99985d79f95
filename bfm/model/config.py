# SPDX-License-Identifier: Apache-2.0
"""What a model is: one frozen config. Files are read into it by `config_hf` and `config_gguf`."""

from __future__ import annotations

import dataclasses
import math

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
    attention: str = "auto"  # how softmax attention is computed: see kernels.choose

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


def pattern(n: int, most: str, interval: int) -> tuple[str, ...]:
    """Return kinds of n layers: every `interval`-th one full attention, the others `most`."""
    return tuple(FULL if (i + 1) % interval == 0 else most for i in range(n))


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
