# SPDX-License-Identifier: Apache-2.0
"""Compile a job's real step for TPU slices on this host: memory a chip, work, collectives, time.

    python launch/aot.py --config configs/llama31_8b.py --config.topology=v5e:4x4 --config.job=sft

No TPU, weights or workdir: only libtpu, of jax's extra `tpu`. config.topology may name several slices.
Tables go to stderr; the last line of stdout is a JSON object for the last topology (with several, a
line each). Exit code 1: a step does not fit in the memory of a chip.
"""

import json
import os
import sys

import _door

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Any host that could have a TPU: else libtpu complains that it finds none.
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("TPU_WORKER_ID", "0")


def main(settings) -> int:
    import jax

    from bfm import aot

    # Programs for chips that are not here go into the cache and cannot be read from it.
    jax.config.update("jax_enable_compilation_cache", False)
    names = aot.parse_topologies(settings.topology)
    reports = [
        aot.report(settings, name, lambda text: print(text, file=sys.stderr)) for name in names
    ]
    for found in reports:
        show_parts(found)
    show(reports)
    for found in reports:
        print(json.dumps(found.line(), separators=(",", ":")))
    return 0 if all(found.fits for found in reports) else 1


def show_parts(found) -> None:
    """Print the programs of a step and its collectives."""
    from bfm.aot import GIB

    columns = ("program", "times", "GiB at most", "TFLOP", "GiB moved", "compiled in, s")
    made = table(f"{found.job} on {found.topology}, a chip", *columns)
    for p in found.parts:
        moved = "?" if p.bytes is None else f"{p.bytes / GIB:,.1f}"
        made.add_row(p.name, str(p.times), f"{p.peak / GIB:.2f}", f"{p.flops / 1e12:,.1f}", moved,
                     f"{p.seconds:.0f}")  # fmt: skip
    console().print(made)
    made = table(
        "collectives of a program, a run", "program", "what", "array", "times", "MiB each", "GiB"
    )
    for p in found.parts:
        for c in (p.collectives or ())[:12]:
            shape = f"{c.dtype}[{','.join(map(str, c.dims))}]"
            made.add_row(p.name, c.kind, shape, str(c.times), f"{c.size / 2**20:,.1f}",
                         f"{c.moved / GIB:,.2f}")  # fmt: skip
    console().print(made)


def show(reports) -> None:
    """Print all topologies side by side."""
    from bfm.aot import GIB

    columns = (
        "topology", "mesh", "GiB", "of", "fits", "TFLOP", "GiB moved", "GiB over links",
        "at least, s", "bound by", "share of peak", "tokens/s",
    )  # fmt: skip
    made = table("a step, a chip", *columns)
    for r in reports:
        bound = max(r.times, key=r.times.get)
        seconds = r.times[bound]
        known = r.bytes is not None
        made.add_row(
            r.topology, " x ".join(f"{n} {axis}" for axis, n in r.mesh.items() if n > 1),
            f"{r.peak / GIB:.2f}", f"{r.chip.usable / GIB:.2f}", "yes" if r.fits else "NO",
            f"{r.flops / 1e12:,.1f}", f"{r.bytes / GIB:,.1f}" if known else "?",
            f"{r.moved / GIB:,.1f}" if known else "?", f"{seconds:.3f}", bound,
            f"{r.times['products'] / seconds:.0%}", f"{r.tokens / seconds:,.0f}",
        )  # fmt: skip
    console().print(made)


def table(title: str, *columns: str):
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for i, name in enumerate(columns):
        made.add_column(name, justify="left" if i == 0 else "right")
    return made


def console():
    from rich.console import Console

    return Console(stderr=True, width=None if sys.stderr.isatty() else 160)


if __name__ == "__main__":
    _door.config_main(main, __doc__, workdir=False)
