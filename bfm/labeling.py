# SPDX-License-Identifier: Apache-2.0
"""Labels: saliency of every turn of every record, written in input order, resumable after a kill.

Records are scored in groups whose make-up depends on the input alone, and every group is a file until
all are there: a run that was stopped and started again, by any number of processes, writes the same
bytes as one that was not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from bfm import lora, sharding
from bfm.dialogue import Example, generator, group_of
from bfm.jsonl import DataError, JsonlSource, whole, write_json
from bfm.labels import Rendered, label, render, token_lines
from bfm.lm import LM, ModelError, ModelFiles, code_hash, open_model
from bfm.progress import Meter
from bfm.saliency import Job, Scorer, Suffix
from bfm.settings import Settings, parse_fold

if TYPE_CHECKING:
    from bfm.datasets import Prepared

DIALOGUES = Path(__file__).parent / "dialogues.jsonl"
SHIPPED = Path(__file__).parent / "policy.safetensors"  # for the default model; configs/shipped.py
GROUP_TOKENS = 16_384  # tokens of records that are scored, then written, together
# Settings that move a byte of the labels, beside `label` and what the hashes name.
_MOVES = (
    *("split", "fold", "limit", "seed", "batch_size", "unit", "context_turns", "shortlist", "tau"),
    *("max_focus", "on_overflow", "on_bad_record", "dump_tokens"),
)
LABELS, META, TOKENS = "labels.jsonl", "labels.meta.json", "tokens.jsonl"
PARTS = "parts"  # a file a group, until all are there


class WorkdirError(ValueError):
    """A workdir that holds something else; one line that says what to do."""


def run(settings: Settings, workdir: Path) -> dict[str, Any]:
    """Label a data set into `workdir` and return the meta data that stands in labels.meta.json.

    Everything that can be wrong with model, data and settings is found before the workdir is touched.
    Of several processes each labels its share of the groups on its own devices, over which the model is
    split as `mesh` says (one copy on a CPU, whose devices share its cores); the first joins them.
    Raises DataError, WorkdirError, ShardingError or the errors of `bfm.lm.open_model` (bad input).
    """
    files = open_base(settings)
    judge = open_tuned(settings.label.from_checkpoint, "label.from_checkpoint", files)
    tokens: list[int] = []
    evidence: list[tuple[int, int]] = []

    def check(example: Example) -> None:
        rendered = render(example, files.scaffold, files.config.window, settings)
        tokens.append(rendered.job.tokens)
        evidence.append(rendered.evidence)

    source = open_data(settings, check)
    places = source.places if isinstance(source, Part) else range(len(source))
    sizes, evidence = [tokens[i] for i in places], [evidence[i] for i in places]
    groups = group_starts(sizes)
    mesh = sharding.local_mesh(settings.mesh.data, settings.mesh.fsdp, settings.mesh.tensor)
    sharding.shardings(lora.base_shapes(files.config), mesh)  # what does not divide is told now
    this = identity(files, settings, source.sha256)
    if judge:
        this["judge"] = judge.sha256()
    meta = {
        "identity": this,
        "records": len(source),
        "skipped": source.skipped,
        "skipped_messages": list(source.skipped_messages),
    }
    if settings.shortlist:
        kept, labelled = map(sum, zip(*evidence, strict=True))
        meta["shortlist"] = {"evidence_kept": kept, "evidence": labelled}
    if _whole(workdir, meta):
        return _read_meta(workdir)
    spans = list(zip(groups, [*groups[1:], len(source)], strict=True))
    mine = range(jax.process_index(), len(spans), jax.process_count())
    todo = [k for k in mine if not _part(workdir, k).exists()]
    with Meter("scoring", sum(sum(sizes[slice(*spans[k])]) for k in mine), "tokens") as meter:
        meter.skip(sum(sum(sizes[slice(*spans[k])]) for k in mine if k not in todo))
        if todo:
            models = [one.load(settings.model.dtype, mesh) for one in (files, judge) if one]
            scorers = [
                Scorer(lm.decoder, lm.scaffold.head, batch_size=settings.batch_size, mesh=mesh)
                for lm in models
            ]
            _score_groups(
                workdir, source, {k: spans[k] for k in todo}, scorers, settings, files, meter
            )
    if jax.process_index() == 0:
        _join(workdir, len(spans), meta, settings.dump_tokens)
    _wait(workdir / LABELS)
    return _read_meta(workdir)


def _score_groups(workdir, source, spans, scorers, settings, files, meter) -> None:
    """Score groups of records, a file each; a helper thread reads and writes beside the device."""
    scaffold, window = files.scaffold, files.config.window
    base, *judge = scorers

    def read(k: int) -> list[Rendered]:
        return [render(source[i], scaffold, window, settings) for i in range(*spans[k])]

    def write(k: int, rendered: list[Rendered], results: list, timing: dict) -> None:
        pairs = list(zip(rendered, results, strict=True))
        dump = "".join(token_lines(*pair, scaffold.head) for pair in pairs)
        write_json(_part(workdir, k), {
            "labels": "".join(label(*pair, settings).to_json_line() for pair in pairs),
            "tokens": dump if settings.dump_tokens else "", "timing": timing,
        })  # fmt: skip

    before = dict.fromkeys(_spent(scorers), 0)
    with ThreadPoolExecutor(1) as helper:
        order = list(spans)
        ahead, written = helper.submit(read, order[0]), None
        for k, following in zip(order, [*order[1:], None], strict=True):
            rendered = ahead.result()
            if following is not None:
                ahead = helper.submit(read, following)
            jobs = [r.job for r in rendered]
            if judge:
                results = judged(
                    base.score(list(map(unanswered, jobs))), judge[0].score(jobs, meter.add)
                )
            else:
                results = base.score(jobs, meter.add)
            if written:
                written.result()
            now = _spent(scorers)
            timing = {name: now[name] - before[name] for name in now}
            before, written = now, helper.submit(write, k, rendered, results, timing)
        written.result()


def _spent(scorers: Sequence[Scorer]) -> dict[str, float]:
    timings = [dataclasses.asdict(scorer.timing) for scorer in scorers]
    return {name: sum(timing[name] for timing in timings) for name in timings[0]}


def open_base(settings: Settings) -> ModelFiles:
    """Open the model that the settings name, without reading weights. Raises as `open_model` does."""
    return open_model(settings.model.path, settings.model.arch, settings.seed)


def open_tuned(path: str, field: str, base: ModelFiles | LM) -> ModelFiles | None:
    """Open a model that was fine-tuned from `base`; None for "". `field` is the setting that names it.

    path: an export, an adapter.safetensors of launch/sft.py, or "shipped" for the adapter that comes
    with bfm. Raises ModelError where adapters belong to other weights or the chat template is another
    than the base model's, WeightsError for a file that holds no adapters. A loaded base takes an export
    only; `bfm.lm.adapted` gives it adapters.
    """
    if not path:
        return None
    if place := adapter_at(path):
        adapter = lora.read(place, base.config)
        if adapter.base != base.source.sha256():
            raise ModelError(f"{field}: {path}: adapters of other weights than the base model's")
        return dataclasses.replace(base, adapter=adapter)
    try:
        tuned = open_model(path)
    except ModelError as error:
        raise ModelError(f"{field}: {str(error).removeprefix('model.path: ')}") from None
    ours, its = base.scaffold, tuned.scaffold
    if (ours.head, ours.tail, ours.end) != (its.head, its.tail, its.end):
        raise ModelError(f"{field}: {tuned.path}: another chat template than the base model's")
    return tuned


def adapter_at(path: str) -> Path | None:
    """Return the file of adapters that `path` names: "shipped" or *.safetensors; else None."""
    return SHIPPED if path == "shipped" else Path(path) if path.endswith(".safetensors") else None


def unanswered(job: Job) -> Job:
    """Return the job without its answers: what the base model scores beside a judge."""
    first = job.suffixes[0]
    return Job(job.prefixes, (Suffix(first.ids[: first.q[1]], first.q),))


def judged(base: Sequence, judge: Sequence) -> list:
    """Return scores whose questions are the base model's and whose answers are the judge's."""
    return [
        [
            [dataclasses.replace(suffix, q=turn[0].q) for suffix in its]
            for turn, its in zip(turns, theirs, strict=True)
        ]
        for turns, theirs in zip(base, judge, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class Part:
    """The records of a source whose group is in a fold (or is not); groups are dealt out by seed."""

    source: JsonlSource | Prepared
    places: tuple[int, ...]
    sha256: str  # of the source and the fold
    whole_sha256: str

    @classmethod
    def of(cls, source: JsonlSource | Prepared, fold: str, seed: int) -> Part:
        inside, part, parts = parse_fold(fold)
        groups = [group_of(source[i]) for i in range(len(source))]
        names = sorted(set(groups))
        order = generator(seed, "folds").permutation(len(names))
        held = {names[k] for place, k in enumerate(order) if place % parts == part}
        places = tuple(i for i, group in enumerate(groups) if (group in held) == inside)
        digest = hashlib.sha256(f"{source.sha256} {fold} {seed}".encode()).hexdigest()
        return cls(source, places, digest, source.sha256)

    @property
    def skipped(self) -> int:
        return self.source.skipped

    @property
    def skipped_messages(self) -> tuple[str, ...]:
        return self.source.skipped_messages

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Example:
        return self.source[self.places[index]]


def open_data(
    settings: Settings, check: Callable[[Example], None] = lambda example: None
) -> JsonlSource | Prepared | Part:
    """Open the data that the settings name, every record checked. Raises DataError (one line)."""
    source = _open_whole(settings, check)
    if not settings.fold:
        return source
    part = Part.of(source, settings.fold, settings.seed)
    if not len(part):
        raise DataError(f"{settings.data}: fold {settings.fold} holds no record")
    return part


def _open_whole(settings: Settings, check: Callable[[Example], None]) -> JsonlSource | Prepared:
    bad, limit = settings.on_bad_record, settings.limit
    if settings.data == "dialogues":
        return JsonlSource.open(DIALOGUES, bad, limit, check)
    if settings.data.startswith("jsonl:"):
        return JsonlSource.open(settings.data.removeprefix("jsonl:"), bad, limit, check)
    from bfm import datasets  # tensorflow-datasets takes seconds to import

    source = datasets.load(
        settings.data, settings.split, data_dir=settings.data_dir,
        prepared_dir=settings.prepared_dir, download=settings.download,
        reading=datasets.Reading(seed=settings.seed, **dataclasses.asdict(settings.reading)),
    )  # fmt: skip
    return source.checked(check, bad, limit)


def identity(files: ModelFiles, settings: Settings, data_sha256: str) -> dict[str, Any]:
    """Return everything that the bytes of the labels depend on."""
    # Model and data are named by the hashes of what they hold.
    config = {name: getattr(settings, name) for name in _MOVES}
    label = dataclasses.asdict(settings.label)
    for name in ("from_checkpoint", "source", "rounds", "folds"):
        del label[name]
    return {
        **files.identity(settings.model.dtype),
        "data": data_sha256,
        "code": code_hash(),
        "jax": f"{jax.__version__} {jax.default_backend()}",
        "config": config | {"label": label},
    }


def group_starts(sizes: Sequence[int]) -> list[int]:
    """Cut records into consecutive groups of about GROUP_TOKENS; a larger record stands alone."""
    starts, held = [0], 0
    for i, size in enumerate(sizes):
        if held and held + size > GROUP_TOKENS:
            starts.append(i)
            held = 0
        held += size
    return starts


def _whole(workdir: Path, meta: dict[str, Any]) -> bool:
    """Prepare the workdir, or find its labels whole. Raises WorkdirError for those of another run."""
    make_workdir(workdir)
    if jax.process_index():
        _wait(workdir / META)
    elif not (workdir / META).exists():
        if found := [name for name in (LABELS, TOKENS, PARTS) if (workdir / name).exists()]:
            raise WorkdirError(
                f"--workdir: {workdir} holds {found[0]} but no {META}; choose another"
            )
        write_json(workdir / META, meta)
    check_identity(workdir, "labels", _read_meta(workdir).get("identity", {}), meta["identity"])
    if not (workdir / LABELS).exists():
        (workdir / PARTS).mkdir(exist_ok=True)
        return False
    with open(workdir / LABELS, "rb") as file:
        if sum(line.endswith(b"\n") for line in file) != meta["records"]:
            raise WorkdirError(
                f"--workdir: {workdir / LABELS} has other lines than the data has records; remove it"
            )
    if jax.process_index() == 0:  # a kill may have left them after all was joined
        shutil.rmtree(workdir / PARTS, ignore_errors=True)
    return True


def _part(workdir: Path, k: int) -> Path:
    return workdir / PARTS / f"{k:07}.json"


def _join(workdir: Path, n: int, meta: dict[str, Any], dumped: bool) -> None:
    """Write the labels of all groups, in input order, when all of them are there."""
    for k in range(n):
        _wait(_part(workdir, k))
    timing: dict[str, float] = {}
    with contextlib.ExitStack() as stack:
        labels = stack.enter_context(whole(workdir / LABELS))  # takes its name last
        dump = stack.enter_context(whole(workdir / TOKENS)) if dumped else None
        for k in range(n):
            part = json.loads(_part(workdir, k).read_text("utf-8"))
            labels.write(part["labels"])
            if dump:
                dump.write(part["tokens"])
            timing = {name: timing.get(name, 0) + value for name, value in part["timing"].items()}
        write_json(workdir / META, {**meta, "timing": timing})
    shutil.rmtree(workdir / PARTS)


def _wait(path: Path) -> None:
    """Wait for what another process writes; jax ends this one where that one has died."""
    while not path.exists():
        time.sleep(0.1)


def make_workdir(workdir: Path) -> None:
    """Make the folder a run writes to. Raises WorkdirError where it cannot be written."""
    if workdir.exists() and not workdir.is_dir():
        raise WorkdirError(f"--workdir: {workdir} is not a folder")
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        if not os.access(workdir, os.W_OK):
            raise PermissionError(13, "not writable")
    except OSError as error:
        raise WorkdirError(f"--workdir: {workdir}: {error.strerror}") from None


def check_identity(workdir: Path, what: str, before: dict, now: dict) -> None:
    """Raise WorkdirError, naming the keys, where a folder is of a run with another identity."""
    if changed := [key for key in now if before.get(key) != now[key]]:
        raise WorkdirError(
            f"--workdir: {workdir} holds {what} of another run ({', '.join(changed)} differ); "
            "choose another folder or remove it"
        )


def _read_meta(workdir: Path) -> dict[str, Any]:
    try:
        return json.loads((workdir / META).read_text("utf-8"))
    except (OSError, ValueError):
        raise WorkdirError(f"--workdir: {workdir / META} cannot be read; choose another") from None
