# SPDX-License-Identifier: Apache-2.0
"""Measure an update of fine-tuning beside a plain transformers loop on the same rows.

Ours as the settings say (adapters or every parameter, model.dtype); the peer, where torch is
installed, trains every parameter of the same weights in model.dtype and in bfloat16: padded batches,
logits of the answers' rows in full, AdamW. Both in one run, in turn. Rows are cut from the bundled
dialogues: 450 tokens on average, answers of 6. Times are medians. Writes bench_sft.json.
"""

from statistics import median

import _door
import _peers
from bench import Draw, beside, figure, say, seconds, table


def main(settings, workdir) -> None:
    import jax

    from bfm import finetune, opening, sharding, training
    from bfm.jsonl import write_json

    train = settings.train
    files = opening.open_base(settings)
    mesh = sharding.make_mesh(settings.mesh.data, settings.mesh.fsdp, settings.mesh.tensor)
    rows = draw_rows(files.scaffold, train.batch_size, train.tokens)
    tokens = sum(len(row.ids) for row in rows)
    parts = training.split_batch(rows, train, sharding.row_shards(mesh))
    learner = finetune.Learner(settings, files, mesh, steps=100)
    state = learner.start()

    def update():
        nonlocal state
        state, metrics = learner.step(state, learner.frozen, parts)
        jax.block_until_ready(metrics)

    say("compiling")
    compiling = seconds(update)
    peers = {}
    if settings.bench.peer == "auto" and settings.model.path:
        try:
            for dtype in dict.fromkeys(("bfloat16", settings.model.dtype)):
                model = _peers.transformers(files.path, dtype)
                peers[f"transformers, every parameter in {dtype}"] = peer_update(model, rows)
        except ImportError:
            say("no torch here, so no peer")
    ours, theirs = [], {name: [] for name in peers}
    for k in range(settings.bench.repeats):
        say(f"side by side, {k + 1} of {settings.bench.repeats}")
        ours.append(seconds(update))
        for name, step in peers.items():
            theirs[name].append(seconds(step))
    spent = median(ours)
    workdir.mkdir(parents=True, exist_ok=True)
    name = f"adapters of rank {train.lora_rank}" if train.lora_rank else "every parameter"
    figures = [
        *beside(f"an update, {name}", ours, theirs),
        figure("tokens trained on", tokens / spent, "tokens/s"),
        figure("compiling", compiling - spent, "s"),
    ]
    write_json(workdir / "bench_sft.json", figures)
    model = settings.model.path or settings.model.arch
    table(figures, f"{model} {settings.model.dtype}, {len(rows)} rows, {tokens} tokens")


def draw_rows(scaffold, n: int, limit: int):
    from bfm.rows import Row

    draw, rows = Draw(scaffold, 0), []
    for i in range(n):
        prompt, answer = draw.cut(450)[: limit - 16], draw.cut(6)[:15]
        rows.append(Row(str(i), "reader", (*prompt, *answer, scaffold.end), len(prompt)))
    return rows


def peer_update(model, rows, batch: int = 8):
    """Return one update of a plain loop: batches of 8 by length, gradients summed, AdamW."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    model.train()
    ordered = sorted(rows, key=lambda row: len(row.ids))
    answers = sum(len(row.ids) - row.start for row in rows)

    def update() -> None:
        for at in range(0, len(ordered), batch):
            part = ordered[at : at + batch]
            width = max(len(row.ids) for row in part)
            ids = torch.zeros((len(part), width), dtype=torch.long)
            mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
            for i, row in enumerate(part):
                n = len(row.ids)
                ids[i, :n], mask[i, :n] = torch.tensor(row.ids), 1
                labels[i, row.start : n] = ids[i, row.start : n]
            logits = model(ids, attention_mask=mask).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(
                logits.float().flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
            )
            (loss / answers).backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


if __name__ == "__main__":
    _door.config_main(main, __doc__)
