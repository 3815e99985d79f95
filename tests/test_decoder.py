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
from bfm.model.config import ConfigError, ModelConfig, Rope, from_hf, inverse_frequencies
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


def ids(n, seed=1, vocab=384):
    return np.random.default_rng(seed).integers(0, vocab, n).tolist()


def close(got, expected):
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


VARIANTS = {
    "llama31": {},
    "tied": {"tie_word_embeddings": True},
    "plain_rope": {"rope_scaling": None, "head_dim": None},
    "one_kv_head": {"num_key_value_heads": 1},
}


@pytest.mark.parametrize(
    ("variant", "length"),
    [("llama31", 1), ("llama31", 64), ("llama31", 200), ("tied", 65), ("plain_rope", 65),
     ("one_kv_head", 63)],
)  # fmt: skip
def test_logits_equal_the_oracle(tmp_path_factory, variant, length):
    folder = models.llama_folder(tmp_path_factory.mktemp(variant), **VARIANTS[variant])
    config = json.loads((folder / "config.json").read_text())
    model = weights.read(weights.open_source(folder))
    expected = reference.llama_logits(config, models.llama_tensors(config), ids(length))
    close(logits(model, jnp.array([ids(length)]))[0][0], expected)


@pytest.mark.parametrize("length", [300, 513])
def test_chunked_queries_equal_the_oracle(tiny, tiny_folder, length):
    config = json.loads((tiny_folder / "config.json").read_text())
    expected = reference.llama_logits(config, models.llama_tensors(config), ids(length))
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


def test_padding_and_neighbours_change_nothing(tiny):
    row = ids(20)
    alone = logits(tiny.decoder, jnp.array([row]))[0][0]
    tokens = jnp.array([row + [7] * 12, ids(32, seed=2)])
    segments = jnp.array([[1] * 20 + [0] * 12, [1] * 32])
    positions = jnp.broadcast_to(jnp.arange(32), (2, 32))
    x, state = run(tiny.decoder, tokens, positions, segments)
    close(dot(x[0, :20], tiny.decoder.unembed_VD.T), alone)
    assert np.isfinite(np.asarray(x)).all()
    assert (state.position_bP >= 0).sum() == 52


def test_packed_rows_equal_each_row_alone(tiny):
    parts = [ids(n, seed=n) for n in (5, 17, 1, 30)]
    tokens = jnp.array([[*itertools.chain(*parts), *[0] * 11]])
    segments = np.repeat([1, 2, 3, 4, 0], [5, 17, 1, 30, 11])[None]
    positions = np.concatenate([np.arange(n) for n in (5, 17, 1, 30, 11)])[None]
    x, _ = run(tiny.decoder, tokens, jnp.array(positions), jnp.array(segments))
    got = dot(x, tiny.decoder.unembed_VD.T)[0]
    at = 0
    for part in parts:
        close(got[at : at + len(part)], logits(tiny.decoder, jnp.array([part]))[0][0])
        at += len(part)


@pytest.mark.parametrize("cuts", [(1,), (16,), (39,), (3, 20), (7, 8, 9), (290, 310)])
def test_continuing_from_states_equals_the_whole(tiny, cuts):
    row = ids(40 if cuts[-1] < 40 else 330)
    whole = logits(tiny.decoder, jnp.array([row]))[0][0]
    past, pieces, edges = (), [], [0, *cuts, len(row)]
    for start, end in itertools.pairwise(edges):
        got, state = logits(tiny.decoder, jnp.array([row[start:end]]), past, start=start)
        past = (*past, state)
        pieces.append(got[0])
    close(jnp.concatenate(pieces), whole)


def test_many_rows_share_one_state(tiny):
    """Two turns of different length, three suffixes each: six rows continue two state rows."""
    head, turns = ids(4), [ids(9, seed=3), ids(6, seed=4)]
    suffixes = [ids(5, seed=10 + i) for i in range(6)]
    _, head_state = logits(tiny.decoder, jnp.array([head]))
    tokens = jnp.array([turns[0], turns[1] + [0] * 3])
    segments = jnp.array([[1] * 9, [1] * 6 + [0] * 3])
    positions = jnp.broadcast_to(4 + jnp.arange(9), (2, 9))
    _, turn_state = run(tiny.decoder, tokens, positions, segments, (head_state,))
    base = jnp.array([13, 13, 13, 10, 10, 10])
    positions = base[:, None] + jnp.arange(5)
    ones = jnp.ones((6, 5), jnp.int32)
    x, _ = run(tiny.decoder, jnp.array(suffixes), positions, ones, (head_state, turn_state))
    for i, suffix in enumerate(suffixes):
        row = head + turns[i // 3] + suffix
        close(
            dot(x[i], tiny.decoder.unembed_VD.T), logits(tiny.decoder, jnp.array([row]))[0][0, -5:]
        )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, "model_type: 'mamba'"),
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


def test_rope_parameters_of_transformers_5_mean_the_same():
    new = dict(models.LLAMA)
    new["rope_parameters"] = {"rope_theta": new.pop("rope_theta"), **new.pop("rope_scaling")}
    assert from_hf(new) == from_hf(models.LLAMA)
