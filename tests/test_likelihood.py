# SPDX-License-Identifier: Apache-2.0
"""The kernel against numpy in float64, and against a bigram model whose values are known by hand."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bfm import likelihood
from bfm.likelihood import Spans, span_logprobs, token_logprobs
from bfm.model.config import ModelConfig, Rope
from bfm.model.decoder import Decoder
from bfm.saliency import Job, ScoreError, Scorer, Suffix, focus
from tests import models, reference

V = 6
P = np.array(  # P[i, j] = p(j | i): rows sum to one
    [
        [0.50, 0.10, 0.10, 0.10, 0.10, 0.10],
        [0.05, 0.05, 0.60, 0.10, 0.10, 0.10],
        [0.05, 0.05, 0.10, 0.20, 0.40, 0.20],
        [0.20, 0.20, 0.20, 0.20, 0.10, 0.10],
        [0.02, 0.02, 0.02, 0.02, 0.02, 0.90],
        [0.30, 0.30, 0.10, 0.10, 0.10, 0.10],
    ]
)


@pytest.fixture(scope="module")
def bigram():
    """A decoder that is the bigram model P: no attention, no mlp, one-hot states."""
    config = ModelConfig(V, V, 1, 2, 1, 1, 2, 0.0, Rope(), 512, False)
    model = Decoder(config, nnx.Rngs(0))
    model.full.o_NhD[...] *= 0
    model.full.down_FD[...] *= 0
    model.embed_VD[...] = jnp.eye(V)  # the norm makes sqrt(V) of a one-hot's 1
    model.head_VD[...] = jnp.asarray(np.log(P.T) / np.sqrt(V), jnp.float32)
    return model


def test_saliency_of_the_bigram_model_is_known_by_hand(bigram):
    """q = (2, 4) directly after the memory, a = (5,); the head ends with 0.

    log p(q | c) = log P[last of c, 2] + log P[2, 4]; log p(a | q, c) = log P[4, 5] whatever c is.
    """
    scorer = Scorer(bigram, [3, 0])
    suffix = Suffix(ids=(2, 4, 5), q=(0, 2), a=(2, 3))
    turns = ((5, 1), (1,), (4, 4, 3), (5, 1))
    scored = scorer.score([Job(turns, (suffix,))])[0]
    base = scored[0][0]
    assert base.logp_q == pytest.approx(np.log(0.10) + np.log(0.40), abs=1e-6)
    assert base.logp_a == pytest.approx(np.log(0.90), abs=1e-6)
    sal_q = [turn[0].logp_q - base.logp_q for turn in scored[1:]]
    expected = np.log(np.array([0.60, 0.60, 0.20, 0.60]) / 0.10)
    np.testing.assert_allclose(sal_q, expected, atol=2e-6)
    assert sal_q[0] == sal_q[3]  # equal turns tie exactly
    np.testing.assert_allclose([t[0].logp_a - base.logp_a for t in scored[1:]], 0, atol=2e-6)


def test_posterior_of_an_option_is_known_by_hand(bigram):
    scorer = Scorer(bigram, [3, 0])
    suffix = Suffix(ids=(2, 3), q=(0, 1), a=(1, 2), choices=(1, 3, 4), right=1)
    result = scorer.score([Job(((1,),), (suffix,))])[0][1][0]
    assert result.log_choice == pytest.approx(np.log(0.20 / (0.05 + 0.20 + 0.40)), abs=1e-6)
    assert result.logp_a == pytest.approx(np.log(0.20), abs=1e-6)


def test_spans_equal_the_oracle(tiny, tiny_folder):
    config = json.loads((tiny_folder / "config.json").read_text())
    row = np.random.default_rng(0).integers(0, 384, 30).tolist()
    spans = [(3, 9), (20, 30)]
    index = [i - 1 for s, e in spans for i in range(s, e)]
    member = [0] * 6 + [1] * 10
    logp, sums = jax.jit(span_logprobs)(
        tiny.decoder,
        jnp.array([row]),
        jnp.arange(30)[None],
        jnp.ones((1, 30), jnp.int32),
        Spans(
            jnp.array([[*index, 0]]),
            jnp.array([[*(row[i + 1] for i in index), 5]])[..., None],
            jnp.array([[*member, -1]]),
        ),
    )
    expected = reference.logits(config, models.tensors(config), row)
    for k, span in enumerate(spans):
        assert float(sums[0, k]) == pytest.approx(
            reference.span_logp(expected, row, span), abs=2e-4
        )
    assert logp[0, -1, 0] == 0
    np.testing.assert_allclose(logp[0, :, 0].sum(), sums.sum(), rtol=1e-6)


@pytest.mark.parametrize("vocab", [1, 7, 8, 9, 50])
def test_chunks_equal_one_softmax_and_its_gradient(vocab, monkeypatch):
    monkeypatch.setattr(likelihood, "VOCAB_CHUNK", 8)
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((2, 5, 8)), 3 * rng.standard_normal((vocab, 8))
    targets = rng.integers(0, vocab, (2, 5, 3))
    weight = rng.standard_normal(targets.shape)
    x32, w32 = jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32)
    got = token_logprobs(x32, w32, targets)
    expected = np.take_along_axis(reference.log_softmax(x @ w.T), targets, -1)
    np.testing.assert_allclose(got, expected, atol=1e-5)

    def plain(x, w, targets):
        return jnp.take_along_axis(jax.nn.log_softmax(x @ w.T), targets, -1)

    def gradient(f):
        return jax.grad(lambda x, w: (f(x, w, targets) * weight).sum(), argnums=(0, 1))(x32, w32)

    for ours, theirs in zip(gradient(token_logprobs), gradient(plain), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_memory_holds_no_logits_beyond_a_chunk():
    """Peak temporaries stay near one chunk of logits, not positions x vocabulary."""
    n, d, v = 4096, 16, 200_000
    shapes = [jax.ShapeDtypeStruct(s, t) for s, t in (
        ((1, n, d), jnp.float32), ((v, d), jnp.float32), ((1, n, 1), jnp.int32))]  # fmt: skip
    compiled = jax.jit(token_logprobs).lower(*shapes).compile()
    chunk = n * likelihood.VOCAB_CHUNK * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * chunk < n * v * 4 / 4


def test_a_value_that_is_not_finite_stops(bigram):
    broken = jax.tree.map(lambda x: x * jnp.nan, bigram)
    with pytest.raises(ScoreError, match="not finite"):
        Scorer(broken, [3, 0]).score([Job(((1,),), (Suffix((2, 4), (0, 2)),))])


@pytest.mark.parametrize("bad", [-1, V, 10**6])
def test_an_id_outside_the_vocabulary_is_refused(bigram, bad):
    scorer = Scorer(bigram, [3, 0])
    with pytest.raises(ValueError, match="token id outside"):
        scorer.score([Job(((bad,),), (Suffix((2, 4), (0, 2)),))])
    with pytest.raises(ValueError, match="token id outside"):
        scorer.score([Job(((1,),), (Suffix((2, bad), (0, 2)),))])


def test_focus_sorts_by_saliency_then_index():
    assert focus([1.0, 3.0, 0.5, 3.0, 2.0], 0.5, 9) == [1, 3, 4, 0]
    assert focus([1.0, 3.0, 0.5, 3.0, 2.0], 0.5, 2) == [1, 3]
    assert focus([0.1, float("nan")], 0.0, 5) == [0]
    assert focus([0.0], 0.0, 5) == []
