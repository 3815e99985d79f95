# SPDX-License-Identifier: Apache-2.0
"""The decoder against numpy in float64; causality; padding, packing and states change nothing."""

import itertools
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bfm import weights
from bfm.model.config import ConfigError, ModelConfig, Rope, inverse_frequencies
from bfm.model.config_hf import from_hf
from bfm.model.config_write import to_hf
from bfm.model.decoder import decode
from bfm.model.matmul import dot
from tests import models, reference

# fp32 against float64, relative to the largest logit (three layers of widths below 100).
TOLERANCE = 2e-5
run = jax.jit(decode)


@partial(jax.jit, static_argnames="start")
def logits(model, tokens_BT, past=(), start=0):
    T = tokens_BT.shape[1]
    positions_BT = jnp.broadcast_to(start + jnp.arange(T), tokens_BT.shape)
    x_BTD, state = decode(model, tokens_BT, positions_BT, jnp.ones_like(tokens_BT), past)
    return dot(x_BTD, model.unembed_VD.T), state


def alone(model, row):
    """Logits of one row by itself. It is padded to one length, so that one program serves all."""
    n = len(row)
    segments = (jnp.arange(160) < n).astype(jnp.int32)[None]
    tokens = jnp.array([[*row, *[0] * (160 - n)]])
    x, _ = run(model, tokens, jnp.arange(160)[None], segments)
    return dot(x[0, :n], model.unembed_VD.T)


def ids(n, seed=1, vocab=384):
    return np.random.default_rng(seed).integers(0, vocab, n).tolist()


def close(got, expected):
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


CASES = {
    "llama31": (models.LLAMA, {}),
    "tied": (models.LLAMA, {"tie_word_embeddings": True}),
    "plain_rope": (models.LLAMA, {"rope_scaling": None, "head_dim": None}),
    "one_kv_head": (models.LLAMA, {"num_key_value_heads": 1}),
    "qwen3": (models.QWEN3, {}),
    "qwen3_5": (models.QWEN35, {}),
    "all_linear": (models.QWEN35, {"num_hidden_layers": 1}),
    "gemma3": (models.GEMMA3, {}),
}


@pytest.mark.parametrize(
    ("case", "length"),
    [("llama31", 1), ("llama31", 64), ("llama31", 200), ("tied", 65), ("plain_rope", 65),
     ("one_kv_head", 63), ("qwen3", 65), ("qwen3_5", 3), ("qwen3_5", 64),
     ("qwen3_5", 200), ("all_linear", 70), ("gemma3", 65)],
)  # fmt: skip
def test_logits_equal_the_oracle(tmp_path_factory, case, length):
    base, overrides = CASES[case]
    folder = models.folder(tmp_path_factory.mktemp(case), base, **overrides)
    config = json.loads((folder / "config.json").read_text())
    model = weights.read(weights.open_source(folder))
    expected = reference.logits(config, models.tensors(config), ids(length))
    close(logits(model, jnp.array([ids(length)]))[0][0], expected)


@pytest.fixture(scope="module", params=["llama", "qwen3_5", "gemma3"])
def family(request, tmp_path_factory):
    """One model of each kind of layer (Qwen3 adds norms only: oracle and parity hold it)."""
    folder = models.folder(tmp_path_factory.mktemp(request.param), models.FAMILIES[request.param])
    return weights.read(weights.open_source(folder))


def test_bf16_weights_stay_near(family):
    """Operands in bf16, sums in fp32, the delta rule and its rates in fp32: compare the mean."""
    folded = weights.abstract_decoder(family.config, "bfloat16")
    rounded = jax.tree.map(lambda x, like: x.astype(like.dtype), family, folded)
    row = jnp.array([ids(90)])
    exact, near = (np.asarray(jax.nn.log_softmax(logits(m, row)[0])) for m in (family, rounded))
    assert 0 < np.abs(exact - near).mean() < 0.03
    _, state = logits(rounded, row)
    assert {x.dtype.name for x in jax.tree.leaves(state)} <= {"bfloat16", "int32", "float32"}
    if state.state_LbKgdv is not None:
        assert state.state_LbKgdv.dtype == np.float32 and state.k_LbKPh.dtype == jnp.bfloat16


