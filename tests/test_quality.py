# SPDX-License-Identifier: Apache-2.0
"""Labels against evidence: shares by hand, and over the labels of a set that names evidence."""

import json

import numpy as np
import pytest

from bfm import labeling, quality
from bfm.settings import Settings
from tests.test_labeling import record, write


def label(sal_q, sal_a, focus):
    return {"sal_q": sal_q, "sal_a": sal_a, "gate": int(bool(focus)), "focus": focus}


def test_shares_by_hand():
    records = [
        ("u", label([0.0, 1.0, 2.0], [3.0, 0.5, 0.2], [0]), [0]),  # found
        ("u", label([5.0, 1.0, 2.0], [0.1, 0.5, 2.0], [2]), [0, 1]),  # another turn is read
        ("v", label([0.0, 1.0, 2.0], [-1.0, -2.0, -3.0], []), []),  # nothing to read, none read
        ("v", label([0.0, None, 2.0], [-1.0, None, -3.0], []), [2]),  # missed; one turn not scored
    ]
    rows = quality.compare(records)
    # Sal_q: 0; 1 of (5>2) and 0 of (1>2): 0.5; last before the unscored and the other: 1
    expected = [
        ("Sal_q orders the evidence first", (0 + 0.5 + 1) / 3, 3),
        ("its highest turn is evidence", 2 / 3, 3),
        ("Sal_a orders the evidence first", (1 + 0 + 0.5) / 3, 3),
        ("its highest turn is evidence", 1 / 3, 3),
        ("the gate opens where there is evidence, and only there", 3 / 4, 4),
        ("turns of the focus that are evidence", 1 / 2, 4),
        ("evidence turns that are in the focus", 1 / 4, 4),
        ("F1 of the focus", 2 * 1 / (2 + 4), 4),
    ]
    assert [(r["what"], pytest.approx(r["value"]), r["n"]) for r in rows] == expected
    assert all(r["low"] <= r["value"] <= r["high"] for r in rows)
    assert quality.compare([("u", label([1.0], [1.0], [0]), [])]) == []  # nothing to compare with


def by_hand(workdir, records) -> float:
    """The share of turns that Sal_q puts below the one that is evidence, a mean over labels."""
    own = {r["id"]: r["evidence"][0] // 2 for r in records}  # messages come in pairs
    lines = map(json.loads, (workdir / "labels.jsonl").read_text().splitlines())
    scores = [(np.array(line["sal_q"]), own[line["id"]]) for line in lines]
    return float(np.mean([np.mean(of[turn] > np.delete(of, turn)) for of, turn in scores]))


@pytest.mark.parametrize("limit", [0, 3])
@pytest.mark.parametrize("long", [None, 1])
def test_labels_are_compared_with_the_records_that_they_are_of(tmp_path, limit, long):
    """A query that is too long for the window is found by labeling alone, and skipped."""
    records = [record(i) | {"evidence": [2 * i]} for i in range(4)]
    if long is not None:
        records[long]["query"] = "tea " * 100_000
    settings = Settings.of({
        "model": {"path": "", "arch": "tiny"}, "data": write(tmp_path / "d.jsonl", records),
        "tau": "0.0", "on_bad_record": "skip", "limit": limit,
    })  # fmt: skip
    meta = labeling.run(settings, tmp_path / "w")
    assert (meta["records"], meta["skipped"]) == (limit or 4 - (long is not None), long or 0)
    [first, *_] = quality.against_evidence(settings, tmp_path / "w")
    assert first["what"].startswith("Sal_q") and first["n"] == meta["records"]
    assert first["value"] == pytest.approx(by_hand(tmp_path / "w", records))
