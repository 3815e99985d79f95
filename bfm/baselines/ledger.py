# SPDX-License-Identifier: Apache-2.0
"""A backend as one system uses it: every call, token, retry and fallback is counted."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np

from bfm.baselines import replies
from bfm.baselines.backend import Backend, BackendError, Cut, ask
from bfm.baselines.tasks import Task

T = TypeVar("T")
Kind = Literal["reply", "retry", "fallback", "rule"]  # rule: no reply was needed
MOST_FALLBACKS = 0.2
_LEAST = 200  # tokens of data, below which no prompt makes sense
_ENCODER = threading.Lock()  # encoders need not bear several threads


@dataclasses.dataclass
class Counts:
    """What one phase cost.

    units: turns added or questions asked. calls: of the chat model, retries included. asked: replies
    wanted; of these `retries` came at the second try and `fallbacks` not at all. truncated: replies
    stopped at max_tokens. cut_tokens: tokens of texts that did not fit a prompt. Tokens are those of
    the messages' texts, without the chat template. seconds: of chat model and encoder.
    """

    units: int = 0
    calls: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    embedded: int = 0
    seconds: float = 0.0
    asked: int = 0
    retries: int = 0
    fallbacks: int = 0
    truncated: int = 0
    cut_tokens: int = 0

    def __add__(self, other: Counts) -> Counts:
        mine, theirs = dataclasses.asdict(self), dataclasses.asdict(other)
        return Counts(**{name: mine[name] + theirs[name] for name in mine})


@dataclasses.dataclass
class Ledger:
    """The costs of a system, split by adding turns, asking questions and training (RMM)."""

    add: Counts = dataclasses.field(default_factory=Counts)
    ask: Counts = dataclasses.field(default_factory=Counts)
    train: Counts = dataclasses.field(default_factory=Counts)

    def __add__(self, other: Ledger) -> Ledger:
        return Ledger(self.add + other.add, self.ask + other.ask, self.train + other.train)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Ledger:
        return cls(**{name: Counts(**data[name]) for name in ("add", "ask", "train")})


def merged(ledgers: Iterable[Ledger]) -> Ledger:
    """Return the sum over users."""
    return sum(ledgers, Ledger())


def unmeasured(ledger: Ledger) -> bool:
    """Say whether over a fifth of the replies asked for fell back: then the model was not measured."""
    total = ledger.add + ledger.ask + ledger.train
    return total.fallbacks > MOST_FALLBACKS * total.asked


class Asked(NamedTuple, Generic[T]):
    """A parsed reply, or None where the caller must fall back; how it came; the last reply itself."""

    value: T | None
    kind: Kind
    reply: str


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line of the audit log: what happened to a record, from which turns, and by which reply."""

    event: str
    turns: tuple[int, ...]
    before: str
    after: str
    kind: Kind
    reply: str = ""

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Entry:
        return cls(**data | {"turns": tuple(data["turns"])})


class Client:
    """The calls of one user's system. Counts go to the phase that `counting` names."""

    def __init__(self, backend: Backend, ledger: Ledger | None = None):
        self.backend = backend
        self.ledger = ledger or Ledger()
        self._phase: Literal["add", "ask", "train"] = "add"

    @property
    def counts(self) -> Counts:
        return getattr(self.ledger, self._phase)

    @contextlib.contextmanager
    def counting(self, phase: Literal["add", "ask", "train"], units: int = 1) -> Iterator[None]:
        before, self._phase = self._phase, phase
        self.counts.units += units
        try:
            yield
        finally:
            self._phase = before

    def generate(self, prompt: str, max_tokens: int) -> str:
        """Return the reply to one user message. Raises BackendError where it is too long."""
        tokens = self.backend.count_tokens(prompt)
        if tokens > self.backend.room:
            raise BackendError(f"a prompt of {tokens} tokens; the room is {self.backend.room}")
        text, seconds = ask(self.backend, [{"role": "user", "content": prompt}], max_tokens)
        # A lone surrogate, which JSON can smuggle in, is no text and breaks every tokenizer.
        clean = text.encode("utf-8", "replace").decode()
        counts = self.counts
        counts.calls += 1
        counts.seconds += seconds
        counts.prompt_tokens += tokens
        counts.generated_tokens += self.backend.count_tokens(clean)
        counts.truncated += isinstance(text, Cut)
        return Cut(clean) if isinstance(text, Cut) else clean

    def ask(self, task: Task, data: str, parse: Callable[[str], T | None]) -> Asked[T]:
        """Ask, parse leniently, ask once more in fewer words, or say that it is a fallback."""
        self.counts.asked += 1
        first = f"{task.what}\n\n{data}\n\n{task.form}"
        for kind, prompt in (("reply", first), ("retry", f"{data}\n\n{task.again}")):
            text = self.generate(prompt, task.max_tokens)
            value = parse(replies.clean(text, cut=isinstance(text, Cut), prose=task.prose))
            if value is not None:
                self.counts.retries += kind == "retry"
                return Asked(value, kind, str(text))
        self.counts.fallbacks += 1
        return Asked(None, "fallback", str(text))

    def left(self, task: Task) -> int:
        """Return the tokens that a task leaves for its data; pieces joined may take a few more each."""
        words = f"{task.what}\n\n\n\n{task.form}\n\n{task.again}"
        left = self.backend.room - self.backend.count_tokens(words) - 16
        if left < _LEAST:
            raise BackendError(
                f"room: {self.backend.room} tokens leave {left} for data in a prompt"
            )
        return left

    def clip(self, text: str, room: int) -> str:
        """Return the text, cut visibly (and counted) where it takes more than `room` tokens."""
        count = self.backend.count_tokens
        if len(text.encode()) <= room or count(text) <= room:  # no token is less than a byte
            return text
        low, high = 0, len(text)  # the longest prefix that fits, with the mark
        while low < high - 1:
            middle = (low + high) // 2
            low, high = (middle, high) if count(text[:middle]) <= room - 2 else (low, middle)
        short = text[:low]
        self.counts.cut_tokens += count(text) - count(short)
        return short.rstrip() + " ..."

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Return unit vectors float32 [n, d]; an empty list is not sent. Raises BackendError."""
        started = time.perf_counter()
        with _ENCODER:
            vectors = np.asarray(self.backend.embed(list(texts)))
        self.counts.seconds += time.perf_counter() - started
        self.counts.embedded += len(texts)
        if vectors.ndim != 2 or len(vectors) != len(texts) or not vectors.shape[1]:
            raise BackendError(f"embed: {len(texts)} texts gave an array of shape {vectors.shape}")
        if not np.isfinite(vectors).all():
            row = int(np.flatnonzero(~np.isfinite(vectors).all(1))[0])
            raise BackendError(f"embed: the vector of text {row} is not finite")
        length = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
        return (vectors / np.maximum(length, 1e-12)).astype(np.float32)
