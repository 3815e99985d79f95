# SPDX-License-Identifier: Apache-2.0
"""An evaluation as a run: examples in groups, resumable, then summary and reports."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bfm import report, summary
from bfm.dialogue import Example, RecordError, evidence_turns, turns_of
from bfm.evaluation import Models, evaluate, parse_methods
from bfm.heads import controller_prompt, reader_room
from bfm.jsonl import read_lines, whole, write_json
from bfm.labeling import (
    WorkdirError,
    check_identity,
    make_workdir,
    open_base,
    open_data,
    open_tuned,
)  # fmt: skip
from bfm.labels import render
from bfm.lm import ModelFiles, code_hash
from bfm.progress import Meter
from bfm.prompts import PromptError
from bfm.saliency import Scorer
from bfm.settings import Settings, SettingsError

RESULTS, SALIENCY, IDENTITY, SUMMARY = (
    "results.jsonl", "saliency.jsonl", "eval.meta.json", "summary.json",
)  # fmt: skip
GROUP = 8  # examples that are worked on together
SHOWN = 50  # examples in the browsable part of the report


def run(settings: Settings, workdir: Path) -> dict[str, Any]:
    """Evaluate `methods` on a data set into `workdir`; return what stands in summary.json.

    Raises SettingsError, DataError, ModelError or WorkdirError before any work.
    """
    methods = parse_methods(settings.methods)
    pairs = parse_contrasts(settings.eval.contrasts, methods)
    files = open_base(settings)
    policy = open_tuned(settings.policy, "policy", files)
    source = open_data(settings, lambda example: _check(example, files, settings))
    identity = {
        **files.identity(settings.model.dtype), "data": source.sha256, "code": code_hash(),
        "policy": policy.source.sha256() if policy else "", "methods": list(methods),
        "settings": {
            name: getattr(settings, name)
            for name in ("seed", "unit", "context_turns", "prefilter_k", "max_focus", "split")
        } | dataclasses.asdict(settings.eval) | {
            "answer": settings.label.answer, "norm": settings.label.norm,
            "tokens": settings.train.tokens, "gate": settings.train.gate,
        },
    }  # fmt: skip
    identity["settings"].pop("contrasts")
    done = _resume(workdir, identity, len(methods), len(source))
    if done < len(source):
        _work(settings, files, policy, source, methods, workdir, done)
    results = read_lines(workdir / RESULTS)
    sal_q = [line["sal_q"] for line in read_lines(workdir / SALIENCY)]
    evidence = [evidence_turns(source[i], settings.unit) for i in range(len(source))]
    name = settings.data
    if name.startswith("jsonl:"):  # a table names the file, not the folders of one machine
        name = f"jsonl:{Path(name.removeprefix('jsonl:')).name}"
    table = summary.rows(results, name)
    notes, valid = summary.notes(results, table)
    found = {
        "identity": identity, "data": name, "split": settings.split, "n": len(source),
        "valid": valid, "notes": notes, "rows": table,
        "contrasts": summary.contrasts(results, pairs),
        "diagnosis": summary.diagnosis(results, sal_q, evidence, settings.prefilter_k),
    }  # fmt: skip
    write_json(workdir / SUMMARY, found)
    shown = [
        example_page(
            source[i], sal_q[i], results[i * len(methods) : (i + 1) * len(methods)], settings
        )
        for i in range(min(SHOWN, len(source)))
    ]
    report.write(workdir, found, results, shown)
    return found


def _check(example: Example, files: ModelFiles, settings: Settings) -> None:
    if example.answer_index < 0:
        raise RecordError("options", "missing, or none of them right: only choices are compared")
    render(example, files.scaffold, files.config.window, settings)
    question, turns = example.question, turns_of(example.question.messages, settings.unit)
    try:
        controller_prompt(files.scaffold, question, turns, [None] * len(turns), settings)
    except PromptError as error:
        raise RecordError(*str(error).split(": ", 1)) from None
    if (room := reader_room(files.scaffold, question, settings)) < 0:
        raise RecordError("query", f"question and options take {-room} tokens over train.tokens")


def parse_contrasts(text: str, methods: Sequence[str]) -> list[tuple[str, str]]:
    """Read "bfm-full,bfm-bm25" as pairs. Raises SettingsError for a method that is not compared."""
    if not text:
        others = [m for m in methods if m not in ("bfm", *summary.CONTROLS)]
        return [("bfm", other) for other in others] if "bfm" in methods else []
    pairs = []
    for part in text.split(","):
        a, _, b = part.strip().partition("-")
        if a not in methods or b not in methods or a == b:
            raise SettingsError(
                f"eval.contrasts: {part.strip()!r} is not A-B of two of the methods"
            )
        pairs.append((a, b))
    return pairs


def _work(settings, files, policy, source, methods, workdir: Path, done: int) -> None:
    base = files.load(settings.model.dtype)
    tuned = policy.load(settings.model.dtype) if policy else None
    reader = tuned if tuned and settings.eval.reader == "policy" else base
    size = settings.batch_size
    base_scorer = Scorer(base.decoder, base.scaffold.head, batch_size=size)
    reader_scorer = base_scorer
    if reader is not base:
        reader_scorer = Scorer(reader.decoder, base.scaffold.head, batch_size=size)
    encoder = None
    if any(method.startswith("embedding") for method in methods):
        from bfm import embed

        encoder = embed.load()
    models = Models(base, base_scorer, reader, reader_scorer, tuned, encoder)
    with (
        open(workdir / RESULTS, "a", encoding="utf-8", newline="\n") as results,
        open(workdir / SALIENCY, "a", encoding="utf-8", newline="\n") as saliency,
        Meter("evaluating", len(source), "examples") as meter,
    ):
        meter.skip(done)
        for start in range(done, len(source), GROUP):
            examples = [source[i] for i in range(start, min(start + GROUP, len(source)))]
            lines, sal_q = evaluate(examples, methods, models, settings)
            for example, scores in zip(examples, sal_q, strict=True):
                line = {"id": example.question.id, "sal_q": [round(s, 5) for s in scores]}
                saliency.write(json.dumps(line, ensure_ascii=False) + "\n")
            saliency.flush()
            text = (json.dumps(line, ensure_ascii=False) for own in lines for line in own)
            results.write("".join(line + "\n" for line in text))
            results.flush()
            meter.add(len(examples))


def _resume(workdir: Path, identity: dict, n_methods: int, n: int) -> int:
    """Prepare the workdir; return how many examples are done, in whole groups."""
    make_workdir(workdir)
    meta = workdir / IDENTITY
    if not meta.exists():
        if (workdir / RESULTS).exists():
            raise WorkdirError(
                f"--workdir: {workdir} holds {RESULTS} but no {IDENTITY}; choose another"
            )
        write_json(meta, identity)
        return 0
    check_identity(workdir, "results", json.loads(meta.read_text("utf-8")), identity)
    done = min(len(read_lines(workdir / RESULTS)) // n_methods, len(read_lines(workdir / SALIENCY)))
    done = done if done == n else done // GROUP * GROUP
    for name, lines in ((RESULTS, done * n_methods), (SALIENCY, done)):
        kept = read_lines(workdir / name)[:lines]
        with whole(workdir / name) as file:
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in kept)
    return done


def example_page(example: Example, sal_q, lines, settings: Settings) -> dict[str, Any]:
    """Return what the report shows of one example."""
    question, evidence = example.question, set(evidence_turns(example, settings.unit))
    turns = turns_of(question.messages, settings.unit)
    return {
        "id": question.id, "query": question.query, "query_time": question.query_time,
        "options": list(question.options), "gold": example.answer_index, "answer": example.answer,
        "turns": [
            {
                "text": "\n".join(
                    f"{m.name or m.role.capitalize()}: {m.content}" for m in turn.messages
                ),
                "time": turn.messages[0].time, "evidence": turn.index in evidence,
                "sal_q": sal_q[turn.index], "sal_a": None,
            }
            for turn in turns
        ],
        "methods": {
            line["method"]: {
                name: line[name]
                for name in ("prediction", "correct", "probs", "evidence", "gate", "tokens")
            }
            for line in lines
        },
    }  # fmt: skip
