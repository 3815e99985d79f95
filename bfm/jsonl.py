# SPDX-License-Identifier: Apache-2.0
"""JSONL files of examples: checked whole in one streaming pass, then read at random by offset.

And the one way to write JSON and JSONL files: whole or not at all.
"""

import array
import collections
import contextlib
import dataclasses
import hashlib
import json
import operator
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Self, TextIO

import numpy as np

from bfm.dialogue import Example, RecordError, parse_example, shown, to_json

_BOM = b"\xef\xbb\xbf"
_KEPT_MESSAGES = 5  # of skipped records


class DataError(ValueError):
    """A data file is wrong: one line that names the file and, where there is one, the record."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class JsonlSource:
    """Random access to the records of a checked file; only their places are held in memory."""

    path: str
    sha256: str  # of the whole file
    skipped: int
    skipped_messages: tuple[str, ...]  # the first few
    _spans: np.ndarray  # int64 [record, (offset, length)]
    _version: tuple[int, ...]  # of the file that was checked

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        on_bad_record: str = "stop",
        limit: int = 0,
        check: Callable[[Example], None] | None = None,
    ) -> Self:
        """Check every record of the file, in one pass that holds one line at a time.

        Args:
          path: a JSONL file; records end at b"\\n" only, lines of white space are passed over.
          on_bad_record: "stop" raises DataError at the first bad record; "skip" counts them.
          limit: keep the first `limit` good records (0: all); the rest is checked all the same.
          check: a further check of each example, which may raise RecordError.
        """
        if on_bad_record not in ("stop", "skip"):
            raise ValueError(f"on_bad_record: must be 'stop' or 'skip', not {on_bad_record!r}")
        if limit < 0:
            raise ValueError(f"limit: must not be negative, got {limit}")
        path = os.fsdecode(path)
        name = _shown_path(path)
        spans = array.array("q")
        first_line: dict[bytes, int] = {}  # digest of an id -> the line that has it
        sha256 = hashlib.sha256()
        records, skipped, messages = 0, 0, []
        with _open_file(path) as file:
            version = _version(file)
            for line_number, place, line in _lines(file, sha256):
                records += 1
                obj = None
                try:
                    obj = _decode(line)
                    example = parse_example(obj)
                    digest = hashlib.blake2b(example.question.id.encode(), digest_size=16).digest()
                    if digest in first_line:
                        raise RecordError("id", f"is already that of line {first_line[digest]}")
                    if check is not None:
                        check(example)
                except RecordError as error:
                    where = f"line {line_number}"
                    if isinstance(obj, dict) and obj.get("id") and isinstance(obj["id"], str):
                        where += f", id {shown(obj['id'])}"
                    message = f"{name}: record {records} ({where}): {error}"
                    if on_bad_record == "stop":
                        raise DataError(message) from error
                    skipped += 1
                    if skipped <= _KEPT_MESSAGES:
                        messages.append(message)
                    continue
                first_line[digest] = line_number
                if not limit or len(spans) < 2 * limit:
                    spans.extend((place, len(line)))
        if not records:
            raise DataError(f"{name}: holds no record")
        if not spans:
            raise DataError(f"{name}: all {records} records are bad; the first: {messages[0]}")
        table = np.array(spans, dtype=np.int64).reshape(-1, 2)
        return cls(path, sha256.hexdigest(), skipped, tuple(messages), table, version)

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> Example:
        span = self._spans[operator.index(index)]
        with self._reopen() as file:
            return self._read(file, *span.tolist())

    def __iter__(self) -> Iterator[Example]:
        with self._reopen() as file:
            for span in self._spans:
                yield self._read(file, *span.tolist())

    def _reopen(self) -> BinaryIO:
        file = _open_file(self.path)
        if _version(file) != self._version:
            file.close()
            raise DataError(f"{_shown_path(self.path)}: has changed since it was checked")
        return file

    def _read(self, file: BinaryIO, place: int, length: int) -> Example:
        file.seek(place)
        return parse_example(_decode(file.read(length)))


def write(path: Path, examples: Iterable[Example]) -> int:
    """Write examples as JSONL, holding one at a time, and return how many.

    The file is there when it is whole, and `JsonlSource.open` reads the same examples back. Raises
    DataError (one line) where it cannot be written.
    """
    count = 0
    try:
        with whole(path) as file:
            for example in examples:
                line = json.dumps(to_json(example), ensure_ascii=False, allow_nan=False)
                file.write(line + "\n")
                count += 1
    except OSError as error:
        shown = _shown_path(os.fspath(path))
        raise DataError(f"{shown}: cannot be written: {error.strerror or error}") from None
    return count


def write_json(path: Path, value: Any, indent: int | None = 2) -> None:
    """Write one JSON value so that a reader sees the old file or the new one, never a part."""
    with whole(path) as file:
        json.dump(value, file, ensure_ascii=False, indent=indent)


def json_lines(values: Iterable[Any]) -> str:
    """Return JSON values as text, one a line."""
    return "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values)


def read_lines(path: Path) -> list[Any]:
    """Return the values of a file of one JSON value a line; a torn last line is left out.

    [] where there is no file.
    """
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


@contextlib.contextmanager
def whole(path: Path) -> Iterator[TextIO]:
    """Open a file to write that takes its name when the block is done, and never if it fails."""
    scratch = path.with_name(path.name + ".part")
    try:
        with open(scratch, "w", encoding="utf-8", newline="\n") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


# Files and lines


def _open_file(path: str) -> BinaryIO:
    """Open a regular file (anything else has no random access, and a pipe would block)."""
    shown = _shown_path(path)
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISREG(mode):
            return open(path, "rb")
    except OSError as error:
        raise DataError(f"{shown}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # a null character, say; every Python has its own words for it
        raise DataError(f"{shown}: cannot be read: no file can have this name") from error
    raise DataError(f"{shown}: is {'a directory, ' if stat.S_ISDIR(mode) else ''}not a file")


def _version(file: BinaryIO) -> tuple[int, ...]:
    info = os.fstat(file.fileno())
    return info.st_size, info.st_mtime_ns


def _lines(file: BinaryIO, sha256) -> Iterator[tuple[int, int, bytes]]:
    """(line number, offset, bytes without the line end) of every line that is not white space."""
    place = 0
    for number, raw in enumerate(file, start=1):
        sha256.update(raw)
        skip = len(_BOM) if number == 1 and raw.startswith(_BOM) else 0
        line = raw[skip:].rstrip(b"\r\n")
        if line.strip():
            yield number, place + skip, line
        place += len(raw)


def _decode(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"), object_pairs_hook=_unique_keys)
    except UnicodeDecodeError as error:
        byte = line[error.start]
        reason = f"is not UTF-8: byte 0x{byte:02x} at offset {error.start} of the line"
    except json.JSONDecodeError as error:
        reason = f"is not JSON: {error.msg} at column {error.colno}"
    except RecordError:
        raise
    except RecursionError:
        reason = "is nested too deeply"
    except ValueError:  # Python's limit on the digits of an integer
        reason = "holds a number with too many digits"
    raise RecordError("record", reason)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    obj = dict(pairs)
    if len(obj) < len(pairs):
        [(key, _)] = collections.Counter(key for key, _ in pairs).most_common(1)
        raise RecordError("record", f"holds the field {shown(key)} twice in one object")
    return obj


def _shown_path(path: str) -> str:
    return path if path.isprintable() else repr(path)
