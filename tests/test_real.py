# SPDX-License-Identifier: Apache-2.0
"""The real SmolLM2-135M-Instruct: known values, and labels of dialogues that ship."""

import json
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bfm
from bfm import labeling, lm, opening
from bfm.dialogue import parse_example, turns_of
from bfm.likelihood import Spans, span_logprobs
from bfm.settings import Settings

pytestmark = pytest.mark.real

PARAGRAPH = (
    "The Eiffel Tower is a wrought-iron lattice tower on the Champ de Mars in Paris, France. It is "
    "named after the engineer Gustave Eiffel, whose company designed and built the tower from 1887 "
    "to 1889."
)


RECORD = {
    "id": "x",
    "turns": [{"role": "user", "content": "I like tea."}, {"role": "user", "content": "Or rum."}],
    "query": "What do I like?",
}


def test_parameter_count_and_window(smollm2):
    assert sum(leaf.size for leaf in jax.tree.leaves(smollm2.decoder)) == 134_515_008
    assert smollm2.config.window == 8192 and smollm2.config.tied


def test_plain_text_has_the_known_likelihood(smollm2):
    """51 tokens, 93.5 nats: 1.834 a token; with q and k rows left permuted it would be 3.22."""
    ids = smollm2.scaffold.tokenizer.encode(PARAGRAPH)
    n = len(ids) - 1
    spans = Spans(
        jnp.arange(n)[None], jnp.array([ids[1:]])[..., None], jnp.zeros((1, n), jnp.int32)
    )
    tokens, segments = jnp.array([ids]), jnp.ones((1, n + 1), jnp.int32)
    positions = jnp.arange(n + 1)[None]
    _, total = jax.jit(span_logprobs)(smollm2.decoder, tokens, positions, segments, spans)
    assert n == 51 and -float(total[0, 0]) / n == pytest.approx(1.834, abs=0.002)


@pytest.mark.parametrize("name", opening.SHIPPED)
def test_the_adapters_that_ship_are_of_the_default_model(smollm2_path, name):
    tuned = opening.open_tuned(name, "policy", lm.open_model(str(smollm2_path)))
    assert opening.SHIPPED[name].stat().st_size < 3_000_000
    moved = [float(np.abs(x).max()) for x in tuned.adapter.params.values()]
    assert min(moved) > 0 and max(moved) < 10


def test_bundled_dialogues_give_finite_labels(smollm2_path, tmp_path):
    settings = Settings.of({"model": {"path": str(smollm2_path)}, "limit": 2, "dump_tokens": True})
    labeling.run(settings, tmp_path)
    for line in (tmp_path / labeling.LABELS).read_text().splitlines():
        label = json.loads(line)
        values = [*label["sal_q"], *label["sal_a"], label["logp_q"], label["logp_a"]]
        assert all(map(math.isfinite, values)) and np.std(label["sal_q"]) > 0


def test_the_readmes_python_runs(smollm2_path, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("BFM_MODEL", str(smollm2_path))
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    code = re.findall(r"```python\n(.*?)```", readme, re.S)
    space = {}
    exec(code[0], space)
    assert len(space["label"].sal_q) == 2 and "," in capsys.readouterr().out
    space |= {
        "turns": turns_of(parse_example(RECORD).question.messages),
        "questions": [parse_example(RECORD).question] * 2,
    }
    monkeypatch.chdir(tmp_path)  # the memory's file
    online, scorer = (next(c for c in code if word in c) for word in ("memory.db", "StateStore"))
    exec(online, shown := {})
    assert "eval.tau_q" in capsys.readouterr().out and (tmp_path / "memory.db").exists()
    # The reader that comes with bfm answers, its controller only when it is asked for.
    loaded = shown["memory"]._load()
    assert loaded.policy is None and loaded.reader is not loaded.base
    exec(next(c for c in code if "def chat(" in c), space)
    heard = []
    with bfm.BayesFactorMemory(":memory:", policy=None) as memory:
        for said in ("I gave up coffee in May.", "What should I drink now?"):
            reply = space["chat"](
                lambda m: heard.append(m[0]["content"]) or "Tea!", memory, "ann", said
            )
        assert reply == "Tea!" and heard[0] == "I gave up coffee in May."  # nothing was known yet
        assert heard[1].endswith("What should I drink now?")
        assert [entry.messages[1].content for entry in memory.get_all("ann")] == ["Tea!"] * 2
    exec(scorer, space)
    assert len(space["sal_q"]) == 2
    exec(next(c for c in code if "records_from_log" in c), space)
    log = [{"role": "user", "content": str(i)} for i in range(4)]
    [made] = space["records_from_log"](log, {0: "no history", 2: "yes"})
    asked = parse_example(made)
    assert asked.answer == "yes" and asked.question.query == "2"
    assert [m.content for m in asked.question.messages] == ["0", "1"]  # nothing later
    assert space["scorer"].store.counts.device > 0
