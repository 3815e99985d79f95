# SPDX-License-Identifier: Apache-2.0
"""Bayes-factor memory: which turns of a user's history change what a language model believes.

    import bfm

    lm = bfm.load()  # SmolLM2-135M-Instruct, or a folder, a .gguf file, a hub name
    label = bfm.score(lm, history, "What should I cook?", answer="A lentil curry")
    print(label.sal_q, label.sal_a, label.focus)

Importing the package touches no device, no network and no file.
"""

from typing import Any

__version__ = "0.1.0"
_PLACES = {"load": "bfm.lm", "score": "bfm.labels", "BayesFactorMemory": "bfm.memory"}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'bfm' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_PLACES[name]), name)
