# SPDX-License-Identifier: Apache-2.0
"""Splits never cut a group, cover everything once, and depend on the seed only."""

import os
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from bfm.datasets.common import permutation
from bfm.datasets.splits import FOLDS, make

groups = st.lists(st.sampled_from([f"user {i}" for i in range(12)]), min_size=1, max_size=60)


@given(groups, st.integers(0, 3))
def test_parts_cover_all_once_and_cut_no_group(names, seed):
    metas = [{"group": name} for name in names]
    splits = make(metas, "x", seed)
    assert splits == make(metas, "x", seed)
    parts = [splits[name] for name in ("train", "dev", "test")]
    assert sorted(i for part in parts for i in part) == splits["all"] == list(range(len(names)))
    folds = [splits[f"fold{k}_test"] for k in range(FOLDS) if f"fold{k}_test" in splits]
    assert bool(folds) == (len(set(names)) >= FOLDS)
    if folds:
        assert sorted(i for part in folds for i in part) == splits["all"]
        for k in range(FOLDS):
            assert not set(splits[f"fold{k}_test"]) & set(splits[f"fold{k}_train"])
    for part in (parts, folds):
        held = [{names[i] for i in indices} for indices in part]
        assert sum(map(len, held)) == len(set().union(*held))  # no name stands in two parts


def test_shares_of_groups():
    splits = make([{"group": str(i)} for i in range(100)], "x", 0)
    assert [len(splits[name]) for name in ("train", "dev", "test")] == [60, 20, 20]
    assert splits["train"] != make([{"group": str(i)} for i in range(100)], "x", 1)["train"]


def test_official_and_published_splits_stand():
    metas = [{"group": "a", "split": "dev"}, {"group": "a", "split": "test"}]
    splits = make(metas, "x", 0, {"one"}, ["one", "two"])
    assert splits["dev"] == [0] and splits["test"] == [1] and "train" not in splits
    assert splits["per20_train"] == [0] and splits["per20_test"] == [1]


entities = st.lists(st.sets(st.sampled_from("abcdefgh"), max_size=2), min_size=1, max_size=40)


@given(entities, st.integers(0, 3))
def test_components_share_no_entity_however_indirectly(named, seed):
    metas = [{"group": str(i // 2), "entities": sorted(names)} for i, names in enumerate(named)]
    splits = make(metas, "x", seed)
    parts = [splits[f"components_{part}"] for part in ("train", "dev", "test")]
    assert sorted(i for part in parts for i in part) == splits["all"]
    for key in (lambda i: named[i], lambda i: {metas[i]["group"]}):
        held = [set().union(*map(key, part)) for part in parts]
        assert sum(map(len, held)) == len(set().union(*held))
    known = set().union(*(named[i] for i in splits["train"]))
    for part in ("dev", "test"):
        seen, unseen = splits[f"{part}_seen"], splits[f"{part}_unseen"]
        assert sorted([*seen, *unseen]) == splits[part]
        assert all(named[i] & known for i in seen) and not any(named[i] & known for i in unseen)


def test_components_fill_the_shares_where_they_are_small():
    metas = [{"group": str(i), "entities": [f"e{i // 5}"]} for i in range(100)]
    splits = make(metas, "x", 0)
    sizes = [len(splits[f"components_{part}"]) for part in ("train", "dev", "test")]
    assert sizes == [60, 20, 20]
    assert splits["components_train"] != make(metas, "x", 1)["components_train"]


def test_a_permutation_is_the_same_in_every_process():
    code = "from bfm.datasets.common import permutation; print(permutation(9, 3, 'é'))"
    printed = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
        ).stdout.strip()
        for seed in ("0", "1")
    }  # fmt: skip
    assert printed == {str(permutation(9, 3, "é"))}
    assert sorted(permutation(9, 3, "é")) == list(range(9))
