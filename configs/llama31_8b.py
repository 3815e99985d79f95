# SPDX-License-Identifier: Apache-2.0
"""Llama-3.1-8B-Instruct, one of the two models of the paper. Needs its folder (Hugging Face layout).

    python launch/label.py --config configs/llama31_8b.py --workdir runs/labels \
        --config.model.path=FOLDER --config.data=jsonl:FILE
    python launch/sft.py --config configs/llama31_8b.py --workdir runs/sft \
        --config.model.path=FOLDER --config.data=jsonl:FILE --config.labels=runs/labels/labels.jsonl

Without a folder the hub is asked for the name below, whose licence has to be accepted there first. The
architecture is at parity with transformers on random weights; these weights were never run here.
"""

from bfm.settings import default_config


def get_config():
    config = default_config()
    config.model.path = "meta-llama/Llama-3.1-8B-Instruct"
    config.model.dtype = "bfloat16"  # as published; masters and optimizer stay fp32
    config.tau = "auto"
    config.train.lora_rank = (
        0  # the paper tunes all parameters: 16 bytes each, 7.5 GiB a chip of 16
    )
    config.train.learning_rate = 1e-5  # usual for all parameters of an 8B model
    config.train.epochs = 2  # a third pass over silver labels is learning them by heart
    config.train.tokens = 4096  # ten candidates of 107 tokens on average, with room for long ones
    config.train.packing = True  # one shape, no padding
    config.train.batch_size = 128  # about 32 packed sequences
    config.train.accumulation = 2  # one or two sequences of 4,096 tokens a chip at a time
    config.train.remat = True  # 1 GiB of activations a sequence instead of some 20
    config.mesh.fsdp = 16  # a v5e-16; the rest of a larger slice becomes mesh.data
    return config