@pytest.mark.parametrize("length", [300, 513])
def test_chunked_queries_equal_the_oracle(tiny, tiny_folder, length):
    config = json.loads((tiny_folder / "config.json").read_text())
    expected = reference.logits(config, models.tensors(config), ids(length))
    close(logits(tiny.decoder, jnp.array([ids(length)]))[0][0], expected)


def test_llama3_scaling_of_the_published_model():
    """D=128, theta 5e5: pairs 0-28 unscaled, 29-34 blended, 35-63 divided by 8."""
    rope = Rope(theta=5e5, kind="llama3", factor=8.0, low=1.0, high=4.0, original=8192)
    config = ModelConfig(8, 512, 1, 8, 4, 1, 128, 1e-5, rope, 131072, False)
    ratio = inverse_frequencies(config) * 5e5 ** (np.arange(0, 128, 2) / 128)
    np.testing.assert_allclose(ratio[:29], 1, rtol=1e-5)
    assert ((ratio[29:35] < 0.9999) & (ratio[29:35] > 0.1251)).all()
    np.testing.assert_allclose(ratio[35:], 1 / 8, rtol=1e-5)


def test_no_position_reads_a_later_token(tiny):
    """The gradient of position t's output with respect to a later embedding is exactly zero."""
    at = 5
    positions = jnp.arange(12)[None]  # the rows of the table are the tokens' own embeddings
    leaves, treedef = jax.tree.flatten(tiny.decoder)
    table = next(i for i, leaf in enumerate(leaves) if leaf is tiny.decoder.embed_VD[...])

    def output(embedded_TD):
        model = jax.tree.unflatten(treedef, [*leaves[:table], embedded_TD, *leaves[table + 1 :]])
        x, _ = decode(model, positions, positions, jnp.ones((1, 12), jnp.int32))
        return x[0, at].sum()

    gradient = np.asarray(jax.grad(output)(tiny.decoder.embed_VD[...][jnp.array(ids(12))]))
    assert np.abs(gradient[: at + 1]).max(-1).min() > 0
    assert (gradient[at + 1 :] == 0).all()


def test_padding_and_neighbours_change_nothing(family, tmp_path):
    """A padded row beside a full one equals the row at its own length, and one padded further."""
    row = ids(20)
    expected = logits(family, jnp.array([row]))[0][0]
    tokens = jnp.array([row + [7] * 60, ids(80, seed=2)])
    segments = jnp.array([[1] * 20 + [0] * 60, [1] * 80])
    positions = jnp.broadcast_to(jnp.arange(80), (2, 80))
    x, state = run(family, tokens, positions, segments)
    close(dot(x[0, :20], family.unembed_VD.T), expected)
    close(alone(family, row), expected)
    assert np.isfinite(np.asarray(x)).all()
    assert (state.position_bP >= 0).sum() == 100


def test_packed_rows_equal_each_row_alone(family):
    """Also where they continue a state: every segment sees the past, none sees another."""
    sizes = (5, 17, 1, 70)
    parts = [ids(n, seed=n) for n in sizes]
    tokens = jnp.array([[*itertools.chain(*parts), *[0] * 11]])
    segments = jnp.array(np.repeat([1, 2, 3, 9, 0], [*sizes, 11])[None])
    head = ids(6, seed=99)
    _, past = logits(family, jnp.array([head]))
    for before, states in (([], ()), (head, (past,))):
        start = len(before)
        positions = start + jnp.array(np.concatenate([np.arange(n) for n in (*sizes, 11)])[None])
        x, _ = run(family, tokens, positions, segments, states)
        got, at = dot(x, family.unembed_VD.T)[0], 0
        for part in parts:
            close(got[at : at + len(part)], alone(family, [*before, *part])[start:])
            at += len(part)


def continued(model, row, cuts):
    past, pieces, edges = (), [], [0, *cuts, len(row)]
    for start, end in itertools.pairwise(edges):
        got, state = logits(model, jnp.array([row[start:end]]), past, start=start)
        past = (*past, state)
        pieces.append(got[0])
    return jnp.concatenate(pieces)


def test_continuing_from_states_equals_the_whole(family):
    """Blocks shorter than the filter, of one token, and longer than a chunk of the delta rule."""
    row = ids(140)
    close(continued(family, row, (2, 3, 100)), alone(family, row))


