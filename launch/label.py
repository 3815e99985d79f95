# SPDX-License-Identifier: Apache-2.0
"""Label a data set: the saliency of every turn, with gate and focus.

Writes labels.jsonl (a line a record, in input order), labels.meta.json (what the labels were made
with, and timing) and, with --config.dump_tokens=true, tokens.jsonl (every scored sequence as ids).
With tau=auto also tau.json and tau.png; with label.rounds, rounds/ with the readers that were
fine-tuned to judge; where the data names evidence, labels.quality.json says how far the labels agree
with it. Started again after a kill it goes on where it stopped and gives the same bytes.
Several processes (launch/cluster.md) share the work and write one file.
"""

import _door


def main(settings, workdir) -> None:
    _door.join_processes()
    import jax
    from rich.console import Console

    from bfm import labeling, quality, show, tau
    from bfm.jsonl import write_json

    if settings.tau == "auto":
        tau.check(settings)
    if settings.label.rounds:
        from bfm import rounds

        meta = rounds.run(settings, workdir)
        if meta is None:
            print("stopped, checkpoint saved; the same command goes on")
            return
    else:
        meta = labeling.run(settings, workdir)
    if jax.process_index():
        return  # the first process tells
    timing = meta["timing"]
    tokens = timing["prefix_tokens"] + timing["suffix_tokens"]
    rate = tokens / timing["score_s"] if timing["score_s"] else 0
    skipped = f", {meta['skipped']} bad records skipped" if meta["skipped"] else ""
    if "shortlist" in meta:
        kept, labelled = meta["shortlist"]["evidence_kept"], meta["shortlist"]["evidence"]
        share = f"{kept} of {labelled} ({kept / labelled:.0%})" if labelled else "none labelled"
        print(f"shortlist of {settings.shortlist} turns: evidence turns kept: {share}")
    if settings.tau == "auto":
        choice = tau.choose(settings, workdir)
        best = max(row["accuracy"] for row in choice["curve"])
        print(
            f"tau = {choice['tau']:.3f} nats: reader accuracy {best:.3f} on {choice['dev']} held-out "
            f"examples (curve: {workdir / 'tau.png'})"
        )
    if found := quality.against_evidence(settings, workdir):
        write_json(workdir / "labels.quality.json", found)
        Console().print(show.quality(found))
    print(
        f"{workdir / labeling.LABELS}: {meta['records']} records{skipped}; "
        f"{tokens:,} tokens in {timing['score_s']:.1f} s ({rate:,.0f} tokens/s), "
        f"compiling {timing['compile_s']:.1f} s"
    )


if __name__ == "__main__":
    _door.config_main(main, __doc__)
