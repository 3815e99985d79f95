# SPDX-License-Identifier: Apache-2.0
"""Stores in a file, a line a user: built once, with a large model perhaps, and evaluated later."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bfm.baselines.protocol import StoreError, System
from bfm.baselines.vectors import VectorError
from bfm.dialogue import shown
from bfm.jsonl import whole

_VERSION = 1


def save(path: Path, systems: Mapping[str, System], writer: str = "") -> None:
    """Write the stores of users, whole or not at all. writer: the chat model that made them."""
    _write(path, {user: system.to_json() for user, system in systems.items()}, writer)


def writer_of(path: Path) -> str:
    """Return the chat model that made the stores of a file that `load` has read."""
    with open(path, "rb") as file:
        return json.loads(file.readline() or b'{"writer": ""}')["writer"]


def load(path: Path, restore: Callable[[dict[str, Any]], System]) -> dict[str, System]:
    """Return user -> system; `restore` makes one of its JSON (`bfm.baselines.restore`).

    Raises StoreError naming file, line and user.
    """
    systems = {}
    for line, (user, data) in enumerate(_read(path)[0].items(), start=1):
        try:
            systems[user] = restore(data)
        except (StoreError, VectorError) as error:
            raise StoreError(f"{path}: line {line}, user {shown(user)}: {error}") from None
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            reason = f"not a store of this version ({type(error).__name__}: {error})"
            raise StoreError(f"{path}: line {line}, user {shown(user)}: {reason}") from None
    return systems


def delete(path: Path, user: str) -> None:
    """Remove a user, wholly, and nobody else. Raises StoreError where the file has no such user."""
    stores, writer = _read(path)
    if user not in stores:
        raise StoreError(f"{path}: no user {shown(user)}")
    del stores[user]
    _write(path, stores, writer)


def _write(path: Path, stores: Mapping[str, dict[str, Any]], writer: str) -> None:
    try:
        with whole(Path(path)) as file:
            for user, data in stores.items():
                line = {"version": _VERSION, "writer": writer, "user": user, "store": data}
                file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error.strerror or error}") from None


def _read(path: Path) -> tuple[dict[str, dict[str, Any]], str]:
    stores: dict[str, dict[str, Any]] = {}
    writers: set[str] = set()
    try:
        with open(path, "rb") as file:
            for number, raw in enumerate(file, start=1):
                try:
                    line = json.loads(raw)
                    version, user, store = line["version"], line["user"], line["store"]
                    writers.add(line["writer"])
                except (ValueError, KeyError, TypeError):
                    raise StoreError(f"{path}: line {number}: not a store") from None
                if version != _VERSION or not isinstance(user, str) or not isinstance(store, dict):
                    raise StoreError(f"{path}: line {number}: not a store of version {_VERSION}")
                if user in stores:
                    raise StoreError(f"{path}: line {number}: user {shown(user)} is there twice")
                if len(writers) > 1:
                    raise StoreError(
                        f"{path}: line {number}: by another chat model than the lines before"
                    )
                stores[user] = store
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror or error}") from None
    return stores, next(iter(writers), "")
