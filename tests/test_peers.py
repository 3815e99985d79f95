# SPDX-License-Identifier: Apache-2.0
"""The peers of launch/bench.py score the ids that we score, and get the sums that they should."""

import json
from pathlib import Path

import numpy as np
import pytest

from bfm.saliency import Suffix
from tests import models, reference


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "launch"))
    import _peers
    import bench

    return bench, _peers


@pytest.mark.torch
@pytest.mark.parametrize("peer", ["transformers", "lm-evaluation-harness"])
def test_by_transformers(bench, tiny_folder, peer):
    pytest.importorskip("torch")
    if peer != "transformers":
        pytest.importorskip("lm_eval")
    bench, peers = bench
    rng = np.random.default_rng(0)
    prefixes = tuple(tuple(map(int, rng.integers(3, 300, n))) for n in (5, 9))
    suffix = Suffix(tuple(map(int, rng.integers(3, 300, 12))), (2, 6), (9, 12))
    rows = bench.sequences((1, 7, 8), prefixes, suffix)
    assert len(rows) == 6  # c+q and c+q+a of two turns, and both without
    config = json.loads((tiny_folder / "config.json").read_text())
    tensors = models.tensors(config)
    expected = [
        reference.span_logp(reference.logits(config, tensors, ids), ids, span) for ids, span in rows
    ]
    found = peers.load(tiny_folder, "float32", print)[peer](rows)
    np.testing.assert_allclose(found, expected, atol=1e-3)


@pytest.mark.real
def test_llama_cpp(bench, smollm2_path, smollm2):
    """The same weights multiplied by activations of 8 bits: near, not equal."""
    pytest.importorskip("llama_cpp")
    _, peers = bench
    from bfm.saliency import Job, Scorer

    ids = smollm2.scaffold.tokenizer.encode(
        "Memory is the faculty by which the mind keeps what it has learned, and finds it again later."
    )
    suffix = Suffix(tuple(ids), (1, 9), (9, len(ids)))
    [[[scored]]] = Scorer(smollm2.decoder, smollm2.scaffold.head).score([Job((), (suffix,))])
    head = list(smollm2.scaffold.head)
    rows = [
        ([*head, *ids], (len(head) + start, len(head) + end)) for start, end in (suffix.q, suffix.a)
    ]
    found = peers.llama_cpp(smollm2_path)["llama.cpp"](rows)
    np.testing.assert_allclose(found, [scored.logp_q, scored.logp_a], rtol=0.02)
