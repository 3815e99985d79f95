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


def test_labels_of_a_set_are_compared_in_its_order(tmp_path):
    records = [record(i) | {"evidence": [i % 2]} for i in range(3)]
    settings = Settings.of({
        "model": {"path": "", "arch": "tiny"}, "data": write(tmp_path / "d.jsonl", records),
        "tau": "0.0",
    })  # fmt: skip
    labeling.run(settings, tmp_path / "w")
    [first, *_] = quality.against_evidence(settings, tmp_path / "w")
    lines = [
        json.loads(line) for line in (tmp_path / "w" / "labels.jsonl").read_text().splitlines()
    ]
    by_hand = []
    for line, own in zip(lines, records, strict=True):
        turn = own["evidence"][0] // 2  # messages come in pairs
        scores = np.array(line["sal_q"])
        by_hand.append(np.mean(scores[turn] > np.delete(scores, turn)))
    assert first["what"].startswith("Sal_q") and first["value"] == pytest.approx(np.mean(by_hand))
