# SPDX-License-Identifier: Apache-2.0
"""Score the dialogues that ship with the package with SmolLM2-135M-Instruct, and show every turn.

    bash launch/quickstart.sh [--only TEXT]

--only shows the dialogues whose id contains TEXT. The labels are kept in the user's cache, named by
everything they depend on, so a second run only prints, and an interrupted one goes on.
"""

import argparse
import hashlib
import json

import _door


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="show ids that contain TEXT")
    only = parser.parse_args().only
    _door.enable_compile_cache()

    from rich.console import Console

    from bfm import labeling, show
    from bfm.dialogue import Label
    from bfm.jsonl import JsonlSource
    from bfm.settings import Settings, SettingsError
    from bfm.wheel import cache_dir

    source = JsonlSource.open(labeling.DIALOGUES)
    examples = list(source)
    if not any(only in example.question.id for example in examples):
        ids = ", ".join(example.question.id for example in examples)
        raise SettingsError(f"--only: no dialogue's id contains {only!r}; ids: {ids}")
    settings = Settings()
    files = labeling.open_base(settings)
    key = json.dumps(labeling.identity(files, settings, source.sha256))
    workdir = cache_dir() / "quickstart" / hashlib.sha256(key.encode()).hexdigest()[:16]
    meta = labeling.run(settings, workdir)
    lines = (workdir / labeling.LABELS).read_text("utf-8").split("\n")[:-1]
    pairs = list(zip(examples, (Label(**json.loads(line)) for line in lines), strict=True))
    console = Console(highlight=False)
    for example, label in pairs:
        if only in example.question.id:
            console.print(show.dialogue(example, label))
    console.print(show.summary(pairs))
    console.print(show.LEGEND, style="dim")
    timing = meta["timing"]
    tokens = timing["prefix_tokens"] + timing["suffix_tokens"]
    console.print(
        f"\n{len(pairs)} dialogues, {timing['sequences']} sequences, {tokens:,} tokens scored in "
        f"{timing['score_s']:.1f} s (compiling {timing['compile_s']:.1f} s).\nLabels: {workdir}"
    )


if __name__ == "__main__":
    _door.guarded(main)
