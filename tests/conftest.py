# SPDX-License-Identifier: Apache-2.0
"""Eight simulated devices before the backend starts; models are made on the spot."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tiny programs are compiled by the hundred and run once: compile them quickly.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(scope="session")
def smollm2_path():
    """The real SmolLM2-135M-Instruct, obtained as a user's first run obtains it."""
    from bfm import lm

    return lm.find(lm.DEFAULT_MODEL)


@pytest.fixture(scope="session")
def smollm2(smollm2_path):
    from bfm import lm

    return lm.load(str(smollm2_path))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    from tests import models

    return models.llama_folder(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def tiny(tiny_folder):
    from bfm import lm

    return lm.load(str(tiny_folder))
