# SPDX-License-Identifier: Apache-2.0
"""Training checkpoints: whole or not at all, restored on any mesh, never under other settings.

Saving, sharding, the order of processes and what is kept are orbax's. Added here: every step lists its
files with their sizes, so that damage is found before a restore, and what belongs to a run is compared.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import absl.logging
import jax
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from bfm.jsonl import write_json

_UNFINISHED = ".orbax-checkpoint-tmp"  # orbax's name for a step that is being written
_METADATA = "_CHECKPOINT_METADATA"  # orbax's file about a step
_FILES = "files.json"  # ours: the size of every file of a step
_ABSENT = "absent"


class CheckpointError(ValueError):
    """Checkpoints cannot be written or do not fit: one line that names the folder and the reason."""


class Checkpoints:
    """The checkpoints of one run in one folder (shared by all processes): the newest, and the best."""

    def __init__(self, folder: Path | str, keep: int, identity: Mapping[str, Any], best: str = ""):
        """Open the folder, or make it; steps that are not whole are set aside with a warning.

        For the run that writes, one at a time: what another has not finished is removed. Every
        process calls every method; the first one writes the JSON.

        Args:
          folder: on a file system that all processes see.
          keep: how many of the newest steps to keep, at least 1.
          identity: JSON; what a run must share with the run it goes on from (config, dtype, hashes).
          best: a metric; the step where it is highest is kept too. "" keeps the newest only.

        Raises:
          CheckpointError: keep is below 1, or the folder cannot be made or written to.
        """
        if keep < 1:
            raise CheckpointError(f"keep: must be at least 1, got {keep}")
        self.folder = Path(folder).absolute()
        self._identity = json.loads(json.dumps(identity))
        self._best = best
        self._at: int | None = None  # the step last saved or restored here
        self._writing: int | None = None
        self._saving: ocp.AsyncResponse | None = None
        policies = ocp.training.preservation_policies
        kept = [policies.LatestN(keep)]
        if best:
            one = dict(n=1, keep_checkpoints_without_metrics=False)
            kept.append(policies.BestN(get_metric_fn=self._rank, **one))
        context = ocp.Context()
        # A lambda: orbax copies its options deeply, and a method would bring a copy of this object.
        context.async_options.post_finalization_callback = lambda: self._list_files()
        with _explained(f"{self.folder}: checkpoints cannot be kept here"):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._try_to_write()
            if jax.process_index() == 0:
                self._set_aside()
            multihost_utils.sync_global_devices("bfm.checkpoint: damaged steps are set aside")
            self._steps = ocp.training.Checkpointer(
                self.folder,
                context=context,
                preservation_policy=policies.AnyPreservationPolicy(kept),
                cleanup_tmp_directories=True,
            )

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except CheckpointError:
            if kind is None:  # else the error that ended the block is the one to report
                raise

    def latest(self) -> int | None:
        """Return the newest step, or None. Raises CheckpointError if it is another run's."""
        self._wait()
        last = self._steps.latest
        if last is None:
            return None
        self._metadata(last.step)
        return last.step

    def best(self) -> int | None:
        """Return the step where the metric `best` is highest (the newest of equals), or None."""
        self._wait()
        ranked = [(self._rank(at.metrics), at.step) for at in self._steps.checkpoints if at.metrics]
        return max(ranked)[1] if ranked else None

    def save(
        self,
        step: int,
        state: Any,
        position: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Begin to write a step and return once the arrays are copied; they may be donated then.

        Saving the step that was just saved or restored does nothing.

        Args:
          step: after every step in the folder.
          state: nested dicts, lists and NamedTuples of jax Arrays.
          position: JSON; the place in the data of the next step.
          metrics: must name `best`, where that is set.

        Raises:
          CheckpointError: this step cannot be written, or the one before it could not.
        """
        if step == self._at:
            return
        self._wait()
        last = self._steps.latest
        if last is not None and step <= last.step:
            raise CheckpointError(
                f"{self.folder}: step {step} is not after step {last.step}, which is there already;"
                " go on from that one or use another folder"
            )
        numbers = {name: float(value) for name, value in (metrics or {}).items()}
        if numbers and self._best and self._best not in numbers:
            raise ValueError(f"metrics: {self._best!r} is missing, by which the best is kept")
        with _explained(f"{self.folder}: step {step} cannot be saved"):
            self._try_to_write()
            self._writing = step
            self._saving = self._steps.save_async(
                step,
                state,
                force=True,  # when to save is the caller's choice
                metrics=numbers or None,
                custom_metadata={"identity": self._identity, "position": position},
            )
        self._at = step

    def restore(self, step: int, abstract_state: Any) -> tuple[Any, Any]:
        """Read a step into the shardings of `abstract_state`, on any mesh and number of devices.

        Args:
          step: one of the folder, as `latest` or `best` gives it.
          abstract_state: jax.ShapeDtypeStruct leaves with shardings, in the form that was saved.

        Returns:
          (state, position), both as they were saved, bit for bit.

        Raises:
          CheckpointError: the step is missing, damaged or another run's, or a path, shape or dtype
            differs (nothing is cast).
        """
        self._wait()
        metadata = self._metadata(step)
        saved, wanted = (
            {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in _named(tree).items()}
            for tree in (metadata.metadata, abstract_state)
        )
        if differences := _differences(saved, wanted):
            raise CheckpointError(
                f"{self.folder}: step {step} does not fit: {differences}; train with the settings"
                " that wrote it or use another folder"
            )
        if any(leaf.sharding is None for leaf in jax.tree.leaves(abstract_state)):
            raise ValueError("abstract_state: every leaf needs a sharding")
        with self._readable(step):
            state = self._steps.load(step, abstract_state)
        self._at = step
        return state, metadata.custom_metadata["position"]

    def close(self) -> None:
        """Wait for the save in flight. Raises CheckpointError if it failed."""
        self._wait()
        with _explained(f"{self.folder}: checkpoints cannot be closed"):
            self._steps.close()

    def _wait(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            try:
                with _explained(f"{self.folder}: step {self._writing} could not be saved"):
                    saving.result()
            except CheckpointError:
                self._at = None
                raise

    def _metadata(self, step: int) -> ocp.training.CheckpointMetadata:
        with self._readable(step):
            metadata = self._steps.metadata(step)
            if metadata.metadata is None:  # orbax has only logged why
                raise LookupError("its list of arrays is damaged")
        written = (metadata.custom_metadata or {}).get("identity", {})
        if differences := _differences(_named(written), _named(self._identity)):
            raise CheckpointError(
                f"{self.folder}: step {step} is of another run: {differences}; use the settings that"
                " wrote it or another folder"
            )
        return metadata

    def _readable(self, step: int) -> contextlib.AbstractContextManager[None]:
        path = self.folder / str(step)
        return _explained(f"{path}: cannot be read (remove it to go on from an earlier step)")

    def _rank(self, metrics: Mapping[str, float]) -> float:
        value = metrics.get(self._best, math.nan)
        return -math.inf if math.isnan(value) else value

    def _try_to_write(self) -> None:
        with tempfile.TemporaryFile(dir=self.folder):
            pass

    def _list_files(self) -> None:
        # Orbax calls this on the first process, when all is written and before the step gets its name.
        [scratch] = self.folder.glob(f"{self._writing}{_UNFINISHED}*")
        files = [path for path in scratch.glob("*/**/*") if path.is_file()]
        sizes = {path.relative_to(scratch).as_posix(): path.stat().st_size for path in files}
        write_json(scratch / _FILES, sizes)

    def _set_aside(self) -> None:
        # Orbax removes unfinished steps itself, but counts damaged ones, and stops at some.
        for path in sorted(self.folder.iterdir()):
            if _UNFINISHED in path.name:
                _warn(f"{path}: was not finished; it is ignored and removed")
            elif path.name.isdigit() and (damage := _damage(path)):
                aside = path.with_name(f"damaged-{path.name}")
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
                _warn(f"{path}: {damage}; it is ignored and set aside as {aside.name}")


def _damage(step: Path) -> str:
    """Say what is wrong with the files of a step; "" if nothing is (their bytes are not read)."""
    try:
        json.loads((step / _METADATA).read_bytes())
        sizes = json.loads((step / _FILES).read_bytes())
        for name, size in sizes.items():
            if (found := (step / name).stat().st_size) != size:
                return f"{name} has {found} bytes of {size}"
    except OSError as error:
        return f"{Path(error.filename).relative_to(step)} cannot be read: {error.strerror}"
    except ValueError:
        return f"{_METADATA} or {_FILES} is not JSON"
    return ""


def _named(tree: Any) -> dict[str, Any]:
    """Leaves by path, the same for a NamedTuple and for the dict that orbax makes of it."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _differences(written: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Name up to three keys whose values differ, and count the rest; "" if all are equal."""
    both = [
        (name, written.get(name, _ABSENT), here.get(name, _ABSENT)) for name in {**written, **here}
    ]
    differ = [f"{name} is {a!s:.60} there and {b!s:.60} here" for name, a, b in both if a != b]
    rest = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
    return ", ".join(differ[:3]) + rest


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Raise what goes wrong inside (files, TensorStore, a barrier) as CheckpointError, in one line."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, ValueError, LookupError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error).split("[tensorstore_spec")[0]
        raise CheckpointError(f"{what}: {' '.join(reason.split())[:300]}") from error


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


def _wanted(record: logging.LogRecord) -> bool:
    twice = "orbax" in record.pathname and record.exc_info
    return not twice or absl.logging.get_verbosity() >= absl.logging.INFO


# One failed write is logged many times over, with tracebacks; here it is raised as CheckpointError.
logging.getLogger("absl").addFilter(_wanted)
