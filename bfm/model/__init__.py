# SPDX-License-Identifier: Apache-2.0
"""The decoder: config, attention, turn state, forward pass. Imports jax, flax and numpy only."""
