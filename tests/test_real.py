# SPDX-License-Identifier: Apache-2.0
"""The real SmolLM2-135M-Instruct: known values, and labels of dialogues that ship."""

import json
import math

import numpy as np
import pytest

from bfm import labeling
from bfm.saliency import Job, Scorer, Suffix
from bfm.settings import Settings

pytestmark = pytest.mark.real

PARAGRAPH = (
    "The Eiffel Tower is a wrought-iron lattice tower on the Champ de Mars in Paris, France. It is "
    "named after the engineer Gustave Eiffel, whose company designed and built the tower."
)


def test_parameter_count_and_window(smollm2):
    import jax

    assert sum(leaf.size for leaf in jax.tree.leaves(smollm2.decoder)) == 134_515_008
    assert smollm2.config.window == 8192 and smollm2.config.tied


def test_plain_text_is_likely_only_with_unpermuted_rows(smollm2):
    """Interleaved q and k rows still look sane (about 1.4 nats a token worse)."""
    ids = tuple(smollm2.scaffold.tokenizer.encode(PARAGRAPH))
    suffix = Suffix(ids[1:], (0, len(ids) - 1))
    scorer = Scorer(smollm2.decoder, ids[:1] + ids[:1])
    # The head is doubled because a scorer needs two tokens; only the second is a context of note.
    mean = -scorer.score([Job((), (suffix,))])[0][0][0].logp_q / (len(ids) - 1)
    assert 1.2 < mean < 2.3


def test_bundled_dialogues_give_finite_labels(smollm2_path, tmp_path):
    settings = Settings.of({"model": {"path": str(smollm2_path)}, "limit": 2, "dump_tokens": True})
    labeling.run(settings, tmp_path)
    for line in (tmp_path / labeling.LABELS).read_text().splitlines():
        label = json.loads(line)
        values = [*label["sal_q"], *label["sal_a"], label["logp_q"], label["logp_a"]]
        assert all(map(math.isfinite, values)) and np.std(label["sal_q"]) > 0
