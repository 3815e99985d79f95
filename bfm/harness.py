# SPDX-License-Identifier: Apache-2.0
"""The models of an evaluation at work: k tuned, rerankers taught, groups of examples run to files."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import jax

from bfm import summary
from bfm.baselines import backend
from bfm.baselines.reranker import Reranker
from bfm.choosing import SYSTEMS, TUNED, Models
from bfm.dialogue import turns_of
from bfm.evaluation import evaluate, steps
from bfm.jsonl import json_lines, write_json
from bfm.lm import ModelFiles
from bfm.progress import Meter
from bfm.saliency import Scorer
from bfm.settings import numbers
from bfm.sharding import local_mesh
from bfm.systems import Systems
from bfm.workdir import Spool, wait

RESULTS, SALIENCY, TUNED_K, SYSTEM_COSTS = (
    "results.jsonl", "saliency.jsonl", "tuned.json", "systems.json",
)  # fmt: skip
GROUP = 8  # examples that are worked on together


class Harness:
    """The models of a run, loaded when the first example needs them."""

    def __init__(self, settings, files: ModelFiles, tuned, methods: Sequence[str], workdir: Path):
        self.settings, self.files, self.tuned, self.methods = settings, files, tuned, methods
        self.stores = Path(settings.eval.stores) if settings.eval.stores else workdir / "stores"
        self._models: Models | None = None

    @property
    def models(self) -> Models:
        if self._models is None:
            self._models = self._load()
        return self._models

    def _load(self) -> Models:
        settings, dtype = self.settings, self.settings.model.dtype
        mesh = local_mesh(settings.mesh.data, settings.mesh.fsdp, settings.mesh.tensor)
        loaded: dict[str, tuple] = {}

        def load(files: ModelFiles) -> tuple:
            key = files.sha256()
            if key not in loaded:
                lm = files.load(dtype, mesh)
                scorer = Scorer(lm.decoder, lm.scaffold.head, batch_size=settings.batch_size)
                loaded[key] = lm, scorer
            return loaded[key]

        base = load(self.files)
        encoder, named = None, [method for method in self.methods if method in SYSTEMS]
        if named or any(method.startswith("embedding") for method in self.methods):
            from bfm import embed

            encoder = embed.load()
        policy, reader = self.tuned["policy"], self.tuned["reader"]
        own = {name.removeprefix("of "): load(one) for name, one in self.tuned.items()
               if name.startswith("of ")}  # fmt: skip
        systems = None
        if named:
            systems = Systems(named, self.backend(base[0], encoder), self.stores, settings.seed)
        return Models(
            *base, *(load(reader) if reader else base), load(policy)[0] if policy else None,
            encoder, own, systems,
        )  # fmt: skip

    def backend(self, lm, encoder) -> backend.Backend:
        asked = self.settings.eval
        if not asked.chat_url:
            return backend.local(lm, encoder)
        from bfm import embed

        return backend.endpoint(
            asked.chat_url, asked.chat_model, embed=lambda texts: embed.embed(encoder, texts),
            count_tokens=lambda text: len(lm.scaffold.tokenizer.encode(text)),
        )  # fmt: skip

    def teach(self, dev, workdir: Path) -> None:
        """Train RMM's reranker on the questions of the tuning split (no gold), or load it."""
        place, systems = workdir / "rmm.json", self.models.systems
        if place.exists():
            systems.reranker = Reranker.from_json(json.loads(place.read_text("utf-8"))["reranker"])
            return
        updates = systems.teach([dev[i].question for i in range(len(dev))], self.settings.unit)
        write_json(place, {"reranker": systems.reranker.to_json(), "updates": updates})

    def tune(self, dev, workdir: Path) -> dict[str, int]:
        """Return each selector's k: best on dev by accuracy or F1, then by log p, then the smaller."""
        place, settings = workdir / TUNED_K, self.settings
        if jax.process_index():
            wait(place)
        if place.exists():
            return json.loads(place.read_text("utf-8"))["k"]
        methods = [method for method in self.methods if method in TUNED]
        examples, curve = [dev[i] for i in range(len(dev))], []
        values = numbers(settings.eval.tune, "eval.tune")
        without = dataclasses.replace(
            settings, eval=dataclasses.replace(settings.eval, sal_a=False)
        )
        ks, lines = dict.fromkeys(methods, values), []
        with Meter("tuning k", len(examples), "examples") as meter:
            for start in range(0, len(examples), GROUP):
                part = examples[start : start + GROUP]
                none = [()] * len(part)
                made = evaluate(part, none, methods, self.models, without, ks).lines
                lines += itertools.chain.from_iterable(made)
                meter.add(len(part))
        told = ("method", "accuracy", "f1", "logp", "tokens")
        for k in values:
            curve += [
                {"k": k, **{name: row[name] for name in told}}
                for row in summary.rows([line for line in lines if line.get("k") == k], "")
                if not row["control"]
            ]
        outcome = lambda row: row["accuracy"] if row["f1"] is None else row["f1"]  # noqa: E731
        best = lambda row: (outcome(row), row["logp"] or 0.0, -row["k"])  # noqa: E731
        found = dict.fromkeys(row["method"] for row in curve)  # ebf needs questions with options
        ks = {m: max((r for r in curve if r["method"] == m), key=best)["k"] for m in found}
        write_json(place, {"k": ks, "split": settings.eval.tune_split, "curve": curve})
        return ks

    def run(self, source, others, ks, spool: Spool, todo: Sequence[int], workdir: Path) -> None:
        """Evaluate groups of examples: those of this process that are not done."""
        settings, ks = self.settings, {method: (k,) for method, k in ks.items()}
        places = {k: group(k, len(source)) for k in spool.mine()}
        each = steps(self.methods, settings)
        with Meter("evaluating", each * sum(map(len, places.values())), "steps") as meter:
            meter.skip(each * sum(len(own) for k, own in places.items() if k not in todo))
            for k in todo:
                examples = [source[i] for i in places[k]]
                histories = [
                    turns_of(source[others[i]].question.messages, settings.unit)
                    if "other" in self.methods else () for i in places[k]
                ]  # fmt: skip
                found = evaluate(
                    examples, histories, self.methods, self.models, settings, ks, meter.add
                )
                scores = [
                    {"id": example.question.id} | {m: _rounded(own) for m, own in scored.items()}
                    for example, scored in zip(examples, found.scores, strict=True)
                ]
                lines = [line for own in found.lines for line in own]
                spool.put(k, {RESULTS: json_lines(lines), SALIENCY: json_lines(scores)})
                if self.models.systems:
                    write_json(workdir / SYSTEM_COSTS, self.models.systems.costs())


def group(k: int, examples: int) -> range:
    """Return the examples of a group."""
    return range(k * GROUP, min((k + 1) * GROUP, examples))


def _rounded(values: Sequence[float | None] | None) -> list[float | None] | None:
    if values is None:
        return None
    return [None if value is None else round(value, 5) for value in values]
