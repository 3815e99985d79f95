# SPDX-License-Identifier: Apache-2.0
"""A tiny model of random weights on a few bundled questions: every part of a run, to try it.

python launch/sft.py --config configs/tiny.py --workdir runs/tiny
"""

from bfm.settings import default_config


def get_config():
    config = default_config()
    config.model.path = ""
    config.model.arch = "tiny"
    config.data = "shifting_prefs"
    config.split = "small_train"
    config.limit = 24
    config.tau = "0.0"
    config.prefilter_k = 4
    config.train.steps = 20
    config.train.batch_size = 4
    config.train.tokens = 2048  # bytes: one token each
    config.train.lora_rank = 0
    config.train.learning_rate = 3e-3
    config.train.dev = 0.25
    return config
