# SPDX-License-Identifier: Apache-2.0
"""Turn state: what a block of tokens leaves behind so that later tokens can continue from it.

A state holds the block's own keys and values only; a sequence is a tuple of states, oldest first
(the scaffold's head shared by all turns, then a turn). A state of `b` rows serves `B` rows of new
tokens in groups of `B // b` consecutive rows without being copied: 20 questions on one turn read one
state. What is inside is the decoder's business; callers make, continue, measure and move it.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """Keys (rotated, at absolute positions) and values of one block of `P` tokens in `b` rows.

    k_LbKPh, v_LbKPh: in the weights' dtype. valid_bP: bool, False at padding.
    """

    k_LbKPh: jax.Array
    v_LbKPh: jax.Array
    valid_bP: jax.Array


def size(state: State) -> int:
    """Return the bytes that a state occupies."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def to_host(state: State) -> State:
    """Return the state as numpy arrays in host memory (a spill), bit for bit."""
    return jax.tree.map(np.asarray, state)
