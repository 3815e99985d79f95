# SPDX-License-Identifier: Apache-2.0
"""Eight simulated devices before the backend starts; models are made on the spot."""

import importlib.metadata
import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tiny programs are compiled by the hundred and run once: compile them quickly, and each shape once for
# all modules, workers and child processes.
# The second flag halves the time of a compilation; 0.12 does not know it.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0"
    + " --xla_cpu_use_fusion_emitters=false"
    * importlib.metadata.version("jaxlib").startswith("0.10."),
)
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "jax")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

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


@pytest.fixture(scope="module", autouse=True)
def let_programs_go():
    """Forget compiled programs before a worker holds too many: each takes memory mappings, of which
    Linux allows a process 65,530, and XLA aborts at the next.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 30_000:
        from bfm import saliency

        saliency._PROGRAMS.clear()
        jax.clear_caches()
