# SPDX-License-Identifier: Apache-2.0
"""Compile the real steps for TPU slices that are not there, and say what they need and cost.

libtpu compiles on any x86 Linux host for a topology that it is told; no TPU and no weight is needed.
Everything is per chip; flops and bytes are those of one step.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from bfm import arch, hlo, lm, sharding, weights
from bfm.model import config_hf
from bfm.model.config import ModelConfig
from bfm.settings import Settings, SettingsError
from bfm.steps import Part, on_chip, step_of

GIB = 2**30


class Chip(NamedTuple):
    """A TPU generation: bf16 FLOP/s, bytes/s of HBM and of all links together, usable bytes of HBM."""

    flops: float
    memory: float
    links: float
    usable: float


# Rates: Google Cloud's pages "TPU v5e", "TPU v5p", "TPU v6e". Usable memory: what libtpu 0.0.42 says
# that it has when a program asks for more (nominally 16, 95 and 32 GB).
CHIPS: Mapping[str, Chip] = {
    "v5e": Chip(197e12, 819e9, 200e9, 15.75 * GIB),
    "v5p": Chip(459e12, 2765e9, 600e9, 95.74 * GIB),
    "v6e": Chip(918e12, 1640e9, 448e9, 31.25 * GIB),
}
# Hub names whose shape is known here, so that nothing is fetched to compile them.
PUBLISHED: Mapping[str, str] = {
    "meta-llama/Llama-3.1-8B-Instruct": "llama3.1-8b",
    "Qwen/Qwen3.5-9B": "qwen3.5-9b",
}


class Unavailable(SettingsError):
    """A topology that cannot be compiled for here; one line that says what is missing."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one program takes on a chip.

    Of one that the compiler refuses bytes and collectives are None, and the peak is what it asked for
    with all arguments: at most that.
    """

    name: str
    times: int
    peak: float
    flops: float
    bytes: int | None
    collectives: list[hlo.Collective] | None
    seconds: float  # to compile


@dataclasses.dataclass(frozen=True)
class Report:
    """A step on a topology."""

    job: str
    topology: str
    mesh: dict[str, int]
    chip: Chip
    tokens: int
    parts: list[Cost]

    @property
    def peak(self) -> float:
        """HBM bytes a chip: of the program that needs most, with what lies there beside it."""
        return max(part.peak for part in self.parts)

    @property
    def fits(self) -> bool:
        return all(p.bytes is not None for p in self.parts) and self.peak <= self.chip.usable

    @property
    def flops(self) -> float:
        return sum(part.times * part.flops for part in self.parts)

    @property
    def bytes(self) -> int | None:
        if any(part.bytes is None for part in self.parts):
            return None
        return sum(part.times * part.bytes for part in self.parts)

    @property
    def moved(self) -> int:
        """Bytes through a chip's links in a step."""
        return sum(p.times * sum(c.moved for c in p.collectives or ()) for p in self.parts)

    @property
    def times(self) -> dict[str, float]:
        """Seconds that a step takes at least, by what bounds it (doi 10.1145/1498765.1498785)."""
        chip = self.chip
        return {
            "products": self.flops / chip.flops,
            "memory": (self.bytes or 0) / chip.memory,
            "links": self.moved / chip.links,
        }

    def line(self) -> dict[str, Any]:
        """Return what stays of a report as one JSON object."""
        return {
            "job": self.job, "topology": self.topology, "chips": math.prod(self.mesh.values()),
            "hbm_peak_gib": round(self.peak / GIB, 3),
            "hbm_limit_gib": round(self.chip.usable / GIB, 3), "fits": self.fits,
            "flops": int(self.flops), "bytes": self.bytes, "tokens_per_step": self.tokens,
        }  # fmt: skip


# --- topologies --------------------------------------------------------------------------------


