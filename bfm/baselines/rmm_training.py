# SPDX-License-Identifier: Apache-2.0
"""RMM's reranker taught by REINFORCE (arXiv 2503.08026, eq. 3): what an answer cites is rewarded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bfm.baselines.backend import Backend, side_by_side
from bfm.baselines.reranker import M, Reranker, gumbel_top
from bfm.baselines.rmm import RMM
from bfm.dialogue import Question, generator

BASELINE, RATE, BATCH, CLIP = 0.5, 1e-3, 4, 1.0
CALIBRATION = 50  # questions


def train(
    backend: Backend, stream: Sequence[tuple[RMM, Question]], seed: int = 0, policy: str = "product"
) -> tuple[Reranker, list[dict[str, Any]]]:
    """Teach one reranker on a stream of questions, no gold: noise on, reward 1 if cited, else -1.

    The systems (made with `backend`) keep theirs; set `.reranker` to the result to use it. Returns it
    and a line an update: questions read so far, cited share, unknown answers, reward, norms. Raises
    ValueError where no system holds a topic.
    """
    found = []
    for system, question in stream:
        with system.client.counting("train"):
            found.append(system.candidates(question))
    known = [(i, c) for i, c in enumerate(found) if c is not None]
    if not known:
        raise ValueError("train: no system of the stream holds a topic; add turns and call end()")
    spread = [float((m @ q).std()) for _, (rows, q, m) in known[:CALIBRATION] if len(rows) > 1]
    mean = float(np.mean(spread)) if spread else 0.0
    made = Reranker.of(known[0][1][1].size, 1 / mean if mean > 1e-6 else 1.0)
    history = []
    for start in range(0, len(known), BATCH):
        batch = known[start : start + BATCH]
        shown = {
            i: gumbel_top(made.scores(q, m), M, generator(seed, f"rmm {i} {stream[i][1].id}"))
            for i, (_, q, m) in batch
        }
        cited = _cited(backend, stream, batch, shown)
        gradients, rewards = [], []
        for i, (_, q, m) in batch:
            if cited[i] is not None:  # unknown is not the same as not cited
                reward = np.array([1.0 if n in cited[i] else -1.0 for n in range(len(shown[i]))])
                gradients.append(made.gradient(q, m, shown[i], reward - BASELINE, policy))
                rewards += [*reward]
        norm = 0.0
        if gradients:
            step = [np.mean(parts, axis=0) for parts in zip(*gradients, strict=True)]
            norm = float(np.sqrt(sum((part**2).sum() for part in step)))
            rate = RATE * min(1.0, CLIP / max(norm, 1e-12))
            made.w_q += rate * step[0]
            made.w_m += rate * step[1]
        history.append({
            "questions": start + len(batch), "unknown": len(batch) - len(gradients),
            "cited": float(np.mean(np.array(rewards) > 0)) if rewards else None,
            "reward": float(np.mean(rewards)) if rewards else None, "gradient_norm": norm,
            "norm_q": float(np.linalg.norm(made.w_q)), "norm_m": float(np.linalg.norm(made.w_m)),
        })  # fmt: skip
    return made, history


def _cited(backend: Backend, stream, batch, shown) -> dict[int, list[int] | None]:
    """Ask for the citations of a batch at once; the questions of one user follow each other."""
    jobs: dict[int, list[int]] = {}
    for i, _ in batch:
        jobs.setdefault(id(stream[i][0]), []).append(i)
    rows = {i: [candidates[0][n] for n in shown[i]] for i, candidates in batch}

    def cite(indices: list[int]) -> list[tuple[int, list[int] | None]]:
        made = []
        for i in indices:
            system, question = stream[i]
            with system.client.counting("train", 0):
                made.append((i, system.cite(question, rows[i])))
        return made

    users = side_by_side([lambda own=own: cite(own) for own in jobs.values()], backend)
    return dict(pair for user in users for pair in user)
