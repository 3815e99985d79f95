# SPDX-License-Identifier: Apache-2.0
"""What a run learns from: a labels file joined with its data, groups held out, rows made."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bfm import selectors
from bfm.dialogue import Example, evidence_turns, generator, group_of, turns_of
from bfm.jsonl import DataError
from bfm.lm import ModelFiles
from bfm.opening import Part, open_data
from bfm.progress import Meter
from bfm.prompts import PromptError, has_answer
from bfm.rows import Labelled, Row, make_rows, silver
from bfm.settings import Settings, SettingsError
from bfm.weights import file_hash


@dataclasses.dataclass(frozen=True)
class Material:
    """What a run learns from and is measured on, with what was left out."""

    rows: tuple[Row, ...]
    dev: tuple[Labelled, ...]
    counts: dict[str, int]
    identity: dict[str, Any]  # of labels and data


def prepare(settings: Settings, files: ModelFiles) -> Material:
    """Read labels and data, hold groups out, and make the rows. Raises DataError or SettingsError."""
    counts: collections.Counter[str] = collections.Counter()
    labelled, identity = read_material(settings, files, counts)
    if any(item.tau is None for item in labelled):
        raise DataError(f"{settings.labels}: tau is not chosen yet; run launch/label.py again")
    train, held_out = hold_out(labelled, settings)
    rows: list[Row] = []
    dev: list[Labelled] = []
    ignored: collections.Counter[str] = collections.Counter()
    with Meter("making rows", len(labelled), "examples") as meter:
        for item, held in [*((x, False) for x in train), *((x, True) for x in held_out)]:
            try:  # held-out examples as well: what does not fit must not end a run that has trained
                made = make_rows(item, files.scaffold, settings, ignored if held else counts)
            except PromptError as error:
                where = f"{settings.data}: record {item.example.question.id!r}"
                if settings.on_bad_record == "stop":
                    raise DataError(f"{where}: {error}") from None
                counts["records that do not fit"] += 1
            else:
                if held:
                    dev.append(item)
                else:
                    rows += made
            meter.add(1)
    if not rows:
        raise DataError(f"{settings.data}: no example with an answer is left to train on")
    return Material(tuple(rows), tuple(dev), dict(counts), identity)


def read_material(
    settings: Settings, files: ModelFiles, counts: collections.Counter[str]
) -> tuple[list[Labelled], dict[str, Any]]:
    """Join examples and labels by id; return them with what identifies both."""
    source = open_data(settings)
    form = settings.label.answer
    shown = evidence_shown(settings)
    if not settings.labels:
        examples = [e for e in (source[i] for i in range(len(source))) if has_answer(e, form)]
        counts["records without an answer"] += len(source) - len(examples)
        items = [Labelled(e, (), (), 0.0, shown(e)) for e in examples]
        return items, {"labels": "", "data": source.sha256}
    path = Path(settings.labels)
    labels, identity = read_labels(path)
    here = {**files.identity(settings.model.dtype), "data": source.sha256}
    if isinstance(source, Part) and identity.get("data") == source.whole_sha256:
        here["data"] = source.whole_sha256  # labels of everything serve each part
    for name in ("data", "weights", "tokenizer", "template"):
        if identity.get(name) != here[name]:
            what = (
                f"data={settings.data}, split={settings.split}" if name == "data" else "the model"
            )
            raise DataError(f"{path}: made with another {name} than {what}; make labels for it")
    config = identity.get("config", {})
    for name in ("unit", "context_turns"):
        if config.get(name) != getattr(settings, name):
            raise SettingsError(f"{name}: {path} was made with {config.get(name)!r}")
    kept, scores = [], []
    encoder = _encoder(settings)
    for i in range(len(source)):
        example = source[i]
        label = labels.get(example.question.id)
        if label is None:
            raise DataError(f"{path}: no label for record {example.question.id!r}")
        score = None
        if label["sal_a"] is not None and has_answer(example, form):
            score = scores_by(settings.label.source, example, label, settings, encoder)
        if score is None:
            counts["records without an answer"] += 1
            continue
        by_a = Labelled(
            example, tuple(label["sal_q"]), tuple(label["sal_a"]), label["tau"], shown(example)
        )
        kept.append(by_a)
        scores.append(score)
    tau = _tau(kept, scores, settings)
    kept = [
        dataclasses.replace(item, score=score, tau=item.tau if tau is None else tau)
        for item, score in zip(kept, scores, strict=True)
    ]
    return kept, {"labels": file_hash(path), "data": source.sha256}


def _tau(kept: Sequence[Labelled], scores: Sequence, settings: Settings) -> float | None:
    """Return the threshold of a source other than sal_a: as many turns pass as over Sal_a's."""
    if settings.label.source == "sal_a":
        return None
    if settings.label.source == "evidence":
        return 0.5
    opened = sum(len(silver(item, range(len(item.score)), len(item.score))) for item in kept)
    return matching_tau(scores, opened)


