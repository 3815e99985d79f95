# SPDX-License-Identifier: Apache-2.0
"""What a memory system is to the harness: turns in, notes out, a store that can be saved."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, Self

from bfm.baselines.backend import Backend
from bfm.baselines.ledger import Client, Entry, Ledger
from bfm.baselines.vectors import Index
from bfm.dialogue import Question, Turn

_PROBE = "The quick brown fox jumps over the lazy dog."  # embedded to know an encoder again
_NEAR = 1e-3


class StoreError(ValueError):
    """A saved store that cannot be used; one line."""


@dataclasses.dataclass(frozen=True)
class Note:
    """What retrieval gives: a text for the reader, its date, and the turns that it was made from."""

    text: str
    time: str
    turns: tuple[int, ...]


class System(Protocol):
    """The memory of one user, used by one thread at a time.

    Two users never share one; to delete a user is to drop his.
    """

    name: str
    client: Client
    log: list[Entry]

    def add(self, turn: Turn) -> None:
        """Take in the next turn. Dates come from messages, never from a clock."""
        ...

    def end(self) -> None:
        """Finish what is open (a day, a session), as when a question comes later. Idempotent."""
        ...

    def search(self, question: Question) -> list[Note]:
        """Return notes, best first. Calls `end`; no search moves what a later one finds."""
        ...

    def size(self) -> dict[str, int]:
        """Return the records of the store and the characters of their texts."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Return the whole store, its ledger and log."""
        ...

    @classmethod
    def from_json(cls, data: dict[str, Any], backend: Backend) -> Self:
        """Return the system that `to_json` was called on; the backend may be another model."""
        ...


def saved(system: System, index: Index, **state: Any) -> dict[str, Any]:
    """Return a store as JSON: what all systems share, and the `state` of this one."""
    return {
        "system": system.name,
        "probe": _probe(system.client.backend),
        "index": index.to_json(),
        "ledger": system.client.ledger.to_json(),
        "log": [dataclasses.asdict(entry) for entry in system.log],
        **state,
    }


def resumed(data: dict[str, Any], backend: Backend, name: str) -> tuple[Client, Index, list[Entry]]:
    """Return what all systems share, of a saved store.

    Raises StoreError where it is another system's, or was built with another encoder.
    """
    if data["system"] != name:
        raise StoreError(f"system: the store is of {data['system']!r}, not of {name!r}")
    client = Client(backend, Ledger.from_json(data["ledger"]))
    probe, held = _probe(backend), data["probe"]
    if len(probe) != len(held) or max(abs(a - b) for a, b in zip(probe, held, strict=True)) > _NEAR:
        raise StoreError(
            f"probe: the store was built with another sentence encoder ({len(held)} numbers a "
            f"vector, here {len(probe)}); use that one"
        )
    log = [Entry.from_json(entry) for entry in data["log"]]
    return client, Index.from_json(data["index"]), log


def _probe(backend: Backend) -> list[float]:
    """Return a vector by which an encoder is known again; it costs the system nothing."""
    return [round(float(x), 6) for x in Client(backend).embed([_PROBE])[0]]
