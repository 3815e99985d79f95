# SPDX-License-Identifier: Apache-2.0
"""Which way of asking lets a small reader judge evidence? The same reader, one setting at a time.

    python launch/sweep.py --config configs/judging.py --workdir runs/judging \\
        --config.eval.reader=runs/quality/evidence=chance/export

after configs/label_quality.py, whose reader, taught on turns by chance, is the judge.
"""

from bfm.settings import default_config

SWEEP = [
    {},  # the answer's text, summed over its tokens, a turn by itself
    {"context_turns": 1},
    {"unit": "message"},
    {"label.answer": "letter"},
    {"label.answer": "options"},
]
EVALUATE = {
    "split": "small_dev",
    "limit": 24,
    "methods": "none,embedding,sal_a",
    "eval.contrasts": "sal_a-none",
}


def get_config():
    config = default_config()
    config.data = "shifting_prefs"
    config.tau = "0.0"
    return config