def _encoder(settings: Settings):
    if settings.label.source != "embedding":
        return None
    from bfm import embed  # only where embeddings are asked for

    encoder = embed.load()

    def cosine(example: Example) -> np.ndarray:
        turns = turns_of(example.question.messages, settings.unit)
        texts = ["\n".join(m.content for m in turn.messages) for turn in turns]
        unit = embed.embed(encoder, [example.question.query, *texts])
        return unit[1:] @ unit[0]

    return cosine


def evidence_shown(settings: Settings) -> Callable[[Example], tuple[int, ...] | None]:
    """Return what chooses the turns of a reader's row by `train.evidence`; None means the silver focus.

    Only `evidence` looks at labels; the others see the question and its turns.
    """
    kind, k = settings.train.evidence, settings.eval.k
    encoder = None
    if kind == "embedding":
        from bfm import embed  # only where embeddings are asked for

        encoder = embed.load()

    def shown(example: Example) -> tuple[int, ...] | None:
        question = example.question
        turns = turns_of(question.messages, settings.unit)
        match kind:
            case "evidence":
                return evidence_turns(example, settings.unit)[: settings.max_focus]
            case "chance":
                return by_chance(range(len(turns)), example, settings)
            case "full":
                return selectors.recency(question, turns)
            case "recency":
                return selectors.recency(question, turns)[:k]
            case "bm25":
                return selectors.by_score(selectors.lexical(question, turns, False))[:k]
            case "embedding":
                [scores] = selectors.embedding([(question, turns)], False, encoder)
                return selectors.by_score(scores)[:k]
        return None

    return shown


def by_chance(turns: Sequence[int], example: Example, settings: Settings) -> tuple[int, ...]:
    """Return 1 .. max_focus of the turns; which depends on seed and id only."""
    rng = generator(settings.seed, f"evidence {example.question.id}")
    k = min(len(turns), int(rng.integers(1, settings.max_focus + 1)))
    return tuple(int(i) for i in rng.choice(turns, k, replace=False))


def hold_out(
    labelled: Sequence[Labelled], settings: Settings
) -> tuple[list[Labelled], list[Labelled]]:
    """Split by group (`meta["group"]`, else the record) into training and held-out examples."""
    groups = sorted({group_of(item.example) for item in labelled})
    n = round(settings.train.dev * len(groups))
    if settings.train.dev and len(groups) > 1:
        n = min(max(1, n), len(groups) - 1)
    order = generator(settings.seed, "hold out").permutation(len(groups))
    held = {groups[i] for i in order[:n]}
    train = [item for item in labelled if group_of(item.example) not in held]
    dev = [item for item in labelled if group_of(item.example) in held]
    return train, dev


def read_labels(path: Path) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Read labels.jsonl: id -> line, and the identity in labels.meta.json beside it.

    Raises DataError (one line): a missing or torn file, a line without a needed field, fewer lines than
    its meta data names.
    """
    meta_path = path.with_name(f"{path.stem}.meta.json")
    try:
        lines = path.read_bytes().split(b"\n")
        meta = json.loads(meta_path.read_text("utf-8"))
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DataError(f"{meta_path}: is not JSON ({error})") from None
    if lines.pop():
        raise DataError(f"{path}: its last line is torn; run launch/label.py again to finish it")
    labels = {}
    for number, line in enumerate(lines, start=1):
        try:
            label = json.loads(line)
            labels[label["id"]] = {name: label[name] for name in ("sal_q", "sal_a", "tau")}
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}: line {number}: is no label ({error})") from None
    if len(labels) < meta.get("records", 0):
        raise DataError(
            f"{path}: holds {len(labels)} labels of {meta['records']} records; run launch/label.py "
            "again to finish it"
        )
    return labels, meta.get("identity", {})


def scores_by(
    source: str,
    example: Example,
    label: Mapping[str, Any],
    settings: Settings,
    cosine: Callable[[Example], Sequence[float]] | None = None,
) -> tuple[float | None, ...] | None:
    """Return one score a turn by `label.source`; None where the example has none (no answer).

    sal_a and sal_q come from the label, evidence is 1 or 0, embedding the cosine of question and turn,
    random uniform in [0, 1) from the seed.
    """
    n = len(turns_of(example.question.messages, settings.unit))
    if source in ("sal_a", "sal_q"):
        return None if label[source] is None else tuple(label[source])
    if source == "evidence":
        found = set(evidence_turns(example, settings.unit))
        return tuple(float(i in found) for i in range(n))
    if source == "embedding":
        return tuple(float(x) for x in cosine(example))
    rng = generator(settings.seed, f"scores {example.question.id}")
    return tuple(float(x) for x in rng.random(n))


def matching_tau(scores: Sequence[Sequence[float | None]], wanted: int) -> float:
    """Return the threshold that lets `wanted` turns pass over all examples (as many as Sal_a does).

    So sources of labels are compared at one rate of opening. Of equal scores none passes.
    """
    values = np.sort([x for row in scores for x in row if x is not None])[::-1]
    if not len(values) or wanted <= 0:
        return float("inf")
    return float(values[min(wanted, len(values) - 1)])
