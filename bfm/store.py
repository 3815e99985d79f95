# SPDX-License-Identifier: Apache-2.0
"""Turn states kept between questions, under a budget of bytes on the device and on the host.

A state that fits neither budget is not kept; whoever asks for it computes it again. Every way gives the
same bits, since the same rows go through the same program at the same shape.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import jax
import numpy as np

from bfm.model.state import State, size, to_host


@dataclasses.dataclass
class Counts:
    """What happened to requests: answered on the device, brought back from the host, computed."""

    device: int = 0
    host: int = 0
    computed: int = 0
    evicted: int = 0


@dataclasses.dataclass
class _Held:
    """What is held for one owner: key -> (where, state), and the bytes at each place."""

    states: dict[bytes, tuple[str, State]] = dataclasses.field(default_factory=dict)
    used: dict[str, int] = dataclasses.field(default_factory=lambda: {"device": 0, "host": 0})


class StateStore:
    """States by key, least recently used history first out; within a history nothing is evicted.

    A history is read front to back by every question, so evicting its own states to keep its own
    states would keep none; what does not fit is spilled to host memory, then not kept at all.
    """

    def __init__(self, device_bytes: int, host_bytes: int = 0):
        if device_bytes < 0 or host_bytes < 0:
            raise ValueError("a budget of bytes must not be negative")
        self.budget = {"device": device_bytes, "host": host_bytes}
        self.used = {"device": 0, "host": 0}
        self.counts = Counts()
        self._held: OrderedDict[Hashable, _Held] = OrderedDict()

    def get(self, owner: Hashable, key: bytes, make: Callable[[], State]) -> State:
        """Return the state of `key`, from memory or made now (and kept where it fits)."""
        held = self._held.get(owner) or _Held()
        if held.states:
            self._held.move_to_end(owner)
        if key in held.states:
            where, state = held.states[key]
            setattr(self.counts, where, getattr(self.counts, where) + 1)
            return state if where == "device" else jax.device_put(state)
        state = make()
        self.counts.computed += 1
        if where := self._room(held, size(state)):
            self._held[owner] = held
            held.states[key] = where, state if where == "device" else to_host(state)
            held.used[where] += size(state)
            self.used[where] += size(state)
        return state

    def drop(self, owner: Hashable) -> None:
        """Forget every state of an owner."""
        for where, bytes_ in self._held.pop(owner, _Held()).used.items():
            self.used[where] -= bytes_

    def owners(self) -> list[Hashable]:
        """List whose states are held, least recently used first."""
        return list(self._held)

    def _room(self, held: _Held, needed: int) -> str | None:
        """Say where `needed` bytes fit, after dropping other owners if that makes them fit."""
        for where, budget in self.budget.items():
            if held.used[where] + needed > budget:
                continue
            while self.used[where] + needed > budget:
                oldest = next(o for o, h in self._held.items() if h is not held and h.used[where])
                self.drop(oldest)
                self.counts.evicted += 1
            return where
        return None


class TurnStates:
    """Turn states of many users, each state evicted alone, the least recently used first.

    For histories of which a question reads a shortlist: no user's whole history is read front to back,
    and what an earlier shortlist needed must not keep out what the next one needs.
    """

    def __init__(self, device_bytes: int):
        self._store = StateStore(device_bytes)

    @property
    def counts(self) -> Counts:
        return self._store.counts

    @property
    def used(self) -> dict[str, int]:
        return self._store.used

    def get(self, owner: Hashable, key: bytes, make: Callable[[], State]) -> State:
        """Return the state of `key`, as `StateStore.get` does."""
        return self._store.get((owner, key), key, make)

    def drop(self, owner: Hashable) -> None:
        """Forget every state of an owner."""
        for pair in [pair for pair in self._store.owners() if pair[0] == owner]:
            self._store.drop(pair)


def state_key(identity: str, blocks: Sequence[Sequence[int]], shape: tuple[int, int]) -> bytes:
    """Name a batch of states by everything that moves it: model identity, ids of each row, shape."""
    digest = hashlib.blake2b(identity.encode(), digest_size=32)
    digest.update(np.asarray(shape, np.int64).tobytes())
    for block in blocks:
        digest.update(len(block).to_bytes(8, "little"))
        digest.update(np.asarray(block, np.int32).tobytes())
    return digest.digest()
