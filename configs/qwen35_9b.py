# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5-9B, one of the two models of the paper. Needs its folder (Hugging Face layout).

    python launch/label.py --config configs/qwen35_9b.py --workdir runs/labels \
        --config.model.path=FOLDER --config.data=jsonl:FILE

Prompts close the thinking block, so that an answer is scored as an answer. The text model is read from
the folder; vision tower and multi-token prediction are left out. The architecture is at parity with
transformers on random weights; these weights were never run here.
"""

from bfm.settings import default_config


def get_config():
    config = default_config()
    config.model.path = "Qwen/Qwen3.5-9B"
    config.model.dtype = "bfloat16"
    return config
