# SPDX-License-Identifier: Apache-2.0
"""Raw files: found, or fetched from their official places; whole under their names, or not there."""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bfm.datasets.common import File, Missing, Reading
from bfm.jsonl import DataError
from bfm.wheel import cache_dir

TIMEOUT_S = 30.0  # without a byte
_BLOCK = 1 << 20  # bytes


def downloads() -> Path:
    """Return the folder in the user's cache that raw files are fetched into, laid out as a data_dir."""
    return cache_dir() / "raw"


def fetch(file: File, folder: Path, on_bytes: Callable[[int], None] = lambda n: None) -> Path:
    """Fetch a file below `folder` unless it is there, and return its path.

    on_bytes: told how many bytes came in since it was last told. What arrives is kept under another
    name until its length is the one that the server announced. Raises DataError (one line).
    """
    target = folder / file.path
    if target.is_file():
        return target
    part = target.with_name(f"{target.name}.{os.getpid()}.part")  # of this process alone
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(file.url, timeout=TIMEOUT_S) as reply, open(part, "wb") as out:
            announced, got = reply.length, 0  # None: in chunks, which http.client counts itself
            if announced is None and not reply.chunked:
                raise ValueError("the server does not say how long the file is")
            while block := reply.read(_BLOCK):
                out.write(block)
                got += len(block)
                on_bytes(len(block))
            if announced not in (None, got):
                raise ValueError(f"only {got:,} of {announced:,} bytes came")
            out.flush()
            os.fsync(out.fileno())
        os.replace(part, target)
    except (OSError, http.client.HTTPException, ValueError) as error:  # URLError is an OSError
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        if isinstance(error, urllib.error.HTTPError):
            reason = f"HTTP {error.code} {error.reason}"
        raise DataError(f"{file.url}: could not be fetched: {reason}") from None
    finally:
        part.unlink(missing_ok=True)
    return target


def obtain(
    module: Any,
    name: str,
    data_dir: Path | None,
    reading: Reading,
    download: bool,
    on_bytes: Callable[[int], None],
) -> Path:
    """Return the folder that has a data set's files: data_dir, or that of the downloads.

    Where data_dir lacks one of them, all are fetched if their places give them one by one. Raises
    Missing (one line), which also says why nothing could be fetched.
    """
    found = data_dir or downloads()
    try:
        module.find(name, found, reading)
    except Missing as missing:
        text = (
            f"{missing}"
            if data_dir
            else f"{name}: not prepared yet; give --data_dir, or: {missing}"
        )
        if not download or not all(file.direct for file in module.FILES[name]):
            raise Missing(text) from None
        try:
            for file in module.FILES[name]:
                fetch(file, downloads(), on_bytes)
        except DataError as error:
            raise Missing(f"{text} ({error})") from None
        return downloads()
    return found


def hashes(
    module: Any, name: str, folder: Path, reading: Reading, absent: dict[str, str] | None = None
) -> dict[str, str]:
    """Return the sha256 of every raw file that is read; `absent` where they are not all there.

    Raises DataError (one line).
    """
    try:
        paths = module.find(name, folder, reading)
    except Missing:
        if absent is None:
            raise
        return absent
    made = {}
    for path in paths:
        try:
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
        made[path.relative_to(folder).as_posix()] = digest
    return made
