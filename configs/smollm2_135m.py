# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct, the default model: labels anything on a laptop, learns the policy in an hour.

    python launch/label.py --config configs/smollm2_135m.py --workdir runs/labels \
        --config.data=shifting_prefs --config.split=small_train
    python launch/sft.py --config configs/smollm2_135m.py --workdir runs/sft \
        --config.data=shifting_prefs --config.split=small_train \
        --config.labels=runs/labels/labels.jsonl

On two cores labeling takes a quarter of an hour and the 39 updates (with --config.train.dev=0.25) 40 to
50 minutes: loss 4.8 to 0.7, gate F1 0.62 to 0.98, focus F1 0.24 to 0.42 on 30 questions of three users
held out, accuracy at chance: labels of an untrained model are worth nothing (see configs/readers.py).

Every parameter instead of adapters: --config.train.lora_rank=0 --config.train.learning_rate=2e-4.
"""

from bfm.settings import default_config

# python launch/sweep.py --config configs/smollm2_135m.py --workdir runs/sweep [the flags of sft.py]
SWEEP = [
    {"train.lora_rank": 16, "train.learning_rate": rate} for rate in (2e-4, 1e-3)
] + [{"train.lora_rank": 0, "train.learning_rate": rate} for rate in (5e-5, 2e-4)]  # fmt: skip


def get_config():
    config = default_config()
    config.train.learning_rate = 1e-3  # adapters of a small model: ten times that of all parameters
    config.train.batch_size = 8  # more updates from few labels
    config.train.accumulation = 4  # two rows of like length at a time: hardly any padding
    config.train.tokens = 1024  # holds ten short candidates; else the least salient are dropped
    config.train.remat = False  # two rows fit in memory without, and take a third less time
    return config
