# SPDX-License-Identifier: Apache-2.0
"""Turn state: what a block of tokens leaves behind so that later tokens can continue from it.

A sequence is a tuple of states, oldest first (the scaffold's head shared by all turns, then a turn).
Keys and values in a state are the block's own; a recurrent state includes everything before it, so
only the newest one is read. A state of `b` rows serves `B` rows of new tokens in groups of `B // b`
consecutive rows without being copied: 20 questions on one turn read one state. What is inside is the
decoder's business; callers make, continue, measure and move it.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from jax.experimental import multihost_utils


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """What one block of `P` tokens in `b` rows leaves, by layer; a part that no layer has is None.

    k_LbKPh, v_LbKPh: keys (rotated, at absolute positions) and values of the softmax layers, in the
    weights' dtype. position_bP: int32, -1 at padding. inputs_LbWC: last convolution inputs and
    state_LbKgdv: recurrent state of the linear layers, fp32, after the row's last token.
    """

    k_LbKPh: jax.Array | None
    v_LbKPh: jax.Array | None
    position_bP: jax.Array
    inputs_LbWC: jax.Array | None
    state_LbKgdv: jax.Array | None


def size(state: State) -> int:
    """Return the bytes that a state occupies."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def fetch(x: jax.Array) -> np.ndarray:
    """Bring a whole array to the host; where other processes hold parts of it, all of them call."""
    if x.is_fully_addressable:
        return np.asarray(x)
    return multihost_utils.process_allgather(x, tiled=True)


def to_host(state: State) -> State:
    """Return the state as numpy arrays in host memory (a spill), bit for bit."""
    return jax.tree.map(np.asarray, state)
