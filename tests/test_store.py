# SPDX-License-Identifier: Apache-2.0
"""States kept, spilled or computed again give the same bits; budgets hold; owners stay apart."""

import numpy as np
import pytest

from bfm.saliency import Job, Scorer
from bfm.store import StateStore, TurnStates, state_key
from tests.test_saliency import HEAD, close, ids, suffix, sums

PLENTY = 10**9


@pytest.fixture(scope="module")
def history():
    rng = np.random.default_rng(0)
    return tuple(ids(rng, int(n)) for n in rng.integers(1, 70, 20))


@pytest.fixture(scope="module")
def questions():
    rng = np.random.default_rng(1)
    return [suffix(rng, q=int(q)) for q in (3, 9, 5)]


@pytest.fixture(scope="module")
def one_shot(tiny, history, questions):
    scorer = Scorer(tiny.decoder, HEAD, batch_size=8)
    return [sums(scorer.score([Job(history, (q,))])[0]) for q in questions]


def scorer(tiny, store):
    return Scorer(tiny.decoder, HEAD, batch_size=8, store=store, identity="tiny")


@pytest.mark.parametrize("budget", [(PLENTY, 0), (0, PLENTY), (0, 0), (500_000, 300_000)])
def test_every_way_gives_the_same_bits_in_any_order(tiny, history, questions, one_shot, budget):
    store = StateStore(*budget)
    keeps = scorer(tiny, store)
    for k in (0, 1, 2, 1, 0):
        assert sums(keeps.score([Job(history, (questions[k],))])[0]) == one_shot[k]
    assert store.used["device"] <= budget[0] and store.used["host"] <= budget[1]
    batches = store.counts.device + store.counts.host + store.counts.computed
    if budget == (PLENTY, 0):
        assert store.counts.device == batches - batches // 5 and store.counts.host == 0
    if budget == (0, PLENTY):
        assert store.counts.host == batches - batches // 5
    if budget == (0, 0):
        assert store.counts.computed == batches
    if budget == (500_000, 300_000):
        assert min(store.counts.device, store.counts.host, store.counts.computed) > 0


def test_questions_together_equal_questions_apart(tiny, history, questions, one_shot):
    together = scorer(tiny, StateStore(PLENTY)).score([Job(history, tuple(questions))])[0]
    for k in range(3):
        for turn, expected in zip(together, one_shot[k], strict=True):
            close(turn[k].logp_q, expected[0][0])
            close(turn[k].logp_a, expected[0][1])


def test_a_kept_history_costs_only_suffixes(tiny, history, questions):
    keeps = scorer(tiny, StateStore(PLENTY))
    keeps.score([Job(history, (questions[0],))])
    before = keeps.timing.prefix_tokens
    keeps.score([Job(history, (questions[1],))])
    assert keeps.timing.prefix_tokens == before > 0


def test_other_owners_make_room_and_are_forgotten_wholly(tiny, history, questions):
    probe = StateStore(PLENTY)
    job = Job(history, (questions[0],))
    scorer(tiny, probe).score([job], owner="probe")
    store = StateStore(int(probe.used["device"] * 1.5))
    keeps = scorer(tiny, store)
    keeps.score([job], owner="ana")
    keeps.score([job], owner="ben")
    assert store.counts.evicted == 1 and store.counts.device == 0
    keeps.score([job], owner="ben")
    assert store.counts.device > 0
    store.drop("ben")
    store.drop("nobody")
    assert store.used == {"device": 0, "host": 0}


def test_a_key_names_everything_that_moves_a_state():
    key = state_key("model", [(1, 2), (3,)], (2, 16))
    assert key == state_key("model", [(1, 2), (3,)], (2, 16))
    others = [
        state_key("other", [(1, 2), (3,)], (2, 16)),
        state_key("model", [(1,), (2, 3)], (2, 16)),
        state_key("model", [(1, 2), (4,)], (2, 16)),
        state_key("model", [(1, 2), (3,)], (2, 32)),
        state_key("model", [(3,), (1, 2)], (2, 16)),
    ]
    assert len({key, *others}) == 6


def test_a_store_needs_an_identity(tiny):
    with pytest.raises(ValueError, match="identity: needed"):
        Scorer(tiny.decoder, HEAD, store=StateStore(1))
    with pytest.raises(ValueError, match="must not be negative"):
        StateStore(-1)


def test_turns_are_evicted_one_by_one_and_dropped_by_owner(tiny, questions):
    turns = [(5, i, 6) for i in range(4)]  # the last token is not part of a state
    kept = TurnStates(PLENTY)

    def ask(states, *which, owner="ann"):
        scorer = Scorer(tiny.decoder, HEAD, batch_size=1, store=states, identity="tiny")
        jobs = [Job(tuple(turns[i] for i in which), (questions[0],))]
        return sums(scorer.score(jobs, owner=owner)[0])

    expected = ask(kept, 0, 1, 2, 3)
    one = kept.used["device"] // 4
    states = TurnStates(2 * one)
    for which in ((0, 1), (1, 2), (1, 3), (1, 0)):
        assert ask(states, *which) == [expected[0], *(expected[i + 1] for i in which)]
        assert states.used["device"] <= 2 * one
    # Turn 1 was read each time and never made again; the others gave way to each other.
    assert (states.counts.computed, states.counts.device, states.counts.evicted) == (5, 3, 3)
    ask(states, 2, owner="bob")
    states.drop("ann")
    assert states.used["device"] == one
    ask(states, 2, owner="bob")
    assert states.counts.computed == 6
    states.drop("bob"), states.drop("nobody")
    assert states.used["device"] == 0
