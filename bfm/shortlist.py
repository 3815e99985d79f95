# SPDX-License-Identifier: Apache-2.0
"""A shortlist before scoring, for histories too long to score: BM25 and recency united."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

K1, B = 1.5, 0.75  # Robertson and Zaragoza, The Probabilistic Relevance Framework (2009)


def words(text: str) -> list[str]:
    """Split into lower-case words; each CJK character is a word, since no spaces divide them."""
    return re.findall(r"[぀-ヿ㐀-鿿가-힯]|[^\W_぀-ヿ㐀-鿿가-힯]+", text.lower())


def bm25(query: str, documents: Sequence[str]) -> list[float]:
    """Return the BM25 score of each document, idf log(1 + (N - n + 0.5) / (n + 0.5)) (Lucene's)."""
    counts = [Counter(words(document)) for document in documents]
    sizes = [count.total() for count in counts]
    mean = sum(sizes) / max(1, len(sizes)) or 1.0
    scores = [0.0] * len(documents)
    for word in dict.fromkeys(words(query)):
        holds = sum(word in count for count in counts)
        idf = math.log(1 + (len(documents) - holds + 0.5) / (holds + 0.5))
        for i, count in enumerate(counts):
            if f := count[word]:
                scores[i] += idf * f * (K1 + 1) / (f + K1 * (1 - B + B * sizes[i] / mean))
    return scores


def shortlist(query: str, documents: Sequence[str], n: int) -> list[int]:
    """Return at most n indices, ascending: best by BM25 and most recent in turn, ties to the recent.

    shortlist("tea", ["tea", "x", "tea tea", "y"], 2) == [2, 3]: the best match, then the last turn.
    """
    scores = bm25(query, documents)
    recent = range(len(documents) - 1, -1, -1)
    best = sorted(recent, key=lambda i: -scores[i])
    chosen: dict[int, None] = {}
    for pair in zip(best, recent, strict=True):
        for i in pair:
            if len(chosen) < n:
                chosen[i] = None
    return sorted(chosen)
