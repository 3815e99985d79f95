# SPDX-License-Identifier: Apache-2.0
"""The adapter that comes with bfm: controller and reader of SmolLM2-135M-Instruct, learned here.

    python launch/sft.py --config configs/shipped.py --workdir runs/shipped

makes labels (Sal_q of every turn), trains, measures on users apart, and leaves adapter.safetensors,
which is bfm/policy.safetensors. The focus is the evidence of shifting_prefs, which follows from how its
histories are made: an untrained model of this size judges evidence too badly to label it.

Forty minutes on two cores. On nine questions of one user held out, before and after: accuracy with
the evidence 0.22 and 0.78 (log p -3.8 and -0.7), with what the controller chose 0.22 and 0.44; focus
F1 0.10 and 0.11.
"""

from bfm.settings import default_config


def get_config():
    config = default_config()
    config.data = "shifting_prefs"
    config.split = "small_train"
    config.label.source = "evidence"
    config.train.steps = 36  # half an hour on two cores
    config.train.lora_rank = 4  # a file of 2.5 MB
    config.train.lora_alpha = 8.0
    config.train.learning_rate = 1e-3
    config.train.batch_size = 8
    config.train.accumulation = 4
    config.train.tokens = 1024
    config.train.remat = False
    config.train.dev = 0.1
    config.train.checkpoint_every = 12
    return config
