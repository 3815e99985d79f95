# SPDX-License-Identifier: Apache-2.0
"""RMM's reranker (arXiv 2503.08026, eqs. 1-3): linear maps with residual, taught by REINFORCE.

    q' = q + W_q q      m'_j = m_j + W_m m_j      s_j = alpha q'.m'_j      p = softmax(s / tau)

Shapes: d numbers a vector, K candidates, M shown. Everything is float64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bfm.baselines.backend import Backend, side_by_side
from bfm.baselines.vectors import pack, unpack
from bfm.dialogue import Question, generator

if TYPE_CHECKING:
    from bfm.baselines.rmm import RMM

M = 5  # topics shown
BASELINE, RATE, BATCH, CLIP = 0.5, 1e-3, 4, 1.0
CALIBRATION = 50  # questions
POLICIES = ("product", "plackett_luce")


@dataclasses.dataclass
class Reranker:
    """Score candidates; two matrices that start at zero, where scores are the retriever's.

    alpha scales the scores: standard Gumbel noise has a standard deviation of 1.28, cosines among the
    best 20 one of about 0.05, so that at alpha = 1 the choice would be near chance.
    """

    w_q: np.ndarray  # [d, d]
    w_m: np.ndarray  # [d, d]
    alpha: float = 1.0
    tau: float = 0.5

    @classmethod
    def of(cls, d: int, alpha: float = 1.0) -> Reranker:
        return cls(np.zeros((d, d)), np.zeros((d, d)), alpha)

    def scores(self, query: np.ndarray, memories: np.ndarray) -> np.ndarray:
        """Return s [K] of a query [d] and candidates [K, d]."""
        q = query + self.w_q @ query
        m = memories + memories @ self.w_m.T
        return self.alpha * (m @ q)

    def gradient(
        self,
        query: np.ndarray,
        memories: np.ndarray,
        shown: list[int],
        advantage: np.ndarray,
        policy: str = "product",
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return d/dW_q and d/dW_m of sum_i advantage_i log P(shown_i), each [d, d].

        product: P(i) = softmax(s / tau)_i of each shown candidate, as the paper writes it.
        plackett_luce: P(i) among what is left after those drawn before it, s unscaled by tau: the exact
        law of the M largest of s + Gumbel noise.
        """
        if policy not in POLICIES:
            raise ValueError(f"policy: must be one of {', '.join(POLICIES)}, not {policy!r}")
        query, memories = np.asarray(query, np.float64), np.asarray(memories, np.float64)
        q = query + self.w_q @ query
        m = memories + memories @ self.w_m.T
        s = self.alpha * (m @ q)
        of_score = np.zeros(len(s))  # derivative with respect to s_j
        left = np.ones(len(s), bool)
        tau = self.tau if policy == "product" else 1.0
        for i, a in zip(shown, advantage, strict=True):
            p = np.where(left, np.exp((s - s[left].max()) / tau), 0.0)
            of_score -= a * p / p.sum() / tau
            of_score[i] += a / tau
            if policy == "plackett_luce":
                left[i] = False
        of_score *= self.alpha
        return np.outer(of_score @ m, query), np.outer(q, of_score @ memories)

    def to_json(self) -> dict[str, Any]:
        return {"w_q": pack(self.w_q), "w_m": pack(self.w_m), "alpha": self.alpha, "tau": self.tau}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Reranker:
        return cls(unpack(data["w_q"]), unpack(data["w_m"]), data["alpha"], data["tau"])


def gumbel_top(scores: np.ndarray, m: int, rng: np.random.Generator) -> list[int]:
    """Return the m candidates of largest score plus Gumbel noise, best first: m draws, none twice."""
    noise = -np.log(-np.log(rng.uniform(np.finfo(float).tiny, 1.0, len(scores))))
    return [int(i) for i in np.argsort(-(scores + noise), kind="stable")[:m]]


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
