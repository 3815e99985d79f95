# SPDX-License-Identifier: Apache-2.0
"""MemBench: one multiple-choice question to each trajectory, in the official or the prepared layout.

Official: `{type: {scenario: [{tid, message_list, QA}]}}`. Prepared: source and target lines that
share an `id`. Both give the same examples with the same ids.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from bfm.datasets.common import File, Missing, Reading, field, read_json, read_jsonl
from bfm.datasets.membench_record import Trajectory, example_of, pairs_of, sessions_of
from bfm.dialogue import Example, shown
from bfm.jsonl import DataError

NAMES = ("membench_high", "membench_low")
_URL = "https://github.com/import-myself/Membench (its README leads to the folder data2test/0-10k)"
FILES = {  # sizes are estimates from the published numbers of steps
    "membench_high": (
        File("membench/FirstAgentDataHighLevel_multiple_0.json", _URL, "about 7 MB", direct=False),
    ),
    "membench_low": (
        File("membench/FirstAgentDataLowLevel_multiple_0.json", _URL, "about 50 MB", direct=False),
    ),
}
# name -> (the one question type in it, its prepared files, its entry in split_per20.json)
_SETS = {
    "membench_high": ("highlevel", "high", "membench-high"),
    "membench_low": ("simple", "low", "membench-low"),
}
SPLIT_FILE = "membench/split_per20.json"


def find(name: str, data_dir: Path, reading: Reading) -> list[Path]:
    """Return the raw files that are read, of whichever layout is there. Raises Missing."""
    official, source, target = _paths(name, data_dir)
    split = Path(data_dir) / SPLIT_FILE
    beside = [split] if split.exists() else []
    if official.exists():
        return [official, *beside]
    if source.exists() and target.exists():
        return [source, target, *beside]
    file = FILES[name][0]
    present, absent = (source, target) if source.exists() else (target, source)
    half = f" ({present.name} is there, but not {absent.name})" if present.exists() else ""
    raise Missing(
        f"{official}: is missing{half}; put it there ({file.size}) from {file.url}, "
        f"or the prepared files {source.name} and {target.name}"
    )


def read(
    name: str, data_dir: Path, reading: Reading, skipped: collections.Counter[str]
) -> Iterator[Example]:
    """Yield the examples of a MemBench set in file order, from whichever layout is there.

    Raises DataError (one line: file, record, field, reason).
    """
    kind = _SETS[name][0]
    first, second, *_ = [*find(name, data_dir, reading), None]
    if first == _paths(name, data_dir)[0]:
        return read_official(first, (kind,), reading, skipped)
    return _read_prepared(first, second, kind, reading)


def read_official(
    path: Path, types: Collection[str], reading: Reading, skipped: collections.Counter[str]
) -> Iterator[Example]:
    """Yield the questions of some types of any official file, first person or observation.

    The 100k files are read too, but some of their `target_step_id` are wrong at the source (moved
    by three steps for each block of noise, however long the block).

    Raises DataError (one line: file, record, field, reason).
    """
    seen: dict[str, Any] = {}
    for index, (where, kind, scenario, item) in enumerate(_official_items(path, types)):
        tid = field(item, "tid", (int, str), where)
        qa = field(item, "QA", dict, where)
        sessions = sessions_of(field(item, "message_list", list, where), where)
        trajectory = Trajectory(kind, scenario, tid, index, sessions, qa, where)
        if trajectory.key in seen:
            if seen[trajectory.key] != item:
                raise DataError(f"{where}: tid: {tid!r} is that of another trajectory")
            skipped["duplicate trajectory"] += 1
            continue
        seen[trajectory.key] = item
        yield example_of(trajectory, reading)


def named_split(name: str, data_dir: Path) -> frozenset[str]:
    """Return the question ids that split_per20.json, where it is there, puts into the train part.

    It lists running numbers, resolved here through the data files. Raises DataError.
    """
    kind, _, entry = _SETS[name]
    numbers = split_numbers(entry, data_dir)
    official, _, target = _paths(name, data_dir)
    rows: Iterable[tuple[int, str, Any]] = ()
    if numbers and official.exists():
        items = enumerate(_official_items(official, (kind,)))
        rows = ((i, scenario, field(item, "tid", (int, str), where))
                for i, (where, _, scenario, item) in items)  # fmt: skip
    elif numbers:
        targets = _targets(target, kind).items()
        rows = ((i, row["category"], row["tid"]) for i, (_, row) in targets)
    return frozenset(f"{kind}/{scenario}/{tid}" for i, scenario, tid in rows if i in numbers)


def split_numbers(entry: str, data_dir: Path) -> frozenset[int]:
    """Return the running numbers of a data set that split_per20.json trains on, none without it.

    Raises DataError.
    """
    path = Path(data_dir) / SPLIT_FILE
    if not path.exists():
        return frozenset()
    for i, row in enumerate(field(read_json(path), "datasets", list, str(path))):
        if field(row, "name", str, f"{path}: datasets[{i}]") == entry:
            numbers = field(row, "train_source_ids", list, f"{path}: {entry}")
            if not all(type(number) is int for number in numbers):
                raise DataError(f"{path}: {entry}: train_source_ids: must hold integers only")
            return frozenset(numbers)
    return frozenset()


def _paths(name: str, data_dir: Path) -> tuple[Path, Path, Path]:
    """The official file, the prepared source and the prepared target."""
    official = Path(data_dir) / FILES[name][0].path
    level = _SETS[name][1]
    return official, *(official.parent / f"{level}_{part}.jsonl" for part in ("source", "target"))


def _official_items(path: Path, types: Collection[str]) -> Iterator[tuple[str, str, str, Any]]:
    """(where, type, scenario, trajectory) in file order."""
    data = read_json(path)
    for kind in types:
        for scenario, items in field(data, kind, dict, str(path)).items():
            if not isinstance(items, list):
                raise DataError(f"{path}: {kind}: {shown(scenario)}: is not a list")
            for i, item in enumerate(items):
                yield f"{path}: {kind}: {shown(scenario)}[{i}]", kind, scenario, item


def _read_prepared(source: Path, target: Path, kind: str, reading: Reading) -> Iterator[Example]:
    targets = _targets(target, kind)
    joined = set()
    for line, row in read_jsonl(source):
        where = f"{source}: line {line}"
        metadata = field(row, "metadata", dict, where)
        if field(metadata, "data_level", str, where) != kind:
            continue
        number = field(row, "id", int, where)
        if number in joined:
            raise DataError(f"{where}: id: {number} is already that of another line")
        if number not in targets:
            raise DataError(f"{where}: id: {number} has no line in {target.name}")
        joined.add(number)
        _, qa = targets[number]
        for key in ("category", "tid"):  # the join is by id; these prove that it is right
            if metadata.get(key) != qa[key]:
                raise DataError(f"{where}: {key}: differs from that of id {number} in {target}")
        sessions = [pairs_of(field(row, "messages", list, where), where)]
        trajectory = Trajectory(kind, qa["category"], qa["tid"], number, sessions, qa, where)
        yield example_of(trajectory, reading)
    if lonely := sorted(targets.keys() - joined):
        raise DataError(f"{target}: id {lonely[0]}: has no line in {source.name}")


def _targets(path: Path, kind: str) -> dict[int, tuple[str, dict[str, Any]]]:
    """id -> (where, target line)."""
    rows: dict[int, tuple[str, dict[str, Any]]] = {}
    for line, row in read_jsonl(path):
        where = f"{path}: line {line}"
        if field(row, "data_level", str, where) != kind:
            continue
        field(row, "category", str, where)
        field(row, "tid", (int, str), where)
        number = field(row, "id", int, where)
        if number in rows:
            raise DataError(f"{where}: id: {number} is already that of another line")
        rows[number] = where, row
    return rows
