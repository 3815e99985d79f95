# SPDX-License-Identifier: Apache-2.0
"""Tiny random models in the Hugging Face layout, written without torch."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

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


def byte_tokenizer() -> Tokenizer:
    """A byte-level BPE without merges: 256 bytes and the control tokens of the template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*CONTROL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL])
    return tokenizer


def write_tokenizer(folder: Path, template: str = TEMPLATE) -> None:
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": CONTROL[1],
        "eos_token": CONTROL[2],
        "unk_token": CONTROL[0],
        "pad_token": CONTROL[2],
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def llama_tensors(config: dict, seed: int = 0, scale: float = 0.25) -> dict[str, np.ndarray]:
    """Random fp32 tensors under Hugging Face names; norms away from one."""
    rng = np.random.default_rng(seed)
    d, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    n, k = config["num_attention_heads"], config["num_key_value_heads"]
    h = config.get("head_dim") or d // n

    def linear(*shape: int) -> np.ndarray:
        return (scale * rng.standard_normal(shape)).astype(np.float32)

    def norm(size: int) -> np.ndarray:
        return (1 + 0.3 * rng.standard_normal(size)).astype(np.float32)

    tensors = {"model.embed_tokens.weight": linear(v, d), "model.norm.weight": norm(d)}
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = linear(v, d)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        tensors |= {
            at + "input_layernorm.weight": norm(d),
            at + "self_attn.q_proj.weight": linear(n * h, d),
            at + "self_attn.k_proj.weight": linear(k * h, d),
            at + "self_attn.v_proj.weight": linear(k * h, d),
            at + "self_attn.o_proj.weight": linear(d, n * h),
            at + "post_attention_layernorm.weight": norm(d),
            at + "mlp.gate_proj.weight": linear(f, d),
            at + "mlp.up_proj.weight": linear(f, d),
            at + "mlp.down_proj.weight": linear(d, f),
        }
    return tensors


def llama_folder(folder: Path, **overrides) -> Path:
    """Write a tiny Llama: config.json, model.safetensors, tokenizer and chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    config = LLAMA | overrides
    (folder / "config.json").write_text(json.dumps(config))
    save_file(llama_tensors(config), folder / "model.safetensors", {"format": "pt"})
    write_tokenizer(folder)
    return folder
