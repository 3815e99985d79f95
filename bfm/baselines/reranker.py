# SPDX-License-Identifier: Apache-2.0
"""RMM's reranker (arXiv 2503.08026, eqs. 1-3): linear maps with residual, their gradient.

    q' = q + W_q q      m'_j = m_j + W_m m_j      s_j = alpha q'.m'_j      p = softmax(s / tau)

Shapes: d numbers a vector, K candidates, M shown. Everything is float64.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from bfm.baselines.vectors import pack, unpack

M = 5  # topics shown
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
