# SPDX-License-Identifier: Apache-2.0
"""Others' scoring of the same ids, for launch/bench.py: each peer where it is installed.

A peer is a function from rows (ids, span) to the log-probability of each span, nats; a row is a whole
sequence, as a plain loop scores it.
"""

import numpy as np

Row = tuple[list[int], tuple[int, int]]


def load(path, dtype: str, say) -> dict:
    """Return the peers that are installed here by name, with the model at `path` loaded."""
    found = {}
    try:
        say("loading transformers")
        model = transformers(path, dtype)
    except ImportError:
        say("no torch here, so neither transformers nor lm-evaluation-harness")
    else:
        found["transformers"] = lambda rows: by_transformers(model, rows)
        try:
            found["lm-evaluation-harness"] = harness(model, path)
        except ImportError:
            say("no lm-evaluation-harness here")
    try:
        found |= llama_cpp(path)
    except ImportError:
        say("no llama.cpp here (its Python package is llama-cpp-python)")
    return found


def transformers(path, dtype: str):
    """Return the model in transformers. Raises ImportError where torch is not installed."""
    import torch
    from transformers import AutoModelForCausalLM

    place, more = _place(path)
    dtype = getattr(torch, dtype)
    return AutoModelForCausalLM.from_pretrained(place, dtype=dtype, **more).eval()


def _place(path) -> tuple:
    return (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})


def by_transformers(model, rows: list[Row], batch: int = 16) -> list[float]:
    """Score rows in padded batches of 16, logits in full, as a plain loop does."""
    import torch

    sums = []
    for at in range(0, len(rows), batch):
        part = rows[at : at + batch]
        width = max(len(ids) for ids, _ in part)
        tokens = torch.zeros((len(part), width), dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for i, (ids, _) in enumerate(part):
            tokens[i, : len(ids)] = torch.tensor(ids)
            mask[i, : len(ids)] = 1
        with torch.no_grad():
            logits = model(tokens, attention_mask=mask).logits
        for i, (ids, (start, end)) in enumerate(part):
            logp = torch.log_softmax(logits[i, start - 1 : end - 1].float(), -1)
            sums.append(float(logp[range(end - start), ids[start:end]].sum()))
    return sums


def harness(model, path):
    """lm-evaluation-harness around the same transformers model, in batches of 16."""
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer

    place, more = _place(path)
    tokenizer = AutoTokenizer.from_pretrained(place, **more)
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=16)

    def by_harness(rows: list[Row]) -> list[float]:
        asked = [(("", ""), ids[:start], ids[start:end]) for ids, (start, end) in rows]
        return [logp for logp, _ in lm._loglikelihood_tokens(asked, disable_tqdm=True)]

    return by_harness


def llama_cpp(path) -> dict:
    """llama.cpp on the same .gguf file, a sequence at a time; {} for other files.

    It multiplies the weights as they are packed there, by activations of 8 bits: its sums are near, not
    equal. What a sequence begins with is not kept from the last, as by the other peers.
    """
    from llama_cpp import Llama

    if path.suffix != ".gguf":
        return {}
    lm = None

    def by_llama_cpp(rows: list[Row]) -> list[float]:
        nonlocal lm
        longest = max(len(ids) for ids, _ in rows)
        if lm is None or lm.n_ctx() < longest:
            lm = Llama(str(path), n_ctx=longest, n_batch=longest, logits_all=True, verbose=False)
        sums = []
        for ids, (start, end) in rows:
            lm.reset()
            lm.eval(ids)
            logits = np.asarray(lm.scores[start - 1 : end - 1], np.float64)
            logp = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
            sums.append(float(logp[range(end - start), ids[start:end]].sum()))
        return sums

    return {"llama.cpp": by_llama_cpp}
