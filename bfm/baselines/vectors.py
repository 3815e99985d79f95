# SPDX-License-Identifier: Apache-2.0
"""Unit vectors of a store in one matrix: exact cosine search, rows that keep their number."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

_PLACES = 6  # equal texts tie exactly, whatever order a matrix product sums in


class VectorError(ValueError):
    """Vectors that do not fit the store; one line."""


class Grown:
    """Rows of fp32 or fp64 numbers that grow by doubling, so that n additions cost O(n)."""

    def __init__(self, rows: np.ndarray):
        self._held = rows
        self.n = len(rows)

    @property
    def rows(self) -> np.ndarray:
        """The rows [n, d], to be read and written in place."""
        return self._held[: self.n]

    def append(self, row: np.ndarray) -> int:
        """Add a row and return its number."""
        if self.n == len(self._held):
            held = np.zeros((max(16, 2 * self.n), row.size), self._held.dtype)
            if self.n:
                held[: self.n] = self.rows
            self._held = held
        self._held[self.n] = row
        self.n += 1
        return self.n - 1


class Index:
    """Unit vectors [n, d]; a removed row is never found again, and its number is not reused."""

    def __init__(self, vectors: np.ndarray | None = None, removed: tuple[int, ...] = ()):
        self._vectors = Grown(np.zeros((0, 0), np.float32) if vectors is None else vectors)
        self.removed = set(removed)

    def __len__(self) -> int:
        return self._vectors.n - len(self.removed)

    def add(self, vector: np.ndarray) -> int:
        """Add a unit vector [d] and return its row."""
        self._check(vector)
        return self._vectors.append(vector)

    def replace(self, row: int, vector: np.ndarray) -> None:
        self._check(vector)
        self._vectors.rows[row] = vector

    def remove(self, row: int) -> None:
        self.removed.add(row)

    def vector(self, row: int) -> np.ndarray:
        return self._vectors.rows[row]

    def nearest(
        self, vector: np.ndarray, k: int, allowed: np.ndarray | None = None
    ) -> list[tuple[int, float]]:
        """Return at most k (row, cosine), best first, ties to the lower row.

        allowed: bool [rows]; only these may be found.
        """
        if not self._vectors.n:
            return []
        self._check(vector)
        scores = np.round(self._vectors.rows @ vector, _PLACES).astype(np.float64)
        if self.removed:
            scores[[*self.removed]] = -np.inf
        if allowed is not None:
            scores[~allowed] = -np.inf
        order = np.argsort(-scores, kind="stable")[:k]
        return [(int(row), float(scores[row])) for row in order if scores[row] > -np.inf]

    def _check(self, vector: np.ndarray) -> None:
        held = self._vectors.rows.shape[1]
        if self._vectors.n and vector.shape != (held,):
            raise VectorError(
                f"the store holds vectors of {held} numbers, the embedder gives {vector.shape[-1]}; "
                "use the embedder that the store was built with"
            )

    def to_json(self) -> dict[str, Any]:
        return {"vectors": pack(self._vectors.rows), "removed": sorted(self.removed)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Index:
        return cls(unpack(data["vectors"]), tuple(data["removed"]))


def pack(array: np.ndarray) -> dict[str, Any]:
    """Return an array as JSON: shape, type and base64 of its little-endian bytes."""
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    data = base64.b64encode(array.tobytes()).decode("ascii")
    return {"shape": list(array.shape), "dtype": array.dtype.name, "data": data}


def unpack(data: dict[str, Any]) -> np.ndarray:
    """Return the array of `pack`; raises VectorError where the bytes do not fill the shape."""
    try:
        dtype = {"float32": "<f4", "float64": "<f8"}[data["dtype"]]
        flat = np.frombuffer(base64.b64decode(data["data"], validate=True), dtype)
        return flat.reshape(data["shape"]).astype(data["dtype"])
    except (ValueError, KeyError, TypeError) as error:
        raise VectorError(f"vectors: not an array of a store ({error})") from None
