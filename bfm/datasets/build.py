# SPDX-License-Identifier: Apache-2.0
"""Making prepared data sets: what a reader yields, as ArrayRecord through tensorflow-datasets.

Under prepared_dir/NAME/VERSION/ stand the records in file order (one tfds split, "examples") and
`source.json`: raw files with their hashes, how they were read, what was skipped, and the splits.
VERSION names reading and code, so that another setting is another folder, which takes its name when it
is whole.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from bfm.datasets import locomo, longmemeval, membench, personamem, prefeval, shifting_prefs, splits
from bfm.datasets.common import Reading
from bfm.datasets.raw import hashes, obtain
from bfm.dialogue import to_json
from bfm.jsonl import DataError, write_json
from bfm.wheel import cache_dir

# The one table of data sets: name -> the module that reads it.
NAMES: dict[str, Any] = {
    name: module
    for module in (membench, personamem, prefeval, locomo, longmemeval, shifting_prefs)
    for name in module.NAMES
}
SOURCE = "source.json"
SPLIT = "examples"  # tfds reserves "all"; our splits are lists of indices into it
AS_IS = Reading()
_SHARD = 1 << 14  # examples a file
_STALE_S = 86_400.0  # a half-written folder is left over when nothing came into it for so long
_GROUPING = ("group", "split", "entities")  # what of an example's meta decides the splits


def prepare(
    name: str,
    *,
    data_dir: str | Path = "",
    prepared_dir: str | Path = "",
    reading: Reading = AS_IS,
    download: bool = True,
    on_example: Callable[[int, int], None] = lambda done, total: None,
    on_bytes: Callable[[int], None] = lambda n: None,
) -> Path:
    """Prepare a data set if it is not prepared yet and return its folder.

    The raw files are read twice, once to check every record and count, once to write; memory holds one
    record and the metas. Files that data_dir lacks are fetched into the user's cache where their
    official place gives them one by one (download=False: never). on_example(done, total): total is 0
    in the first pass; on_bytes: how many more bytes were fetched. Raises DataError (one line).
    """
    if name not in NAMES:
        raise DataError(f"data: {name!r} is unknown; known: {', '.join(NAMES)}")
    module = NAMES[name]
    root = Path(prepared_dir or cache_dir() / "prepared").expanduser()
    code = code_hash()
    folder = root / name / version_of(code, reading)
    raw = Path(data_dir).expanduser() if data_dir else None
    if (folder / SOURCE).is_file():
        known = json.loads((folder / SOURCE).read_text("utf-8"))
        if raw is None or known["files"] == hashes(module, name, raw, reading, known["files"]):
            return folder
        raise DataError(
            f"{folder}: was prepared from other raw files than those in {raw}; remove that folder first"
        )
    raw = obtain(module, name, raw, reading, download, on_bytes)
    files = hashes(module, name, raw, reading)
    skipped: collections.Counter[str] = collections.Counter()
    metas, ids = [], []
    for example in module.read(name, raw, reading, skipped):
        metas.append({key: example.meta[key] for key in _GROUPING if key in example.meta})
        ids.append(example.question.id)
        on_example(len(ids), 0)
    repeated = [id_ for id_, n in collections.Counter(ids).items() if n > 1]
    if repeated:
        raise DataError(f"{name}: {len(repeated)} ids stand twice, such as {repeated[0]!r}")
    if not ids:
        raise DataError(f"{name}: the raw files hold no usable record ({dict(skipped)})")
    named = getattr(module, "named_split", lambda name, data_dir: frozenset())
    made = splits.make(metas, name, reading.seed, named(name, raw), ids)

    def records() -> Iterator[dict[str, str]]:
        examples = module.read(name, raw, reading, collections.Counter())
        for i, example in enumerate(examples, start=1):
            record = json.dumps(to_json(example), ensure_ascii=False, allow_nan=False)
            yield {"id": example.question.id, "record": record}
            on_example(i, len(ids))

    source = source_of(module, name, reading, files, skipped, len(ids), code)
    try:
        with _whole(folder) as scratch:
            _write(scratch, name, folder.name, records())
            write_json(scratch / SOURCE, {**source, "splits": made}, indent=None)
    except OSError as error:
        raise DataError(f"{folder}: cannot be written: {error.strerror or error}") from None
    return folder


def source_of(
    module: Any, name: str, reading: Reading, files: dict, skipped: dict, n: int, code: str
) -> dict[str, Any]:
    """Return what the examples are made from, which is what identifies them."""
    return {
        "name": name,
        "reading": dataclasses.asdict(reading),
        "files": files,
        "skipped": dict(sorted(skipped.items())),
        "examples": n,
        "version": version_of(code, reading),
        "code": code,
        **({"generator": module.VERSION} if hasattr(module, "VERSION") else {}),
    }


def code_hash() -> str:
    """Return the sha256 of all code that an example depends on, the generator's words included."""
    here = Path(__file__).parent
    sources = (*sorted(here.glob("*.py")), here.parent / "dialogue.py")
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def version_of(code: str, reading: Reading) -> str:
    """Name what moves an example besides the raw files: how they are read, and the code that reads."""
    digest = hashlib.sha256(f"{reading!r} {code}".encode()).digest()
    return f"1.0.{int.from_bytes(digest[:4], 'little')}"


def tfds_module():
    import tensorflow_datasets as tfds

    tfds.disable_progress_bar()  # progress is told to whoever calls
    return tfds


def _write(folder: Path, name: str, version: str, records: Iterable[dict[str, str]]) -> None:
    """Write records in their order, one at a time (a tfds builder would hold up to a gigabyte)."""
    tfds = tfds_module()
    place = tfds.core.dataset_info.DatasetIdentity(
        name=name, version=tfds.core.Version(version), data_dir=str(folder), module_name=__name__
    )
    text = tfds.features.Text()
    info = tfds.core.DatasetInfo(
        builder=place, features=tfds.features.FeaturesDict({"id": text, "record": text})
    )
    writer = tfds.core.SequentialWriter(info, _SHARD, file_format="array_record")
    writer.initialize_splits([SPLIT])
    for record in records:
        writer.add_examples({SPLIT: [record]})
    writer.close_all()


@contextlib.contextmanager
def _whole(folder: Path) -> Iterator[Path]:
    """Give a folder to write to, which takes its name when the block is done, and never if it fails."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob("*.part"):  # by runs that were killed
        if time.time() - left.stat().st_mtime > _STALE_S:
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(
        prefix=f"{folder.name}.", suffix=".part", dir=folder.parent, ignore_cleanup_errors=True
    ) as scratch:
        yield Path(scratch)
        os.chmod(scratch, folder.parent.stat().st_mode)  # it was its owner's alone
        try:
            os.replace(scratch, folder)
        except OSError:
            if not (folder / SOURCE).is_file():  # no other process was faster, with the same bytes
                raise
