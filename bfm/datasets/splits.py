# SPDX-License-Identifier: Apache-2.0
"""Which examples belong together: splits that never cut a user, persona, trajectory or preference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bfm.datasets.common import permutation

FOLDS = 5
SHARES = {"train": 0.6, "dev": 0.2, "test": 0.2}  # of groups, where the source names no split


def make(
    metas: Sequence[Mapping[str, Any]],
    name: str,
    seed: int,
    train_ids: set[str] = frozenset(),
    ids: Sequence[str] = (),
) -> dict[str, list[int]]:
    """Return split name -> indices, in file order: all, train, dev, test and folds for out-of-fold use.

    metas: each example's `meta`; its "group" is never cut. Official splits (`meta["split"]`) stand as
    they are; else groups are dealt out in an order that depends on `seed` and `name` only.
    `foldK_test` are FOLDS disjoint parts of everything, `foldK_train` what each leaves.
    train_ids: a published list of training ids, which becomes per20_train and per20_test.

    >>> sorted(make([{"group": "a"}, {"group": "b"}, {"group": "a"}], "x", 0)["all"])
    [0, 1, 2]
    """  # fmt: skip
    groups = sorted({meta["group"] for meta in metas})
    order = [groups[i] for i in permutation(len(groups), seed, f"splits {name}")]
    place = {group: i for i, group in enumerate(order)}
    splits: dict[str, list[int]] = {"all": list(range(len(metas)))}
    if any("split" in meta for meta in metas):
        parts = {meta["split"] for meta in metas}
        of = [meta["split"] for meta in metas]
    else:
        parts, of = set(SHARES), [_share(place[meta["group"]], len(order)) for meta in metas]
    for part in sorted(parts):
        splits[part] = [i for i, named in enumerate(of) if named == part]
    for k in range(FOLDS if len(order) >= FOLDS else 0):
        held = [place[meta["group"]] % FOLDS == k for meta in metas]
        splits[f"fold{k}_test"] = [i for i, out in enumerate(held) if out]
        splits[f"fold{k}_train"] = [i for i, out in enumerate(held) if not out]
    if train_ids:
        splits["per20_train"] = [i for i, id_ in enumerate(ids) if id_ in train_ids]
        splits["per20_test"] = [i for i, id_ in enumerate(ids) if id_ not in train_ids]
    return splits


def _share(place: int, n: int) -> str:
    edge = 0.0
    for part, share in SHARES.items():
        edge += share
        if place < round(edge * n):
            return part
    return part
