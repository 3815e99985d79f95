# SPDX-License-Identifier: Apache-2.0
"""The GGUF container: metadata and tensors of a .gguf file, version 2 or 3, little-endian.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` package dequantizes;
its own reader is not used, as it takes seconds for a vocabulary that is read here in 0.2 s.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_TEXT, _ARRAY = 8, 9
_COUNT = struct.Struct("<Q")
_MOST = 2**24  # of anything counted; the largest vocabularies have 2**19 merges
_MOST_DIMS = 4  # GGML_MAX_DIMS


class GgufError(ValueError):
    """A GGUF file that cannot be used; one line that names the path and the fault."""


@dataclasses.dataclass(frozen=True, eq=False)
class Gguf:
    """An open GGUF file, checked to be complete and readable. Made by `open`.

    Attributes:
      path: the file.
      metadata: its key-values; an array is a list.
      shapes: the shape of every tensor in numpy's order (the last axis is contiguous).
    """

    path: Path
    metadata: dict[str, Any] = dataclasses.field(repr=False)
    shapes: dict[str, tuple[int, ...]] = dataclasses.field(repr=False)
    _stored: dict[str, tuple[int, np.ndarray]] = dataclasses.field(repr=False)  # type, rows' bytes

    def read(self, name: str) -> np.ndarray:
        """Return a tensor in fp32; one that is stored in fp32 is a read-only view of the file."""
        import gguf

        if name not in self._stored:
            raise GgufError(f"{self.path}: no tensor {name!r}")
        kind, rows = self._stored[name]
        values = gguf.dequantize(rows, gguf.GGMLQuantizationType(kind))
        return values.reshape(self.shapes[name])


def open(path: str | Path) -> Gguf:
    """Open a GGUF file; read its metadata and the places of its tensors, but no values.

    Raises:
      GgufError: there is no such file, it is not a complete GGUF file of a version known here, or
        the type of a tensor is not one that can be read.
    """
    path = Path(path)
    if not path.is_file():
        raise GgufError(f"{path}: {'a folder, not a .gguf' if path.is_dir() else 'no such'} file")
    try:
        if not path.stat().st_size:
            raise ValueError("it is empty")
        data = np.asarray(np.memmap(path, np.uint8, "r"))
        metadata, infos, end = _header(memoryview(data))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment {alignment!r} is not a power of two")
        start = -(-end // alignment) * alignment
        stored = {name: (info.kind, _rows(data, start, info)) for name, info in infos.items()}
    except NotImplementedError as error:
        raise GgufError(f"{path}: {error}; get the model in another quantization") from None
    except struct.error:
        reason = f"its header does not fit into its {len(data)} bytes"
    except OSError as error:
        raise GgufError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
    else:
        return Gguf(path, metadata, {name: info.shape for name, info in infos.items()}, stored)
    raise GgufError(f"{path}: not a complete GGUF file ({reason}); get the file again")


class _Info(NamedTuple):
    name: str
    shape: tuple[int, ...]
    kind: int  # the number of a gguf.GGMLQuantizationType
    offset: int  # in bytes, from the start of the data


def _header(data: memoryview) -> tuple[dict[str, Any], dict[str, _Info], int]:
    """Return the key-values, where the tensors are, and the length of the header in bytes.

    Raises ValueError, struct.error or RecursionError where the bytes are no such header.
    """
    at = 0

    def take(form: str, count: int = 1) -> tuple:
        nonlocal at
        form = f"<{count}{form}"
        values = struct.unpack_from(form, data, at)
        at += struct.calcsize(form)
        return values

    def length() -> int:
        nonlocal at
        (count,) = _COUNT.unpack_from(data, at)
        if count > _MOST:
            raise ValueError(f"a count of {count} at byte {at}")
        at += _COUNT.size
        return count

    def text() -> str:
        nonlocal at
        size = length()
        start, at = at, at + size
        if at > len(data):
            raise struct.error
        return str(data[start:at], "utf-8")

    def value(kind: int) -> Any:
        if kind == _TEXT:
            return text()
        if kind == _ARRAY:
            (kind,), count = take("I"), length()
            if kind in _SCALARS:
                return list(take(_SCALARS[kind], count))
            return [value(kind) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"a value of type {kind} at byte {at}")
        return take(_SCALARS[kind])[0]

    def info() -> _Info:
        name, (dims,) = text(), take("I")
        if dims > _MOST_DIMS:
            raise ValueError(f"{name}: {dims} dimensions")
        shape = take("Q", dims)[::-1]
        return _Info(name, shape, *take("I"), *take("Q"))

    (magic,) = take("s", 4)
    if magic != b"GGUF":
        raise ValueError(f"not GGUF: it starts with {magic!r}")
    (version,) = take("I")
    if version not in (2, 3):
        big = version in (2 << 24, 3 << 24)
        raise ValueError("it is big-endian" if big else f"version {version}, not 2 or 3")
    tensors, keys = length(), length()
    pairs = [(text(), value(*take("I"))) for _ in range(keys)]
    infos = [info() for _ in range(tensors)]
    metadata, places = dict(pairs), {info.name: info for info in infos}
    if len(metadata) < keys or len(places) < tensors:
        raise ValueError("a name stands in it twice")
    return metadata, places, at


def _rows(data: np.ndarray, start: int, info: _Info) -> np.ndarray:
    """Return the bytes of a tensor, one row for each row of it.

    Raises ValueError where they are not in the file, NotImplementedError for an unreadable type.
    """
    size, width = _block(info.kind)
    *outer, row = info.shape or (1,)
    if not math.prod(info.shape) or row % size:
        raise ValueError(f"{info.name}: shape {info.shape} in blocks of {size}")
    row = row // size * width
    begin = start + info.offset
    end = begin + math.prod(outer) * row
    if end > len(data):
        raise ValueError(f"{info.name}: ends at byte {end} of {len(data)}")
    return data[begin:end].reshape(*outer, row)


@functools.cache
def _block(kind: int) -> tuple[int, int]:
    """Return how many elements a block of this type holds, and in how many bytes."""
    import gguf

    try:
        known = gguf.GGMLQuantizationType(kind)
        size, width = gguf.GGML_QUANT_SIZES[known]
        gguf.dequantize(np.zeros(width, np.uint8), known)  # not every known type can be read
    except (ValueError, KeyError):
        raise NotImplementedError(f"tensor type {kind} is not known") from None
    except NotImplementedError:
        raise NotImplementedError(f"tensor type {known.name} cannot be read") from None
    return size, width
