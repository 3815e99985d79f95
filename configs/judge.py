# SPDX-License-Identifier: Apache-2.0
"""The judge that comes with bfm: adapters with which SmolLM2-135M-Instruct can tell evidence.

    python launch/sft.py --config configs/judge.py --workdir runs/judge

leaves adapter.safetensors, which is bfm/judge.safetensors (`label.from_checkpoint=judge`): a reader
taught to answer after one to five turns drawn by chance. It needs no evidence labels, and log p(answer)
after a turn then depends on what the turn says. Forty-six minutes of one core. On the 16 bundled
dialogues, which it was not taught on,

    python launch/label.py --config configs/smollm2_135m.py --workdir runs/labels \\
        --config.label.from_checkpoint=judge

says that its highest turn is evidence in 0.46 [0.23, 0.69] of 13 (untouched 0.08 [0.00, 0.23]).
"""

from bfm.settings import default_config


def get_config():
    config = default_config()
    config.data = "shifting_prefs"
    config.split = "train"
    config.limit = 320
    config.train.heads = "reader"
    config.train.evidence = "chance"
    config.train.epochs = 1  # 40 updates
    config.train.dev = 0.0
    config.train.batch_size = 8
    config.train.tokens = 1024
    config.train.remat = False
    config.train.learning_rate = 1e-3
    config.train.lora_rank = 4  # a file of 2.5 MB
    config.train.lora_alpha = 8.0
    return config
