# SPDX-License-Identifier: Apache-2.0
"""From settings to what they name: models, adapters and data, opened and checked before any work."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from bfm import lora
from bfm.dialogue import Example, generator, group_of
from bfm.jsonl import DataError, JsonlSource
from bfm.lm import LM, ModelError, ModelFiles, open_model
from bfm.settings import Settings, parse_fold

if TYPE_CHECKING:
    from bfm.datasets import Prepared

T = TypeVar("T")
DIALOGUES = Path(__file__).parent / "dialogues.jsonl"
SHIPPED = {  # adapters of the default model that come with bfm, and the configs that made them
    "shipped": Path(__file__).parent / "policy.safetensors",  # shipped.py
    "judge": Path(__file__).parent / "judge.safetensors",  # judge.py
}


def open_base(settings: Settings) -> ModelFiles:
    """Open the model that the settings name, without reading weights. Raises as `open_model` does."""
    files = open_model(settings.model.path, settings.model.arch, settings.seed)
    return files.with_attention(settings.model.attention)


def open_tuned(path: str, field: str, base: ModelFiles | LM) -> ModelFiles | None:
    """Open a model that was fine-tuned from `base`; None for "". `field` is the setting that names it.

    path: an export, an adapter.safetensors of launch/sft.py, or a name in SHIPPED. Raises ModelError
    where adapters belong to other weights or the chat template is another than the base model's,
    WeightsError for a file that holds no adapters. A loaded base takes an export only;
    `bfm.lm.adapted` gives it adapters.
    """
    if not path:
        return None
    if place := adapter_at(path):
        adapter = lora.read(place, base.config)
        if adapter.base != base.source.sha256():
            raise ModelError(f"{field}: {path}: adapters of other weights than the base model's")
        return dataclasses.replace(base, adapter=adapter)
    try:
        tuned = open_model(path).with_attention(base.config.attention)
    except ModelError as error:
        raise ModelError(f"{field}: {str(error).removeprefix('model.path: ')}") from None
    if not base.scaffold.same_frame(tuned.scaffold):
        raise ModelError(f"{field}: {tuned.path}: another chat template than the base model's")
    return tuned


def adapter_at(path: str) -> Path | None:
    """Return the file of adapters that `path` names: one of SHIPPED, or *.safetensors; else None."""
    return SHIPPED.get(path) or (Path(path) if path.endswith(".safetensors") else None)


@dataclasses.dataclass(frozen=True)
class Part:
    """Records of a source, in its order: those whose group is in a fold (or is not), or a sample."""

    source: JsonlSource | Prepared
    places: tuple[int, ...]
    sha256: str  # of the source, and of how its records were picked
    whole_sha256: str

    @classmethod
    def of(cls, source: JsonlSource | Prepared, fold: str, sample: int, seed: int) -> Part:
        """Draw so many records by seed (0: all), then keep those of a fold of all groups."""
        places, picked = range(len(source)), fold
        if sample and sample < len(source):
            order = generator(seed, "sample").permutation(len(source))
            places, picked = sorted(map(int, order[:sample])), f"{fold} sample {sample}"
        if fold:
            inside, part, parts = parse_fold(fold)
            groups = [group_of(source[i]) for i in range(len(source))]
            names = sorted(set(groups))
            order = generator(seed, "folds").permutation(len(names))
            held = {names[k] for place, k in enumerate(order) if place % parts == part}
            places = [i for i in places if (groups[i] in held) == inside]
        digest = hashlib.sha256(f"{source.sha256} {picked} {seed}".encode()).hexdigest()
        return cls(source, tuple(places), digest, source.sha256)

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
    if not settings.fold and not settings.sample:
        return source
    part = Part.of(source, settings.fold, settings.sample, settings.seed)
    if not len(part):
        raise DataError(f"{settings.data}: fold {settings.fold} holds no record")
    return part


def noted(source: JsonlSource | Prepared | Part, notes: Sequence[T]) -> Sequence[T]:
    """Return what a `check` noted of each record of a source; it sees those left out of a part, too."""
    places = source.places if isinstance(source, Part) else range(len(source))
    return [notes[i] for i in places]


def _open_whole(settings: Settings, check: Callable[[Example], None]) -> JsonlSource | Prepared:
    bad, limit = settings.on_bad_record, settings.limit
    if settings.data == "dialogues":
        return JsonlSource.open(DIALOGUES, bad, limit, check)
    if settings.data.startswith("jsonl:"):
        return JsonlSource.open(settings.data.removeprefix("jsonl:"), bad, limit, check)
    if Path(settings.data).is_file():
        raise DataError(f"data: {settings.data!r} is a file; give jsonl:{settings.data}")
    from bfm import datasets  # tensorflow-datasets takes seconds to import

    source = datasets.load(
        settings.data, settings.split, data_dir=settings.data_dir,
        prepared_dir=settings.prepared_dir, download=settings.download,
        reading=datasets.Reading(seed=settings.seed, **dataclasses.asdict(settings.reading)),
    )  # fmt: skip
    return source.checked(check, bad, limit)
