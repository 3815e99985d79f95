# SPDX-License-Identifier: Apache-2.0
"""The benchmarks as data: prepare them, count them, look at them.

    python launch/data.py prepare NAME --data_dir DIR    raw files -> ArrayRecord in the cache
    python launch/data.py stats NAME [--json]            counts, lengths, evidence, gold positions
    python launch/data.py peek NAME [--n 3]              examples a person can read

DIR holds one folder a benchmark (membench/, prefeval/, personamem_v1/, personamem_v2/, locomo/,
longmemeval/); what is missing is named with its place and size. `shifting_prefs` needs no files.
"""

import argparse
import contextlib
import dataclasses
import json

import _door


def main() -> None:
    from bfm.datasets import NAMES, Reading, load
    from bfm.progress import Meter

    args = parse(sorted(NAMES))
    known = {f.name for f in dataclasses.fields(Reading)}
    given = {key: value for key, value in vars(args).items() if key in known and value is not None}
    reading = Reading(**given)
    with contextlib.ExitStack() as stack:
        meters: dict[bool, Meter] = {}

        def on_example(done: int, total: int) -> None:
            """Show two passes: checking, whose end is not known, and writing."""
            writing = bool(total)
            if writing not in meters:
                stack.close()  # the first pass is over when the second begins
                title = f"{'writing' if writing else 'checking'} {args.name}"
                meters[writing] = stack.enter_context(Meter(title, total, "examples"))
            meters[writing].add(done - meters[writing].done)

        source = load(
            args.name, args.split, data_dir=args.data_dir, prepared_dir=args.prepared_dir,
            reading=reading, on_example=on_example,
        )  # fmt: skip
    if args.command == "prepare":
        print(f"{source.folder}: {source.source['examples']} examples")
        for reason, count in source.source["skipped"].items():
            print(f"  left out: {count} {reason}")
    elif args.command == "stats":
        show_stats(args, source)
    else:
        peek(source, args.n)


def count(text: str) -> int:
    """A number that is not negative; argparse names the flag of what is not."""
    if not text.isdecimal():
        raise ValueError(text)
    return int(text)


def truth(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(text)
    return text == "true"


def parse(names: list[str]) -> argparse.Namespace:
    """Parse the flags. Raises UsageError (one line)."""

    class Parser(argparse.ArgumentParser):
        def error(self, message: str):
            raise _door.UsageError(f"{message} (see --help)")

    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("prepare", "stats", "peek"))
    parser.add_argument("name", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--data_dir", default="", help="raw downloads, read only")
    parser.add_argument("--prepared_dir", default="", help="default: the user's cache")
    parser.add_argument(
        "--split", default="all", help="all, train, dev, test, fold0_test, FIELD=VALUE .."
    )
    parser.add_argument("--seed", type=count, help="of option shuffles and splits (default 0)")
    parser.add_argument(
        "--time_suffix", choices=("keep", "remove"), help="MemBench: note in each message"
    )
    parser.add_argument("--persona_card", type=truth, metavar="true|false",
                        help="PersonaMem: persona cards in or out (default true)")  # fmt: skip
    parser.add_argument("--padding_turns", type=count, help="PrefEval: unrelated exchanges put in")
    parser.add_argument(
        "--length",
        type=int,
        choices=(10, 100, 1000),
        help="shifting_prefs: exchanges a history (10, 100 or 1000)",
    )
    parser.add_argument(
        "--model", default="smollm2-135m-instruct", help="whose tokenizer counts (stats)"
    )
    parser.add_argument("--json", action="store_true", help="stats as one JSON object on stdout")
    parser.add_argument("--n", type=count, default=3, help="examples to show (peek)")
    return parser.parse_args()


def show_stats(args: argparse.Namespace, source) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from bfm import lm, tokenizer
    from bfm.datasets.stats import stats

    encode = tokenizer.load(lm.find(args.model)).encode
    found = stats(source, lambda text: len(encode(text)))
    found = {"name": args.name, "split": args.split, **found, "skipped": source.source["skipped"]}
    if args.json:
        print(json.dumps(found, ensure_ascii=False))
        return
    table = Table(box=box.SIMPLE_HEAD, title=f"{args.name}, {args.split}", title_justify="left")
    table.add_column("what")
    table.add_column("value", overflow="fold")
    for key, value in found.items():
        if isinstance(value, dict):
            value = "  ".join(f"{k} {_short(v)}" for k, v in value.items())
        table.add_row(key.replace("_", " "), _short(value))
    Console().print(table)


def _short(value) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def peek(source, n: int) -> None:
    from rich.console import Console

    from bfm.show import example

    step = max(1, len(source) // max(1, n))
    for i in range(0, min(len(source), n * step), step):
        Console().print(example(source[i]))


if __name__ == "__main__":
    _door.guarded(main)
