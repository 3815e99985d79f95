# SPDX-License-Identifier: Apache-2.0
"""Saliency: how much each turn of a history changes log p(question) and log p(answer).

Works on ids: a scored sequence is head + prefix(turn) + suffix(question, options, answer), and its
baseline is head + suffix. The head is run once, every distinct turn once, every suffix continues
from the turn's state. Sums are float64 on the host; device values are fp32.

A block ends one token early and the next begins with that token, so that a suffix's first token has
a predictor like any other:   head[:-1] | head[-1] prefix[:-1] | prefix[-1] suffix
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bfm.batching import Batch, bucket, pad, plan
from bfm.likelihood import Spans, span_logprobs
from bfm.model.decoder import Decoder, decode
from bfm.model.split import mesh_of, row_shards
from bfm.model.state import State, fetch
from bfm.sharding import place_rows
from bfm.store import StateStore, TurnStates, state_key

# Compiled programs of this process, by function, shapes and configuration; they hold no weights.
_PROGRAMS: dict[tuple, Callable] = {}
TOKEN_BUDGET = 4096  # padded tokens a batch; more does not raise the rate on a CPU, less lowers it


class ScoreError(ArithmeticError):
    """A log-probability that is not finite."""


@dataclasses.dataclass(frozen=True)
class Suffix:
    """The part of a sequence after the memory: question, options, header, answer, as ids.

    q, a: half-open token ranges within `ids`. choices: ids that compete at position a[0] (option
    letters); choices[right] is the reference. Without an answer, a is None.
    """

    ids: tuple[int, ...]
    q: tuple[int, int]
    a: tuple[int, int] | None = None
    choices: tuple[int, ...] = ()
    right: int = 0

    def targets(self) -> tuple[list[int], list[list[int]]]:
        """Return the places of the scored tokens and the candidate ids at each, q first, then a."""
        spans = [self.q] + ([self.a] if self.a else [])
        places = [i for start, end in spans for i in range(start, end)]
        width = max(1, len(self.choices))
        ids = [[self.ids[i]] * width for i in places]
        if self.choices:
            at = self.q[1] - self.q[0]
            # The reference stands first, so that candidate 0 is the token of the sequence itself.
            ids[at] = [self.choices[self.right], *_without(self.choices, self.right)]
        return places, ids


def _without(items: Sequence[int], index: int) -> list[int]:
    return [item for i, item in enumerate(items) if i != index]


@dataclasses.dataclass(frozen=True)
class Job:
    """One history: the prefixes of its turns and the suffixes to continue each of them with."""

    prefixes: tuple[tuple[int, ...], ...]
    suffixes: tuple[Suffix, ...]

    @property
    def history_tokens(self) -> int:
        """Tokens of the distinct prefixes."""
        return sum(map(len, set(self.prefixes)))

    @property
    def asked_tokens(self) -> int:
        """Tokens of the suffixes, each after every distinct prefix and after the head."""
        return sum(len(s.ids) for s in self.suffixes) * (len(set(self.prefixes)) + 1)

    @property
    def tokens(self) -> int:
        """Tokens to compute: the history once, the suffixes after each of its turns."""
        return self.history_tokens + self.asked_tokens


def unanswered(job: Job) -> Job:
    """Return the job without its answers: what the base model scores beside a judge."""
    first = job.suffixes[0]
    return Job(job.prefixes, (Suffix(first.ids[: first.q[1]], first.q),))


@dataclasses.dataclass(frozen=True)
class Scored:
    """Log-probabilities of one sequence, nats: per token of q and a (fp32), log posterior of choices.

    log_choice: log p(reference letter) minus logsumexp over all letters; None without choices.
    choices: log p of every letter, the reference first.
    """

    q: np.ndarray
    a: np.ndarray | None
    log_choice: float | None
    choices: np.ndarray | None = None

    @property
    def logp_q(self) -> float:
        return float(self.q.sum(dtype=np.float64))

    @property
    def logp_a(self) -> float | None:
        return None if self.a is None else float(self.a.sum(dtype=np.float64))


@dataclasses.dataclass
class Timing:
    """Seconds and counts; `score_s` excludes compilation (`compile_s`)."""

    compile_s: float = 0.0
    score_s: float = 0.0
    sequences: int = 0
    prefix_tokens: int = 0
    suffix_tokens: int = 0


class Scorer:
    """A decoder and the state of the head that all turns share; scores jobs in planned batches."""

    def __init__(
        self,
        model: Decoder,
        head: Sequence[int],
        *,
        batch_size: int = 32,
        token_budget: int = TOKEN_BUDGET,
        store: StateStore | TurnStates | None = None,
        identity: str = "",
    ):
        """Prepare to score with a model inside a scaffold whose first tokens are `head`.

        store: keeps turn states between calls, so that a second question on a history costs only its
        suffix. identity: names weights, dtype, template, tokenizer and code; needed with a store,
        because it is part of every key. Where the model lies split over a mesh, so do the rows.
        """
        if store is not None and not identity:
            raise ValueError(
                "identity: needed with a store; a state must never serve another model"
            )
        if len(head) < 2:
            raise ValueError("head: needs two tokens before the message, the template gives fewer")
        self.model, self.head = model, tuple(head)
        self.mesh = mesh_of(model)
        self.shards = row_shards(self.mesh)
        self.batch_size, self.token_budget = batch_size, token_budget
        self.store, self.identity = store, f"{identity} {self.head}"
        self.timing = Timing()
        self._last: object = None  # what was dispatched last
        ids, lengths = pad([self._checked(self.head)[:-1]], 1, len(head) - 1)
        self._head_state: State = self._call(_prefill, (), ids, lengths, np.int32(0))

    def score(
        self,
        jobs: Sequence[Job],
        on_tokens: Callable[[int], None] = lambda n: None,
        owner: Hashable = None,
    ) -> list[list[list[Scored]]]:
        """Score every suffix of every job after nothing and after each prefix.

        Returns result[job][turn][suffix]; turn 0 is the baseline without memory, turn i + 1 is
        `job.prefixes[i]`. Equal prefixes of a job are computed once and share the result; so are those
        of jobs on one history (the same prefixes), which are then questions asked of it together.
        `on_tokens(n)` is told of tokens as they are done; `owner` (a user) owns the states that a
        store keeps. Raises ScoreError on a non-finite value.
        """
        histories: dict[tuple, list[int]] = {}  # the jobs on each
        for j, job in enumerate(jobs):
            histories.setdefault(job.prefixes, []).append(j)
        rows, places, spans = [], {}, {}
        for prefixes, members in histories.items():
            suffixes, place = [], {}
            for j in members:
                spans[j] = slice(len(suffixes), len(suffixes) + len(jobs[j].suffixes))
                places[j] = place
                suffixes += jobs[j].suffixes
            for prefix in dict.fromkeys(((), *prefixes)):
                place[prefix] = len(rows)
                rows.append((prefix, tuple(suffixes), len(members)))
        done: list[list[Scored]] = [[] for _ in rows]
        started, compile_s = time.perf_counter(), self.timing.compile_s
        for batch, scored, tokens in self._run(rows, owner):
            for row, result in zip(batch.rows, scored, strict=True):
                done[row] = result
            on_tokens(tokens)
        elapsed = time.perf_counter() - started - (self.timing.compile_s - compile_s)
        self.timing.score_s += elapsed
        return [
            [done[places[j][prefix]][spans[j]] for prefix in ((), *job.prefixes)]
            for j, job in enumerate(jobs)
        ]

    def _run(self, rows, owner: Hashable) -> Iterator[tuple[Batch, list[list[Scored]], int]]:
        """Plan, dispatch ahead of the device by two batches, and read results in plan order."""
        queue: deque = deque()
        for batch in self._plan(rows):
            queue.append(self._dispatch(batch, rows, owner))
            if len(queue) > 2:
                yield self._collect(*queue.popleft())
        while queue:
            yield self._collect(*queue.popleft())

    def _plan(self, rows) -> Iterator[Batch]:
        # Rows of one batch have the same number of suffixes; bare rows (no memory) continue the head.
        groups: dict[tuple[bool, int, int], list[int]] = {}
        for i, (prefix, suffixes, _) in enumerate(rows):
            width = max(len(s.choices) for s in suffixes)
            groups.setdefault((bool(prefix), len(suffixes), width), []).append(i)
        for (has_prefix, _, _), members in sorted(groups.items(), reverse=True):
            lengths = [
                len(rows[i][0]) if has_prefix else max(len(s.ids) for s in rows[i][1])
                for i in members
            ]
            for batch in plan(lengths, self.batch_size, self.token_budget):
                yield Batch(
                    tuple(members[k] for k in batch.rows),
                    -(-batch.height // self.shards) * self.shards,
                    batch.width if has_prefix else 0,
                )

    def _state(self, blocks, batch: Batch, owner: Hashable) -> State:
        """Return the state of a batch of turns: from the store, or computed."""
        ids, lengths = pad(blocks, batch.height, batch.width)
        base = np.int32(len(self.head) - 1)

        def make() -> State:
            self.timing.prefix_tokens += int(lengths.sum())
            return self._call(_prefill, (self._head_state,), ids, lengths, base)

        if self.store is None:
            return make()
        return self.store.get(owner, state_key(self.identity, blocks, ids.shape), make)

    def _dispatch(self, batch: Batch, rows, owner: Hashable):
        prefixes = [self._checked(rows[i][0]) for i in batch.rows]
        carried = [(*self.head[-1:], *prefix)[-1] for prefix in prefixes]
        past, base = (self._head_state,), np.full(batch.height, len(self.head) - 1, np.int32)
        if batch.width:
            blocks = [(*self.head[-1:], *prefix[:-1]) for prefix in prefixes]
            past = (*past, self._state(blocks, batch, owner))
            base[: len(blocks)] += [len(block) for block in blocks]
        # Each row's suffixes longest first, so that those computed together have one width.
        suffixes = [rows[i][1] for i in batch.rows]
        orders = [sorted(range(len(g)), key=lambda k, g=g: -len(g[k].ids)) for g in suffixes]
        parts, k = [], 0
        while k < len(orders[0]):
            longest = max(len(g[o[k]].ids) for g, o in zip(suffixes, orders, strict=True))
            width = bucket(1 + longest)
            step = max(1, self.token_budget // (batch.height * width))
            chosen = [o[k : k + step] for o in orders]
            part = [[g[i] for i in c] for g, c in zip(suffixes, chosen, strict=True)]
            logp = self._continue(past, base, carried, part, batch.height, width)
            parts.append((chosen, part, logp))
            k += step
        n_suffix = sum(len(s.ids) for g in suffixes for s in g)
        # Counted as if each job on a history were alone, which is what a meter was told of.
        n_prefix = sum(len(rows[i][0]) * rows[i][2] for i in batch.rows)
        self.timing.suffix_tokens += n_suffix
        self.timing.sequences += sum(map(len, suffixes))
        return batch, parts, n_prefix + n_suffix

    def _continue(self, past, base, carried, suffixes, height: int, width: int):
        """Continue each row's state with its suffixes: device log-probabilities [height * r, n, C]."""
        r = len(suffixes[0])
        flat = [s for group in suffixes for s in group]
        blocks = [
            (first, *self._checked(s.ids))
            for first, group in zip(carried, suffixes, strict=True)
            for s in group
        ]
        ids, lengths = pad(blocks, height * r, width)
        targets = [s.targets() for s in flat]
        n = bucket(max(len(index) for index, _ in targets))
        c = max(len(s.choices) for s in flat) or 1
        index = np.zeros((height * r, n), np.int32)
        target = np.zeros((height * r, n, c), np.int32)
        for i, (places, candidates) in enumerate(targets):
            index[i, : len(places)] = places
            for k, candidate in enumerate(candidates):
                target[i, k] = candidate + candidate[:1] * (c - len(candidate))
        return self._call(_score, past, ids, lengths, np.repeat(base, r), index, target)

    def _collect(self, batch: Batch, parts, tokens: int):
        results = [[None] * sum(len(chosen[row]) for chosen, _, _ in parts)
                   for row in range(len(batch.rows))]  # fmt: skip
        for chosen, part, logp_device in parts:
            logp_MnC, at = fetch(logp_device), 0
            for row, group in enumerate(part):
                for i, suffix in zip(chosen[row], group, strict=True):
                    results[row][i] = _scored(suffix, logp_MnC[at])
                    at += 1
        return batch, results, tokens

    def _checked(self, ids: Sequence[int]) -> Sequence[int]:
        # JAX clamps or wraps an id outside the table in silence.
        vocab = self.model.config.vocab
        if ids and not (min(ids) >= 0 and max(ids) < vocab):
            raise ValueError(f"token id outside 0..{vocab - 1}: the tokenizer is of another model")
        return ids

    def _call(self, function: Callable, past: tuple[State, ...], *arrays):
        """Run a function at its shape, compiling at first sight and timing that apart."""
        args = (self.model, past, *(place_rows(x, self.mesh) for x in arrays))
        if jax.config.jax_disable_jit:  # to look inside: every operation as it stands
            return function(*args)
        leaves, structure = jax.tree.flatten(args)
        shapes = ((np.shape(x), x.dtype, getattr(x, "sharding", None)) for x in leaves)
        key = (function, structure, *shapes)
        if key not in _PROGRAMS:
            # Let the device finish first: work that ran under a compilation would seem to cost nothing.
            jax.block_until_ready(self._last)
            started = time.perf_counter()
            _PROGRAMS[key] = jax.jit(function).lower(*args).compile()
            self.timing.compile_s += time.perf_counter() - started
        self._last = _PROGRAMS[key](*args)
        return self._last


