# SPDX-License-Identifier: Apache-2.0
"""Measure likelihood scoring on this machine: rates, reuse of turn states, scaling, share of the peak.

Everything is measured in one run on the same ids, ours and the peers' (a plain transformers loop,
lm-evaluation-harness and llama.cpp, where they are installed) in turn; ratios are side by side, times
medians of bench.repeats, with their range. Histories are cut from the bundled dialogues to the lengths
of real ones: turns of 107 tokens, questions of 17, options of 20, answers of 3 on average. Writes
bench.json (a list of {name, value, unit, peer, ratio, ..}) with the raw seconds, and scaling.png.
"""

import resource
import sys
import time
from statistics import median

import _door
import _peers
import numpy as np

SEED = 0


def main(settings, workdir) -> None:
    import jax

    from bfm import opening
    from bfm.jsonl import write_json
    from bfm.progress import Meter
    from bfm.saliency import Job, Scorer, programs
    from bfm.settings import numbers
    from bfm.store import StateStore

    jax.config.update("jax_enable_compilation_cache", False)  # compiling is a figure
    files = opening.open_base(settings)
    lm = files.load(settings.model.dtype)
    workdir.mkdir(parents=True, exist_ok=True)
    draw = Draw(lm.scaffold, SEED)
    prefixes = tuple(draw.prefix() for _ in range(settings.bench.history))
    counts = numbers(settings.bench.questions, "bench.questions")
    questions = [draw.suffix() for _ in range(max(2, *counts))]

    def scorer(device_bytes: int) -> Scorer:
        return Scorer(
            lm.decoder, lm.scaffold.head, batch_size=settings.batch_size,
            store=StateStore(device_bytes), identity=lm.identity,
        )  # fmt: skip

    asks = settings.bench.peer == "auto" and settings.model.path
    peers = _peers.load(files.path, settings.model.dtype, say) if asks else {}
    asked = sequences(lm.scaffold.head, prefixes, questions[0])
    runs = []
    for k in range(settings.bench.repeats):
        say(f"side by side, {k + 1} of {settings.bench.repeats}")
        keeps = scorer(8 << 30)
        run = {
            "peak": matmul_peak(lm.decoder, 4096),
            "first": scoring(keeps, prefixes, questions[:1]),
            "second": scoring(keeps, prefixes, questions[1:2]),
            "compile": keeps.timing.compile_s,
            "peers": {name: seconds(lambda loop=loop: loop(asked)) for name, loop in peers.items()},
        }
        runs.append(run)
    all_first, all_second = ([run[name] for run in runs] for name in ("first", "second"))
    theirs = {name: [run["peers"][name] for run in runs] for name in peers}
    first, second = median(all_first), median(all_second)
    peak = median(run["peak"] for run in runs)
    job = Job(prefixes, (questions[0],))
    useful = useful_flops(lm.decoder, job)
    figures = [
        *beside("both saliencies of a history, first question", all_first, theirs),
        *beside("a second question on it", all_second, theirs),
        figure("second question / first", second / first, "share"),
        figure("tokens scored", job.tokens / first, "tokens/s"),
        figure("matmul rate of scoring, real tokens", useful / first / 1e9, "GFLOP/s"),
        figure("peak of the model's own matmuls", peak / 1e9, "GFLOP/s"),
        figure("share of that peak", useful / first / peak, "share"),
        figure("compiling for the first two questions", runs[0]["compile"], "s"),
    ]

    curves: dict[str, list[tuple[int, float]]] = {"questions": [], "turns": []}
    keeps, done, spent = scorer(8 << 30), 0, 0.0
    for n in counts:
        say(f"{n} questions")
        spent += scoring(keeps, prefixes, questions[done:n])
        done = n
        curves["questions"].append((n, spent))
        # The peer reads everything again for each question: n times its one measured question.
        figures += beside(
            f"questions: {n}", [spent], {name: [n * median(own)] for name, own in theirs.items()}
        )
    for n in numbers(settings.bench.turns, "bench.turns"):
        history = tuple(draw.prefix() for _ in range(n))
        before = programs()
        with Meter(f"{n} turns", Job(history, (questions[0],)).tokens, "tokens") as meter:
            spent = scoring(scorer(0), history, questions[:1], meter.add)
        curves["turns"].append((n, spent))
        figures.append(figure(f"turns: {n}", spent, "s"))
        figures.append(figure(f"turns: {n}, programs compiled", programs() - before, "count"))
        figures.append(figure(f"turns: {n}, host memory at most", memory_gib(), "GiB"))
    figures.append(figure("programs compiled in all", programs(), "count"))
    write_json(workdir / "bench.json", figures)
    write_json(workdir / "bench.raw.json", runs)
    plot(curves, workdir / "scaling.png")
    table(figures, f"{settings.model.path} {settings.model.dtype}, {settings.bench.history} turns")


