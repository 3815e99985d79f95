# SPDX-License-Identifier: Apache-2.0
"""Compare ways of choosing what to read: same questions, same reader, same budget of tokens.

    python launch/eval.py --config configs/smollm2_135m.py --workdir runs/eval \\
        --config.data=shifting_prefs --config.split=small_test --config.policy=runs/sft/export

Writes results.jsonl (a line an example and method), summary.json, report.md and report.html (one file,
opens anywhere). Started again after a kill it goes on where it stopped.
"""

import shlex
import sys

import _door


def main(settings, workdir) -> None:
    from bfm import comparing

    found = comparing.run(settings, workdir, shlex.join(["python", *sys.argv]))
    show(found)
    print(f"{workdir / 'report.html'}: {found['n']} examples, {len(found['rows'])} methods")


def show(found) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for name in ("method", "accuracy, 95 %", "log p", "tokens", "turns", "evidence recall"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for row in found["rows"]:
        logp = "" if row["logp"] is None else f"{row['logp']:.3f}"
        recall = "" if row["recall"] is None else f"{row['recall']:.2f}"
        table.add_row(
            row["method"], _door.with_interval(row["accuracy"], row["low"], row["high"]), logp,
            f"{row['tokens']:.0f}", f"{row['turns']:.1f}", recall,
        )  # fmt: skip
    Console().print(table)
    for note in found["notes"]:
        print(note)


if __name__ == "__main__":
    _door.config_main(main, __doc__)
