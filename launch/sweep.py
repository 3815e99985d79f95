# SPDX-License-Identifier: Apache-2.0
"""Run launch/sft.py once for each entry of a config's SWEEP, one after the other, and compare.

    python launch/sweep.py --config configs/smollm2_135m.py --workdir runs/sweep [flags of sft.py]

Each run has its own folder below --workdir, named by its overrides, and goes on where it stopped; a
finished one is not run again. Prints the last held-out measurements of all.
"""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import _door


def main() -> int:
    parser = _door.Parser(__doc__)
    parser.add_argument("--config", required=True, help="a settings file with a list SWEEP")
    parser.add_argument("--workdir", required=True, type=Path)
    args, flags = parser.parse_known_args()
    try:
        sweep = runpy.run_path(args.config)["SWEEP"]
    except (OSError, KeyError) as error:
        raise _door.UsageError(f"--config: {args.config}: no list SWEEP ({error})") from None
    script, rows = Path(__file__).with_name("sft.py"), []
    for overrides in sweep:
        name = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in overrides.items())
        place = args.workdir / name
        if not (place / "curves.png").exists():  # the last thing that a run writes
            print(f"== {name}", flush=True)
            given = [f"--config.{key}={value}" for key, value in overrides.items()]
            command = [sys.executable, str(script), "--config", args.config, *flags, *given]
            if code := subprocess.run([*command, "--workdir", str(place)], check=False).returncode:
                return code
        if not (place / "dev.jsonl").exists():
            raise _door.UsageError("train.dev: 0 holds nothing out, so there is nothing to compare")
        rows.append((name, json.loads((place / "dev.jsonl").read_text("utf-8").split("\n")[-2])))
    show(rows)
    return 0


def show(rows) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from bfm.show import with_interval

    names = [name for name, value in rows[0][1].items() if isinstance(value, list)]
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("run", *names):
        table.add_column(column.replace("_", " "))
    for name, found in rows:
        table.add_row(name, *(with_interval(*found[n]) for n in names))
    Console().print(table)


if __name__ == "__main__":
    _door.guarded(main)
