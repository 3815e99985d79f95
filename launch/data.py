# SPDX-License-Identifier: Apache-2.0
"""The benchmarks as data: prepare them, count them, look at them.

    python launch/data.py prepare NAME --data_dir DIR    raw files -> ArrayRecord in the cache
    python launch/data.py stats NAME [--json]            counts, lengths, evidence, gold positions
    python launch/data.py peek NAME [--n 3]              examples a person can read
    python launch/data.py export NAME --out FILE         the examples of a split as JSONL

DIR holds one folder a benchmark (membench/, prefeval/, personamem_v1/, personamem_v2/, locomo/,
longmemeval/). What is missing is fetched from its official place where that gives single files, else
named with its place and size. `shifting_prefs` needs no files.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import _door

if TYPE_CHECKING:
    from rich.console import RenderableType


def main() -> None:
    from bfm import jsonl
    from bfm.datasets import NAMES, Reading, load
    from bfm.progress import Meter

    args = parse(sorted(NAMES))
    known = {f.name for f in dataclasses.fields(Reading)}
    given = {key: value for key, value in vars(args).items() if key in known and value is not None}
    reading = Reading(**given)
    with contextlib.ExitStack() as stack:
        meters: dict[str, Meter] = {}

        def on_example(done: int, total: int) -> None:
            """Show two passes: checking, whose end is not known, and writing."""
            now = "writing" if total else "checking"
            if now not in meters:
                stack.close()  # the pass before this one is over
                meters[now] = stack.enter_context(Meter(f"{now} {args.name}", total, "examples"))
            meters[now].add(done - meters[now].done)

        def on_bytes(n: int) -> None:
            if "fetching" not in meters:
                sizes = ", ".join(
                    dict.fromkeys(file.size for file in NAMES[args.name].FILES[args.name])
                )
                title = f"fetching {args.name} ({sizes})"
                meters["fetching"] = stack.enter_context(Meter(title, 0, "bytes"))
            meters["fetching"].add(n)

        source = load(
            args.name, args.split, data_dir=args.data_dir, prepared_dir=args.prepared_dir,
            reading=reading, download=args.download, on_example=on_example, on_bytes=on_bytes,
        )  # fmt: skip
    if args.command == "prepare" and not source.folder.name:
        print(
            f"{args.name} {args.split}: {len(source)} examples, generated when they are asked for"
        )
    elif args.command == "prepare":
        print(f"{source.folder}: {source.source['examples']} examples")
        for reason, count in source.source["skipped"].items():
            print(f"  left out: {count} {reason}")
    elif args.command == "stats":
        show_stats(args, source)
    elif args.command == "export":
        print(f"{args.out}: {jsonl.write(Path(args.out), source)} examples")
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

    parser = _door.Parser(__doc__)
    parser.add_argument("command", choices=("prepare", "stats", "peek", "export"))
    parser.add_argument("name", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--data_dir", default="", help="raw downloads, read only")
    parser.add_argument("--prepared_dir", default="", help="default: the user's cache")
    parser.add_argument("--download", type=truth, metavar="true|false", default=True,
                        help="fetch missing raw files into the cache (default true)")  # fmt: skip
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
    parser.add_argument("--out", default="", help="JSONL file to write (export)")
    parser.add_argument("--n", type=count, default=3, help="examples to show (peek)")
    args = parser.parse_args()
    if args.command == "export" and not args.out:
        parser.error("--out: missing; name a JSONL file to write")
    return args


def show_stats(args: argparse.Namespace, source) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from bfm import lm, tokenizer
    from bfm.datasets import NAMES
    from bfm.datasets.stats import stats

    encode = tokenizer.load(lm.find(args.model)).encode
    found = stats(source, lambda text: len(encode(text)))
    found = {"name": args.name, "split": args.split, **found, "skipped": source.source["skipped"]}
    if hasattr(NAMES[args.name], "measure"):
        embed, found["minilm"] = encoder()
        found["rules"] = NAMES[args.name].measure(source, embed)
    if args.json:
        print(json.dumps(found, ensure_ascii=False))
        return
    table = Table(box=box.SIMPLE_HEAD, title=f"{args.name}, {args.split}", title_justify="left")
    table.add_column("what")
    table.add_column("value", overflow="fold")
    rules = found.pop("rules", {})
    for key, value in found.items():
        if isinstance(value, dict):
            value = "  ".join(f"{k} {_short(v)}" for k, v in value.items())
        table.add_row(key.replace("_", " "), _short(value))
    Console().print(table)
    if rules:
        Console().print(rules_table(rules))


def encoder() -> tuple[Callable | None, str]:
    """Return MiniLM as texts -> unit vectors and its hash, or None and why there is none."""
    from bfm import embed

    try:
        made = embed.load()
    except embed.EmbedError as error:
        return None, f"not measured: {error}"
    return functools.partial(embed.embed, made), made.sha256


def rules_table(rules: dict) -> RenderableType:
    """Return shares of right answers by rules that read no model, a column a stratum."""
    from rich import box
    from rich.table import Table

    columns = {"all": rules["all"], **rules["strata"]}
    table = Table(
        box=box.SIMPLE_HEAD, title="rules, per stratum", title_justify="left", padding=(0, 1, 0, 0)
    )
    table.add_column("rule", no_wrap=True)
    for name in columns:
        table.add_column(name.replace("_", "\n"), justify="right", no_wrap=True)
    for key, value in rules["all"].items():
        if not isinstance(value, dict):
            row = (column.get(key) for column in columns.values())
            table.add_row(
                key,
                *(
                    "-" if x is None else f"{x:.2f}" if isinstance(x, float) else str(x)
                    for x in row
                ),
            )
    return table


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
