# SPDX-License-Identifier: Apache-2.0
"""Cross-fitted labels: each fold is labelled by a reader that was fine-tuned on the others.

A small model as it is cannot judge evidence; after a short fine-tune of its reader it can. A reader
must not label what it has learned by heart, hence the folds. The first round's readers see turns
picked by chance; a later round's the focus of the labels before.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax

from bfm import finetune, labeling, tau
from bfm.jsonl import whole, write_json
from bfm.labeling import LABELS, META
from bfm.opening import open_data
from bfm.settings import Settings, SettingsError
from bfm.workdir import check_identity


def run(settings: Settings, workdir: Path) -> dict[str, Any] | None:
    """Label a data set in `label.rounds` rounds into `workdir`; return labels.meta.json's content.

    Leaves `rounds/R/K/` with the reader of each fold and its labels, and the last round's labels, in
    input order, in the workdir itself. Returns None when SIGTERM stopped it: the same command goes on.
    """
    if jax.process_count() > 1:
        raise SettingsError("label.rounds: are for one process; label in one round")
    folds, label = settings.label.folds, settings.label
    earlier = ""
    for r in range(label.rounds):
        place = workdir / "rounds" / str(r)
        for k in range(folds):
            reader = dataclasses.replace(
                settings, fold=f"-{k}/{folds}", labels=earlier,
                train=dataclasses.replace(
                    settings.train, heads="reader", evidence="silver" if earlier else "chance"
                ),
                label=dataclasses.replace(label, source="sal_a"),
            )  # fmt: skip
            if finetune.run(reader, place / str(k) / "reader")["stopped"]:
                return None
            export = place / str(k) / "reader" / finetune.EXPORT
            judged = dataclasses.replace(
                settings, fold=f"{k}/{folds}",
                label=dataclasses.replace(label, from_checkpoint=str(export)),
            )  # fmt: skip
            labeling.run(judged, place / str(k) / "labels")
        merge(settings, [place / str(k) / "labels" for k in range(folds)], place)
        if settings.tau == "auto":
            tau.choose(judged, place)
        earlier = str(place / LABELS)
    for name in (LABELS, META, *((tau.CHOICE, "tau.png") if settings.tau == "auto" else ())):
        _copy(place / name, workdir / name)
    return json.loads((workdir / META).read_text("utf-8"))


def merge(settings: Settings, parts: list[Path], place: Path) -> None:
    """Join the labels of all folds in input order, with one meta file over all of them."""
    metas = [json.loads((part / META).read_text("utf-8")) for part in parts]
    source = open_data(settings)
    identity = {
        **metas[0]["identity"], "data": source.sha256,
        "judge": [meta["identity"]["judge"] for meta in metas],
    }  # fmt: skip
    identity["config"] = {**identity["config"], "fold": ""}
    if (place / META).exists():
        before = json.loads((place / META).read_text("utf-8"))["identity"]
        check_identity(place, "labels", before, identity)
        return
    lines: dict[str, str] = {}
    for part in parts:
        for line in (part / LABELS).read_text("utf-8").split("\n")[:-1]:
            lines[json.loads(line)["id"]] = line + "\n"
    with whole(place / LABELS) as file:
        file.writelines(lines[source[i].question.id] for i in range(len(source)))
    timing = {key: sum(meta["timing"][key] for meta in metas) for key in metas[0]["timing"]}
    meta = {**metas[0], "identity": identity, "records": len(source), "timing": timing}
    write_json(place / META, meta)


def _copy(source: Path, target: Path) -> None:
    scratch = target.with_name(f".{target.name}")
    shutil.copyfile(source, scratch)
    os.replace(scratch, target)
