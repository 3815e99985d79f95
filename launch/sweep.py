# SPDX-License-Identifier: Apache-2.0
"""Run launch/sft.py once for each entry of a config's SWEEP, one after the other, and compare.

    python launch/sweep.py --config configs/smollm2_135m.py --workdir runs/sweep [flags of sft.py]

Each run has its own folder below --workdir, named by its overrides, and goes on where it stopped; a
finished one is not run again. Prints the last held-out measurements of all.

A config may also hold EVALUATE, overrides for launch/eval.py: it is then run with the reader of each
entry, and its results are compared instead, and written to sweep.json. An entry that sets nothing of
train is not trained: its reader is the run's own.
"""

import json
import os
import platform
import runpy
import subprocess
import sys
from pathlib import Path

import _door

FIGURES = ("command", "data", "split", "n", "identity", "rows", "contrasts")  # no text of any data


def main() -> int:
    parser = _door.Parser(__doc__)
    parser.add_argument("--config", required=True, help="a settings file with a list SWEEP")
    parser.add_argument("--workdir", required=True, type=Path)
    args, flags = parser.parse_known_args()
    try:
        held = runpy.run_path(args.config)
        sweep, evaluate = held["SWEEP"], held.get("EVALUATE")
    except (OSError, KeyError) as error:
        raise _door.UsageError(f"--config: {args.config}: no list SWEEP ({error})") from None
    if evaluate is None and not all(map(trains, sweep)):
        raise _door.UsageError(
            f"--config: {args.config}: an entry of SWEEP trains nothing; add EVALUATE"
        )
    names = list(map(folder, sweep))
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise _door.UsageError(f"--config: {args.config}: two entries of SWEEP named {twice[0]!r}")
    trained, compared = [], []
    for name, overrides in zip(names, sweep, strict=True):
        place, asked = args.workdir / name, {**(evaluate or {}), **overrides}
        if trains(overrides):
            if code := run("sft.py", "curves.png", args.config, place, flags, overrides):
                return code
            asked["eval.reader"] = str(place / "export")
            if evaluate is None:
                trained.append((name, last_line(place / "dev.jsonl")))
        if evaluate is not None:
            place = place / "eval"
            if code := run("eval.py", "report.html", args.config, place, flags, asked):
                return code
            compared.append((name, json.loads((place / "summary.json").read_text())))
    if evaluate is None:
        show_trained(trained)
        return 0
    show_compared(compared)
    runs = {name: {key: found[key] for key in FIGURES} for name, found in compared}
    for name, found in compared:
        runs[name]["separation"] = found["diagnosis"]["separation"]
    machine = f"{platform.machine()} {platform.system()}, {os.cpu_count()} cores"
    from bfm.jsonl import write_json

    write_json(args.workdir / "sweep.json", {"machine": machine, "runs": runs})
    return 0


def folder(overrides) -> str:
    """Name an entry by what it sets, but for the methods that it compares."""
    named = [f"{k.rpartition('.')[2]}={v}" for k, v in overrides.items() if k != "methods"]
    return (",".join(named) or "untrained").replace("/", "-")


def trains(overrides) -> bool:
    return any(key.startswith("train.") for key in overrides)


def run(script: str, last: str, config: str, place: Path, flags, overrides) -> int:
    """Run a script into a folder, unless the last file that it writes is there; return its code."""
    if (place / last).exists():
        return 0
    print(f"== {place.name if script == 'sft.py' else place.parent.name}: {script}", flush=True)
    given = [f"--config.{key}={value}" for key, value in overrides.items()]
    command = [sys.executable, str(Path(__file__).with_name(script)), "--config", config, *flags]
    return subprocess.run([*command, *given, "--workdir", str(place)], check=False).returncode


def last_line(path: Path) -> dict:
    if not path.exists():
        raise _door.UsageError("train.dev: 0 holds nothing out, so there is nothing to compare")
    return json.loads(path.read_text("utf-8").split("\n")[-2])


def show_trained(rows) -> None:
    """Print the last held-out measurements of each run."""
    from bfm.show import with_interval

    names = [name for name, value in rows[0][1].items() if isinstance(value, list)]
    show("run", names, [(name, *(with_interval(*found[n]) for n in names)) for name, found in rows])


def show_compared(rows) -> None:
    """Print how well each reader's scores order the evidence, and how it answers by method."""
    from bfm.show import with_interval

    areas, answers = {}, {}
    for name, found in rows:
        areas[name] = {
            row["score"]: with_interval(row["auc"], row["low"], row["high"])
            for row in found["diagnosis"]["separation"] if row["stratum"] == "all"
        }  # fmt: skip
        answers[name] = {
            row["method"]: with_interval(row["accuracy"], row["low"], row["high"])
            for row in found["rows"]
        }
    for title, cells in (("area under the curve", areas), ("accuracy", answers)):
        names = list(dict.fromkeys(name for own in cells.values() for name in own))
        lines = [(name, *(own.get(name, "") for own in cells.values())) for name in names]
        show(title, list(cells), lines)


def show(first: str, columns, rows) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for column in (first, *columns):
        table.add_column(column.replace("_", " "))
    for row in rows:
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    _door.guarded(main)
