# SPDX-License-Identifier: Apache-2.0
"""Prepared data sets: what a reader yields, as ArrayRecord through tensorflow-datasets.

Under prepared_dir/NAME/VERSION/ stand the records in file order (one tfds split, "examples") and
`source.json`: raw files with their hashes, how they were read, what was skipped, and the splits.
VERSION names reading and code, so that another setting is another folder. Nothing counts as prepared
before it is whole: tfds renames a finished folder, `source.json` is written last.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import io
import json
import operator
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bfm.datasets import locomo, longmemeval, membench, personamem, prefeval, shifting_prefs, splits
from bfm.datasets.common import Reading
from bfm.dialogue import Example, RecordError, parse_example, shown, to_json
from bfm.jsonl import DataError, write_json
from bfm.lm import cache_dir

# The one table of data sets: name -> the module that reads it.
NAMES: dict[str, Any] = {
    name: module
    for module in (membench, personamem, prefeval, locomo, longmemeval, shifting_prefs)
    for name in module.NAMES
}
SOURCE = "source.json"
SPLIT = "examples"  # tfds reserves "all"; our splits are lists of indices into it
AS_IS = Reading()


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
    on_example: Callable[[int, int], None] = lambda done, total: None,
) -> Prepared:
    """Open a split of a data set, preparing it first where the raw files are at hand.

    split: all, train, dev, test, foldK_train, foldK_test, per20_train, per20_test, or FIELD=VALUE or
    FIELD!=VALUE of the examples' meta ("topic!=travel_hotel" leaves a topic out). prepared_dir: by
    default the user's cache. Raises DataError (one line): unknown name or split, raw files missing or
    broken.
    """
    where = {"data_dir": data_dir, "prepared_dir": prepared_dir}
    folder = prepare(name, **where, reading=reading, on_example=on_example)
    source = json.loads((folder / SOURCE).read_text("utf-8"))
    made = source.pop("splits")
    records = _tfds().builder_from_directory(str(folder)).as_data_source(SPLIT)
    if split in made:
        indices = made[split]
    elif "=" in split:
        indices = _matching(name, split, records)
    else:
        raise DataError(f"{name}: no split {split!r}; there are {', '.join(made)}")
    identity = json.dumps([name, split, source, indices], sort_keys=True)
    sha256 = hashlib.sha256(identity.encode()).hexdigest()
    return Prepared(name, split, folder, source, sha256, indices, records)


def prepare(
    name: str,
    *,
    data_dir: str | Path = "",
    prepared_dir: str | Path = "",
    reading: Reading = AS_IS,
    on_example: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Prepare a data set if it is not prepared yet and return its folder.

    The raw files are read twice, once to check every record and count, once to write; memory holds one
    record and the metas. Raises DataError (one line).
    """
    if name not in NAMES:
        raise DataError(f"data: {name!r} is unknown; known: {', '.join(NAMES)}")
    module = NAMES[name]
    root = Path(prepared_dir or cache_dir() / "prepared").expanduser()
    folder = root / name / _version(module, reading)
    raw = Path(data_dir).expanduser() if data_dir else None
    files = module.FILES.get(name, ())
    hashes = _hashes(raw / files[0].path.split("/")[0]) if raw and files else {}
    if (folder / SOURCE).is_file():
        known = json.loads((folder / SOURCE).read_text("utf-8"))
        if not hashes or known["files"] == hashes:
            return folder
        raise DataError(
            f"{folder}: was prepared from other raw files than those in {raw}; remove that folder first"
        )
    if files and raw is None:
        wanted = "; ".join(f"{f.path} ({f.size}) from {f.url}" for f in files)
        raise DataError(f"{name}: not prepared yet; give --data_dir with its raw files: {wanted}")
    skipped: collections.Counter[str] = collections.Counter()
    metas, ids = [], []
    for example in module.read(name, raw, reading, skipped):
        metas.append({key: example.meta[key] for key in ("group", "split") if key in example.meta})
        ids.append(example.question.id)
        on_example(len(ids), 0)
    repeated = [id_ for id_, n in collections.Counter(ids).items() if n > 1]
    if repeated:
        raise DataError(f"{name}: {len(repeated)} ids stand twice, such as {repeated[0]!r}")
    if not ids:
        raise DataError(f"{name}: the raw files hold no usable record ({dict(skipped)})")
    named = getattr(module, "named_split", lambda data_dir: frozenset())
    made = splits.make(metas, name, reading.seed, named(raw) if raw else frozenset(), ids)

    def records() -> Iterator[tuple[int, dict[str, str]]]:
        examples = module.read(name, raw, reading, collections.Counter())
        for i, example in enumerate(examples):
            record = json.dumps(to_json(example), ensure_ascii=False, allow_nan=False)
            yield i, {"id": example.question.id, "record": record}
            on_example(i + 1, len(ids))

    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed before its source.json
    with contextlib.redirect_stdout(io.StringIO()):  # tfds prints there, where --json writes
        _builder(name, folder.name, records, root).download_and_prepare()
    source = {
        "name": name,
        "reading": dataclasses.asdict(reading),
        "files": hashes,
        "skipped": dict(sorted(skipped.items())),
        "examples": len(ids),
        "version": folder.name,
        "splits": made,
    }
    write_json(folder / SOURCE, source, indent=None)
    return folder


def _version(module: Any, reading: Reading) -> str:
    """Name what moves an example besides the raw files: how they are read, and the code that reads."""
    digest = hashlib.sha256(repr(reading).encode())
    here = Path(__file__).parent
    own = sorted(here.glob(f"{module.__name__.rpartition('.')[2].split('_')[0]}*.py"))
    for path in (*own, here / "common.py", here / "splits.py", here.parent / "dialogue.py"):
        digest.update(path.read_bytes())
    return f"1.0.{int.from_bytes(digest.digest()[:4], 'little')}"


def _hashes(folder: Path) -> dict[str, str]:
    """Return the sha256 of every file below a benchmark's folder."""
    hashes = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        hashes[path.relative_to(folder).as_posix()] = digest
    return hashes


def _matching(name: str, text: str, records: Any) -> list[int]:
    """Return the indices whose meta has FIELD=VALUE (or has not, with !=)."""
    key, _, value = text.partition("=")
    wanted = not key.endswith("!")
    key = key.removesuffix("!")
    metas = [json.loads(records[i]["record"]).get("meta", {}) for i in range(len(records))]
    if not any(key in meta for meta in metas):
        raise DataError(f"{name}: split {text!r}: no example has a field {key!r} in its meta")
    found = [i for i, meta in enumerate(metas) if (str(meta.get(key)) == value) == wanted]
    if not found:
        raise DataError(f"{name}: split {text!r}: no example is left")
    return found


def _tfds():
    import tensorflow_datasets as tfds

    tfds.disable_progress_bar()  # progress is told to whoever calls
    return tfds


def _builder(name: str, version: str, records: Callable, root: Path):
    """Make a tfds builder of one split that keeps the order it is given."""
    tfds = _tfds()

    class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version(version)

        def _info(self):
            text = tfds.features.Text()
            return tfds.core.DatasetInfo(
                builder=self,
                features=tfds.features.FeaturesDict({"id": text, "record": text}),
                disable_shuffling=True,
            )

        def _split_generators(self, download_manager):
            return {SPLIT: self._generate_examples()}

        def _generate_examples(self):
            return records()

    Builder.name = name
    return Builder(data_dir=str(root), file_format="array_record")
