# SPDX-License-Identifier: Apache-2.0
"""PersonaMem v1 (32k, 128k, 1M) and v2: multiple choice about a persona over long chats.

What is changed in the texts: the "User: " or "Assistant: " that v1 puts before each message of
that role is removed. System messages are no turns: each begins a session, and the persona card it
holds becomes the session's first user message, named "persona", or is dropped (Reading.persona_card).
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from pathlib import Path

from bfm.datasets import personamem_v1, personamem_v2
from bfm.datasets.common import File, Missing, Reading
from bfm.datasets.personamem_chat import NO_HISTORY
from bfm.dialogue import Example
from bfm.jsonl import DataError

NAMES = (*personamem_v1.SIZES, "personamem_v2")
_V1 = "https://huggingface.co/datasets/bowen-upenn/PersonaMem/resolve/main"
_V2 = "https://huggingface.co/datasets/bowen-upenn/PersonaMem-v2"


def _v1_files(size: str, questions: str, contexts: str) -> tuple[File, ...]:
    names = {f"questions_{size}.csv": questions, f"shared_contexts_{size}.jsonl": contexts}
    return tuple(File(f"personamem_v1/{n}", f"{_V1}/{n}", large) for n, large in names.items())


FILES = {
    "personamem_32k": _v1_files("32k", "1.3 MB", "5.6 MB"),
    "personamem_128k": _v1_files("128k", "about 6 MB", "73.7 MB"),
    "personamem_1m": _v1_files("1M", "about 6 MB", "some hundred MB"),
    "personamem_v2": (
        *(
            File(f"personamem_v2/{n}.csv", f"{_V2}/resolve/main/benchmark/text/{n}.csv", large)
            for n, large in zip(personamem_v2.SPLITS, ("42 MB", "157 MB", "17.5 MB"), strict=True)
        ),
        File(
            "personamem_v2/data/chat_history_32k/",
            f"{_V2}/tree/main/data/chat_history_32k",
            "1,000 files of about 0.17 MB",
            direct=False,
        ),
    ),
}


def find(name: str, data_dir: Path, reading: Reading) -> list[Path]:
    """Return the raw files that are read. Raises Missing (one line)."""
    if name == "personamem_v2":
        tables = list(personamem_v2.tables(Path(data_dir)).values())
        files = tables + personamem_v2.chat_files(Path(data_dir)) if tables else []
    else:
        table, contexts = personamem_v1.find(Path(data_dir), name)
        files = [table, *contexts] if table.is_file() and contexts else []
    if not files:
        raise Missing(_needs(name, data_dir))
    return files


def _needs(name: str, data_dir: Path) -> str:
    files = "; ".join(f"{file.path} ({file.size}) from {file.url}" for file in FILES[name])
    note = " (one of the three .csv is enough)" if name == "personamem_v2" else ""
    return f"{data_dir}: {name} needs {files}{note}"


def read(
    name: str, data_dir: Path, reading: Reading, skipped: collections.Counter[str]
) -> Iterator[Example]:
    """Yield the questions of `name` in file order; one or two histories are held at a time.

    Rows that repeat an earlier one in full, rows without their history, and null messages are left
    out and counted in `skipped`. Raises DataError (one line).
    """
    if name not in NAMES:
        raise ValueError(f"name: must be one of {', '.join(NAMES)}, not {name!r}")
    files = find(name, data_dir, reading)
    if name == "personamem_v2":
        rows = personamem_v2.read(personamem_v2.tables(Path(data_dir)), reading, skipped)
    else:
        rows = personamem_v1.read(files[0], files[1:], reading, skipped)
    read_any, absent = False, skipped[NO_HISTORY]
    for item in rows:
        read_any = True
        yield item
    if not read_any and skipped[NO_HISTORY] > absent:
        raise DataError(f"{_needs(name, data_dir)}: no question has its history there")
