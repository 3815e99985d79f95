# SPDX-License-Identifier: Apache-2.0
"""How well labels agree with what people marked as evidence: the judge is judged.

A label knows the answer and not the evidence, so on data that has both it can be checked before
anything is taught by it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bfm.diagnosis import separation
from bfm.dialogue import evidence_turns, group_of
from bfm.intervals import f1, interval, mean
from bfm.jsonl import read_lines
from bfm.labeling import LABELS
from bfm.opening import open_data
from bfm.settings import Settings

Row = dict[str, Any]


def against_evidence(settings: Settings, workdir: Path) -> list[Row]:
    """Compare the labels in a workdir with the evidence of their data; [] where it has none.

    Returns rows of {what, value, low, high, n}, intervals by user. Of the records with evidence: how
    well each saliency orders it first (area under the curve; chance 0.5), and whether the most salient
    turn is evidence. Of all: whether the gate opens where there is evidence, and the focus, turn by
    turn.
    """
    labels = {label["id"]: label for label in read_lines(workdir / LABELS)}
    # A record that labeling skipped still counts here, so the limit is not where it was.
    source = open_data(dataclasses.replace(settings, limit=0, on_bad_record="skip"))
    return compare([
        (group_of(example), labels[example.question.id], evidence_turns(example, settings.unit))
        for example in map(source.__getitem__, range(len(source)))
        if example.question.id in labels
    ])  # fmt: skip


def compare(records: Sequence[tuple[str, Row, Sequence[int]]]) -> list[Row]:
    """Compare (group, label, evidence turns) of records, as `against_evidence` does.

    >>> label = {"sal_q": [0.1, 0.9], "sal_a": [2.0, 0.0], "gate": 1, "focus": [0]}
    >>> [(row["what"], row["value"]) for row in compare([("u", label, [0])])][:2]
    [('Sal_q orders the evidence first', 0.0), ('its highest turn is evidence', 0.0)]
    """
    if not any(evidence for _, _, evidence in records):
        return []
    rows = []

    def row(what: str, groups: Sequence[str], statistic) -> None:
        value, low, high = interval(groups, statistic)
        rows.append({"what": what, "value": value, "low": low, "high": high, "n": len(groups)})

    for name, title in (("sal_q", "Sal_q"), ("sal_a", "Sal_a")):
        known = [
            (group, label[name], evidence)
            for group, label, evidence in records
            if label[name] is not None and separation(label[name], evidence) is not None
        ]
        if known:
            groups, scores, wanted = zip(*known, strict=True)
            areas = [separation(own, turns) for own, turns in zip(scores, wanted, strict=True)]
            first = [
                float(np.argmax([-np.inf if s is None else s for s in own]) in turns)
                for own, turns in zip(scores, wanted, strict=True)
            ]
            row(f"{title} orders the evidence first", groups, mean(np.array(areas)))
            row("its highest turn is evidence", groups, mean(np.array(first)))
    known = [(g, label, set(e)) for g, label, e in records if label["focus"] is not None]
    if known:
        groups, labels, wanted = zip(*known, strict=True)
        found = [set(label["focus"]) for label in labels]
        hits, read, all_of = (
            np.array([len(own) for own in sets], float)
            for sets in ([a & b for a, b in zip(found, wanted, strict=True)], found, wanted)
        )
        opens = np.array([bool(a) == bool(b) for a, b in zip(found, wanted, strict=True)], float)
        row("the gate opens where there is evidence, and only there", groups, mean(opens))
        row("turns of the focus that are evidence", groups, _share(hits, read))
        row("evidence turns that are in the focus", groups, _share(hits, all_of))
        row("F1 of the focus", groups, f1(hits, read, all_of))
    return rows


def _share(part: np.ndarray, whole: np.ndarray):
    def statistic(index: np.ndarray) -> float:
        total = whole[index].sum()
        return part[index].sum() / total if total else float("nan")

    return statistic
