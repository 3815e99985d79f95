# SPDX-License-Identifier: Apache-2.0
"""Fine-tune the controller and the reader on labels: one model, both heads, one command.

    python launch/label.py --config configs/smollm2_135m.py --workdir runs/labels --config.data=D
    python launch/sft.py --config configs/smollm2_135m.py --workdir runs/sft --config.data=D \\
        --config.labels=runs/labels/labels.jsonl

Without --config.labels they are made first, in labels/ of the workdir. Writes checkpoints/,
metrics.jsonl (a line an update), dev.jsonl (held-out measurements with 95 % intervals), curves.png,
export/ (Hugging Face layout, adapters merged: give it as model.path, or to transformers) and
adapter.safetensors (the adapters alone: give it as policy). Started again after a kill it goes on from
the newest checkpoint; SIGTERM saves first. On several hosts each process runs the same command
(launch/cluster.md).
"""

import dataclasses
import math
import sys

import _door


def main(settings, workdir) -> None:
    _door.join_processes()
    import jax

    from bfm import curves, finetune

    if finetune.needs_labels(settings):
        settings = label_first(settings, workdir / "labels")
    found = finetune.run(settings, workdir)
    if jax.process_index():
        return  # the first process tells
    if found["stopped"]:
        print(
            f"stopped after step {found['stopped']} of {found['steps']}, checkpoint saved; the same "
            "command goes on"
        )
        return
    curves.draw(found["metrics"], found["dev"], workdir / "curves.png")
    show(found)
    tokens = sum(line["tokens"] for line in found["metrics"])
    seconds = sum(line["seconds"] for line in found["metrics"])
    print(
        f"{workdir / finetune.EXPORT}: {found['steps']} updates on {found['rows']} rows; "
        f"{tokens:,} tokens in {seconds:.1f} s ({tokens / seconds:,.0f} tokens/s, compiling included)"
    )


def label_first(settings, place):
    """Make the labels that no setting names, as launch/label.py would; return settings with them."""
    import jax

    from bfm import finetune, labeling, opening, tau
    from bfm.settings import MeshSettings

    finetune.check(settings, opening.open_base(settings))
    if settings.tau == "auto":
        tau.check(settings)
    print(f"no labels are given: making them first, in {place}", file=sys.stderr)
    asked = settings
    if jax.process_count() > 1:  # each process labels its share on its own devices
        mesh = MeshSettings(fsdp=math.gcd(settings.mesh.fsdp, jax.local_device_count()))
        asked = dataclasses.replace(settings, mesh=mesh)
    labeling.run(asked, place)
    if settings.tau == "auto":
        tau.choose(settings, place)
    return dataclasses.replace(settings, labels=str(place / labeling.LABELS))


def show(found) -> None:
    """Print what was left out, and the held-out measurements before and after."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from bfm.show import with_interval

    for reason, count in sorted(found["counts"].items()):
        if count:
            print(f"  {count} {reason}")
    if len(found["dev"]) < 2:
        return
    before, after = found["dev"][0], found["dev"][-1]
    table = Table(
        box=box.SIMPLE_HEAD, title=f"held-out, {after['n']} examples", title_justify="left"
    )
    for column in ("", f"step {before['step']}", f"step {after['step']}"):
        table.add_column(column)
    for name, value in after.items():
        if isinstance(value, list):
            cells = (with_interval(*found) for found in (before[name], value))
            table.add_row(name.replace("_", " "), *cells)
    Console().print(table)


if __name__ == "__main__":
    _door.config_main(main, __doc__)
