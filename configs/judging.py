# SPDX-License-Identifier: Apache-2.0
"""Which way of asking lets a small reader judge evidence? The same reader, one setting at a time.

    python launch/sweep.py --config configs/judging.py --workdir runs/judging

The reader is the judge that comes with bfm (configs/judge.py). Ten minutes an entry on one core.
Dividing by tokens (label.norm) is left out: it moves no order within a question.
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
    config.eval.reader = "judge"
    config.tau = "0.0"
    return config
