# SPDX-License-Identifier: Apache-2.0
"""Labels: saliency of every turn of every record, written in input order, resumable after a kill.

Records are scored in groups whose make-up depends on the input alone, so a run that was stopped and
started again writes the same bytes as one that was not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import jax

from bfm.dialogue import Example, generator, group_of
from bfm.jsonl import DataError, JsonlSource, write_json
from bfm.labels import Rendered, label, render, token_lines
from bfm.lm import LM, ModelError, ModelFiles, code_hash, open_model
from bfm.progress import Meter
from bfm.saliency import Job, Scorer, Suffix
from bfm.settings import Settings, parse_fold

if TYPE_CHECKING:
    from bfm.datasets import Prepared

DIALOGUES = Path(__file__).parent / "dialogues.jsonl"
GROUP_TOKENS = 16_384  # tokens of records that are scored, then written, together
# Settings that move a byte of the labels, beside `label` and what the hashes name.
_MOVES = (
    *("split", "fold", "limit", "seed", "batch_size", "unit", "context_turns", "shortlist", "tau"),
    *("max_focus", "on_overflow", "on_bad_record", "dump_tokens"),
)
LABELS, META, TOKENS = "labels.jsonl", "labels.meta.json", "tokens.jsonl"


class WorkdirError(ValueError):
    """A workdir that holds something else; one line that says what to do."""


def run(settings: Settings, workdir: Path) -> dict[str, Any]:
    """Label a data set into `workdir` and return the meta data that stands in labels.meta.json.

    Everything that can be wrong with model, data and settings is found before the workdir is touched.
    Raises DataError, WorkdirError or the errors of `bfm.lm.open_model` (bad input).
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
    this = identity(files, settings, source.sha256)
    if judge:
        this["judge"] = judge.source.sha256()
    done = _resume(workdir, this, source, groups, settings.dump_tokens)
    meta = {
        "identity": this,
        "records": len(source),
        "skipped": source.skipped,
        "skipped_messages": list(source.skipped_messages),
    }
    if settings.shortlist:
        kept, labelled = map(sum, zip(*evidence, strict=True))
        meta["shortlist"] = {"evidence_kept": kept, "evidence": labelled}
    if done == len(source):
        return _read_meta(workdir)
    lm = files.load(settings.model.dtype)
    scorer = Scorer(lm.decoder, lm.scaffold.head, batch_size=settings.batch_size)
    judges = None
    if judge:
        decoder = judge.load(settings.model.dtype).decoder
        judges = Scorer(decoder, lm.scaffold.head, batch_size=settings.batch_size)
    earlier = _read_meta(workdir).get("timing", {}) if done else {}

    def write_meta() -> None:
        timings = [dataclasses.asdict(s.timing) for s in (scorer, judges) if s]
        timing = {key: sum(t[key] for t in (*timings, {key: 0, **earlier})) for key in timings[0]}
        write_json(workdir / META, {**meta, "timing": timing})

    write_meta()
    with contextlib.ExitStack() as stack:
        meter = stack.enter_context(Meter("scoring", sum(sizes), "tokens"))
        labels = stack.enter_context(open(workdir / LABELS, "a", encoding="utf-8", newline="\n"))
        dump = None
        if settings.dump_tokens:
            dump = stack.enter_context(open(workdir / TOKENS, "a", encoding="utf-8", newline="\n"))
        meter.skip(sum(sizes[:done]))
        spans = list(zip(groups, [*groups[1:], len(source)], strict=True))
        spans = [span for span in spans if span[0] >= done]

        def read(start: int, end: int) -> list[Rendered]:
            window = lm.config.window
            return [render(source[i], lm.scaffold, window, settings) for i in range(start, end)]

        def write(rendered: list[Rendered], results: list) -> None:
            _append(labels, dump, rendered, results, lm.scaffold.head, settings)
            write_meta()

        # One helper thread reads the next group and writes the last one while the device computes.
        helper = stack.enter_context(ThreadPoolExecutor(1))
        ahead, written = helper.submit(read, *spans[0]), None
        for k in range(len(spans)):
            rendered = ahead.result()
            if k + 1 < len(spans):
                ahead = helper.submit(read, *spans[k + 1])
            jobs = [r.job for r in rendered]
            if judges:
                results = judged(
                    scorer.score(list(map(unanswered, jobs))), judges.score(jobs, meter.add)
                )
            else:
                results = scorer.score(jobs, meter.add)
            if written:
                written.result()
            written = helper.submit(write, rendered, results)
        written.result()
    return _read_meta(workdir)


