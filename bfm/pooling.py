# SPDX-License-Identifier: Apache-2.0
"""Evaluations of several trained models as one: parts of the users out of fold, seeds of training.

In paths of models, {k} stands for the number of the part and {seed} for that of the seed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

from bfm.harness import RESULTS, SALIENCY
from bfm.jsonl import json_lines, read_lines, whole
from bfm.opening import open_base, open_data
from bfm.settings import Settings, SettingsError
from bfm.workdir import make_workdir

_PATHS = ("reader", "readers")  # of models, in eval, beside policy
# What evaluates settings into a workdir: data, the run's identity, each selector's k.
Work = Callable[[Settings, Path], tuple[Any, dict[str, Any], dict[str, Any]]]


def join(evaluate: Work, check: Callable, settings: Settings) -> Work:
    """Return what evaluates by all the models that the settings ask for.

    evaluate: by one set of models, which it checks. check(settings, files): opens such a set; all of
    them are opened here, before any work.
    """
    work = evaluate
    if settings.eval.folds:
        work = functools.partial(_out_of_fold, work)
    if settings.eval.seeds:
        work = functools.partial(_over_seeds, work)
    if work is not evaluate:
        files = open_base(settings)
        for own in _seeds(settings) if settings.eval.seeds else [settings]:
            for part in _folds(own) if own.eval.folds else [own]:
                check(part, files)
    return work


def _folds(settings: Settings) -> list[Settings]:
    if settings.fold:
        raise SettingsError("fold: leave it out; eval.folds evaluates every part")
    folds = settings.eval.folds
    return [
        dataclasses.replace(_put(settings, "k", k, "folds"), fold=f"{k}/{folds}")
        for k in range(folds)
    ]


def _seeds(settings: Settings) -> list[Settings]:
    return [_put(settings, "seed", s, "seeds") for s in range(settings.eval.seeds)]


def _out_of_fold(evaluate: Work, settings: Settings, workdir: Path):
    """Evaluate each part of the users by the models trained on the others. Leaves folds/K behind."""
    parts = [(part, workdir / "folds" / str(k)) for k, part in enumerate(_folds(settings))]
    made = [evaluate(*part) for part in parts]
    make_workdir(workdir)
    source = open_data(settings)
    for name in (RESULTS, SALIENCY):
        by_id: dict[str, list] = {}
        for line in (line for _, place in parts for line in read_lines(place / name)):
            by_id.setdefault(line["id"], []).append(line)
        ids = (source[i].question.id for i in range(len(source)))
        _write(workdir / name, (line for id_ in ids for line in by_id[id_]))
    identity = {**made[0][1], "data": source.sha256}
    identity["models"] = [each["models"] for _, each, _ in made]
    return source, identity, {f"fold {k}": ks for k, (_, _, ks) in enumerate(made) if ks}


def _over_seeds(work: Work, settings: Settings, workdir: Path):
    """Evaluate all users by the models of each seed; lines say which. Leaves seeds/N behind."""
    places = [workdir / "seeds" / str(s) for s in range(settings.eval.seeds)]
    made = [work(*part) for part in zip(_seeds(settings), places, strict=True)]
    make_workdir(workdir)
    for name in (RESULTS, SALIENCY):
        lines = ((s, line) for s, place in enumerate(places) for line in read_lines(place / name))
        _write(workdir / name, ({**line, "seed": s} for s, line in lines))
    source, identity, _ = made[0]
    identity = {**identity, "models": [each["models"] for _, each, _ in made]}
    return source, identity, {f"seed {s}": ks for s, (_, _, ks) in enumerate(made) if ks}


def _put(settings: Settings, name: str, value: int, field: str) -> Settings:
    """Return the settings of one part: its number stands in the paths of models."""
    mark, asked = "{" + name + "}", settings.eval
    if mark not in settings.policy + "".join(getattr(asked, path) for path in _PATHS):
        raise SettingsError(f"eval.{field}: put {mark} into policy, eval.reader or eval.readers")
    put = lambda text: text.replace(mark, str(value))  # noqa: E731
    paths = {path: put(getattr(asked, path)) for path in _PATHS}
    asked = dataclasses.replace(asked, **paths, **{field: 0})
    return dataclasses.replace(settings, policy=put(settings.policy), eval=asked)


def _write(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    if jax.process_index() == 0:
        with whole(path) as file:
            file.write(json_lines(lines))
