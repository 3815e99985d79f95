# SPDX-License-Identifier: Apache-2.0
"""Compare ways of choosing what to read: same questions, same reader, same budget of tokens.

    python launch/eval.py --config configs/smollm2_135m.py --workdir runs/eval \\
        --config.data=shifting_prefs --config.split=small_test --config.policy=runs/sft/export

Writes results.jsonl (a line an example and method), summary.json, report.md and report.html (one file,
opens anywhere). Started again after a kill it goes on where it stopped. Several processes
(launch/cluster.md) share the examples and write one report.
"""

import shlex
import sys

import _door


def main(settings, workdir) -> None:
    _door.join_processes()
    from rich.console import Console

    from bfm import comparing, show

    found = comparing.run(settings, workdir, shlex.join(["python", *sys.argv]))
    if not found:
        return  # the first process tells
    Console().print(show.compared(found["rows"]))
    for note in found["notes"]:
        print(note)
    print(f"{workdir / 'report.html'}: {found['n']} examples, {len(found['rows'])} rows")


if __name__ == "__main__":
    _door.config_main(main, __doc__)
