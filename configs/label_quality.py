# SPDX-License-Identifier: Apache-2.0
"""Can a small model judge evidence, and what does a short fine-tune of its reader change?

    python launch/sweep.py --config configs/label_quality.py --workdir runs/quality

teaches a reader with each entry of SWEEP and evaluates it on users it has not seen: does its Sal_a (and
the expected Bayes factor by it) order the evidence first, and does what Sal_a picks help it answer?

What it gave (32 questions of seven users; 95 % intervals by user; some three hours on two cores):

                                          untouched          taught by chance   taught by evidence
    Sal_a orders the evidence first       0.51 [0.43, 0.59]  0.86 [0.79, 0.94]  0.72 [0.57, 0.88]
    expected Bayes factor does            0.50 [0.36, 0.65]  0.63 [0.43, 0.83]  0.73 [0.60, 0.86]
    (Sal_q 0.82 [0.68, 0.92], MiniLM 0.80 [0.67, 0.90], by the base model in all three)
    accuracy without memory               0.28 [0.23, 0.33]  0.28 [0.17, 0.41]  0.28 [0.15, 0.43]
    with the labelled evidence            0.28 [0.23, 0.33]  0.34 [0.17, 0.59]  0.62 [0.42, 0.84]
    with the turns that Sal_a picks       0.31 [0.23, 0.42]  0.38 [0.23, 0.61]  0.69 [0.52, 0.87]
    with five turns by Sal_q              0.25 [0.22, 0.29]  0.31 [0.23, 0.42]  0.41 [0.20, 0.60]

Turns by chance, which need no labels, make a judge; turns that decide the answer make a reader (and,
in the second training below, a judge too).

Does it hold for another training, by 320 questions of other users? (how: chance, evidence)

    python launch/sft.py --config configs/label_quality.py --workdir runs/quality/$how-1 \\
        --config.seed=1 --config.train.evidence=$how
    python launch/eval.py --config configs/label_quality.py --workdir runs/quality/$how-1/eval \\
        --config.split=small_dev --config.limit=32 --config.eval.reader=runs/quality/$how-1/export \\
        --config.methods=none,sal_q,evidence,sal_a --config.eval.contrasts=evidence-none,sal_a-none

Predicted, before it was run, for the same 32 questions: by chance Sal_a orders the evidence at 0.78 to
0.92 and evidence gains 0 to 15 points over nothing; by evidence 0.62 to 0.82, and 20 to 45 points. It
gave 0.86 [0.77, 0.93] and 6 points; 0.87 [0.78, 0.95] (more than predicted) and 41 points [24, 53].
"""

from bfm.settings import default_config

SWEEP = [
    {},  # the model as it is
    {"train.evidence": "chance"},  # one to five turns by chance: needs no labels
    {"train.evidence": "evidence"},  # the labelled turns: what a benchmark would allow
]
EVALUATE = {
    "split": "small_dev",
    "limit": 32,  # of small_dev; the rest is the accelerator's
    "methods": "none,embedding,sal_q,ebf,evidence,sal_a",
    "eval.contrasts": "evidence-none,sal_a-evidence,ebf-sal_q,ebf-embedding",
}


def get_config():
    config = default_config()
    config.data = "shifting_prefs"
    config.split = "train"
    config.limit = 320  # 40 updates
    config.train.heads = "reader"
    config.train.epochs = 1
    config.train.dev = 0.0  # what is held out is another split, evaluated below
    config.train.batch_size = 8
    config.train.tokens = 1024
    config.train.remat = False
    config.train.learning_rate = 1e-3
    config.tau = "0.0"  # Sal_a's own sign decides
    return config
