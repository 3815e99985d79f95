# SPDX-License-Identifier: Apache-2.0
"""An evaluation as a run: examples in groups, resumable, then summary and reports."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from bfm import diagnosis, pooling, report, summary
from bfm.answering import longest
from bfm.baselines import backend
from bfm.choosing import BY_OPTIONS, CONTROLS, SYSTEMS, parse_methods
from bfm.dialogue import Example, RecordError, evidence_turns, group_of, turns_of
from bfm.evaluation import wants_sal_a, wants_sal_q
from bfm.harness import GROUP, RESULTS, SALIENCY, SYSTEM_COSTS, Harness, group
from bfm.heads import controller_prompt, reader_room
from bfm.jsonl import read_lines, write_json
from bfm.labels import render
from bfm.lm import ModelFiles, code_hash
from bfm.opening import noted, open_base, open_data, open_tuned
from bfm.prompts import PromptError
from bfm.settings import Settings, SettingsError, numbers
from bfm.tokenizer import TokenizerError
from bfm.workdir import Spool, claim

IDENTITY, SUMMARY = "eval.meta.json", "summary.json"
SHOWN = 50  # examples in the browsable part of the report


def run(settings: Settings, workdir: Path, command: str = "") -> dict[str, Any]:
    """Evaluate `methods` on a data set into `workdir`; return what stands in summary.json.

    Of several processes each evaluates its share of the examples on its own devices; the first writes
    and returns the summary, the others an empty one.
    command: what a person typed, for the report. Raises SettingsError, DataError, ModelError or
    WorkdirError before any work.
    """
    pairs = parse_contrasts(settings.eval.contrasts, parse_methods(settings.methods))
    check = lambda part, files: _open_tuned(part, parse_methods(part.methods), files)  # noqa: E731
    work = pooling.join(_evaluate, check, settings)
    source, identity, ks = work(settings, workdir)
    if jax.process_index():
        return {}
    results = read_lines(workdir / RESULTS)
    saliency = read_lines(workdir / SALIENCY)
    evidence = [evidence_turns(source[i], settings.unit) for i in range(len(source))]
    evidence *= max(1, settings.eval.seeds)  # results and saliencies stand seed by seed
    name = settings.data
    if name.startswith("jsonl:"):  # a table names the file, not the folders of one machine
        name = f"jsonl:{Path(name.removeprefix('jsonl:')).name}"
    table = summary.rows(results, name)
    notes, valid = summary.notes(results, table, parse_methods(settings.methods))
    costs = sorted(workdir.glob(f"**/{SYSTEM_COSTS}"))
    systems = [row for path in costs for row in json.loads(path.read_text("utf-8"))]
    notes += [
        f"{row['system']} was not measured with this model: of the {row['asked']:,} replies that its "
        f"memory rests on {row['fallbacks']:,} could not be read."
        for row in systems if not row["measured"]
    ]  # fmt: skip
    found = {
        "systems": systems, "identity": identity, "data": name, "split": settings.split,
        "n": len(source), "seeds": settings.eval.seeds,
        "valid": valid, "notes": notes, "rows": table, "command": command, "k": ks,
        "contrasts": summary.contrasts(results, pairs),
        "diagnosis": diagnosis.diagnose(results, saliency, evidence, settings.prefilter_k),
    }  # fmt: skip
    write_json(workdir / SUMMARY, found)
    lines = summary.by_example([line for line in results if not line.get("seed")])
    shown = [
        example_page(source[i], saliency[i], lines[source[i].question.id], settings)
        for i in range(min(SHOWN, len(source)))
    ]
    report.write(workdir, found, results, shown)
    return found


def _evaluate(settings: Settings, workdir: Path) -> tuple[Any, dict[str, Any], dict[str, int]]:
    """Write the results and saliencies of all examples; return data, the run's identity and each k."""
    methods = parse_methods(settings.methods)
    if "sal_a" in methods and settings.threshold is None:
        raise SettingsError("tau: the method sal_a needs a number here, not 'auto'")
    files = open_base(settings)
    tuned = _open_tuned(settings, methods, files)
    _check_thinking(settings, files)
    if bool(settings.eval.chat_url) != bool(settings.eval.chat_model):
        raise SettingsError("eval.chat_model: give it together with eval.chat_url")
    if settings.eval.chat_url:
        backend.address(settings.eval.chat_url)
    jobs: list[Work] = []
    check = lambda example: jobs.append(_check(example, files, methods, settings))  # noqa: E731
    if jax.process_count() > 1 and (named := [m for m in methods if m in SYSTEMS]):
        raise SettingsError(f"methods: {named[0]} writes its stores in one process; run it apart")
    source = open_data(settings, check)
    seen = [
        (group_of(e), bool(e.question.options)) for e in map(source.__getitem__, range(len(source)))
    ]
    others = other_users([name for name, _ in seen])
    if "other" in methods and others is None:
        raise SettingsError("methods: 'other' reads another user's history; there is one user only")
    tokens = plan(noted(source, jobs), methods, settings)
    dev = _dev(settings, source, check)
    identity = {
        **files.identity(settings.model.dtype), "data": source.sha256, "code": code_hash(),
        "models": {name: one.sha256() if one else "" for name, one in tuned.items()},
        "dev": dev.sha256 if dev else "", "methods": list(methods),
        "settings": {
            name: getattr(settings, name)
            for name in ("seed", "unit", "context_turns", "prefilter_k", "max_focus", "split")
        } | dataclasses.asdict(settings.eval) | {
            "answer_form": settings.label.answer, "norm": settings.label.norm, "tau": settings.tau,
            "tokens": settings.train.tokens, "gate": settings.train.gate,
        },
    }  # fmt: skip
    # What only reads results, and paths, for which the models' hashes or names stand.
    for name in ("contrasts", "reader", "readers", "chat_url", "folds", "seeds"):
        del identity["settings"][name]
    claim(workdir, IDENTITY, "results", {"identity": identity}, (RESULTS, SALIENCY))
    spool = _spool(workdir, [options for _, options in seen], methods)
    work = Harness(settings, files, tuned, methods, workdir)
    ks = work.tune(dev, workdir) if dev else {}
    if todo := spool.todo():
        print(f"{len(source):,} examples by {len(methods)} methods: "
              f"some {tokens:,} tokens to score", file=sys.stderr)  # fmt: skip
        if dev and "rmm" in methods:
            work.teach(dev, workdir)
        work.run(source, others, ks, spool, todo, workdir)
    spool.finish()
    return source, identity, ks


