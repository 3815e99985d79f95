# SPDX-License-Identifier: Apache-2.0
"""Which way of asking lets a small reader judge evidence? The same reader, one setting at a time.

    python launch/sweep.py --config configs/judging.py --workdir runs/judging

The reader is the judge that comes with bfm (configs/judge.py). Three to ten minutes an entry
on one core.
Dividing by tokens (label.norm) is left out: it moves no order within a question.

What it gave (24 questions of small_dev, 95 % intervals by user; results/judging.json;
the first row is the area under the curve, chance 0.5):

                           as taught          context            messages           letters
    Sal_a, evidence first  0.85 [0.74, 0.95]  0.74 [0.54, 0.89]  0.85 [0.75, 0.95]  0.46 [0.35, 0.60]
    Sal_q does             0.85 [0.68, 0.95]  0.80 [0.74, 0.87]  0.91 [0.85, 0.97]  as the first
    right by its choice    0.38 [0.25, 0.50]  0.29 [0.18, 0.44]  0.33 [0.22, 0.46]  0.17 [0.03, 0.36]
    without memory         0.25 [0.11, 0.34]  0.25               0.25               0.17

A judge is asked as it was taught: with the answer's text and a turn by itself. The right letter against
all letters (the last entry, at a later commit) tells as little as the letter: 0.51 [0.35, 0.67], right
0.17 [0.03, 0.36], so averaging it over orders of the options (label.permutations) was not run.
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
