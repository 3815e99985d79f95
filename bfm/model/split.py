# SPDX-License-Identifier: Apache-2.0
"""Parameters that lie split over devices, read so that rows stay where they are.

They stand where arrays stand, as a `LowRank` does, so that the decoder holds no annotations. Left to
itself the partitioner moves the rows of a batch to the weights and sums whole activations.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

ROWS = PartitionSpec(("data", "fsdp"))  # of a batch
VOCABULARY = ("fsdp", "tensor")  # mesh axes that split the rows of a table


class _Held:
    """What stands where the array that it holds would stand."""

    held: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.held.shape

    @property
    def dtype(self) -> jnp.dtype:
        return self.held.dtype


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Split(_Held):
    """A layer's weight that is gathered over `fsdp` when it is read (ZeRO-3, arXiv 1910.02054).

    Its gradient goes the other way: summed and split in one collective. held: the array, perhaps behind
    a layer axis; spec: its partition without that axis.
    """

    held: Any
    spec: PartitionSpec = dataclasses.field(metadata={"static": True})
    mesh: Mesh = dataclasses.field(metadata={"static": True})

    def __getitem__(self, key: object) -> jax.Array:
        """Return the gathered weight for [...], by which a module reads its parameter."""
        whole = PartitionSpec(*(None if axis == "fsdp" else axis for axis in self.spec))
        return _moved(
            self.held, NamedSharding(self.mesh, self.spec), NamedSharding(self.mesh, whole)
        )

    def reshape(self, *shape: int) -> jax.Array:
        return self[...].reshape(*shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _moved(x: jax.Array, at: NamedSharding, to: NamedSharding) -> jax.Array:
    """Bring an array from one placement to another; its gradient comes back to the first."""
    return jax.lax.with_sharding_constraint(x, to)


_moved.defvjp(
    lambda x, at, to: (_moved(x, at, to), None),
    lambda at, to, kept, dx: (jax.lax.with_sharding_constraint(dx, at),),
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Table(_Held):
    """An embedding or a head [V, D] whose rows are split: no device ever holds it whole."""

    held: Any
    mesh: Mesh = dataclasses.field(metadata={"static": True})

    def __getitem__(self, key: Any) -> Any:
        """Return itself for [...], and rows [B, T, D] for ids [B, T].

        Each device looks up the ids that lie in its part and gives zeros for the others, so that their
        sum is exact. Its gradient stays in its part.
        """
        if key is Ellipsis:
            return self
        w_SVD = self.blocks()
        parts, size, _ = w_SVD.shape
        local_SBT = self.everywhere(key) - (jnp.arange(parts) * size)[:, None, None]

        def look(w_VD: jax.Array, local_BT: jax.Array) -> jax.Array:
            here_BT1 = ((local_BT >= 0) & (local_BT < size))[..., None]
            return jnp.where(here_BT1, w_VD[jnp.clip(local_BT, 0, size - 1)], 0)

        return self.home(jax.vmap(look)(w_SVD, local_SBT).sum(0))

    def blocks(self) -> jax.Array:
        """Return the parts of the devices as an axis of their own: [S, V / S, D]."""
        parts = self.mesh.shape["fsdp"] * self.mesh.shape["tensor"]
        w_SVD = self.held.reshape(parts, -1, self.held.shape[-1])
        return jax.lax.with_sharding_constraint(w_SVD, self._at(VOCABULARY))

    def everywhere(self, x: jax.Array) -> jax.Array:
        """Gather rows, so that every part of the vocabulary sees them."""
        return _moved(x, self._at(*ROWS), self._at("data"))

    def home(self, x: jax.Array) -> jax.Array:
        """Bring rows back to where the batch has them."""
        return _moved(x, self._at("data"), self._at(*ROWS))

    def _at(self, *spec: Any) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*spec))


def row_shards(mesh: Mesh | None) -> int:
    """Return how many parts the rows of a batch are split into."""
    return mesh.shape["data"] * mesh.shape["fsdp"] if mesh else 1


def mesh_of(model: Any) -> Mesh | None:
    """Return the mesh over which a decoder's parameters lie split; None where they do not."""
    table = model.embed_VD[...]
    return table.mesh if isinstance(table, Table) else None