class Work(NamedTuple):
    """What an example takes: a hash of its turns, their tokens, those of the question after each."""

    history: int
    turns: int
    asked: int


def plan(jobs: Sequence[Work], methods: Sequence[str], settings: Settings) -> int:
    """Estimate the tokens that an evaluation computes.

    Every turn is scored with the question where a method or the diagnosis needs it, and with the answer
    where Sal_a is asked for, a history once for the questions of a group; a method reads up to its
    budget. Models that write (memories, free answers) come on top.
    """
    scored = wants_sal_q(methods, settings) + wants_sal_a(methods, settings)
    passes = scored + ("ebf" in methods)
    budgets = [
        0 if m == "none" or m in CONTROLS
        else settings.train.tokens if m == "full" else settings.eval.budget
        for m in methods
    ]  # fmt: skip
    known = {(i // GROUP, job.history): job.turns for i, job in enumerate(jobs)}
    scored = sum(known.values()) + sum(job.asked for job in jobs)
    return passes * scored + sum(min(job.turns, budget) for job in jobs for budget in budgets)


def _spool(workdir: Path, options: Sequence[bool], methods: Sequence[str]) -> Spool:
    """Return the run's files of lines; options[i]: whether example i has any."""
    bound = sum(method in BY_OPTIONS for method in methods)
    groups = [group(k, len(options)) for k in range(-(-len(options) // GROUP))]
    lines = [len(methods) - (0 if has else bound) for has in options]
    results = [sum(lines[i] for i in own) for own in groups]
    return Spool(workdir, {RESULTS: results, SALIENCY: [len(own) for own in groups]})


def other_users(groups: Sequence[str]) -> list[int] | None:
    """Return for each example the next one, cyclically, of another group; None where there is no other.

    >>> other_users(["a", "a", "b"])
    [2, 2, 0]
    """
    n, found, ahead = len(groups), [0] * len(groups), None
    if len(set(groups)) < 2:
        return None
    for i in range(2 * n - 1, -1, -1):  # twice around: the end learns from the beginning
        if groups[i % n] != groups[(i + 1) % n]:
            ahead = (i + 1) % n
        if i < n:
            found[i] = ahead
    return found


def _open_tuned(settings: Settings, methods, files: ModelFiles) -> dict[str, ModelFiles | None]:
    """Open the policy, the shared reader and the readers of single methods, by name."""
    policy = open_tuned(settings.policy, "policy", files)
    match settings.eval.reader:
        case "policy":
            reader = policy
        case "base":
            reader = None
        case path:
            reader = open_tuned(path, "eval.reader", files)
    tuned = {"policy": policy, "reader": reader}
    for part in filter(None, (p.strip() for p in settings.eval.readers.split(","))):
        method, _, path = part.partition("=")
        if method not in methods or method in CONTROLS or not path or f"of {method}" in tuned:
            raise SettingsError(
                f"eval.readers: {part!r} is not METHOD=EXPORT of one of the methods"
            )
        tuned[f"of {method}"] = open_tuned(path, f"eval.readers: {method}", files)
    return tuned


def _check_thinking(settings: Settings, files: ModelFiles) -> None:
    if settings.eval.thinking:
        try:
            files.scaffold.tokenizer.thinking()
        except TokenizerError as error:
            raise SettingsError(str(error)) from None


def _dev(settings: Settings, source, check):
    """Open the split that k is tuned on, apart from what is evaluated."""
    if not settings.eval.tune:
        if settings.eval.tune_split:
            raise SettingsError("eval.tune: give the values to compare, such as 1,3,5,10")
        return None
    numbers(settings.eval.tune, "eval.tune")
    if not settings.eval.tune_split or settings.eval.tune_split == settings.split:
        raise SettingsError("eval.tune_split: name a split apart from the one that is evaluated")
    dev = open_data(dataclasses.replace(settings, split=settings.eval.tune_split), check)
    here = {group_of(source[i]) for i in range(len(source))}
    if shared := sorted(here & {group_of(dev[i]) for i in range(len(dev))}):
        raise SettingsError(
            f"eval.tune_split: {settings.eval.tune_split!r} shares {len(shared)} users with what is "
            f"evaluated, such as {shared[0]!r}"
        )
    return dev


def _check(example: Example, files: ModelFiles, methods, settings: Settings) -> Work:
    """Return the work of an example that can be evaluated. Raises RecordError."""
    if example.question.options and example.answer_index < 0:
        raise RecordError("answer_index", "missing, or no option: an answer cannot be graded")
    if not example.question.options and not example.answer:
        raise RecordError("answer", "missing: a free answer cannot be graded")
    rendered = render(example, files.scaffold, files.config.window, settings)
    question, turns = example.question, turns_of(example.question.messages, settings.unit)
    try:
        controller_prompt(files.scaffold, question, turns, [None] * len(turns), settings)
    except PromptError as error:
        raise RecordError(*str(error).split(": ", 1)) from None
    kept = longest(question, settings)
    if (room := reader_room(files.scaffold, question, settings, kept)) < 0:
        raise RecordError("query", f"question and options take {-room} tokens over train.tokens")
    job = rendered.job
    return Work(hash(job.prefixes), job.history_tokens, job.asked_tokens)


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


def example_page(example: Example, scores, lines, settings: Settings) -> dict[str, Any]:
    """Return what the report shows of one example. scores: its line of saliency.jsonl."""
    sal_q, sal_a = scores["sal_q"], scores["sal_a"]
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
                "sal_q": sal_q[turn.index] if sal_q else None,
                "sal_a": sal_a[turn.index] if sal_a else None,
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
