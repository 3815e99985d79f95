# SPDX-License-Identifier: Apache-2.0
"""The whole method in small on the dialogues that ship with the package, with SmolLM2-135M-Instruct:
label every turn, fine-tune on half of the dialogues, compare ways to read on the other half.

    bash launch/quickstart.sh [--only TEXT]

--only shows the dialogues whose id contains TEXT. Everything is kept in the user's cache, named by all
that it depends on, so a second run only prints, and an interrupted one goes on. What an earlier
version of the code left there is removed.
"""

import argparse
import dataclasses
import hashlib
import json
import shlex
import shutil
import sys

import _door

TRAINED, HELD = "0/2", "1/2"  # halves of the dialogues
METHODS = "bfm,none,recency,sal_q,evidence,longest,first"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="show ids that contain TEXT")
    only = parser.parse_args().only
    _door.enable_compile_cache()

    from rich.console import Console

    from bfm import comparing, finetune, labeling, opening, show
    from bfm.dialogue import Label
    from bfm.jsonl import JsonlSource, read_lines
    from bfm.settings import Settings, SettingsError
    from bfm.wheel import cache_dir

    source = JsonlSource.open(opening.DIALOGUES)
    examples = list(source)
    if not any(only in example.question.id for example in examples):
        ids = ", ".join(example.question.id for example in examples)
        raise SettingsError(f"--only: no dialogue's id contains {only!r}; ids: {ids}")
    settings = Settings()
    files = opening.open_base(settings)
    key = json.dumps(labeling.identity(files, settings, source.sha256))
    workdir = cache_dir() / "quickstart" / hashlib.sha256(key.encode()).hexdigest()[:16]
    if workdir.parent.exists():  # each holds a model of half a gigabyte: the newest alone is kept
        for old in workdir.parent.iterdir():
            if old != workdir:
                shutil.rmtree(old, ignore_errors=True)
    console = Console(highlight=False)

    meta = labeling.run(settings, workdir)
    lines = (workdir / labeling.LABELS).read_text("utf-8").split("\n")[:-1]
    pairs = list(zip(examples, (Label(**json.loads(line)) for line in lines), strict=True))
    for example, label in pairs:
        if only in example.question.id:
            console.print(show.dialogue(example, label))
    console.print(show.summary(pairs))
    console.print(show.LEGEND, style="dim")
    timing = meta["timing"]
    tokens = timing["prefix_tokens"] + timing["suffix_tokens"]
    console.print(
        f"\n1 of 3, labels: {len(pairs)} dialogues, {timing['sequences']} sequences, {tokens:,} tokens "
        f"scored in {timing['score_s']:.1f} s (compiling {timing['compile_s']:.1f} s)."
    )

    # A few updates show the path, not what the method can do; adapters learn at ten times the rate.
    train = dataclasses.replace(
        settings.train, steps=4, batch_size=4, accumulation=2, tokens=1024, remat=False,
        learning_rate=1e-3, dev=0.0,
    )  # fmt: skip
    tuned = dataclasses.replace(
        settings, train=train, labels=str(workdir / labeling.LABELS), fold=TRAINED
    )
    export = workdir / "sft" / finetune.EXPORT
    if not export.exists() and finetune.run(tuned, workdir / "sft")["stopped"]:
        sys.exit("stopped, checkpoint saved; the same command goes on")
    losses = [line["loss"] for line in read_lines(workdir / "sft" / finetune.METRICS)]
    told = ", ".join(f"{loss:.2f}" for loss in losses)
    console.print(
        f"\n2 of 3, fine-tuning: {len(losses)} updates of 4 rows; loss, nats a token: {told}."
    )

    compared = dataclasses.replace(
        settings, train=train, fold=HELD, policy=str(export), methods=METHODS,
        eval=dataclasses.replace(settings.eval, sal_a=False),
    )  # fmt: skip
    found = comparing.run(compared, workdir / "eval", shlex.join(["bash", "launch/quickstart.sh"]))
    console.print(f"\n3 of 3, evaluation: {found['n']} dialogues that it was not trained on.")
    console.print(show.compared(found["rows"]))
    for note in found["notes"]:
        console.print(note)
    console.print(
        f"{len(losses)} updates on eight dialogues show the path from labels to a report, not what the "
        f"method is worth.\n\nreport: {workdir / 'eval' / 'report.html'}"
    )


if __name__ == "__main__":
    _door.guarded(main)
