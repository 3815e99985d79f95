# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct as it is, the default model: labels anything on a laptop.

    python launch/label.py --config configs/smollm2_135m.py --workdir runs/labels \
        --config.data=jsonl:FILE
"""

from bfm.settings import default_config


def get_config():
    return default_config()