class Draw:
    """Cuts turns and questions of given lengths from the text of the bundled dialogues."""

    def __init__(self, scaffold, seed: int):
        from bfm.jsonl import JsonlSource
        from bfm.opening import DIALOGUES
        from bfm.prompts import MEMORY

        self.scaffold, self.rng = scaffold, np.random.default_rng(seed)
        self.encode = scaffold.tokenizer.encode
        texts = (m.content for e in JsonlSource.open(DIALOGUES) for m in e.question.messages)
        self.text = self.encode("\n".join(texts))
        self.memory = self.encode(MEMORY)

    def cut(self, mean: int, spread: float = 0.4) -> list[int]:
        """Cut a run of lognormal length with the given mean (tokens)."""
        n = max(1, round(mean * self.rng.lognormal(-(spread**2) / 2, spread)))
        start = self.rng.integers(len(self.text) - n)
        return self.text[start : start + n]

    def prefix(self) -> tuple[int, ...]:
        return (*self.memory, *self.cut(107 - len(self.memory)))

    def suffix(self):
        from bfm.saliency import Suffix

        lead, q, options = self.encode("Question:\n"), self.cut(17), self.cut(20)
        body = [*lead, *q, *self.encode("\nOptions:"), *options, *self.scaffold.tail]
        answer = [*self.cut(2), self.scaffold.end]
        return Suffix(
            (*body, *answer), (len(lead), len(lead) + len(q)), (len(body), len(body) + len(answer))
        )


def seconds(run) -> float:
    """Time one call, wall clock."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def scoring(scorer, prefixes, questions, on_tokens=lambda n: None) -> float:
    """Seconds to score every question after every turn, compilation left out."""
    from bfm.saliency import Job

    before = scorer.timing.score_s
    scorer.score([Job(tuple(prefixes), tuple(questions))], on_tokens)
    return scorer.timing.score_s - before


def say(text: str) -> None:
    print(f"bench: {text} ...", file=sys.stderr, flush=True)


def figure(name: str, value: float, unit: str, peer: float | None = None) -> dict:
    """One line of bench.json; ratio says how many times faster than the peer (seconds only)."""
    ratio = peer / value if peer else None
    return {"name": name, "value": value, "unit": unit, "peer": peer, "ratio": ratio}


def beside(name: str, ours: list[float], theirs: dict[str, list[float]]) -> list[dict]:
    """Lines of a time beside each peer's: medians of the repeats, with the range of both."""
    made = []
    for peer, own in (theirs or {"": []}).items():
        line = figure(name, median(ours), "s", median(own) if own else None)
        spread = {"low": min(ours), "high": max(ours)}
        if own:
            spread |= {"beside": peer, "peer_low": min(own), "peer_high": max(own)}
        made.append(line | spread)
    return made


def memory_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def useful_flops(decoder, job) -> float:
    """Matmul FLOPs that the real tokens of a job need: layers for each, the head where scored.

    Attention and padding are left out, so the share of the peak is a lower bound.
    """
    import jax

    layers = sum(x.size for x in jax.tree.leaves((decoder.full, decoder.linear)))
    scored = sum(s.q[1] - s.q[0] + s.a[1] - s.a[0] for s in job.suffixes)
    rows = len(set(job.prefixes)) + 1
    return 2 * layers * job.tokens + 2 * decoder.unembed_VD.size * scored * rows


def matmul_peak(decoder, tokens: int) -> float:
    """FLOP/s of the model's own layer matmuls, one after the other, on `tokens` rows."""
    import jax
    import jax.numpy as jnp

    from bfm.model.matmul import dot

    block = jax.tree.map(lambda x: x[0], (decoder.full, decoder.linear))
    kernels = [x.reshape(-1, x.shape[-1]) if x.shape[0] != decoder.config.d_model
               else x.reshape(x.shape[0], -1)
               for x in jax.tree.leaves(block) if x.ndim > 1]  # fmt: skip
    flops = total = 0.0
    for kernel in kernels:
        x = jnp.ones((tokens, kernel.shape[0]), kernel.dtype)
        run = jax.jit(dot)
        run(x, kernel).block_until_ready()
        total += min(seconds(lambda: run(x, kernel).block_until_ready()) for _ in range(5))  # noqa: B023
        flops += 2 * tokens * kernel.size
    return flops / total


def sequences(head, prefixes, suffix) -> list[tuple[list[int], tuple[int, int]]]:
    """(ids, span) of what a plain loop scores: c+q, q, c+q+a, q+a."""
    rows = []
    for prefix in (*prefixes, ()):
        ids, start = [*head, *prefix, *suffix.ids], len(head) + len(prefix)
        rows.append((ids[: start + suffix.q[1]], (start + suffix.q[0], start + suffix.q[1])))
        rows.append((ids, (start + suffix.a[0], start + suffix.a[1])))
    return sorted(rows, key=lambda row: len(row[0]))


# --- output --------------------------------------------------------------------------------------


def plot(curves, path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import NullFormatter

    fig, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, (name, points) in zip(axes, curves.items(), strict=True):
        x, y = zip(*points, strict=True)
        axis.loglog(x, y, "o-", color="#0b6e4f", label="measured")
        axis.loglog(x, [y[-1] * n / x[-1] for n in x], "--", color="0.6", label="proportional")
        axis.set(xlabel=name, ylabel="seconds", title=f"time against {name}")
        axis.grid(True, which="both", alpha=0.2)
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.set_xticks(x, [f"{n:,}" for n in x])
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
        axis.legend(frameon=False)
    fig.savefig(path, dpi=150)


def table(figures, title: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    made.add_column("what")
    for name in ("value", "unit", "peer", "times as fast"):
        made.add_column(name, justify="left" if name == "unit" else "right")
    for f in figures:
        peer = f"{f['peer']:,.2f}" if f["peer"] else ""
        ratio = f"{f['ratio']:.1f}" if f["ratio"] else ""
        name = f["name"] + (f", beside {f['beside']}" if f.get("beside") else "")
        made.add_row(name, f"{f['value']:,.2f}", f["unit"], peer, ratio)
    Console().print(made)


if __name__ == "__main__":
    _door.config_main(main, __doc__)
