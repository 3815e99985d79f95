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
    Where metas name "entities" there are also components_train, .. of groups that share none, however
    indirectly; and of dev and test dev_seen and dev_unseen, .., by whether train has one of theirs.

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
    if any("entities" in meta for meta in metas):
        splits |= _by_entity(metas, splits, order)
    if train_ids:
        splits["per20_train"] = [i for i, id_ in enumerate(ids) if id_ in train_ids]
        splits["per20_test"] = [i for i, id_ in enumerate(ids) if id_ not in train_ids]
    return splits


def _by_entity(
    metas: Sequence[Mapping[str, Any]], splits: Mapping[str, list[int]], order: Sequence[str]
) -> dict[str, list[int]]:
    named = [set(meta.get("entities", ())) for meta in metas]
    known = set().union(*(named[i] for i in splits["train"]))
    made: dict[str, list[int]] = {}
    for part in ("dev", "test"):
        made[f"{part}_seen"] = [i for i in splits[part] if named[i] & known]
        made[f"{part}_unseen"] = [i for i in splits[part] if not named[i] & known]
    # Components: rows are merged with all rows that share their group or an entity.
    of = list(range(len(metas)))

    def root(i: int) -> int:
        while of[i] != i:
            of[i] = of[of[i]]
            i = of[i]
        return i

    first: dict[tuple[str, str], int] = {}
    for i, meta in enumerate(metas):
        for key in (("group", meta["group"]), *(("entity", name) for name in named[i])):
            of[root(i)] = root(first.setdefault(key, i))
    rows: dict[int, list[int]] = {}
    for i in sorted(range(len(metas)), key=lambda i: order.index(metas[i]["group"])):
        rows.setdefault(root(i), []).append(i)
    # The largest first, each to the part that is furthest below its share.
    parts: dict[str, list[int]] = {part: [] for part in SHARES}
    for component in sorted(rows.values(), key=len, reverse=True):
        lacking = max(SHARES, key=lambda part: SHARES[part] * len(metas) - len(parts[part]))
        parts[lacking] += component
    return made | {f"components_{part}": sorted(rows) for part, rows in parts.items()}


def _share(place: int, n: int) -> str:
    edge = 0.0
    for part, share in SHARES.items():
        edge += share
        if place < round(edge * n):
            return part
    return part
