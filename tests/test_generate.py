# SPDX-License-Identifier: Apache-2.0
"""Decoding: as the float64 oracle would, whatever the neighbours; conversations as ids."""

import json

import numpy as np
import pytest

from bfm import lm, sharding
from bfm.generate import reply, write
from tests import models, reference

PROMPTS = [[5, 9, 200, 31], [7], [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50]]


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def family(request, tmp_path_factory):
    base = {"llama": models.LLAMA, "qwen3_5": models.QWEN35}[request.param]
    folder = models.folder(tmp_path_factory.mktemp(request.param), base)
    config = json.loads((folder / "config.json").read_text())
    tensors = models.tensors(config)

    def oracle(ids):
        return reference.logits(config, tensors, list(ids))[-1]

    return lm.load(str(folder)).decoder, oracle


def greedy(oracle, prompt, n):
    ids = list(prompt)
    for _ in range(n):
        ids.append(int(oracle(ids).argmax()))
    return tuple(ids[len(prompt) :])


def test_greedy_replies_are_the_oracles(family):
    decoder, oracle = family
    expected = [greedy(oracle, prompt, 6) for prompt in PROMPTS]
    found = reply(decoder, PROMPTS, stop=(), max_tokens=6)
    assert [r.ids for r in found] == expected
    assert not any(r.ended for r in found)


def test_a_stop_token_ends_a_row_alone(family):
    decoder, oracle = family
    first, second, third = (greedy(oracle, prompt, 6) for prompt in PROMPTS)
    stop = first[2]
    found = reply(decoder, PROMPTS, stop=(stop,), max_tokens=6)
    for r, whole in zip(found, (first, second, third), strict=True):
        expected = whole[: whole.index(stop)] if stop in whole else whole
        assert (r.ids, r.ended) == (expected, stop in whole)


def test_draws_depend_on_prompt_and_seed_alone(family):
    decoder, _ = family
    together = reply(decoder, PROMPTS, (), 8, temperature=1.5, seeds=[1, 2, 3])
    alone = [
        reply(decoder, [p], (), 8, temperature=1.5, seeds=[s])[0]
        for p, s in zip(PROMPTS, (1, 2, 3), strict=True)
    ]
    assert together == alone
    assert reply(decoder, PROMPTS[:1], (), 8, temperature=1.5, seeds=[9])[0] != alone[0]


def test_draws_follow_the_distribution(family):
    """First tokens of many seeds against softmax(logits / 0.5): chi-square, the seeds fixed."""
    decoder, oracle = family
    n = 512
    drawn = reply(decoder, [PROMPTS[0]] * n, (), 1, temperature=0.5, seeds=range(n), batch_size=256)
    p = np.exp(reference.log_softmax(oracle(PROMPTS[0]) / 0.5))
    counts = np.bincount([r.ids[0] for r in drawn], minlength=len(p))
    order = np.argsort(-p)
    parts = np.array_split(order, 8)  # eight groups by falling probability
    expected = np.array([n * p[part].sum() for part in parts])
    found = np.array([counts[part].sum() for part in parts])
    keep = expected > 5
    assert ((found - expected)[keep] ** 2 / expected[keep]).sum() < 24.3  # p = 0.001 for 7 degrees


def test_written_by_a_grammar_of_everything_is_greedy(family):
    decoder, oracle = family
    everything = list(range(384))
    rule = lambda ids: everything if len(ids) < 4 else []  # noqa: E731
    found = write(decoder, PROMPTS, [rule] * len(PROMPTS), slots=4)
    assert [w.ids for w in found] == [greedy(oracle, prompt, 4) for prompt in PROMPTS]


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "Three <|im_end|> four?"},
]


def test_a_conversation_is_the_template_with_texts_as_data(tiny):
    tokenizer = tiny.scaffold.tokenizer
    ids = tokenizer.chat(CHAT)
    assert tokenizer.decode(ids) == tokenizer.render(CHAT, add_generation_prompt=True)
    plain = [{**m, "content": m["content"].replace("<|im_end|>", "")} for m in CHAT]
    count = [i for i in ids if i in tokenizer.control_ids]
    assert count == [i for i in tokenizer.chat(plain) if i in tokenizer.control_ids]
    assert tuple(tokenizer.chat(CHAT[1:2])) == (
        *tiny.scaffold.head, *tokenizer.encode("One?"), *tiny.scaffold.tail,
    )  # fmt: skip


@pytest.mark.parametrize("mesh", [(2, 2, 2), (1, 8, 1)], ids=str)
def test_a_model_split_over_devices_writes_the_same(mesh):
    files = lm.open_model("", "tiny")
    whole, split = files.load(), files.load(mesh=sharding.make_mesh(*mesh))
    for options in ({}, {"temperature": 1.0, "seeds": [1, 2, 3]}):
        one, other = (reply(m.decoder, PROMPTS, (), 6, **options) for m in (whole, split))
        assert one == other
    rules = [lambda ids: range(3, 300) if len(ids) < 4 else ()] * len(PROMPTS)
    one, other = (write(m.decoder, PROMPTS, rules, slots=4) for m in (whole, split))
    assert [w.ids for w in one] == [w.ids for w in other]
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose([*a.first.values()], [*b.first.values()], atol=1e-4)
