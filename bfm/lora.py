# SPDX-License-Identifier: Apache-2.0
"""What is trained: every parameter, or low-rank adapters beside frozen ones (arXiv 2106.09685).

Parameters are a flat dict by name while they are trained. An adapter of `full.q_DNh` is the pair
`full.q_Dr` (inputs to rank) and `full.q_rNh` (rank to outputs); the model sees w + scale a b.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from safetensors.numpy import save

from bfm.model.decoder import Decoder
from bfm.model.matmul import LowRank
from bfm.weights import WeightsError, abstract_decoder, param_path, tensors

# Small, fp32 by publication, and in the exponent of a decay: left as they are.
_NOT_ADAPTED = ("beta_DH", "step_DH")


def flatten(decoder: Decoder) -> dict[str, jax.Array]:
    """Return the parameters of a decoder by name."""
    return {param_path(key): leaf for key, leaf in jax.tree_util.tree_flatten_with_path(decoder)[0]}


def base_shapes(config) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of a decoder, by name."""
    return {name: leaf.shape for name, leaf in flatten(abstract_decoder(config)).items()}


def assemble(config, params: Mapping[str, jax.Array], scale: float = 1.0) -> Decoder:
    """Return the decoder of named parameters; where adapters are among them they are applied."""

    def leaf(key, _):
        name = param_path(key)
        a, b = parts(config, name) or ("", "")
        if a in params:
            return LowRank(params[name], params[a], params[b], scale)
        return params[name]

    return jax.tree_util.tree_map_with_path(leaf, abstract_decoder(config))


def merge(decoder: Decoder) -> Decoder:
    """Return a decoder of plain weights: every w + scale a b is formed, in w's dtype."""
    is_low_rank = lambda x: isinstance(x, LowRank)  # noqa: E731
    return jax.tree.map(lambda x: x.merged() if is_low_rank(x) else x, decoder, is_leaf=is_low_rank)


def parts(config, name: str) -> tuple[str, str] | None:
    """Return the names of a parameter's adapter, or None where it gets none."""
    inputs = tensors(config, name)[0].inputs
    stem, _, letters = name.rpartition("_")
    if not inputs or name.endswith(_NOT_ADAPTED):
        return None
    return f"{stem}_{letters[:inputs]}r", f"{stem}_r{letters[inputs:]}"


def adapter_shapes(config, rank: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of every adapter part, by name."""
    shapes = {}
    for name, shape in base_shapes(config).items():
        if names := parts(config, name):
            inputs = 1 + tensors(config, name)[0].inputs
            shapes[names[0]] = (*shape[:inputs], rank)
            shapes[names[1]] = (shape[0], rank, *shape[inputs:])
    return shapes


def init_adapters(config, rank: int, seed: int, dtype: str = "float32") -> dict[str, jax.Array]:
    """Return adapters that change nothing yet: a random (variance 1 / inputs), b zero.

    The numbers depend on seed, name and shape only, not on the mesh they are placed on.
    """
    made = {}
    for i, (name, shape) in enumerate(adapter_shapes(config, rank).items()):
        if name.endswith("r"):
            key = jax.random.fold_in(jax.random.key(seed), i)
            std = math.prod(shape[1:-1]) ** -0.5
            made[name] = (std * jax.random.normal(key, shape)).astype(dtype)
        else:
            made[name] = jnp.zeros(shape, dtype)
    return made


# --- in a file


@dataclasses.dataclass(frozen=True)
class Adapter:
    """Trained adapters by name, their scale, and the sha256 of the weights that they belong to."""

    params: Mapping[str, jax.Array]
    scale: float
    base: str
    sha256: str  # of the file


def write(path: Path, params: Mapping[str, jax.Array], scale: float, base: str, dtype: str) -> None:
    """Write adapters as one safetensors file, rounded to `dtype`, whole or not at all.

    Its metadata hold scale and base (see `Adapter`).
    """
    tensors = {name: np.asarray(jnp.asarray(x, dtype)) for name, x in sorted(params.items())}
    facts = {"format": "bfm-lora-1", "scale": repr(scale), "base": base}
    scratch = path.with_name(path.name + ".part")
    scratch.write_bytes(save(tensors, facts))
    os.replace(scratch, path)


def base_of(path: Path) -> str:
    """Return the sha256 of the weights that a file of adapters belongs to."""
    with safetensors.safe_open(path, "numpy") as file:
        return file.metadata()["base"]


def read(path: Path, config) -> Adapter:
    """Read what `write` wrote, as fp32. Raises WeightsError (one line) for anything else.

    Every adapter of the model's shape has to be there, all of one rank.
    """
    try:
        held = path.read_bytes()
        with safetensors.safe_open(path, "numpy") as file:
            facts = file.metadata() or {}
            params = {
                name: jnp.asarray(file.get_tensor(name), jnp.float32)
                for name in sorted(file.keys())
            }
    except (OSError, safetensors.SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise WeightsError(f"{path}: cannot be read as adapters ({reason})") from None
    if facts.get("format") != "bfm-lora-1":
        raise WeightsError(f"{path}: holds no adapters (launch/sft.py writes adapter.safetensors)")
    rank = min((x.shape[-1] for name, x in params.items() if name.endswith("r")), default=0)
    wanted = adapter_shapes(config, rank)
    if {name: x.shape for name, x in params.items()} != wanted:
        raise WeightsError(f"{path}: its adapters are not of the shape of this model")
    digest = hashlib.sha256(held).hexdigest()
    return Adapter(params, float(facts["scale"]), facts["base"], digest)
