# SPDX-License-Identifier: Apache-2.0
"""Where arrays live: one mesh of (data, fsdp, tensor), one table from an axis letter to a mesh axis.

Parameters are named by their shapes (`full.q_DNh`: layers, D, N, h), so the letters of a name are its
partition. Rows of a batch are split over data and fsdp; models run under `jax.jit` with these
shardings and hold no annotations of their own: `spread` gives them parameters that know their place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bfm.model.split import ROWS, VOCABULARY, Split, Table, row_shards

AXES = ("data", "fsdp", "tensor")
# Axis letter -> mesh axis; letters that are missing here (h, W, d, v, r) are never split.
TABLE: Mapping[str, str] = {
    "D": "fsdp",  # model width: parameters are gathered for use (ZeRO-3)
    "N": "tensor",  # query heads
    "K": "tensor",  # key heads
    "F": "tensor",  # mlp width
    "H": "tensor",  # value heads of a linear layer
    "C": "tensor",  # its convolution channels
}


class ShardingError(ValueError):
    """A mesh that does not fit devices, model or batch; one line that names what does not divide."""


def make_mesh(data: int, fsdp: int, tensor: int, devices: list | None = None) -> Mesh:
    """Return the mesh over all devices; data 0 takes what the others leave. Raises ShardingError."""
    devices = jax.devices() if devices is None else devices
    if data == 0:
        data, rest = divmod(len(devices), fsdp * tensor)
        if rest:
            raise ShardingError(
                f"mesh: fsdp x tensor = {fsdp * tensor} does not divide {len(devices)} devices"
            )
    if data * fsdp * tensor != len(devices):
        raise ShardingError(
            f"mesh: {data} x {fsdp} x {tensor} = {data * fsdp * tensor}, but there are "
            f"{len(devices)} devices"
        )
    return Mesh(np.asarray(devices).reshape(data, fsdp, tensor), AXES)


def local_mesh(data: int, fsdp: int, tensor: int) -> Mesh:
    """Return the mesh over this process's own devices, as `make_mesh` does.

    With data 0 a CPU holds one copy of the model: its devices share cores. Raises ShardingError.
    """
    devices = jax.local_devices()
    if data == 0 and devices[0].platform == "cpu":
        data = 1
        devices = devices[: fsdp * tensor]
    return make_mesh(data, fsdp, tensor, devices)


def spec(name: str, rank: int) -> PartitionSpec:
    """Return the partition of a parameter by its name and rank (a layer axis stands in front).

    >>> tuple(spec("full.q_DNh", 4))
    (None, 'fsdp', 'tensor', None)
    """
    letters = name.rpartition("_")[2]
    if letters == "VD":  # embedding and head: by the vocabulary, whole rows
        return PartitionSpec(VOCABULARY)
    if len(letters) == 1:  # a norm or a bias: too small to be worth a gather
        return PartitionSpec()
    stacked = rank - len(letters)
    return PartitionSpec(*(None,) * stacked, *(TABLE.get(letter) for letter in letters))


def shardings(shapes: Mapping[str, tuple[int, ...]], mesh: Mesh) -> dict[str, NamedSharding]:
    """Return the sharding of every parameter. Raises ShardingError naming all that do not divide."""
    made, faults = {}, []
    for name, shape in shapes.items():
        made[name] = NamedSharding(mesh, spec(name, len(shape)))
        for size, axis in zip(shape, made[name].spec, strict=False):
            axes = (axis,) if isinstance(axis, str) else axis or ()
            parts = math.prod(mesh.shape[a] for a in axes)
            if size % parts:
                faults.append(f"{name}: {size} is not a multiple of {' x '.join(axes)}={parts}")
    if faults:
        raise ShardingError("mesh: " + "; ".join(faults))
    return made


def like(tree, params: Mapping[str, NamedSharding], mesh: Mesh):
    """Return shardings for a tree whose leaves stand under parameters' names (an optimizer's state).

    A leaf below no parameter's name (a step count) is on every device.
    """

    def place(path, leaf):
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        return next((params[n] for n in names if n in params), NamedSharding(mesh, PartitionSpec()))

    return jax.tree_util.tree_map_with_path(place, tree)


def spread(params: Mapping[str, jax.Array], mesh: Mesh) -> dict[str, Split | Table | jax.Array]:
    """Return parameters (inside a jitted function) that are read where the rows are.

    On one device they are what they were.
    """
    if mesh.size == 1:
        return dict(params)

    def place(name: str, x: jax.Array) -> Split | Table | jax.Array:
        letters = name.rpartition("_")[2]
        if letters == "VD":
            return Table(x, mesh)
        partition = spec(name, len(letters))
        return Split(x, partition, mesh) if "fsdp" in partition else x

    return {name: place(name, x) for name, x in params.items()}


def place_batch(batch, mesh: Mesh):
    """Put a tree of numpy arrays [rows, ..], equal in every process, on the mesh."""
    sharding = NamedSharding(mesh, ROWS)
    return jax.tree.map(
        lambda x: jax.make_array_from_callback(x.shape, sharding, lambda index: x[index]), batch
    )


def place_rows(x: np.ndarray, mesh: Mesh | None):
    """Put a host array [rows, ..] on a mesh; one that does not divide (a single row) is everywhere."""
    if mesh is None or not np.ndim(x):
        return x
    return jax.device_put(
        x, NamedSharding(mesh, PartitionSpec() if len(x) % row_shards(mesh) else ROWS)
    )
