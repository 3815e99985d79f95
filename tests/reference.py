# SPDX-License-Identifier: Apache-2.0
"""The oracle: a decoder and a scorer in numpy, float64, one token row at a time, no tricks."""

import math

import numpy as np


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def frequencies(config: dict) -> np.ndarray:
    h = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    inv = config["rope_theta"] ** (-np.arange(0, h, 2) / h)
    rope = config.get("rope_scaling")
    if not rope:
        return inv
    out = []
    for f in inv:
        ratio = rope["original_max_position_embeddings"] * f / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        share = min(1.0, max(0.0, (ratio - low) / (high - low)))
        out.append((1 - share) * f / rope["factor"] + share * f)
    return np.array(out)


def llama_logits(config: dict, tensors: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    """Logits [T, V] in float64 of a Llama under Hugging Face names."""
    w = {name: t.astype(np.float64) for name, t in tensors.items()}
    n, k = config["num_attention_heads"], config["num_key_value_heads"]
    h = config.get("head_dim") or config["hidden_size"] // n
    T = len(ids)
    angle = np.arange(T)[:, None] * frequencies(config)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * w[name]

    def rotate(x):  # [T, heads, h]
        a, b = x[..., : h // 2], x[..., h // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x = w["model.embed_tokens.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        y = norm(x, at + "input_layernorm.weight")
        q = rotate((y @ w[at + "self_attn.q_proj.weight"].T).reshape(T, n, h))
        key = rotate((y @ w[at + "self_attn.k_proj.weight"].T).reshape(T, k, h))
        v = (y @ w[at + "self_attn.v_proj.weight"].T).reshape(T, k, h)
        heads = []
        for j in range(n):
            s = q[:, j] @ key[:, j * k // n].T / math.sqrt(h)
            s = np.where(np.tril(np.ones((T, T), bool)), s, -np.inf)
            heads.append(np.exp(log_softmax(s)) @ v[:, j * k // n])
        x = x + np.concatenate(heads, -1) @ w[at + "self_attn.o_proj.weight"].T
        y = norm(x, at + "post_attention_layernorm.weight")
        gate = y @ w[at + "mlp.gate_proj.weight"].T
        up = y @ w[at + "mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[at + "mlp.down_proj.weight"].T
    x = norm(x, "model.norm.weight")
    return x @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


def span_logp(logits: np.ndarray, ids: list[int], span: tuple[int, int]) -> float:
    """Sum of log p(token) over a half-open span, nats."""
    logp = log_softmax(logits)
    return float(sum(logp[i - 1, ids[i]] for i in range(*span)))
