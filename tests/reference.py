# SPDX-License-Identifier: Apache-2.0
"""The oracle: a decoder and a scorer in numpy, float64, one token row at a time, no tricks."""

import math

import numpy as np


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def frequencies(config: dict, rope: dict, width: int) -> np.ndarray:
    inv = rope.get("rope_theta", config.get("rope_theta")) ** (-np.arange(0, width, 2) / width)
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        return inv / rope["factor"]
    if kind == "default":
        return inv
    out = []
    for f in inv:
        ratio = rope["original_max_position_embeddings"] * f / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        share = min(1.0, max(0.0, (ratio - low) / (high - low)))
        out.append((1 - share) * f / rope["factor"] + share * f)
    return np.array(out)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def delta_rule(q, k, v, g, beta, state=None):
    """The gated delta rule token by token: q, k [T, H, d], v [T, H, v], g, beta [T, H]."""
    T, H, d = k.shape
    s = np.zeros((H, d, v.shape[-1])) if state is None else state.copy()
    out = []
    for t in range(T):
        s = np.exp(g[t])[:, None, None] * s
        new = beta[t][:, None] * (v[t] - np.einsum("hdv,hd->hv", s, k[t]))
        s = s + np.einsum("hd,hv->hdv", k[t], new)
        out.append(np.einsum("hdv,hd->hv", s, q[t]))
    return np.array(out), s


def logits(config: dict, tensors: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    """Logits [T, V] in float64 of any family under Hugging Face names, written from its papers."""
    w = {name: t.astype(np.float64) for name, t in tensors.items()}
    kind = config["model_type"]
    gemma, hybrid = kind == "gemma3_text", kind == "qwen3_5_text"
    n, k = config["num_attention_heads"], config["num_key_value_heads"]
    h = config.get("head_dim") or config["hidden_size"] // n
    T, eps = len(ids), config["rms_norm_eps"]
    ropes = config.get("rope_parameters") or config.get("rope_scaling") or {}
    part = int(h * ropes.get("partial_rotary_factor", 1.0)) if not gemma else h

    def unit(x):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)

    def norm(x, name):
        return unit(x) * ((1 if gemma or hybrid else 0) + w[name])

    def rotate(x, rope):  # [T, heads, h]
        angle = np.arange(T)[:, None, None] * frequencies(config, rope, part)
        a, b, rest = x[..., : part // 2], x[..., part // 2 : part], x[..., part:]
        turned = [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)]
        return np.concatenate([*turned, rest], -1)

    def attention(y, at, layer_type):
        rope = ropes.get(layer_type, ropes)
        q = (y @ w[at + "q_proj.weight"].T).reshape(T, n, -1)
        q, gate = q[..., :h], q[..., h:]
        key = (y @ w[at + "k_proj.weight"].T).reshape(T, k, h)
        v = (y @ w[at + "v_proj.weight"].T).reshape(T, k, h)
        if kind != "llama":
            q, key = norm(q, at + "q_norm.weight"), norm(key, at + "k_norm.weight")
        q, key = rotate(q, rope), rotate(key, rope)
        ago = np.arange(T)[:, None] - np.arange(T)
        seen = (ago >= 0) & (layer_type != "sliding_attention" or ago < config["sliding_window"])
        heads = []
        for j in range(n):
            s = q[:, j] @ key[:, j * k // n].T / math.sqrt(config.get("query_pre_attn_scalar", h))
            heads.append(np.exp(log_softmax(np.where(seen, s, -np.inf))) @ v[:, j * k // n])
        out = np.stack(heads, 1)
        return (out * sigmoid(gate) if hybrid else out).reshape(T, -1) @ w[at + "o_proj.weight"].T

    def linear(y, at):
        nk, nv = config["linear_num_key_heads"], config["linear_num_value_heads"]
        dk, dv = config["linear_key_head_dim"], config["linear_value_head_dim"]
        x = y @ w[at + "in_proj_qkv.weight"].T
        filters = w[at + "conv1d.weight"][:, 0]
        taps = filters.shape[1]
        x = np.pad(x, ((taps - 1, 0), (0, 0)))
        x = np.array([(x[t : t + taps].T * filters).sum(1) for t in range(T)])
        x = x * sigmoid(x)
        q, key, v = np.split(x, [nk * dk, 2 * nk * dk], axis=1)
        q, key = (
            np.repeat(z / np.sqrt((z**2).sum(-1, keepdims=True) + 1e-6), nv // nk, axis=1)
            for z in (q.reshape(T, nk, dk), key.reshape(T, nk, dk))
        )
        beta = sigmoid(y @ w[at + "in_proj_b.weight"].T)
        step = np.log1p(np.exp(y @ w[at + "in_proj_a.weight"].T + w[at + "dt_bias"]))
        g = -np.exp(w[at + "A_log"]) * step
        out, _ = delta_rule(q / math.sqrt(dk), key, v.reshape(T, nv, dv), g, beta)
        z = (y @ w[at + "in_proj_z.weight"].T).reshape(T, nv, dv)
        out = unit(out) * w[at + "norm.weight"] * z * sigmoid(z)
        return out.reshape(T, -1) @ w[at + "out_proj.weight"].T

    x = w["model.embed_tokens.weight"][ids]
    x = x * math.sqrt(config["hidden_size"]) if gemma else x
    types = config.get("layer_types")
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        last = hybrid and (i + 1) % config["full_attention_interval"]
        layer_type = types[i] if types else "linear_attention" if last else "full_attention"
        y = norm(x, at + "input_layernorm.weight")
        if layer_type == "linear_attention":
            y = linear(y, at + "linear_attn.")
        else:
            y = attention(y, at + "self_attn.", layer_type)
        x = x + (norm(y, at + "post_attention_layernorm.weight") if gemma else y)
        y = norm(x, at + ("pre_feedforward" if gemma else "post_attention") + "_layernorm.weight")
        gate = y @ w[at + "mlp.gate_proj.weight"].T
        if gemma:
            gate = gate / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
        else:
            gate = gate * sigmoid(gate)
        y = (gate * (y @ w[at + "mlp.up_proj.weight"].T)) @ w[at + "mlp.down_proj.weight"].T
        x = x + (norm(y, at + "post_feedforward_layernorm.weight") if gemma else y)
    x = norm(x, "model.norm.weight")
    return x @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


def span_logp(logits: np.ndarray, ids: list[int], span: tuple[int, int]) -> float:
    """Sum of log p(token) over a half-open span, nats."""
    logp = log_softmax(logits)
    return float(sum(logp[i - 1, ids[i]] for i in range(*span)))
