# SPDX-License-Identifier: Apache-2.0
"""Can a small model judge evidence, and what does a short fine-tune of its reader change?

    python launch/sweep.py --config configs/label_quality.py --workdir runs/quality

teaches a reader with each entry of SWEEP and evaluates it on users it has not seen: does its Sal_a (and
the expected Bayes factor by it) order the evidence first, and does what Sal_a picks help it answer?

Two to three hours on two cores (an example takes some 15 s to evaluate, a reader a quarter of
an hour to teach); it has not been run to its end yet.
"""

from bfm.settings import default_config

SWEEP = [
    {},  # the model as it is
    {"train.evidence": "chance"},  # one to five turns by chance: needs no labels
    {"train.evidence": "evidence"},  # the labelled turns: what a benchmark would allow
]
EVALUATE = {
    "split": "small_dev",
    "limit": 0,
    "methods": "none,embedding,sal_q,ebf,evidence,sal_a",
    "eval.contrasts": "evidence-none,sal_a-evidence,ebf-sal_q,ebf-embedding",
}


def get_config():
    config = default_config()
    config.data = "shifting_prefs"
    config.split = "train"
    config.limit = 320  # read once; more rows than this are the accelerator's
    config.train.heads = "reader"
    config.train.epochs = 1
    config.train.dev = 0.0  # what is held out is another split, evaluated below
    config.train.batch_size = 8
    config.train.tokens = 1024
    config.train.remat = False
    config.train.learning_rate = 1e-3
    config.tau = "0.0"  # Sal_a's own sign decides
    return config
