# SPDX-License-Identifier: Apache-2.0
"""The memory systems that bfm is compared with, over two callables: a chat model and an encoder.

    from bfm import baselines
    from bfm.baselines import backend

    model = backend.local(lm, encoder)  # or backend.endpoint("http://localhost:8000/v1", "name", ..)
    system = baselines.make("mem0", model, seed=0)
    for turn in turns:  # bfm.dialogue.turns_of(..)
        system.add(turn)
    notes = system.search(question)  # bfm.dialogue.Question; best first

Each system's module docstring says where it differs from paper and public code. A system one fifth of
whose replies fell back is `unmeasured`: what it scores is the fallback's doing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bfm.baselines.amem import AMem
from bfm.baselines.backend import Backend, BackendError, side_by_side
from bfm.baselines.ledger import Ledger, merged, unmeasured
from bfm.baselines.mem0 import Mem0
from bfm.baselines.memorybank import MemoryBank
from bfm.baselines.protocol import Note, StoreError, System
from bfm.baselines.rmm import RMM

__all__ = [
    "MAKERS", "Backend", "BackendError", "Ledger", "Note", "StoreError", "System", "make", "merged",
    "restore", "side_by_side", "unmeasured",
]  # fmt: skip

MAKERS: Mapping[str, Callable[[Backend, int], System]] = {
    "mem0": lambda backend, seed: Mem0(backend),
    "mem0_add": lambda backend, seed: Mem0(backend, add_only=True),
    "amem": lambda backend, seed: AMem(backend),
    "memorybank": lambda backend, seed: MemoryBank(backend, seed),
    "memorybank_c1": lambda backend, seed: MemoryBank(backend, seed, forget=1.0),
    "memorybank_c5": lambda backend, seed: MemoryBank(backend, seed, forget=5.0),
    "rmm": lambda backend, seed: RMM(backend),
}


def make(name: str, backend: Backend, seed: int = 0) -> System:
    """Return an empty memory for one user. Raises ValueError for a name that is none."""
    if name not in MAKERS:
        raise ValueError(f"memory system {name!r}: must be one of {', '.join(MAKERS)}")
    return MAKERS[name](backend, seed)


def restore(data: dict[str, Any], backend: Backend) -> System:
    """Return the system that wrote `data` (`to_json`), over a backend that may be another model.

    Raises StoreError where the data name no system, or came with another sentence encoder.
    """
    name = str(data.get("system"))
    if name not in MAKERS:
        raise StoreError(f"system: {name!r}: must be one of {', '.join(MAKERS)}")
    return type(make(name, backend)).from_json(data, backend)