@pytest.mark.parametrize("cuts", [(1,), (16,), (39,), (7, 8, 9), (20,)])
def test_continuing_at_any_edge(tiny, cuts):
    row = ids(330 if cuts == (20,) else 40)
    close(continued(tiny.decoder, row, cuts), logits(tiny.decoder, jnp.array([row]))[0][0])


def test_many_rows_share_one_state(family):
    """Two turns of different length, three suffixes each: six rows continue two state rows."""
    n = 70
    head, turns = ids(4), [ids(9, seed=3), ids(6, seed=4)]
    suffixes = [ids(n, seed=10 + i) for i in range(6)]
    _, head_state = logits(family, jnp.array([head]))
    tokens = jnp.array([turns[0], turns[1] + [0] * 3])
    segments = jnp.array([[1] * 9, [1] * 6 + [0] * 3])
    positions = jnp.broadcast_to(4 + jnp.arange(9), (2, 9))
    _, turn_state = run(family, tokens, positions, segments, (head_state,))
    base = jnp.array([13, 13, 13, 10, 10, 10])
    positions = base[:, None] + jnp.arange(n)
    ones = jnp.ones((6, n), jnp.int32)
    x, _ = run(family, jnp.array(suffixes), positions, ones, (head_state, turn_state))
    for i, suffix in enumerate(suffixes):
        row = head + turns[i // 3] + suffix
        close(dot(x[i], family.unembed_VD.T), alone(family, row)[-n:])


def test_padding_leaves_a_state_as_it_was_and_gradients_finite(family):
    _, head_state = logits(family, jnp.array([ids(6)]))
    zeros = jnp.zeros((1, 130), jnp.int32)
    _, state = run(family, zeros, zeros, zeros, (head_state,))
    if state.state_LbKgdv is not None:
        np.testing.assert_array_equal(state.state_LbKgdv, head_state.state_LbKgdv)
        np.testing.assert_array_equal(state.inputs_LbWC, head_state.inputs_LbWC)

    def loss(model):
        tokens = jnp.array([ids(130), [0] * 130])
        segments = jnp.array([[1] * 30 + [0] * 100, [0] * 130])
        positions = jnp.broadcast_to(jnp.arange(130), (2, 130))
        x, _ = decode(model, tokens, positions, segments)
        return (dot(x[0, :30], model.unembed_VD.T) ** 3).mean()

    gradient = jax.tree.leaves(jax.jit(jax.grad(loss))(family))
    for leaf in gradient:
        assert np.isfinite(np.asarray(leaf)).all() and np.abs(np.asarray(leaf)).max() > 0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, "model_type: 'mamba' is not supported; families: Llama 2/3"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"new_feature": 3}, "new_feature: unknown field"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type: 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "rope_parameters: missing"),
        ({"num_attention_heads": 5}, "n_heads: 5"),
        ({"vocab_size": None}, "vocab_size: missing"),
    ],
)
def test_a_config_that_cannot_be_computed_is_refused_by_name(change, named):
    with pytest.raises(ConfigError, match=named) as caught:
        from_hf(models.LLAMA | change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("base", "change", "named"),
    [
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window: True"),
        ("qwen3", {"num_experts": 8}, "num_experts: unknown field"),
        ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate: False"),
        ("qwen3_5", {"linear_num_value_heads": 3}, "linear_"),
        ("qwen3_5", {"layer_types": ["mamba"] * 4}, "layer_types: 'mamba'"),
        ("qwen3_5", {"layer_types": ["full_attention"]}, "layer_types: 1 for 4 layers"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping: 30.0"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention: True"),
    ],
)
def test_what_a_family_does_not_compute_is_refused_by_name(base, change, named):
    with pytest.raises(ConfigError, match=named) as caught:
        from_hf(models.FAMILIES[base] | change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("base", models.FAMILIES)
def test_a_config_survives_its_export(base):
    config = from_hf(models.FAMILIES[base])
    assert from_hf(to_hf(config)) == config


def test_rope_parameters_of_transformers_5_mean_the_same():
    new = dict(models.LLAMA)
    new["rope_parameters"] = {"rope_theta": new.pop("rope_theta"), **new.pop("rope_scaling")}
    assert from_hf(new) == from_hf(models.LLAMA)
