# SPDX-License-Identifier: Apache-2.0
"""Memory systems in the harness: a store for every history, built once, saved, and asked.

Questions on the same history share its store. Stores lie in `eval.stores` (or the run's workdir), a
file a system, so that a run goes on after a kill and stores of a larger model serve later runs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bfm import baselines
from bfm.baselines import (
    Backend,
    Ledger,
    Note,
    StoreError,
    System,
    merged,
    side_by_side,
    store,
    unmeasured,
)
from bfm.baselines.reranker import Reranker
from bfm.baselines.rmm_training import train
from bfm.dialogue import Message, Question, Turn, turns_of
from bfm.progress import Meter

LABEL = "Memory"  # stands where a turn has its speaker


def history_key(turns: Sequence[Turn]) -> str:
    """Name a history by all of its content: equal histories of one user share a store."""
    content = [[m.role, m.name, m.content, m.time, m.session] for t in turns for m in t.messages]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


class Systems:
    """The stores of one run, by system and history."""

    def __init__(self, names: Iterable[str], backend: Backend, folder: Path, seed: int):
        """Load what the folder holds. Raises StoreError for stores of another encoder or version."""
        self.backend, self.folder, self.seed = backend, folder, seed
        self.reranker: Reranker | None = None  # of this run, whatever the stores were saved with
        self.stores: dict[str, dict[str, System]] = {}
        self.writers: dict[str, str] = {}  # the chat model that wrote them: this run's or another
        for name in names:
            path = self._path(name)
            restore = lambda data: baselines.restore(data, backend)  # noqa: E731
            self.stores[name] = store.load(path, restore) if path.exists() else {}
            self.writers[name] = store.writer_of(path) if path.exists() else backend.name

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.jsonl"

    def build(self, name: str, histories: Sequence[Sequence[Turn]]) -> list[System]:
        """Return the store of each history; those that are missing are built side by side and saved."""
        own, keys = self.stores[name], [history_key(turns) for turns in histories]
        missing = {k: turns for k, turns in zip(keys, histories, strict=True) if k not in own}
        if missing:
            if self.writers[name] != self.backend.name:
                raise StoreError(
                    f"{self._path(name)}: {len(missing)} histories are missing, and what is there was "
                    f"written by {self.writers[name]!r}, not by {self.backend.name!r}; use that model "
                    "(eval.chat_url, eval.chat_model) or another eval.stores"
                )
            made = {key: baselines.make(name, self.backend, self.seed) for key in missing}

            def fill(system: System, turns: Sequence[Turn], meter: Meter) -> None:
                for turn in turns:
                    system.add(turn)
                    meter.add(1)
                system.end()
                meter.add(1)

            steps = sum(len(turns) + 1 for turns in missing.values())  # the end of a history is one
            with Meter(f"{name}: writing {len(missing)} stores", steps, "steps") as meter:
                jobs = [
                    lambda s=made[k], t=turns: fill(s, t, meter) for k, turns in missing.items()
                ]
                side_by_side(jobs, self.backend)
            own |= made
            self.folder.mkdir(parents=True, exist_ok=True)
            store.save(self._path(name), own, self.writers[name])
        return [own[key] for key in keys]

    def search(
        self, name: str, questions: Sequence[Question], histories: Sequence[Sequence[Turn]]
    ) -> list[list[Note]]:
        """Return what a system finds for each question on its history, best first."""
        built = self.build(name, histories)
        if name == "rmm":
            for system in built:
                system.reranker = self.reranker
        jobs = [lambda s=s, q=q: s.search(q) for s, q in zip(built, questions, strict=True)]
        if len({id(system) for system in built}) < len(built):  # one user is one thread
            return [job() for job in jobs]
        return side_by_side(jobs, self.backend)

    def teach(self, questions: Sequence[Question], unit: str) -> list[dict[str, Any]]:
        """Train the run's reranker for RMM on questions without gold; return a line an update."""
        histories = [turns_of(question.messages, unit) for question in questions]
        stream = list(zip(self.build("rmm", histories), questions, strict=True))
        self.reranker, history = train(self.backend, stream, self.seed)
        store.save(self._path("rmm"), self.stores["rmm"], self.writers["rmm"])  # what it cost
        return history

    def costs(self) -> list[dict[str, Any]]:
        """Return a row a system: calls, tokens and seconds a turn and a question, fallbacks, size."""
        return [_cost(name, own) | {"chat": self.writers[name]}
                for name, own in self.stores.items() if own]  # fmt: skip


def as_turns(notes: Sequence[Note]) -> tuple[tuple[Turn, ...], tuple[int, ...]]:
    """Return notes as turns in the order of the turns they rest on, and their places, best first.

    So a reader sees them as it sees anything else that was chosen: dated, in time order.
    """
    order = sorted(range(len(notes)), key=lambda i: (max(notes[i].turns, default=-1), i))
    place = {note: n for n, note in enumerate(order)}
    made = tuple(
        Turn(n, (Message("user", notes[i].text, name=LABEL, time=notes[i].time),))
        for n, i in enumerate(order)
    )
    return made, tuple(place[i] for i in range(len(notes)))


def _cost(name: str, own: Mapping[str, System]) -> dict[str, Any]:
    total: Ledger = merged(system.client.ledger for system in own.values())
    replies = total.add + total.ask + total.train
    row = {
        "system": name, "histories": len(own), "measured": not unmeasured(total),
        "asked": replies.asked, "retries": replies.retries, "fallbacks": replies.fallbacks,
        "truncated": replies.truncated, "cut_tokens": replies.cut_tokens,
    }  # fmt: skip
    for phase in ("add", "ask"):
        counts = getattr(total, phase)
        for what in ("calls", "prompt_tokens", "generated_tokens", "seconds"):
            row[f"{phase}_{what}"] = getattr(counts, what) / counts.units if counts.units else None
    sizes = [system.size() for system in own.values()]
    for what in ("records", "characters"):
        row[what] = sum(size[what] for size in sizes) / len(sizes)
    return row
