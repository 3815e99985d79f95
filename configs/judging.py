# SPDX-License-Identifier: Apache-2.0
"""Which way of asking lets a small reader judge evidence? The same reader, one setting at a time.

    python launch/sweep.py --config configs/judging.py --workdir runs/judging \\
        --config.eval.reader=runs/quality/evidence=chance/export

after configs/label_quality.py, whose reader, taught on turns by chance, is the judge. Ten minutes an
entry on one core. Only the first has been run: Sal_a orders the evidence first at 0.89 [0.82, 0.97]
(Sal_q 0.85, MiniLM 0.81), and what it picks is read with 0.42 [0.22, 0.69], nothing with 0.29. Dividing
by tokens (label.norm) is left out: it moves no order within a question.
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
