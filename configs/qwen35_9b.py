# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5-9B (text), the other model of the paper. Needs its folder (Hugging Face layout).

    python launch/label.py --config configs/qwen35_9b.py --workdir runs/labels \
        --config.model.path=FOLDER --config.data=jsonl:FILE
    python launch/sft.py --config configs/qwen35_9b.py --workdir runs/sft \
        --config.model.path=FOLDER --config.data=jsonl:FILE --config.labels=runs/labels/labels.jsonl

Prompts close the thinking block, so that an answer is scored as an answer. The text model is read from
the folder; vision tower and multi-token prediction are left out. The architecture is at parity with
transformers on random weights; these weights were never run here.
"""

from bfm.settings import default_config


def get_config():
    config = default_config()
    config.model.path = "Qwen/Qwen3.5-9B"
    config.model.dtype = "bfloat16"  # as published; masters, optimizer and decay rates stay fp32
    config.tau = "auto"
    config.train.lora_rank = (
        0  # the paper tunes all parameters: 16 bytes each, 4.2 GiB a chip of 32
    )
    config.train.learning_rate = 1e-5  # usual for all parameters of a 9B model
    config.train.epochs = 2  # a third pass over silver labels is learning them by heart
    config.train.tokens = 4096  # ten candidates of 107 tokens on average, with room for long ones
    config.train.packing = True  # one shape, no padding; recurrent layers start anew at each row
    config.train.batch_size = 128  # about 32 packed sequences
    config.train.accumulation = 2  # one or two sequences of 4,096 tokens a chip at a time
    config.train.remat = (
        True  # the chunk states of the recurrence would take 32 KiB a token and layer
    )
    config.mesh.fsdp = 32  # a v5e-32; fewer chips of more memory take their number
    return config
