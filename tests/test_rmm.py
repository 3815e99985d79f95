# SPDX-License-Identifier: Apache-2.0
"""RMM: topics and merges by scripted replies; the gradient against autodiff; learning by citations."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bfm.baselines import reranker
from bfm.baselines.reranker import Reranker, gumbel_top
from bfm.baselines.rmm import RMM
from bfm.baselines.rmm_training import train
from bfm.baselines.tasks import CITE, MERGE, TOPICS
from bfm.dialogue import Message, Turn, generator
from tests.scripted import Script, events, question, turn

TASKS = {"topics": TOPICS, "merge": MERGE, "cite": CITE}


def made(replies, room=3000):
    script = Script(replies, TASKS, room)
    return script, RMM(script.backend)


def test_topics_hold_their_raw_turns_and_merge():
    script, system = made({
        "topics": ["User likes tea | 0\nUser has a boat | 1, 2", "User now drinks coffee | 0"],
        "merge": ["ADD", "MERGE 1: User drank tea, now coffee"],
    })  # fmt: skip
    system.add(turn(0, "I like tea", "Ok.", "2023-05-07", session="a"))
    system.add(turn(1, "My boat is red", time="2023-05-07", session="a"))
    system.add(turn(2, "It leaks", time="2023-05-07", session="a"))
    assert not script.asked
    system.add(turn(3, "Coffee from now on", "Fine.", "2023-06-01", session="b"))
    assert len(script.of("topics")) == 1
    assert "0. User: I like tea\nAssistant: Ok.\n1. User: My boat is red" in script.of("topics")[0]
    found = system.search(question("tea or coffee"))
    assert [(t.summary, t.turns, t.time) for t in system.topics] == [
        ("User drank tea, now coffee", (0, 3), "2023-06-01"), ("User has a boat", (1, 2), "2023-05-07"),
    ]  # fmt: skip
    assert found[0].turns == (0, 3) and "I like tea" in found[0].text and "Fine." in found[0].text
    assert [e for e in events(system) if e[0] != "EXTRACT"] == [
        ("ADD", (0,), "rule"), ("ADD", (1, 2), "reply"), ("MERGE", (3,), "reply"),
    ]  # fmt: skip
    merge = system.log[-1]
    assert (merge.before, merge.after) == ("User likes tea", "User drank tea, now coffee")
    calls = len(script.asked)
    assert system.search(question("tea or coffee")) == found and len(script.asked) == calls


@pytest.mark.parametrize(
    "reply", ["", "Sure!", "User likes tea", "User likes tea | 7", "<think>", "a | b"]
)
def test_topics_that_cannot_be_read_are_the_users_first_sentences(reply):
    _, system = made({"topics": [reply], "merge": ["ADD"]})
    system.add(turn(5, "I like tea. And milk.", "You do."))
    system.add(turn(6, "", "I am alone."))
    system.add(turn(7, "My boat is red."))
    system.end()
    assert [(t.summary, t.turns) for t in system.topics] == [
        ("I like tea.", (5,)), ("My boat is red.", (7,)),
    ]  # fmt: skip
    assert events(system)[0] == ("EXTRACT", (5, 6, 7), "fallback")
    assert system.client.ledger.add.fallbacks == 1


def test_no_trait_stores_nothing():
    _, system = made({"topics": ["NO_TRAIT"], "merge": ["ADD"]})
    system.add(turn(0, "Hello"))
    assert system.search(question("x")) == [] and not system.client.ledger.add.fallbacks


@pytest.mark.parametrize(
    "reply", ["", "MERGE 9: text", "merge", "DELETE 1", "UPDATE 1: text", "Merge(0, x)"]
)
def test_a_merge_that_cannot_be_read_adds(reply):
    _, system = made({"topics": ["User likes tea | 0\nUser has a boat | 0"], "merge": [reply]})
    system.add(turn(0, "x"))
    system.end()
    assert [t.summary for t in system.topics] == ["User likes tea", "User has a boat"]
    assert events(system)[-1] == ("ADD", (0,), "fallback")


@pytest.mark.parametrize("reply", ["merge 1:", "MERGE(1)", '{"action": "merge", "index": 1}'])
def test_a_merge_without_a_text_keeps_the_summary_and_unites_the_turns(reply):
    _, system = made({"topics": ["User likes tea | 0\nUser loves tea | 1"], "merge": [reply]})
    system.add(turn(0, "x"))
    system.add(turn(1, "y"))
    system.end()
    assert [(t.summary, t.turns) for t in system.topics] == [("User likes tea", (0, 1))]
    assert events(system)[-1] == ("MERGE", (1,), "fallback")
    assert system.client.ledger.add.fallbacks == 1


def test_every_named_speaker_is_asked_for():
    script, system = made({"topics": ["NONE"], "merge": ["ADD"]})
    messages = (Message("user", "Hi", "Ann {who}"), Message("assistant", "Hi", "Bo"))
    system.add(Turn(0, messages))
    system.add(turn(1, "x", "y"))
    system.end()
    assert [p.split("on which ")[1].split(" tells")[0] for p in script.of("topics")] == [
        "Ann {who}", "Bo", "User",
    ]  # fmt: skip


def test_a_long_session_is_read_in_portions_without_loss():
    script, system = made({"topics": ["A topic | 0"], "merge": ["ADD"]}, room=600)
    for i in range(30):
        system.add(turn(i, f"topic{i} " + "word " * 40))
    system.end()
    prompts = script.of("topics")
    assert len(prompts) > 4 and all(f"topic{i} " in "".join(prompts) for i in range(30))
    assert len({t.turns for t in system.topics}) == len(system.topics) == len(prompts)


def random_case(seed, d=7, k=11, m=4):
    rng = np.random.default_rng(seed)
    made = Reranker(*(0.3 * rng.standard_normal((d, d)) for _ in range(2)), alpha=1.7)
    query, memories = rng.standard_normal(d), rng.standard_normal((k, d))
    shown = [int(i) for i in rng.permutation(k)[:m]]
    return made, query, memories, shown, rng.choice([0.5, -1.5], m)


@pytest.mark.parametrize("policy", reranker.POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_the_gradient_is_that_of_autodiff(policy, seed):
    made, query, memories, shown, advantage = random_case(seed)

    def objective(weights):
        w_q, w_m = weights
        s = made.alpha * ((memories + memories @ w_m.T) @ (query + w_q @ query))
        total, left = 0.0, list(range(len(memories)))
        for i, a in zip(shown, advantage, strict=True):
            if policy == "product":
                total += a * jax.nn.log_softmax(s / made.tau)[i]
            else:
                total += a * (s[i] - jax.nn.logsumexp(s[jnp.array(left)]))
                left.remove(i)
        return total

    with jax.enable_x64(True):
        wanted = jax.grad(objective)((jnp.array(made.w_q), jnp.array(made.w_m)))
    found = made.gradient(query, memories, shown, advantage, policy)
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-9)


def test_gumbel_top_draws_by_plackett_luce():
    """First place with probability softmax(s), second among the rest: 20,000 draws."""
    s, rng = np.array([1.0, 0.0, -1.0]), np.random.default_rng(0)
    draws = [tuple(gumbel_top(s, 2, rng)) for _ in range(20_000)]
    p = np.exp(s) / np.exp(s).sum()
    for a, b in ((0, 1), (0, 2), (1, 0), (2, 1)):
        assert draws.count((a, b)) / 20_000 == pytest.approx(p[a] * p[b] / (1 - p[a]), abs=0.012)


def test_the_identity_is_the_retrievers_order_and_scale_changes_no_order():
    made, query, memories, *_ = random_case(0)
    plain = Reranker.of(7)
    np.testing.assert_allclose(plain.scores(query, memories), memories @ query)
    louder = Reranker(made.w_q, made.w_m, alpha=30.0)
    assert (
        np.argsort(made.scores(query, memories)) == np.argsort(louder.scores(query, memories))
    ).all()


def stored(cite, n=9):
    """One user with n topics about tea and boats, in turn."""
    summaries = [f"User likes {'tea' if i % 2 else 'boats'} kind{i}" for i in range(n)]
    topics = "\n".join(f"{s} | {i}" for i, s in enumerate(summaries))
    script, system = made({"topics": [topics], "merge": ["ADD"], "cite": cite})
    for i in range(n):
        system.add(turn(i, f"{'tea' if i % 2 else 'boats'} said {i}"))
    system.end()
    assert len(system.topics) == n
    return script, system


def cites_tea(prompt: str) -> str:
    shown = prompt.split("MEMORIES:\n")[1].split("QUESTION:")[0].split("\n\n")
    used = [i for i, text in enumerate(shown) if "tea said" in text]
    return f"Something warm. {used}" if used else "I do not know [NO_CITE]"


def test_learning_raises_what_is_cited_and_is_frozen_at_test_time():
    _, system = stored([cites_tea])
    asked = question("User likes boats kind3")
    before = system.search(asked)
    stream = [(system, question(asked.query, id=str(i))) for i in range(600)]
    learned, history = train(system.client.backend, stream)
    assert train(system.client.backend, stream[:52])[1] == history[:13]
    assert len(history) == 150 and history[-1]["questions"] == 600
    first, last = (np.mean([h["cited"] for h in part]) for part in (history[:25], history[-25:]))
    assert last > first + 0.08, (first, last)
    assert history[-1]["norm_q"] > history[0]["norm_q"] > 0
    _, query, memories = system.candidates(asked)
    rows, *_ = system.candidates(asked)
    moved = learned.scores(query, memories) - learned.alpha * (memories @ query)
    tea = np.array(["tea" in system.topics[row].summary for row in rows])
    assert moved[tea].min() > moved[~tea].max()
    assert system.search(asked) == before  # training leaves the systems as they were
    system.reranker = learned
    after = system.search(asked)
    assert after != before and system.search(asked) == after  # no noise
    back = RMM.from_json(json.loads(json.dumps(system.to_json())), system.client.backend)
    assert back.search(asked) == after
    assert system.client.ledger.train.units == 652 and system.client.ledger.train.calls == 652


def test_an_answer_without_brackets_is_unknown_not_uncited():
    _script, system = stored(["I would say tea."])
    learned, history = train(system.client.backend, [(system, question("drinks?"))] * 4)
    assert history[0]["unknown"] == 4 and history[0]["cited"] is None
    assert not learned.w_q.any() and not learned.w_m.any()
    counts = system.client.ledger.train
    assert (counts.asked, counts.fallbacks, counts.calls) == (4, 4, 8)


@pytest.mark.parametrize("policy", reranker.POLICIES)
def test_no_cite_lowers_the_probability_of_what_was_shown(policy):
    _, system = stored(["[NO_CITE]"])
    one = question("User likes tea")
    _, query, memories = system.candidates(one)
    learned, history = train(system.client.backend, [(system, one)], policy=policy)
    assert history[0]["cited"] == 0.0 and history[0]["reward"] == -1.0
    plain = Reranker.of(64, learned.alpha)
    noise = generator(0, "rmm 0 q")
    shown = gumbel_top(plain.scores(query, memories), 5, noise)

    def log_p(made):
        s, total = made.scores(query, memories), 0.0
        for i in shown:
            scaled = s / made.tau if policy == "product" else s
            total += scaled[i] - np.log(np.exp(scaled).sum())
            if policy == "plackett_luce":
                s[i] = -np.inf
        return total

    assert log_p(learned) < log_p(plain)


def test_nothing_to_learn_from_is_one_clear_line():
    _, system = made({"topics": ["NONE"]})
    with pytest.raises(ValueError, match="no system of the stream holds a topic"):
        train(system.client.backend, [(system, question("x"))])
