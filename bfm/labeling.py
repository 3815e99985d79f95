# SPDX-License-Identifier: Apache-2.0
"""Labels: saliency of every turn of every record, written in input order, resumable after a kill."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from bfm import lora, sharding
from bfm.dialogue import Example
from bfm.jsonl import write_json
from bfm.labels import Rendered, label, render, token_lines
from bfm.lm import ModelFiles, code_hash
from bfm.opening import noted, open_base, open_data, open_tuned
from bfm.progress import Meter
from bfm.saliency import Scorer, Timing, unanswered
from bfm.settings import Settings
from bfm.workdir import Spool, claim, read_meta

GROUP_TOKENS = 16_384  # tokens of records that are scored, then written, together
SHARED = 4  # times as many where questions share a history
# Settings that move a byte of the labels, beside `label` and what the hashes name.
_MOVES = (
    *("split", "fold", "limit", "sample", "seed", "batch_size", "unit", "context_turns"),
    *("shortlist", "tau", "max_focus", "on_overflow", "on_bad_record", "dump_tokens"),
)
LABELS, META, TOKENS = "labels.jsonl", "labels.meta.json", "tokens.jsonl"


def run(settings: Settings, workdir: Path) -> dict[str, Any]:
    """Label a data set into `workdir` and return the meta data that stands in labels.meta.json.

    Everything that can be wrong with model, data and settings is found before the workdir is touched.
    Of several processes each labels its share of the groups on its own devices, over which the model is
    split as `mesh` says (one copy on a CPU, whose devices share its cores); the first writes them all.
    Raises DataError, WorkdirError, ShardingError or the errors of `bfm.lm.open_model` (bad input).
    """
    files = open_base(settings)
    judge = open_tuned(settings.label.from_checkpoint, "label.from_checkpoint", files)
    seen: list[_Seen] = []

    def check(example: Example) -> None:
        rendered = render(example, files.scaffold, files.config.window, settings)
        seen.append(_Seen.of(rendered, judge is not None))

    source = open_data(settings, check)
    own = noted(source, seen)
    same = [a.history == b.history for a, b in itertools.pairwise(own)]
    starts = group_starts([r.tokens for r in own], [r.asked for r in own], [False, *same])
    spans = list(zip(starts, [*starts[1:], len(source)], strict=True))
    mesh = sharding.local_mesh(settings.mesh.data, settings.mesh.fsdp, settings.mesh.tensor)
    sharding.shardings(lora.base_shapes(files.config), mesh)  # what does not divide is told now
    meta = {
        "identity": identity(files, settings, source.sha256),
        "records": len(source),
        "skipped": source.skipped,
        "skipped_messages": list(source.skipped_messages),
        "timing": dataclasses.asdict(Timing()),
    }
    if judge:
        meta["identity"]["judge"] = judge.sha256()
    if settings.shortlist:
        kept, labelled = map(sum, zip(*(record.evidence for record in own), strict=True))
        meta["shortlist"] = {"evidence_kept": kept, "evidence": labelled}
    claim(workdir, META, "labels", meta, (LABELS, TOKENS))

    def count(timing: dict[str, float]) -> None:
        before = read_meta(workdir / META)["timing"]
        total = {name: before[name] + value for name, value in timing.items()}
        write_json(workdir / META, {**meta, "timing": total})

    lines = {}
    if settings.dump_tokens:
        lines[TOKENS] = [sum(record.lines for record in own[slice(*span)]) for span in spans]
    lines[LABELS] = [end - start for start, end in spans]  # appended last
    spool = Spool(workdir, lines, count)
    size = {k: sum(record.work for record in own[slice(*spans[k])]) for k in spool.mine()}
    todo = spool.todo()
    with Meter("scoring", sum(size.values()), "tokens") as meter:
        meter.skip(sum(tokens for k, tokens in size.items() if k not in todo))
        if todo:
            models = [one.load(settings.model.dtype, mesh) for one in (files, judge) if one]
            scorers = [
                Scorer(lm.decoder, lm.scaffold.head, batch_size=settings.batch_size)
                for lm in models
            ]
            todo = {k: spans[k] for k in todo}
            _score_groups(spool, source, todo, scorers, settings, files, meter)
    spool.finish()
    return read_meta(workdir / META)


@dataclasses.dataclass(frozen=True)
class _Seen:
    """What is kept of a record when it is checked.

    tokens: of its job; asked: those of its questions alone, as if its history were computed. work:
    tokens that the models compute, two of them where there is a judge. lines: in tokens.jsonl.
    """

    history: int  # a hash of its turns
    tokens: int
    asked: int
    work: int
    lines: int
    evidence: tuple[int, int]

    @classmethod
    def of(cls, rendered: Rendered, judged: bool) -> _Seen:
        job = rendered.job
        work = job.tokens + (unanswered(job).tokens if judged else 0)
        lines = (1 + len(rendered.turns)) * len(job.suffixes)
        history = hash(job.prefixes)
        return cls(history, job.tokens, job.asked_tokens, work, lines, rendered.evidence)


def _score_groups(spool: Spool, source, spans, scorers, settings, files, meter) -> None:
    """Score groups of records; a helper thread reads and writes beside the device."""
    scaffold, window = files.scaffold, files.config.window
    base, *judge = scorers

    def read(k: int) -> list[Rendered]:
        return [render(source[i], scaffold, window, settings) for i in range(*spans[k])]

    def write(k: int, rendered: list[Rendered], results: list, timing: dict) -> None:
        pairs = list(zip(rendered, results, strict=True))
        texts = {LABELS: "".join(label(*pair, settings).to_json_line() for pair in pairs)}
        if settings.dump_tokens:
            texts[TOKENS] = "".join(token_lines(*pair, scaffold.head) for pair in pairs)
        spool.put(k, texts, timing)

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
                asked = base.score(list(map(unanswered, jobs)), meter.add)
                results = judged(asked, judge[0].score(jobs, meter.add))
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


def judged(base: Sequence, judge: Sequence) -> list:
    """Return scores whose questions are the base model's and whose answers are the judge's."""
    return [
        [
            [dataclasses.replace(suffix, q=turn[0].q) for suffix in its]
            for turn, its in zip(turns, theirs, strict=True)
        ]
        for turns, theirs in zip(base, judge, strict=True)
    ]


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


def group_starts(sizes: Sequence[int], asked: Sequence[int], same: Sequence[bool]) -> list[int]:
    """Cut records into consecutive groups of about GROUP_TOKENS; a larger record stands alone.

    A record on the history of the one before (same[i]) adds only its questions (asked[i]), and such
    records go on up to SHARED groups' worth: the longer the group, the rarer is the history computed.

    >>> group_starts([9000, 9000, 40000, 40000], [900, 900, 4000, 4000], [False, False, False, True])
    [0, 1, 2]
    """
    starts, held = [0], 0
    for i, size in enumerate(sizes):
        adds, most = (asked[i], SHARED * GROUP_TOKENS) if same[i] else (size, GROUP_TOKENS)
        if held and held + adds > most:
            starts.append(i)
            held, adds = 0, size
        held += adds
    return starts