def open_base(settings: Settings) -> ModelFiles:
    """Open the model that the settings name, without reading weights. Raises as `open_model` does."""
    return open_model(settings.model.path, settings.model.arch, settings.seed)


def open_tuned(path: str, field: str, base: ModelFiles | LM) -> ModelFiles | None:
    """Open a model that was fine-tuned from `base`; None for "". `field` is the setting that names it.

    Raises ModelError where its chat template is another than the base model's.
    """
    if not path:
        return None
    try:
        tuned = open_model(path)
    except ModelError as error:
        raise ModelError(f"{field}: {str(error).removeprefix('model.path: ')}") from None
    ours, its = base.scaffold, tuned.scaffold
    if (ours.head, ours.tail, ours.end) != (its.head, its.tail, its.end):
        raise ModelError(f"{field}: {tuned.path}: another chat template than the base model's")
    return tuned


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


def _append(labels: TextIO, dump: TextIO | None, rendered, results, head, settings) -> None:
    """Write a group: tokens first, so that a complete label line implies complete token lines."""
    if dump:
        for record, scored in zip(rendered, results, strict=True):
            dump.write(token_lines(record, scored, head))
        _flush(dump)
    for record, scored in zip(rendered, results, strict=True):
        labels.write(label(record, scored, settings).to_json_line())
    _flush(labels)


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


def _resume(
    workdir: Path,
    identity: dict,
    source: JsonlSource | Prepared,
    groups: Sequence[int],
    dumped: bool,
) -> int:
    """Prepare the workdir and return how many records are done: whole groups only.

    Lines past the last whole group, torn or not, are cut off; they will be written again.
    """
    make_workdir(workdir)
    found = [name for name in (LABELS, TOKENS) if (workdir / name).exists()]
    if found and not (workdir / META).exists():
        raise WorkdirError(f"--workdir: {workdir} holds {found[0]} but no {META}; choose another")
    if not (workdir / META).exists():
        return 0
    check_identity(workdir, "labels", _read_meta(workdir).get("identity", {}), identity)
    ends = _line_ends(workdir / LABELS)
    if len(ends) > len(source):
        raise WorkdirError(
            f"--workdir: {workdir / LABELS} has more lines than the data has records"
        )
    starts = [*groups, len(source)]
    done = max(start for start in starts if start <= len(ends))
    _cut(workdir / LABELS, ends[done - 1] if done else 0)
    if dumped:
        ids = {source[i].question.id for i in range(done)}
        _cut(workdir / TOKENS, _end_of(workdir / TOKENS, ids))
    return done


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


def _line_ends(path: Path) -> list[int]:
    """Byte offsets after each complete line; a torn last line has none."""
    ends, place = [], 0
    if path.exists():
        with open(path, "rb") as file:
            for line in file:
                place += len(line)
                if line.endswith(b"\n"):
                    ends.append(place)
    return ends


def _end_of(path: Path, ids: set[str]) -> int:
    """Byte offset after the last line whose record is among `ids` (lines stand in input order)."""
    place = 0
    if path.exists():
        with open(path, "rb") as file:
            for line in file:
                if not line.endswith(b"\n") or json.loads(line)["id"] not in ids:
                    break
                place += len(line)
    return place


def _cut(path: Path, size: int) -> None:
    if path.exists() and path.stat().st_size > size:
        os.truncate(path, size)


def _flush(file: TextIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _read_meta(workdir: Path) -> dict[str, Any]:
    try:
        return json.loads((workdir / META).read_text("utf-8"))
    except (OSError, ValueError):
        raise WorkdirError(f"--workdir: {workdir / META} cannot be read; choose another") from None
