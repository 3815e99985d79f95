# SPDX-License-Identifier: Apache-2.0
"""A run's folder: whose it is, and files of lines to which any number of processes add in input order.

A job's records are worked on in groups whose make-up depends on the input alone. Whichever process has
done a group leaves it in parts/; the first one appends parts as their turn comes. Started again after a
kill, by any number of processes, a run goes on with what is missing and gives the same bytes.
"""

from __future__ import annotations

import bisect
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from bfm.jsonl import write_json

PARTS = "parts"  # groups that wait for those before them


class WorkdirError(ValueError):
    """A workdir that holds something else; one line that says what to do."""


def make_workdir(workdir: Path) -> None:
    """Make the folder a run writes to. Raises WorkdirError where it cannot be written."""
    if workdir.exists() and not workdir.is_dir():
        raise WorkdirError(f"--workdir: {workdir} is not a folder")
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        if not os.access(workdir, os.W_OK):
            raise PermissionError(13, "not writable")
    except OSError as error:
        raise WorkdirError(f"--workdir: {workdir}: {error.strerror}") from None


def claim(workdir: Path, name: str, what: str, meta: Mapping[str, Any], files: Sequence[str]):
    """Make a folder a run's own, or find that it is: the first process writes `meta` as file `name`.

    meta["identity"] says whose it is. Raises WorkdirError where the folder is of another run, or holds
    one of `files` (of `what`, such as "labels") and does not say whose they are.
    """
    make_workdir(workdir)
    place = workdir / name
    if jax.process_index():
        wait(place)
    elif not place.exists():
        if found := [file for file in (*files, PARTS) if (workdir / file).exists()]:
            raise WorkdirError(
                f"--workdir: {workdir} holds {found[0]} but no {name}; choose another"
            )
        write_json(place, meta)
    check_identity(workdir, what, read_meta(place).get("identity", {}), meta["identity"])


def check_identity(workdir: Path, what: str, before: dict, now: dict) -> None:
    """Raise WorkdirError, naming the keys, where a folder is of a run with another identity."""
    if changed := [key for key in now if before.get(key) != now[key]]:
        raise WorkdirError(
            f"--workdir: {workdir} holds {what} of another run ({', '.join(changed)} differ); "
            "choose another folder or remove it"
        )


def read_meta(place: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises WorkdirError where there is none."""
    try:
        return json.loads(place.read_text("utf-8"))
    except (OSError, ValueError):
        raise WorkdirError(f"--workdir: {place} cannot be read; choose another") from None


def wait(path: Path) -> None:
    """Wait for what the first process writes; jax ends this one where that one has died."""
    while not path.exists():
        time.sleep(0.1)


class Spool:
    """Files of lines that grow by whole groups, in order.

        spool = Spool(workdir, {"labels.jsonl": [3, 5]})  # two groups: three lines, then five
        for k in spool.todo():
            spool.put(k, {"labels.jsonl": text_of(k)})
        spool.finish()

    What is torn, or of a group that is not whole in every file, is cut off and done again.
    """

    def __init__(
        self,
        workdir: Path,
        lines: Mapping[str, Sequence[int]],
        joined: Callable[[Any], None] = lambda note: None,
    ):
        """lines: file -> how many lines each group has in it. joined: told the note of a group when
        it has been appended. Raises WorkdirError where a file has more lines than all groups."""
        self.workdir, self.joined = workdir, joined
        self._ends = {name: [0, *itertools.accumulate(own)] for name, own in lines.items()}
        self.groups = len(next(iter(self._ends.values()))) - 1
        self._next = self.done()
        if jax.process_index() == 0:
            for name, ends in self._ends.items():
                _cut(workdir / name, ends[self._next])

    def done(self) -> int:
        """Return how many groups, from the first on, stand whole in every file."""
        whole = self.groups
        for name, ends in self._ends.items():
            count = _count(self.workdir / name)
            if count > ends[-1]:
                raise WorkdirError(
                    f"--workdir: {self.workdir / name} has {count} lines, but this run makes "
                    f"{ends[-1]}; remove it"
                )
            whole = min(whole, bisect.bisect_right(ends, count) - 1)
        return whole

    def mine(self) -> range:
        """Return the groups that are this process's to do."""
        return range(jax.process_index(), self.groups, jax.process_count())

    def todo(self) -> list[int]:
        """Return those of them that are not done."""
        # In this order: a part that is gone was appended before.
        missing = [k for k in self.mine() if not self._part(k).exists()]
        done = self.done()
        return [k for k in missing if k >= done]

    def put(self, k: int, texts: Mapping[str, str], note: Any = None) -> None:
        """Leave a group's lines by file; the first process appends all whose turn has come."""
        (self.workdir / PARTS).mkdir(exist_ok=True)
        write_json(self._part(k), {"texts": texts, "note": note}, indent=None)
        if jax.process_index() == 0:
            self._join()

    def finish(self) -> None:
        """Wait until every group of every process stands in the files."""
        if jax.process_index():
            # Count the file that is appended last alone, until it is whole: the others may be large.
            name, ends = list(self._ends.items())[-1]
            while _count(self.workdir / name) < ends[-1] or self.done() < self.groups:
                time.sleep(0.5)
            return
        while self._next < self.groups:
            self._join()
            if self._next < self.groups:
                time.sleep(0.1)
        shutil.rmtree(self.workdir / PARTS, ignore_errors=True)

    def _join(self) -> None:
        while self._next < self.groups and (place := self._part(self._next)).exists():
            part = json.loads(place.read_text("utf-8"))
            for name in self._ends:
                with open(self.workdir / name, "a", encoding="utf-8", newline="\n") as file:
                    file.write(part["texts"][name])
                    file.flush()
                    os.fsync(file.fileno())
            self._next += 1
            self.joined(part["note"])
            place.unlink()

    def _part(self, k: int) -> Path:
        return self.workdir / PARTS / f"{k:07}.json"


def _count(path: Path) -> int:
    """Return how many lines of a file are complete."""
    if not path.exists():
        return 0
    with open(path, "rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))


def _cut(path: Path, lines: int) -> None:
    """Keep the first lines of a file."""
    if path.exists():
        with open(path, "rb+") as file:
            for _ in range(lines):
                file.readline()
            file.truncate(file.tell())
