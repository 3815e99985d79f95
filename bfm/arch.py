# SPDX-License-Identifier: Apache-2.0
"""Models without files: published shapes, random weights from a seed, a byte tokenizer.

For tests, for trying a run in seconds, and for compiling the paper's runs without their weights.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from bfm import tokenizer as tokenizers
from bfm.dialogue import generator
from bfm.model import config_hf
from bfm.weights import Source, expected

# `config.json` of each, from the models' own pages; `tiny` is ours.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "tiny": {
        "model_type": "llama", "vocab_size": 384, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
    "llama3.1-8b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
        "rope_theta": 500000.0, "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "qwen3.5-9b": {
        "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 4096,
        "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 256, "full_attention_interval": 4,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 262144, "attn_output_gate": True, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e7, "mrope_interleaved": True,
            "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
        },
    },
}  # fmt: skip
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def source(name: str, seed: int) -> Source:
    """Return random weights in a published shape: normal, 0.02 wide, a tensor at a time."""
    config = config_hf.from_hf(ARCHITECTURES[name])
    shapes = expected(config)
    identity = json.dumps([ARCHITECTURES[name], seed], sort_keys=True).encode()

    def read(tensor: str) -> np.ndarray:
        if tensor.endswith("norm.weight"):
            plain = 1.0 if "linear_attn" in tensor else 1.0 - config.norm_offset
            return np.full(shapes[tensor], plain, np.float32)
        return 0.02 * generator(seed, tensor).standard_normal(shapes[tensor], np.float32)

    return Source(config, shapes, read, lambda: hashlib.sha256(identity).hexdigest(), 0)


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Return a tokenizer of 256 bytes and three control tokens, with the ChatML template."""
    specials = {"bos_token": CONTROL[1], "eos_token": CONTROL[2], "unk_token": CONTROL[0]}
    return tokenizers.from_spec(
        json.loads(byte_bpe().to_str()), specials, TEMPLATE, "byte tokenizer"
    )


def byte_bpe() -> Tokenizer:
    """Return a byte-level BPE without merges: 256 bytes and the control tokens of the template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*CONTROL, *alphabet])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL])
    return made
