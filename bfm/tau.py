# SPDX-License-Identifier: Apache-2.0
"""The threshold on Sal_a, chosen by what it is for: how well the reader answers on held-out examples.

Focus sets are nested: whatever tau is, a reader sees the m most salient candidates for some m. So it
reads each held-out example once for every m, and every threshold is scored from that.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

from bfm.curves import save
from bfm.dialogue import evidence_turns
from bfm.heads import prefilter
from bfm.jsonl import whole, write_json
from bfm.labeling import LABELS
from bfm.lm import LM
from bfm.material import hold_out, read_material
from bfm.opening import open_base, open_data, open_tuned
from bfm.policy import credit, read_turns
from bfm.prompts import has_answer
from bfm.rows import Labelled, silver
from bfm.saliency import focus
from bfm.settings import Settings, SettingsError

CHOICE = "tau.json"
GRID = 41  # thresholds that are compared


@dataclasses.dataclass(frozen=True)
class Ladder:
    """One held-out example: what the reader gives for the m most salient candidates, m = 0, 1, ..

    saliency: of those candidates, nats, falling. right, logp: credit and log posterior of the right
    option by m. hits: evidence turns among the first m; evidence: all of them.
    """

    saliency: tuple[float, ...]
    right: tuple[float, ...]
    logp: tuple[float, ...]
    hits: tuple[int, ...]
    evidence: int

    def m(self, tau: float) -> int:
        return sum(value > tau for value in self.saliency)


def choose(settings: Settings, workdir: Path) -> dict[str, Any]:
    """Choose tau for the labels in `workdir`, write it into them, and return the choice.

    Writes tau.json (the curve) and tau.png, and rewrites labels.jsonl with tau, gate and focus. Raises
    SettingsError when there is nothing to choose on.
    """
    if (workdir / CHOICE).exists():
        return json.loads((workdir / CHOICE).read_text("utf-8"))
    files = open_base(settings)
    known = dataclasses.replace(
        settings, labels=str(workdir / LABELS),
        label=dataclasses.replace(settings.label, source="sal_a"),
    )  # fmt: skip
    items, _ = read_material(known, files, collections.Counter())
    dev = held_out(items, settings)
    reader = open_tuned(settings.label.from_checkpoint, "label.from_checkpoint", files)
    lm = (reader or files).load(settings.model.dtype)
    curve = score(ladders(lm, dev, settings))
    best = max(curve, key=lambda row: (row["accuracy"], row["logp"], row["tau"]))
    choice = {"tau": best["tau"], "by": "reader accuracy", "dev": len(dev), "curve": curve}
    rewrite(workdir / LABELS, best["tau"], settings.max_focus)
    draw(choice, workdir / "tau.png")
    write_json(workdir / CHOICE, choice)  # last: its presence says that all is done
    return choice


def check(settings: Settings) -> None:
    """Raise SettingsError where the data hold nothing to choose on: before anything is scored."""
    if jax.process_count() > 1:
        raise SettingsError("tau: 'auto' is for one process; give a number")
    source, form = open_data(settings), settings.label.answer
    examples = (source[i] for i in range(len(source)))
    held_out([Labelled(e, (), (), None) for e in examples if has_answer(e, form)], settings)


def held_out(items: Sequence[Labelled], settings: Settings) -> list[Labelled]:
    """Return the held-out items whose reader's accuracy is known. Raises SettingsError without any."""
    dev = [item for item in hold_out(items, settings)[1] if item.example.answer_index >= 0]
    if not dev:
        raise SettingsError(
            "tau: 'auto' needs held-out examples with options (train.dev is their share of the "
            "groups); give a number"
        )
    return dev


def ladders(lm: LM, dev: Sequence[Labelled], settings: Settings) -> list[Ladder]:
    """Let the reader read every held-out example with its m most salient candidates, for every m."""
    chosen = []
    for item in dev:
        ranked = prefilter(item.sal_q, settings.prefilter_k)
        everything = dataclasses.replace(item, tau=-np.inf)
        chosen.append(silver(everything, ranked, settings.max_focus))
    sets = [[order[:m] for m in range(len(order) + 1)] for order in chosen]
    readings = read_turns(lm, [item.example.question for item in dev], sets, settings)
    made = []
    for item, order, by_m in zip(dev, chosen, readings, strict=True):
        gold = item.example.answer_index
        evidence = set(evidence_turns(item.example, settings.unit))
        made.append(
            Ladder(
                tuple(item.score[i] for i in order),
                tuple(credit(reading, gold) for reading in by_m),
                tuple(float(reading.log_posterior[gold]) for reading in by_m),
                tuple(len(evidence & {*order[:m]}) for m in range(len(order) + 1)),
                len(evidence),
            )
        )
    return made


def score(made: Sequence[Ladder]) -> list[dict[str, float]]:
    """Return what each threshold of a grid gives: accuracy, logp, share of open gates, evidence F1."""
    values = np.unique([value for ladder in made for value in ladder.saliency])
    between = (values[1:] + values[:-1]) / 2
    grid = np.concatenate([values[:1] - 1.0, between, values[-1:]])
    if len(grid) > GRID:
        grid = np.quantile(grid, np.linspace(0, 1, GRID))
    rows = []
    for tau in grid:
        ms = [ladder.m(tau) for ladder in made]
        pairs = list(zip(made, ms, strict=True))
        marked = sum(ms) + sum(ladder.evidence for ladder in made)
        rows.append({
            "tau": round(float(tau), 6),
            "accuracy": float(np.mean([ladder.right[m] for ladder, m in pairs])),
            "logp": float(np.mean([ladder.logp[m] for ladder, m in pairs])),
            "open": float(np.mean([m > 0 for m in ms])),
            "turns": float(np.mean(ms)),
            "evidence_f1": 2 * sum(ladder.hits[m] for ladder, m in pairs) / marked if marked else 0.0,
        })  # fmt: skip
    return rows


def rewrite(path: Path, tau: float, max_focus: int) -> None:
    """Put tau, gate and focus into every line of a labels file, whole or not at all."""
    with open(path, encoding="utf-8") as old, whole(path) as new:
        for text in old:
            line = json.loads(text)
            line["tau"] = tau
            if line["sal_a"] is not None:
                values = [float("nan") if x is None else x for x in line["sal_a"]]
                line["focus"] = focus(values, tau, max_focus)
                line["gate"] = int(bool(line["focus"]))
            new.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")


def draw(choice: dict[str, Any], path: Path) -> None:
    """Draw the curve: accuracy and evidence F1 against tau."""
    curve = choice["curve"]
    taus = [row["tau"] for row in curve]
    figure = Figure(figsize=(5.5, 3.6))
    axis = figure.subplots()
    for name, label in (
        ("accuracy", "reader accuracy (chooses)"), ("evidence_f1", "evidence F1 (diagnosis)"),
        ("open", "share of open gates"),
    ):  # fmt: skip
        axis.plot(taus, [row[name] for row in curve], marker=".", label=label)
    axis.axvline(choice["tau"], color="0.5", linestyle=":", label=f"tau = {choice['tau']:.3g}")
    axis.set(xlabel="tau, nats", ylim=(-0.02, 1.02), title=f"{choice['dev']} held-out examples")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)
    save(figure, path)
