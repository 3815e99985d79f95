# SPDX-License-Identifier: Apache-2.0
"""Decoding from a prompt: among the ids that a caller allows (`write`), or freely (`reply`).

The prompt's state is computed once; what is written goes into a state of fixed size, so one compiled
step serves every token. Shapes: B rows, T prompt tokens, S slots for new tokens, C candidates.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bfm.batching import Batch, bucket, pad, plan
from bfm.likelihood import logits, token_logprobs
from bfm.model.decoder import Decoder, decode
from bfm.model.split import mesh_of, row_shards
from bfm.model.state import State, fetch
from bfm.sharding import place_rows


@dataclasses.dataclass(frozen=True)
class Written:
    """What was written after one prompt: ids, and log p (nats) of each candidate of the first place."""

    ids: tuple[int, ...]
    first: dict[int, float]


def write(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    allowed: Sequence[Callable[[Sequence[int]], Sequence[int]]],
    *,
    slots: int,
    batch_size: int = 32,
    token_budget: int = 8192,
) -> list[Written]:
    """Continue each prompt greedily, each token the likeliest of `allowed[i](ids so far)`.

    A row ends where nothing is allowed any more, or after `slots` tokens. Ties go to the lower id. The
    batch plan depends on the prompts' lengths only.
    """
    done: list[Written | None] = [None] * len(prompts)
    for batch in _plan(model, prompts, batch_size, token_budget):
        rows = [prompts[i] for i in batch.rows]
        rules = [allowed[i] for i in batch.rows]
        for i, written in zip(
            batch.rows, _write(model, rows, rules, batch, bucket(slots)), strict=True
        ):
            done[i] = written
    return done


def _plan(model: Decoder, prompts, batch_size: int, token_budget: int) -> Iterator[Batch]:
    """Plan batches of prompts; where the model lies split, heights that its rows' axes divide."""
    shards = row_shards(mesh_of(model))
    for batch in plan([len(p) for p in prompts], batch_size, token_budget):
        yield batch._replace(height=-(-batch.height // shards) * shards)


def _write(model, prompts, rules, batch, slots) -> list[Written]:
    # The prompt's last token is fed as the first step, so that every step gives one next token.
    place = functools.partial(place_rows, mesh=mesh_of(model))
    tokens, lengths = pad([p[:-1] for p in prompts], batch.height, batch.width)
    prompt, made = _prefill(model, place(tokens), place(lengths), slots=slots)
    token = np.zeros(batch.height, np.int32)
    token[: len(prompts)] = [p[-1] for p in prompts]
    ids: list[list[int]] = [[] for _ in prompts]
    first: list[dict[int, float]] = [{} for _ in prompts]
    for t in range(slots):
        wanted = [sorted(rule(row)) for rule, row in zip(rules, ids, strict=True)]
        if not any(wanted):
            break
        width = bucket(max(len(w) for w in wanted))
        target = np.zeros((batch.height, 1, width), np.int32)
        active = np.zeros(batch.height, np.int32)
        for i, candidates in enumerate(wanted):
            active[i] = bool(candidates)
            target[i, 0, : len(candidates)] = candidates
        rows = map(place, (token, lengths + t, active))
        logp, made = _step(model, prompt, made, *rows, np.int32(t), place(target))
        logp_BC = fetch(logp)
        for i, candidates in enumerate(wanted):
            if candidates:
                scores = logp_BC[i, : len(candidates)]
                if not t:
                    first[i] = dict(zip(candidates, map(float, scores), strict=True))
                token[i] = candidates[int(np.argmax(scores))]
                ids[i].append(int(token[i]))
    return [Written(tuple(row), f) for row, f in zip(ids, first, strict=True)]


@functools.partial(jax.jit, static_argnames="slots")
def _prefill(model, tokens_BT, length_B, slots: int) -> tuple[State, State]:
    """Return the prompt's state and an empty one of `slots` tokens that continues from it."""
    T = tokens_BT.shape[1]
    positions_BT = jnp.broadcast_to(jnp.arange(T), tokens_BT.shape)
    segments_BT = (jnp.arange(T) < length_B[:, None]).astype(jnp.int32)
    _, prompt = decode(model, tokens_BT, positions_BT, segments_BT)

    def room(keys: jax.Array | None) -> jax.Array | None:
        return (
            None if keys is None else jnp.zeros((*keys.shape[:3], slots, keys.shape[4]), keys.dtype)
        )

    empty_BS = jnp.full((tokens_BT.shape[0], slots), -1, jnp.int32)
    made = State(
        room(prompt.k_LbKPh), room(prompt.v_LbKPh), empty_BS, prompt.inputs_LbWC, prompt.state_LbKgdv
    )  # fmt: skip
    return prompt, made


@functools.partial(jax.jit, donate_argnames="made")
def _step(model, prompt, made, token_B, position_B, active_B, slot, target_B1C):
    """Feed one token a row and return log p [B, C] of the candidates for the next, and the state."""
    x_B1D, made = _feed(model, prompt, made, token_B, position_B, active_B, slot)
    return token_logprobs(x_B1D, model.unembed_VD, target_B1C)[:, 0], made


def _feed(model, prompt, made, token_B, position_B, active_B, slot) -> tuple[jax.Array, State]:
    """Run one token a row after prompt and `made`; put what it leaves into the slot."""
    x_B1D, new = decode(
        model, token_B[:, None], position_B[:, None], active_B[:, None], (prompt, made)
    )

    def put(held: jax.Array | None, one: jax.Array | None, axis: int) -> jax.Array | None:
        if held is None:
            return None
        return jax.lax.dynamic_update_slice_in_dim(held, one.astype(held.dtype), slot, axis)

    return x_B1D, State(
        put(made.k_LbKPh, new.k_LbKPh, 3), put(made.v_LbKPh, new.v_LbKPh, 3),
        put(made.position_bP, new.position_bP, 1), new.inputs_LbWC, new.state_LbKgdv,
    )  # fmt: skip


# --- free replies ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Reply:
    """What was written after one prompt; ended: by a stop token (not part of ids), not by the limit."""

    ids: tuple[int, ...]
    ended: bool


def reply(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    stop: Collection[int],
    max_tokens: int,
    *,
    vocab: int = 0,
    temperature: float = 0.0,
    seeds: Sequence[int] = (),
    batch_size: int = 32,
    token_budget: int = 8192,
) -> list[Reply]:
    """Continue each prompt until a stop token, or for `max_tokens`; one program a shape does it all.

    vocab: ids from there on are never written (a model may have more rows than its tokenizer has ids).
    temperature 0 is greedy, ties to the lower id. Above it, row i draws from softmax(logits /
    temperature) with noise from seeds[i] (default 0) alone, whatever its neighbours in the batch.
    """
    seeds = list(seeds) or [0] * len(prompts)
    stop_S = np.array(sorted(stop), np.int32)
    vocab = vocab or model.config.vocab
    place = functools.partial(place_rows, mesh=mesh_of(model))
    done: list[Reply | None] = [None] * len(prompts)
    for batch in _plan(model, prompts, batch_size, token_budget):
        rows = [prompts[i] for i in batch.rows]
        tokens, lengths = pad([p[:-1] for p in rows], batch.height, batch.width)
        prompt, made = _prefill(model, place(tokens), place(lengths), slots=bucket(max_tokens))
        token, seed = (np.zeros(batch.height, np.int32) for _ in range(2))
        token[: len(rows)] = [p[-1] for p in rows]
        seed[: len(rows)] = [seeds[i] & 0x7FFFFFFF for i in batch.rows]
        live = np.arange(batch.height) < len(rows)
        ids_BS, count_B, ended_B = map(fetch, _continue(
            model, prompt, made, *map(place, (token, lengths, live, seed)), stop_S,
            np.int32(max_tokens), np.float32(temperature), greedy=temperature == 0.0, vocab=vocab,
        ))  # fmt: skip
        for row, i in enumerate(batch.rows):
            own = tuple(int(x) for x in ids_BS[row, : count_B[row]])
            done[i] = Reply(own, bool(ended_B[row]))
    return done


@functools.partial(jax.jit, static_argnames=("greedy", "vocab"))
def _continue(
    model,
    prompt,
    made,
    token_B,
    length_B,
    live_B,
    seed_B,
    stop_S,
    limit,
    temperature,
    greedy,
    vocab,
):
    """Return ids [B, S], how many of them each row wrote, and which rows met a stop token."""
    slots = made.position_bP.shape[1]
    keys_B = jax.vmap(jax.random.key)(seed_B)

    def wanted(carry):
        return (carry[0] < limit) & carry[3].any()

    def one(carry):
        t, made, token_B, live_B, ids_BS, count_B, ended_B = carry
        x_B1D, made = _feed(model, prompt, made, token_B, length_B + t, live_B.astype(jnp.int32), t)
        logits_BV = logits(x_B1D[:, 0], model.unembed_VD)[:, :vocab]
        if not greedy:
            noise_BV = jax.vmap(
                lambda key: jax.random.gumbel(jax.random.fold_in(key, t), logits_BV.shape[1:])
            )(keys_B)
            logits_BV = logits_BV / temperature + noise_BV
        token_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
        stopped_B = live_B & (token_B[:, None] == stop_S).any(-1)
        live_B = live_B & ~stopped_B
        ids_BS = jax.lax.dynamic_update_slice_in_dim(
            ids_BS, jnp.where(live_B, token_B, 0)[:, None], t, 1
        )
        return t + 1, made, token_B, live_B, ids_BS, count_B + live_B, ended_B | stopped_B

    B = token_B.shape[0]
    start = (
        jnp.int32(0), made, token_B, live_B, jnp.zeros((B, slots), jnp.int32),
        jnp.zeros(B, jnp.int32), jnp.zeros(B, bool),
    )  # fmt: skip
    *_, ids_BS, count_B, ended_B = jax.lax.while_loop(wanted, one, start)
    return ids_BS, count_B, ended_B