def parse_topologies(text: str) -> list[str]:
    """Read comma text such as "v5e:4x4,v5p:2x2x1". Raises SettingsError (one line)."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        generation, _, layout = name.partition(":")
        if generation not in CHIPS or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", layout):
            raise SettingsError(
                f"topology: {name!r} is not a slice such as v5e:4x4 (of {', '.join(CHIPS)})"
            )
    if len(set(names)) < len(names):
        raise SettingsError(f"topology: {text!r} names one twice")
    return names


def devices(topology: str) -> list:
    """Return the devices of a topology. Raises Unavailable without libtpu, or for no such slice."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # ask no cloud who this host is
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no chip is held, so none to guard
    from jax.experimental import topologies

    try:
        found = topologies.get_topology_desc(topology_name=topology, platform="tpu").devices
    except Exception as error:  # libtpu and jax raise several kinds
        reason = " ".join(str(error).split())
        if isinstance(error, ImportError) or not importlib.util.find_spec("libtpu"):
            reason = "libtpu is not installed (pip install 'bfm[tpu]', or jax[tpu])"
        raise Unavailable(f"topology: {topology}: {reason[:300]}") from None
    return list(found)


def mesh_of(settings: Settings, found: list) -> Mesh:
    """Return the mesh of a configuration on a slice; fsdp gives way where there are fewer chips."""
    tensor = settings.mesh.tensor
    fsdp = math.gcd(settings.mesh.fsdp, max(1, len(found) // tensor))
    return sharding.make_mesh(settings.mesh.data, fsdp, tensor, found)


def config_of(settings: Settings) -> ModelConfig:
    """Return the model's config: of a known shape, or from its files; weights are never read."""
    path = settings.model.path
    name = settings.model.arch if not path else PUBLISHED.get(path, "")
    if name and not Path(path or ".", "config.json").exists():
        config = config_hf.from_hf(arch.ARCHITECTURES[name])
    else:
        config = weights.open_source(lm.find(path)).config
    return dataclasses.replace(config, attention=settings.model.attention)


# --- measuring ---------------------------------------------------------------------------------


def report(settings: Settings, topology: str, tell: Callable[[str], None]) -> Report:
    """Compile the step of `settings.job` for one topology. Raises Unavailable, ShardingError."""
    config = config_of(settings)
    mesh = mesh_of(settings, devices(topology))
    parts, tokens = step_of(settings, config, mesh)
    costs = []
    for part in parts:
        tell(f"{topology}: compiling {part.name} ...")
        costs.append(measure(part, mesh.size))
    chip = CHIPS[topology.partition(":")[0]]
    return Report(settings.job, topology, dict(mesh.shape), chip, tokens, costs)


def measure(part: Part, chips: int) -> Cost:
    """Compile one program and read its memory, work and traffic."""
    started = time.perf_counter()
    traced = part.function.trace(*part.args)
    flops = products(traced.jaxpr.jaxpr) / chips
    try:
        compiled = traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if not (needed := over(str(error))):
            raise
        peak = needed + on_chip(part.args) + part.held
        return Cost(part.name, part.times, peak, flops, None, None, time.perf_counter() - started)
    m = compiled.memory_analysis()
    peak = m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes
    peak += part.held - m.alias_size_in_bytes
    program = hlo.Program.of(compiled.as_text())
    return Cost(
        part.name, part.times, peak, flops, program.traffic(), program.collectives(),
        time.perf_counter() - started,
    )  # fmt: skip


def over(message: str) -> float:
    """Return the bytes of temporaries that a refused program asks for; 0 where it is another fault.

    >>> over("RESOURCE_EXHAUSTED: .. HLO temporaries (21.50G) exceeds available HBM (15.75G).") / 2**30
    21.5
    """
    found = re.search(r"RESOURCE_EXHAUSTED.*?\b([\d.]+)([GMK])\)? (?:of|exceeds)", message, re.S)
    return float(found[1]) * {"G": GIB, "M": 2**20, "K": 2**10}[found[2]] if found else 0.0


def products(jaxpr: Any) -> float:
    """Return the FLOPs of the matrix products of a traced function, over all chips, loops run."""
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (inner, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            total += (
                2 * math.prod(equation.outvars[0].aval.shape) * math.prod(shape[i] for i in inner)
            )
        total += _runs(equation) * sum(products(inner) for inner in _inside(equation))
    return total


def _runs(equation: Any) -> int:
    """Return how often what stands inside an equation runs, over all chips."""
    match equation.primitive.name:
        case "scan":
            return equation.params["length"]
        case "shard_map":
            return equation.params["mesh"].size
        case "pallas_call":
            return math.prod(equation.params["grid_mapping"].grid)
    return 1


def _inside(equation: Any) -> Iterator[Any]:
    for value in equation.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(item, "eqns"):
                yield item
            elif hasattr(item, "jaxpr"):
                yield item.jaxpr
