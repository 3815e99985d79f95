# SPDX-License-Identifier: Apache-2.0
"""Tiny random models in the Hugging Face layout, written without torch."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from bfm import weights
from bfm.arch import CONTROL, TEMPLATE, byte_bpe
from bfm.model.config_hf import from_hf

# Widths and head counts all different, GQA of three, llama3 scaling with a short original length.
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 384,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}

_TINY = {
    "vocab_size": 384,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
}
QWEN3 = _TINY | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 3,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_theta": 1e6,
}
# Four value heads over two key heads, key width unlike value width, a quarter of each head rotated.
QWEN35 = _TINY | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0], "mrope_interleaved": True,
    },
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
# A window shorter than any text, a layer count that is no multiple of the pattern.
GEMMA3 = _TINY | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 4,
    "layer_types": [
        "sliding_attention",
        "full_attention",
        "sliding_attention",
        "sliding_attention",
    ],
    "sliding_window": 7,
    "query_pre_attn_scalar": 24,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
FAMILIES = {"llama": LLAMA, "qwen3": QWEN3, "qwen3_5": QWEN35, "gemma3": GEMMA3}


def write_tokenizer(folder: Path, template: str = TEMPLATE) -> None:
    byte_bpe().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": CONTROL[1],
        "eos_token": CONTROL[2],
        "unk_token": CONTROL[0],
        "pad_token": CONTROL[2],
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def tensors(config: dict, seed: int = 0, scale: float = 0.1) -> dict[str, np.ndarray]:
    """Random fp32 tensors under Hugging Face names; norms away from what a model starts with."""
    rng = np.random.default_rng(seed)
    made = {}
    for name, shape in weights.expected(from_hf(config)).items():
        noise = rng.standard_normal(shape)
        if name.endswith("norm.weight"):
            plain = config["model_type"] in ("llama", "qwen3") or "linear_attn" in name
            made[name] = plain + 0.3 * noise
        elif name.endswith(("A_log", "dt_bias", "conv1d.weight")):
            made[name] = 0.5 * noise
        else:
            made[name] = scale * noise
    return {name: array.astype(np.float32) for name, array in made.items()}


def folder(folder: Path, base: dict, **overrides) -> Path:
    """Write a tiny model: config.json, model.safetensors, tokenizer and chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    config = base | overrides
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors(config), folder / "model.safetensors", {"format": "pt"})
    write_tokenizer(folder)
    return folder


def llama_folder(path: Path, **overrides) -> Path:
    return folder(path, LLAMA, **overrides)
