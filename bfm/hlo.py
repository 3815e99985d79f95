# SPDX-License-Identifier: Apache-2.0
"""What a compiled program does on one chip, read from its HLO text: collectives, and HBM traffic.

XLA's own cost analysis counts the body of a loop once; here it counts as often as it runs.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4,
          "f32": 4, "s64": 8, "u64": 8, "f64": 8}  # fmt: skip
_SHAPE = re.compile(r"\b(" + "|".join(_BYTES) + r")\[([\d,]*)\](\{[^}]*\})?")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_OP = re.compile(r"^\s+(ROOT )?%?([\w.-]+) = ")
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
# Ops that move nothing of their own: names, or others' work that is counted where it is done.
_FREE = frozenset({
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call",
    "after-all", "partition-id", "replica-id", "iota", "broadcast", "custom-call", "copy-done",
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Op:
    """One instruction: `shapes` are (dtype, dims, in HBM) of what it makes, `text` all behind them."""

    name: str
    kind: str
    shapes: tuple[tuple[str, tuple[int, ...], bool], ...]
    operands: tuple[str, ...]
    text: str
    root: bool

    @property
    def size(self) -> int:
        """Bytes that it makes in HBM."""
        return sum(_size(dtype, dims) for dtype, dims, hbm in self.shapes if hbm)


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective of one shape: how often a run does it, and the bytes of its largest array."""

    kind: str
    dtype: str
    dims: tuple[int, ...]
    times: int

    @property
    def size(self) -> int:
        return _size(self.dtype, self.dims)

    @property
    def moved(self) -> int:
        """Bytes through a chip's links in a run; an all-reduce sends what it has twice."""
        return self.times * self.size * (2 if self.kind == "all-reduce" else 1)


@dataclasses.dataclass(frozen=True)
class Program:
    """The computations of a module by name, and how often a run of it goes through each."""

    computations: Mapping[str, tuple[Op, ...]]
    times: Mapping[str, int]

    @classmethod
    def of(cls, text: str) -> Program:
        """Read the text of a compiled module (`compiled.as_text()`)."""
        found, entry, name = {}, "", ""
        for line in text.splitlines():
            if header := _HEADER.match(line):
                name = header[2]
                found[name] = []
                entry = name if header[1] else entry
            elif name and (made := _op(line)):
                found[name].append(made)
        times: collections.Counter[str] = collections.Counter()

        def walk(name: str, n: int) -> None:
            times[name] += n
            for op in found.get(name, ()):
                for called, often in _calls(op, found):
                    walk(called, n * often)

        walk(entry, 1)
        return cls({k: tuple(v) for k, v in found.items()}, times)

    def collectives(self) -> list[Collective]:
        """Return the collectives, the most bytes first.

        One that is overlapped with products or with a loop stands in several pieces (their channel
        tells), some of them within the loop: it begins as often as the rarest of them runs.
        """
        seen: dict[tuple, int] = {}
        for name, n in self.times.items():
            for op in self.computations.get(name, ()):
                kind = op.kind.removesuffix("-start")
                if kind in COLLECTIVES:
                    dtype, dims, _ = max(op.shapes, key=lambda s: _size(s[0], s[1]))
                    channel = re.search(r"channel_id=(\d+)", op.text)
                    key = channel[1] if channel else op.name
                    seen[key, kind, dtype, dims] = min(seen.get((key, kind, dtype, dims), n), n)
        total: collections.Counter[tuple] = collections.Counter()
        for (_, *what), n in seen.items():
            total[tuple(what)] += n
        made = (Collective(*what, n) for what, n in total.items())
        return sorted(made, key=lambda c: (-c.moved, c.kind, c.dims))

    def traffic(self) -> int:
        """Return the bytes that a run reads from and writes to HBM: operands and results of each op.

        A fusion that takes a slice of an operand reads the slice, one that updates a slice in place
        writes it; arrays in on-chip memory count nothing. An estimate.
        """
        fused = {called for ops in self.computations.values() for op in ops if op.kind == "fusion"
                 for called in _called(op, "calls")}  # fmt: skip
        return sum(
            n * sum(self._moved(op, name) for op in self.computations.get(name, ()))
            for name, n in self.times.items()
            if name not in fused
        )  # fmt: skip

    def _moved(self, op: Op, where: str) -> int:
        kernel = op.kind == "custom-call" and "tpu_custom_call" in op.text
        if not kernel and (op.kind in _FREE or op.kind.endswith(("-start", "-done", "-update"))):
            return 0
        held = {o.name: o for o in self.computations[where]}
        operands = [held[o].size if o in held and o in op.operands else 0 for o in op.operands]
        if op.kind == "dynamic-slice":
            return 2 * op.size
        if op.kind == "dynamic-update-slice":
            return 2 * operands[1]
        if op.kind == "fusion":
            inside = self.computations.get(next(iter(_called(op, "calls")), ""), ())
            reads, writes = _sliced(inside)
            operands = [min(size, reads.get(i, size)) for i, size in enumerate(operands)]
            return sum(operands) + (min(op.size, writes) if writes else op.size)
        return sum(operands) + op.size


