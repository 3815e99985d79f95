# SPDX-License-Identifier: Apache-2.0
"""Batch plans: which rows go together, at which padded shape. A function of lengths and limits only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

SMALLEST_BUCKET = 8
FILL_TOKENS = 512  # a batch of fewer tokens multiplies matrices below the full rate
NEAR = 0.75  # rows at least this share of a batch's width may fill it


class Batch(NamedTuple):
    """Rows (indices into the input), padded to `height` rows of `width` tokens."""

    rows: tuple[int, ...]
    height: int
    width: int


def bucket(length: int, parts: int = 4) -> int:
    """Round a length up to its bucket: multiples of 8, at least `parts` of them an octave.

    bucket(1) == 8, bucket(53) == 56, bucket(128) == 128, bucket(129) == 160, bucket(300) == 320. With
    4 parts padding is at most 25 % of the length above 32; the number of shapes grows with log2 of the
    longest row.
    """
    octave = 1 << max(0, length - 1).bit_length()  # the power of two at or above the length
    step = max(SMALLEST_BUCKET, octave // (2 * parts))
    return max(1, -(-length // step)) * step


def plan(lengths: Sequence[int], batch_size: int, token_budget: int) -> list[Batch]:
    """Group rows of like length, longest first.

    A batch is full (at most `batch_size` rows and `token_budget` padded tokens; a single longer row
    stands alone) when that many rows are near its width. Else it holds the rows of one bucket, and
    shorter ones only to reach FILL_TOKENS or its height, one of 1, 2, 3, 4, 6, 8, 12, .. So a long
    history has about one shape a bucket. The plan depends on the arguments only.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    batches, start = [], 0
    while start < len(order):
        width = bucket(lengths[order[start]])
        limit = max(1, min(batch_size, token_budget // width))
        following = [bucket(lengths[i]) for i in order[start : start + limit]]
        if len(following) == limit and following[-1] >= width * NEAR:
            height = limit
        else:
            same = following.count(width)
            wanted = min(limit, max(same, -(-FILL_TOKENS // width)), len(order) - start)
            height = min(limit, _height(wanted))
        rows = tuple(order[start : start + height])
        batches.append(Batch(rows, height, width))
        start += len(rows)
    return batches


def _height(rows: int) -> int:
    power = 1 << (rows - 1).bit_length()
    return power * 3 // 4 if rows <= power * 3 // 4 and power > 2 else power


def pad(rows: Sequence[Sequence[int]], height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Right-pad rows of ids to int32 [height, width]; return it with the true lengths [height]."""
    ids = np.zeros((height, width), np.int32)
    lengths = np.zeros(height, np.int32)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
        lengths[i] = len(row)
    return ids, lengths
