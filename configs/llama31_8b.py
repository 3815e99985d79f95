# SPDX-License-Identifier: Apache-2.0
"""Llama-3.1-8B-Instruct, one of the two models of the paper. Needs its folder (Hugging Face layout).

    python launch/label.py --config configs/llama31_8b.py --workdir runs/labels \
        --config.model.path=FOLDER --config.data=jsonl:FILE

Without a folder the hub is asked for the name below, whose licence has to be accepted there first. The
architecture is at parity with transformers on random weights; these weights were never run here.
"""

from bfm.settings import default_config


def get_config():
    config = default_config()
    config.model.path = "meta-llama/Llama-3.1-8B-Instruct"
    config.model.dtype = "bfloat16"
    return config
