# SPDX-License-Identifier: Apache-2.0
"""What a run is: frozen settings with defaults, each checked before any device work.

`default_config()` gives the same fields as an ml_collections ConfigDict, which is what files in
configs/ start from and what flags override; `Settings.of` turns it back and names the first fault.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from bfm import fields
from bfm.fields import SettingsError, build, field


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    path: str = field(
        "smollm2-135m-instruct",
        "model folder (Hugging Face layout), .gguf file or hub name; the default is the small model "
        "that this project downloads once (or what BFM_MODEL names)",
    )
    arch: str = field(
        "",
        "with an empty path: random weights from seed in this shape and a byte tokenizer",
        among=("", "tiny", "llama3.1-8b", "qwen3.5-9b"),
    )
    dtype: str = field(
        "float32",
        "dtype that the weights are rounded to, and of products where bf16 is faster (not most CPUs)",
        among=("float32", "bfloat16"),
    )
    attention: str = field(
        "auto",
        "kernel for the attention of a block over itself, where it fits: splash (TPU; auto takes it "
        "there), cudnn (GPU; not run yet, so it has to be asked for), or XLA's own",
        among=("auto", "xla", "splash", "cudnn"),
    )


@dataclasses.dataclass(frozen=True)
class LabelSettings:
    answer: str = field(
        "text",
        "what log p(a) scores: the answer's text with its end-of-turn token, the letter of the "
        "right option, or the right letter against all letters",
        among=("text", "letter", "options"),
    )
    norm: str = field(
        "sum", "saliency in nats, or divided by the number of tokens", among=("sum", "token")
    )
    permutations: int = field(
        1, "cyclic orders of the options to average over (label.answer=options)", low=1
    )
    from_checkpoint: str = field(
        "",
        "score log p(a) with this fine-tuned reader: export/ or adapter.safetensors of launch/sft.py, "
        "or 'judge', adapters that come with bfm for the default model; log p(q) stays the base "
        "model's; empty: the base model scores both",
    )
    rounds: int = field(
        0,
        "times that readers are fine-tuned and label what they were not trained on: first on turns by "
        "chance, then on the labels of the round before (0: the model as it is labels)",
        low=0,
        high=9,
    )
    folds: int = field(5, "parts of the groups in a round, each labelled by its own reader", low=2)
    source: str = field(
        "sal_a",
        "what makes the silver focus that a policy is trained on: answer-conditioned saliency, or for "
        "comparison question-conditioned saliency, embedding cosine, evidence labels, chance (each of "
        "which opens as many turns as sal_a does); read by launch/sft.py, labels.jsonl keeps sal_a's",
        among=("sal_a", "sal_q", "embedding", "evidence", "random"),
    )


@dataclasses.dataclass(frozen=True)
class TrainSettings:
    """What launch/sft.py does."""

    steps: int = field(0, "updates; 0: as many as train.epochs take", low=0)
    epochs: int = field(2, "passes over the rows (where train.steps is 0)", low=1)
    batch_size: int = field(16, "rows an update, over all devices", low=1)
    accumulation: int = field(1, "parts a batch is computed in, one after the other", low=1)
    tokens: int = field(2048, "most tokens of a row; what does not fit drops turns", low=32)
    packing: bool = field(False, "several rows in one sequence of train.tokens (accelerators)")
    learning_rate: float = field(2e-4, "at its height", low=1e-12, high=1.0)
    warmup: float = field(0.05, "share of the updates in which the rate rises", low=0.0, high=1.0)
    schedule: str = field("cosine", "how the rate falls", among=("cosine", "linear", "constant"))
    weight_decay: float = field(0.01, "of matrices, not of norms and biases", low=0.0, high=1.0)
    clip: float = field(1.0, "largest norm of the gradient", low=1e-12, high=1e12)
    lora_rank: int = field(16, "rank of the adapters; 0 trains every parameter", low=0)
    lora_alpha: float = field(32.0, "adapters are scaled by alpha / rank", low=1e-12, high=1e6)
    master: str = field(
        "float32",
        "dtype of trained parameters and of the optimizer; products are in model.dtype",
        among=("float32", "bfloat16"),
    )
    remat: bool = field(True, "compute activations again in the backward pass: less memory")
    heads: str = field(
        "both",
        "train one model for both heads, or one head alone",
        among=("both", "controller", "reader"),
    )
    controller_weight: float = field(
        1.0, "weight of a controller token in the loss; a reader token weighs 1", low=1e-6, high=1e6
    )
    gate: str = field(
        "coupled",
        "the action is one decision, or (an ablation) a gate beside a list that does not know of it",
        among=("coupled", "separate"),
    )
    evidence: str = field(
        "silver",
        "what reader rows show: the silver focus, labelled evidence, 1 to max_focus turns by chance, "
        "or what a selector gives under eval.k and eval.budget; all but silver need no labels",
        among=("silver", "evidence", "chance", "full", "recency", "bm25", "embedding"),
    )
    noise: float = field(
        0.2,
        "share of reader rows whose evidence loses turns and gains distractors",
        low=0.0,
        high=1.0,
    )
    dev: float = field(
        0.1, "share of the groups (users, personas ..) held out to measure on", low=0.0, high=0.9
    )
    dev_limit: int = field(64, "most held-out examples that are measured", low=1)
    eval_every: int = field(0, "updates between measurements; 0: before and after only", low=0)
    checkpoint_every: int = field(100, "updates between checkpoints", low=1)
    keep: int = field(2, "newest checkpoints that are kept, beside the best", low=1)


@dataclasses.dataclass(frozen=True)
class EvalSettings:
    """What launch/eval.py compares, beside `methods`."""

    k: int = field(5, "most turns that a selector without a controller gives the reader", low=1)
    budget: int = field(
        512, "most tokens of memory the reader sees, by any method but full and evidence", low=16
    )
    reader: str = field(
        "policy",
        "who answers, for every method: the policy's own reader (policy), the base model (base), or "
        "the export of another run",
    )
    readers: str = field(
        "",
        "METHOD=EXPORT, comma text: these methods are answered by a fine-tuned reader of their own "
        "(launch/sft.py with train.evidence=METHOD)",
    )
    answer: str = field(
        "score",
        "how options are chosen: by belief (label.answer: letters or texts), or by a written reply "
        "from which one rule reads the choice; questions without options are always written",
        among=("score", "generate"),
    )
    max_tokens: int = field(64, "most tokens of a written answer", low=1)
    temperature: float = field(0.0, "of written answers; 0 is greedy", low=0.0, high=100.0)
    thinking: int = field(
        0, "tokens of thinking before an answer (models with such a block); 0: closed", low=0
    )
    tune: str = field(
        "", "comma text such as 1,3,5,10: each selector's k is the best of these on eval.tune_split"
    )
    tune_split: str = field("", "split of the data that k is tuned on")
    folds: int = field(
        0,
        "out of fold: each of so many parts of the users is evaluated by models trained on the others "
        "(launch/sft.py with fold=-K/N); {k} in paths of models is the part's number",
        low=0,
    )
    seeds: int = field(
        0,
        "so many trainings of a policy are evaluated together, and intervals draw among them too; "
        "{seed} in paths of models is the number of the training, from 0",
        low=0,
    )
    stores: str = field(
        "", "folder of the memory systems' stores, read and added to; empty: stores/ of the workdir"
    )
    chat_url: str = field(
        "",
        "OpenAI-compatible endpoint that writes the memory systems' stores, key in BFM_API_KEY; empty: "
        "the base model",
    )
    chat_model: str = field("", "name of the model at eval.chat_url")
    sal_a: bool = field(
        True,
        "also score Sal_q and Sal_a of every turn (Sal_a with the reader): diagnosis, and the method "
        "sal_a; off: Sal_q only where a method reads by it",
    )
    tau_q: float = field(0.0, "threshold on Sal_q of the method tau_q, nats", low=-1e6, high=1e6)
    contrasts: str = field(
        "", "pairs to compare, such as bfm-full,bfm-embedding; empty: bfm with each other method"
    )


@dataclasses.dataclass(frozen=True)
class MeshSettings:
    """Devices by axis; their product is the number of devices."""

    data: int = field(0, "copies of the model; 0: what the other two leave", low=0)
    fsdp: int = field(1, "parts that parameters and optimizer are split into, and rows", low=1)
    tensor: int = field(1, "parts that each matrix product is split into", low=1)


@dataclasses.dataclass(frozen=True)
class ReadingSettings:
    """How raw benchmark files become examples (as `bfm.datasets.Reading`; its seed is `seed`)."""

    time_suffix: str = field(
        "keep", "MemBench: the place-and-time note in each message", among=("keep", "remove")
    )
    persona_card: bool = field(True, "PersonaMem: messages that restate the persona, in or out")
    padding_turns: int = field(
        0, "PrefEval: unrelated exchanges between conversation and question", low=0
    )
    length: int = field(10, "shifting_prefs: exchanges of a history", among=(10, 100, 1000))


@dataclasses.dataclass(frozen=True)
class BenchSettings:
    """What launch/bench.py measures; no label depends on it."""

    history: int = field(16, "turns of the history that is compared with the peer", low=1)
    turns: str = field("10,20,40", "history lengths of the scaling curve, comma text")
    questions: str = field("1,2,4,8,20", "numbers of questions of the scaling curve, comma text")
    repeats: int = field(2, "interleaved repeats; the median counts", low=1)
    peer: str = field(
        "auto",
        "compare with a plain transformers loop where torch is there, and with lm-evaluation-harness "
        "where it is",
        among=("auto", "none"),
    )


@dataclasses.dataclass(frozen=True)
class Settings:
    model: ModelSettings = dataclasses.field(default_factory=ModelSettings)
    label: LabelSettings = dataclasses.field(default_factory=LabelSettings)
    train: TrainSettings = dataclasses.field(default_factory=TrainSettings)
    eval: EvalSettings = dataclasses.field(default_factory=EvalSettings)
    mesh: MeshSettings = dataclasses.field(default_factory=MeshSettings)
    reading: ReadingSettings = dataclasses.field(default_factory=ReadingSettings)
    bench: BenchSettings = dataclasses.field(default_factory=BenchSettings)
    data: str = field(
        "dialogues",
        "jsonl:FILE, 'dialogues' (the set in the package), or the name of a benchmark "
        "(`python launch/data.py --help` lists them)",
    )
    data_dir: str = field("", "raw files of the benchmarks, a folder each; read only")
    download: bool = field(
        True, "fetch what data_dir lacks from its official place, where it can be"
    )
    prepared_dir: str = field("", "where benchmarks are prepared; default: the user's cache")
    split: str = field(
        "all", "part of a benchmark: all, train, dev, test, fold0_test, FIELD=VALUE of its meta .."
    )
    seed: int = field(0, "of option shuffles and splits", low=0)
    fold: str = field(
        "",
        "K/N: only the groups (users ..) in part K of N, from 0; -K/N: only the others; empty: all",
    )
    limit: int = field(0, "use only the first records (0: all)", low=0)
    sample: int = field(
        0,
        "use only so many records of the split, drawn by seed (0: all); a fold is its part of them. "
        "Files are often in the order of their topics, so the first ones are no sample",
        low=0,
    )
    batch_size: int = field(32, "most rows in a batch; a token budget caps it too", low=1)
    unit: str = field("exchange", "what a turn is", among=("exchange", "message"))
    context_turns: int = field(0, "preceding turns rendered together with each turn", low=0, high=1)
    shortlist: int = field(
        0,
        "score only this many turns of a history, the best by BM25 and the most recent (0: all); the "
        "others have null saliency",
        low=0,
    )
    tau: str = field(
        "1.0",
        "threshold on Sal_a in nats: turns above it are the focus; auto: the one with which the reader "
        "answers best on held-out groups (train.dev)",
    )
    max_focus: int = field(5, "most turns in a focus", low=1)
    prefilter_k: int = field(
        10, "turns of highest Sal_q that the controller chooses from", low=1, high=99
    )
    labels: str = field(
        "",
        "labels.jsonl to train on, made by launch/label.py; empty: launch/sft.py makes them first",
    )
    methods: str = field(
        "bfm,none,full,recency,bm25,embedding,sal_q,ebf,evidence,random,longest,shortest,first",
        "what launch/eval.py compares, comma text",
    )
    policy: str = field(
        "",
        "fine-tuned model: export/ or adapter.safetensors of launch/sft.py, or 'shipped', the adapter "
        "that comes with bfm for the default model; empty: untrained",
    )
    on_overflow: str = field(
        "refuse",
        "a turn that does not fit the model's window stops the run, or loses its oldest tokens",
        among=("refuse", "truncate"),
    )
    on_bad_record: str = field(
        "stop", "a bad record stops the run before it starts, or is counted", among=("stop", "skip")
    )
    topology: str = field(
        "v5e:4x4", "what launch/aot.py compiles for: comma text of TPU slices, GENERATION:AxB[xC]"
    )
    job: str = field("sft", "whose step launch/aot.py compiles", among=("sft", "label", "eval"))
    dump_tokens: bool = field(False, "also write every scored sequence to tokens.jsonl")

    @property
    def threshold(self) -> float | None:
        """tau as a number, nats; None before it is chosen (auto)."""
        return None if self.tau == "auto" else float(self.tau)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Settings:
        """Check a ConfigDict (or dict). Raises SettingsError naming the first bad field."""
        made = build(cls, config)
        try:
            finite = made.tau == "auto" or math.isfinite(float(made.tau))
        except ValueError:
            finite = False
        if not finite:
            raise SettingsError(f"tau: {made.tau!r} is neither 'auto' nor a finite number")
        if not made.model.path and not made.model.arch:
            raise SettingsError("model.path: empty; name a model, or a shape in model.arch")
        if made.fold:
            parse_fold(made.fold)
        for name in ("turns", "questions"):
            numbers(getattr(made.bench, name), f"bench.{name}")
        if made.data != "dialogues" and not made.data.removeprefix("jsonl:").strip():
            raise SettingsError("data: names no file; give jsonl:FILE")
        if made.split != "all" and (made.data == "dialogues" or made.data.startswith("jsonl:")):
            raise SettingsError(f"split: {made.split!r}, but only a benchmark has splits")
        if made.label.permutations > 1 and made.label.answer != "options":
            raise SettingsError(
                "label.permutations: only label.answer=options averages over orders"
            )
        return made


def parse_fold(text: str) -> tuple[bool, int, int]:
    """Read "2/5" or "-2/5" as (inside, part, parts). Raises SettingsError.

    >>> parse_fold("-2/5")
    (False, 2, 5)
    """
    part, _, parts = text.removeprefix("-").partition("/")
    if not (part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise SettingsError(f"fold: {text!r} is not K/N or -K/N with K from 0 below N")
    return not text.startswith("-"), int(part), int(parts)


def numbers(text: str, label: str) -> list[int]:
    """Read comma text such as "50,100" as positive integers, ascending."""
    try:
        values = sorted({int(part) for part in text.split(",")})
    except ValueError:
        values = [0]
    if values[0] < 1:
        raise SettingsError(f"{label}: {text!r} is not a list of positive integers such as 50,100")
    return values


def default_config():
    """Return the defaults as a locked ConfigDict: what every file in configs/ starts from."""
    import ml_collections

    return ml_collections.ConfigDict(dataclasses.asdict(Settings())).lock()


def describe() -> list[tuple[str, Any, str]]:
    """List (name, default, help) of every setting, groups flattened with dots."""
    return fields.describe(Settings)
