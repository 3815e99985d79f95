# SPDX-License-Identifier: Apache-2.0
"""Prepared data sets, opened: random access to the examples of a split, under one identity."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bfm.datasets import splits
from bfm.datasets.build import (
    AS_IS,
    NAMES,
    SOURCE,
    SPLIT,
    code_hash,
    prepare,
    source_of,
    tfds_module,
)
from bfm.datasets.common import Reading
from bfm.dialogue import Example, RecordError, parse_example, shown, to_json
from bfm.jsonl import DataError

SMALL = "small"  # the splits that need no preparation


@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """Random access to one split of a prepared data set; records are read when asked for."""

    name: str
    split: str
    folder: Path
    source: dict[str, Any]  # of source.json, less the splits
    sha256: str  # of everything that the examples depend on, the split included
    _indices: list[int]
    _records: Any  # a tfds data source
    skipped: int = 0  # records that a further check refused; source["skipped"] counts raw ones
    skipped_messages: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Example:
        raw = self._records[self._indices[operator.index(index)]]
        return parse_example(json.loads(raw["record"]))

    def __iter__(self) -> Iterator[Example]:
        return (self[i] for i in range(len(self)))

    def checked(
        self, check: Callable[[Example], None], on_bad_record: str = "stop", limit: int = 0
    ) -> Prepared:
        """Return the examples that pass `check` (it raises RecordError), the first `limit` of them.

        Raises DataError at the first that does not, or (on_bad_record="skip") counts it.
        """
        kept, messages, skipped = [], [], 0
        for i, example in zip(self._indices, self, strict=True):
            try:
                check(example)
            except RecordError as error:
                message = f"{self.name} {self.split}: id {shown(example.question.id)}: {error}"
                if on_bad_record == "stop":
                    raise DataError(message) from None
                skipped += 1
                messages.append(message)
            else:
                kept.append(i)
        if not kept:
            raise DataError(f"{self.name} {self.split}: no example is left; {messages[:1]}")
        return dataclasses.replace(
            self, _indices=kept[: limit or None], skipped=skipped,
            skipped_messages=tuple(messages[:5]),
        )  # fmt: skip


def load(
    name: str,
    split: str = "all",
    *,
    data_dir: str | Path = "",
    prepared_dir: str | Path = "",
    reading: Reading = AS_IS,
    download: bool = True,
    on_example: Callable[[int, int], None] = lambda done, total: None,
    on_bytes: Callable[[int], None] = lambda n: None,
) -> Prepared:
    """Open a split of a data set, preparing it first where the raw files are at hand.

    split: one that `splits.make` makes (all, train, dev, test, fold0_train, ..), or FIELD=VALUE or
    FIELD!=VALUE of the examples' meta ("topic!=travel_hotel" leaves a topic of PrefEval out, and the
    preferences it shares with others). prepared_dir: by default the user's cache. Of what is generated,
    "small", "small_train", .. are there at once, with nothing prepared. Raises DataError (one line):
    unknown name or split, raw files missing or broken.
    """
    if split.split("_")[0] == SMALL and hasattr(NAMES.get(name), "small"):
        return _small(name, split, reading)
    where = {"data_dir": data_dir, "prepared_dir": prepared_dir}
    folder = prepare(
        name, **where, reading=reading, download=download, on_example=on_example, on_bytes=on_bytes
    )
    source = json.loads((folder / SOURCE).read_text("utf-8"))
    made = source.pop("splits")
    records = tfds_module().builder_from_directory(str(folder)).as_data_source(SPLIT)
    if split in made:
        indices = made[split]
    elif "=" in split:
        indices = _matching(name, split, records)
    else:
        raise DataError(f"{name}: no split {split!r}; there are {', '.join(made)}")
    return _opened(name, split, folder, source, indices, records)


def _small(name: str, split: str, reading: Reading) -> Prepared:
    module, code = NAMES[name], code_hash()
    examples = module.small(reading)
    made = splits.make([e.meta for e in examples], name, reading.seed)
    made = {SMALL if part == "all" else f"{SMALL}_{part}": rows for part, rows in made.items()}
    if split not in made:
        raise DataError(f"{name}: no split {split!r}; there are {', '.join(made)}")
    records = [{"record": json.dumps(to_json(e), ensure_ascii=False)} for e in examples]
    source = source_of(module, name, reading, {}, {}, len(examples), code)
    return _opened(name, split, Path(), source, made[split], records)


def _opened(
    name: str, split: str, folder: Path, source: dict, indices: list[int], records: Any
) -> Prepared:
    identity = json.dumps([name, split, source, indices], sort_keys=True)
    sha256 = hashlib.sha256(identity.encode()).hexdigest()
    return Prepared(name, split, folder, source, sha256, indices, records)


def _matching(name: str, text: str, records: Any) -> list[int]:
    """Return the indices whose meta has FIELD=VALUE (or has not, with !=); of a list, any item."""
    key, _, value = text.partition("=")
    wanted = not key.endswith("!")
    key = key.removesuffix("!")
    metas = [json.loads(records[i]["record"]).get("meta", {}) for i in range(len(records))]
    if not any(key in meta for meta in metas):
        raise DataError(f"{name}: split {text!r}: no example has a field {key!r} in its meta")
    held = (meta.get(key) for meta in metas)
    lists = (of if isinstance(of, list) else [of] for of in held)
    found = [i for i, of in enumerate(lists) if (value in map(str, of)) == wanted]
    if not found:
        raise DataError(f"{name}: split {text!r}: no example is left")
    return found