def _op(line: str) -> Op | None:
    start = _OP.match(line)
    if not start:
        return None
    rest, depth = line[start.end() :], 0
    end = len(rest)
    for i, char in enumerate(rest):  # a type may hold spaces within brackets
        depth += (char in "([{") - (char in ")]}")
        if char == " " and not depth:
            end = i
            break
    kind, _, behind = rest[end + 1 :].partition("(")
    shapes = tuple(
        (dtype, tuple(int(d) for d in dims.split(",") if d), "S(" not in (layout or ""))
        for dtype, dims, layout in _SHAPE.findall(rest[:end])
    )
    operands = tuple(re.findall(r"%([\w.-]+)", behind.split(")", 1)[0]))
    return Op(start[2], kind, shapes, operands, behind, bool(start[1]))


def _called(op: Op, *names: str) -> Iterator[str]:
    for name in names:
        if found := re.search(name + r"=%?([\w.-]+)", op.text):
            yield found[1]


def _calls(op: Op, computations: Mapping[str, list[Op]]) -> Iterator[tuple[str, int]]:
    """Give the computations that an op goes through and how often."""
    if op.kind == "while":
        body, condition = (next(_called(op, name)) for name in ("body", "condition"))
        yield body, _trips(op, computations[condition])
    elif op.kind in ("fusion", "call", "async-start"):
        for called in _called(op, "calls", "to_apply"):
            yield called, 1
    elif op.kind == "conditional":
        found = re.search(r"branch_computations=\{([^}]*)\}", op.text)
        names = re.findall(r"%([\w.-]+)", found[1]) if found else list(
            _called(op, "true_computation", "false_computation"))  # fmt: skip
        for called in names:
            yield called, 1


def _trips(op: Op, condition: list[Op]) -> int:
    """Return how often a loop runs: as XLA says, or the constant its counter is compared with."""
    if said := re.search(r"known_trip_count\D*(\d+)", op.text):
        return int(said[1])
    made = {o.name: o for o in condition}
    root = next(o for o in condition if o.root)
    for operand in root.operands:
        if operand in made and made[operand].kind == "constant":
            return int(made[operand].text.split(")")[0])
    return 1  # as long as the data asks: once at least


def _sliced(inside: tuple[Op, ...]) -> tuple[dict[int, int], int]:
    """Return the bytes read of operands that a fusion only slices, and those that updates write."""
    reads, writes, by_name = {}, 0, {op.name: op for op in inside}
    for op in inside:
        if op.kind == "parameter":
            users = [o for o in inside if op.name in o.operands]
            index = int(op.text.split(")")[0])
            if users and all(o.kind == "dynamic-slice" for o in users):
                reads[index] = sum(_whole(o) for o in users)
            elif users and all(
                o.kind == "dynamic-update-slice" and o.operands[0] == op.name for o in users
            ):
                reads[index] = 0
        if op.kind == "dynamic-update-slice" and op.operands[1] in by_name:
            writes += _whole(by_name[op.operands[1]])
    return reads, writes


def _whole(op: Op) -> int:
    return sum(_size(dtype, dims) for dtype, dims, _ in op.shapes)


def _size(dtype: str, dims: tuple[int, ...]) -> int:
    return _BYTES[dtype] * math.prod(dims)
