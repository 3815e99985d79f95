# SPDX-License-Identifier: Apache-2.0
"""A score is its own item's: batch size, order, neighbours, bucket edges and states move nothing."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bfm.batching import bucket, pad, plan
from bfm.saliency import Job, Scorer, Suffix, programs
from tests import models, reference

HEAD = (1, 40, 41, 42)


def close(got: float, expected: float) -> None:
    """The tolerance of DESIGN 2, Repeatable."""
    assert abs(got - expected) <= 1e-4 + 1e-6 * abs(expected)


def ids(rng, n):
    return tuple(rng.integers(3, 259, n).tolist())


def suffix(rng, q=6, a=3):
    return Suffix(ids(rng, 5 + q + 4 + a), q=(5, 5 + q), a=(9 + q, 9 + q + a))


def sums(scored):
    return [[(s.logp_q, s.logp_a) for s in turn] for turn in scored]


def test_scores_equal_the_oracle_around_every_bucket_edge(tiny, tiny_folder):
    rng = np.random.default_rng(0)
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 127, 128, 129, 160, 161]
    job = Job(tuple(ids(rng, n) for n in lengths), (suffix(rng),))
    scored = Scorer(tiny.decoder, HEAD).score([job])[0]
    config = json.loads((tiny_folder / "config.json").read_text())
    tensors = models.tensors(config)
    for prefix, [result] in zip(((), *job.prefixes), scored, strict=True):
        [tail] = job.suffixes
        row = [*HEAD, *prefix, *tail.ids]
        logits = reference.logits(config, tensors, row)
        start = len(HEAD) + len(prefix)
        for got, (s, e) in ((result.logp_q, tail.q), (result.logp_a, tail.a)):
            assert got == pytest.approx(
                reference.span_logp(logits, row, (start + s, start + e)), abs=1e-4, rel=2e-6
            )


def test_batch_size_and_order_move_nothing(tiny):
    rng = np.random.default_rng(1)
    jobs = [
        Job(
            # Few lengths, on both sides of bucket edges: every new shape is a compilation.
            tuple(ids(rng, int(n)) for n in rng.choice([7, 9, 31, 33], count)),
            (suffix(rng, q=4 + count),),
        )
        for count in (5, 1, 9)
    ]
    base = [sums(s) for s in Scorer(tiny.decoder, HEAD).score(jobs)]
    for batch_size, budget in ((1, 4096), (3, 100)):
        got = Scorer(tiny.decoder, HEAD, batch_size=batch_size, token_budget=budget).score(jobs)
        for mine, theirs in zip(map(sums, got), base, strict=True):
            for a, b in zip(np.ravel(mine), np.ravel(theirs), strict=True):
                close(a, b)
    turned = [Job(job.prefixes[::-1], job.suffixes) for job in jobs[::-1]]
    got = Scorer(tiny.decoder, HEAD).score(turned)
    for mine, theirs in zip(got[::-1], base, strict=True):
        mine = sums(mine)
        for a, b in zip(np.ravel([mine[0], *mine[:0:-1]]), np.ravel(theirs), strict=True):
            close(a, b)


def test_the_same_input_gives_the_same_bits(tiny):
    rng = np.random.default_rng(2)
    job = Job(tuple(ids(rng, n) for n in (3, 30, 30, 90)), (suffix(rng), suffix(rng, a=8)))
    first = Scorer(tiny.decoder, HEAD).score([job, job])
    again = Scorer(tiny.decoder, HEAD).score([job, job])
    assert list(map(sums, first)) == list(map(sums, again))


def test_equal_turns_tie_exactly_and_are_computed_once(tiny):
    rng = np.random.default_rng(3)
    a, b = ids(rng, 20), ids(rng, 21)
    scorer = Scorer(tiny.decoder, HEAD)
    got = sums(scorer.score([Job((a, b, a, a), (suffix(rng),))])[0])
    assert got[1] == got[3] == got[4] != got[2]
    assert scorer.timing.sequences == 3


def test_many_suffixes_continue_one_state(tiny):
    """Seven suffixes on each turn, in parts where the budget is small, equal one at a time."""
    rng = np.random.default_rng(4)
    prefixes = tuple(ids(rng, n) for n in (7, 40, 25))
    suffixes = tuple(suffix(rng, q=q) for q in (1, 25, 2, 25, 9, 25, 2))
    together = Scorer(tiny.decoder, HEAD).score([Job(prefixes, suffixes)])[0]
    parts = Scorer(tiny.decoder, HEAD, token_budget=300).score([Job(prefixes, suffixes)])[0]
    one = Scorer(tiny.decoder, HEAD)
    for k, tail in enumerate(suffixes):
        alone = one.score([Job(prefixes, (tail,))])[0]
        for turn, other in ((together, alone), (parts, alone)):
            for got, expected in zip(turn, other, strict=True):
                close(got[k].logp_q, expected[0].logp_q)
                close(got[k].logp_a, expected[0].logp_a)


def test_questions_on_one_history_share_its_states(tiny):
    """Jobs with the same turns, and one with others between them, equal each job alone."""
    rng = np.random.default_rng(6)
    shared = tuple(ids(rng, n) for n in (7, 40, 25, 7))
    other = (shared[1], ids(rng, 12))
    jobs = [
        Job(shared, (suffix(rng, q=25), suffix(rng, a=1))),
        Job(other, (suffix(rng),)),
        Job(shared, (suffix(rng, q=2, a=9),)),
        Job(shared, (suffix(rng, q=25), suffix(rng, a=1))),
    ]
    scorer, told = Scorer(tiny.decoder, HEAD), []
    together = scorer.score(jobs, told.append)
    assert scorer.timing.prefix_tokens == sum(map(len, (*shared, *other)))
    assert sum(told) == sum(job.tokens for job in jobs)  # a meter counts what was asked for
    alone = Scorer(tiny.decoder, HEAD)
    for got, job in zip(together, jobs, strict=True):
        expected = alone.score([job])[0]
        assert [len(turn) for turn in got] == [len(job.suffixes)] * (1 + len(job.prefixes))
        for a, b in zip(np.ravel(sums(got)), np.ravel(sums(expected)), strict=True):
            close(a, b)


def test_shapes_are_bounded_by_buckets_and_reused(tiny):
    """Two programs (turn, suffix) a full bucket, few for what is left; a second run compiles none."""
    rng = np.random.default_rng(5)
    scorer = Scorer(tiny.decoder, HEAD, batch_size=8)
    lengths = [int(n) for n in rng.integers(1, 64, 200)]
    job = Job(tuple(ids(rng, n) for n in lengths), (suffix(rng),))
    before = programs()
    scorer.score([job])
    buckets, compiled = len({bucket(n) for n in lengths}), programs()
    assert compiled - before <= 2 * buckets + 6
    scorer.score([job])
    assert programs() == compiled


@given(st.lists(st.integers(1, 3000), max_size=60), st.integers(1, 40), st.integers(1, 5000))
def test_a_plan_holds_every_row_once_within_its_limits(lengths, batch_size, budget):
    batches = plan(lengths, batch_size, budget)
    assert sorted(itertools.chain(*(b.rows for b in batches))) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch.rows) <= batch.height <= batch_size
        assert batch.height * batch.width <= budget or batch.height == 1
        assert max(lengths[i] for i in batch.rows) <= batch.width
    assert batches == plan(lengths, batch_size, budget)


@given(st.integers(1, 10**6))
def test_a_bucket_holds_its_length_with_little_waste(length):
    width = bucket(length)
    assert length <= width <= length + max(7, length // 4)
    assert bucket(width) == width and width % 8 == 0


def test_pad_is_on_the_right():
    rows, lengths = pad([(5, 6), (7,)], 3, 4)
    assert rows.tolist() == [[5, 6, 0, 0], [7, 0, 0, 0], [0, 0, 0, 0]]
    assert lengths.tolist() == [2, 1, 0]