def _prefill(model, past, tokens_BT, length_B, base) -> State:
    T = tokens_BT.shape[1]
    positions_BT = jnp.broadcast_to(base + jnp.arange(T), tokens_BT.shape)
    segments_BT = (jnp.arange(T) < length_B[:, None]).astype(jnp.int32)
    return decode(model, tokens_BT, positions_BT, segments_BT, past)[1]


def _score(model, past, tokens_BT, length_B, base_B, index_Bn, target_BnC) -> jax.Array:
    T = tokens_BT.shape[1]
    positions_BT = base_B[:, None] + jnp.arange(T)
    segments_BT = (jnp.arange(T) < length_B[:, None]).astype(jnp.int32)
    spans = Spans(index_Bn, target_BnC, jnp.zeros_like(index_Bn))
    return span_logprobs(model, tokens_BT, positions_BT, segments_BT, spans, past, n_spans=1)[0]


def _scored(suffix: Suffix, logp_nC: np.ndarray) -> Scored:
    n_q = suffix.q[1] - suffix.q[0]
    n_a = suffix.a[1] - suffix.a[0] if suffix.a else 0
    logp_nC = logp_nC[: n_q + n_a]
    if not np.isfinite(logp_nC).all():
        raise ScoreError("a log-probability is not finite: the weights hold nan or overflow")
    log_choice = letters = None
    if suffix.choices:
        letters = logp_nC[n_q, : len(suffix.choices)].astype(np.float64)
        log_choice = float(letters[0] - np.logaddexp.reduce(letters))
    a = logp_nC[n_q:, 0] if suffix.a else None
    return Scored(logp_nC[:n_q, 0], a, log_choice, letters)


def programs() -> int:
    """Return how many programs this process has compiled for scoring."""
    return len(_PROGRAMS)


def focus(sal_a: Sequence[float], tau: float, max_focus: int) -> list[int]:
    """Return S_tau = {i : Sal_a(c_i) > tau}, most salient first, ties by lower index (DESIGN: focus).

    Not a number never enters.
    """
    chosen = [i for i, value in enumerate(sal_a) if value > tau]
    return sorted(chosen, key=lambda i: (-sal_a[i], i))[:max_focus]
