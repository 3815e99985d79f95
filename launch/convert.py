# SPDX-License-Identifier: Apache-2.0
"""A model, Hugging Face or GGUF -> bfm -> a Hugging Face folder, and a check that it is the same.

    python launch/convert.py --model PATH --out FOLDER [--dtype float32|bfloat16]

PATH is a Hugging Face folder (safetensors), a .gguf file, a hub name or smollm2-135m-instruct.
FOLDER gets config.json, safetensors (an index and files of 5 GB for large models), tokenizer, chat
template and generation_config.json; an earlier export there is replaced, anything else refused.

Then logits on fixed prompts are compared in fp32 on the CPU, as the largest difference over the
largest logit: the folder, loaded again, against the model (must be 0; 1e-5 where a GGUF holds rope
factors, which config.json states as Llama 3's formula), and, where torch is installed, transformers on
the folder (at most 1e-4). Exit code 1 if one does not hold, 2 for bad input.
"""

from __future__ import annotations

import argparse

import _door
import numpy as np

PROMPTS = (
    "The capital of France is Paris, and the capital of Italy is",
    "I gave up coffee in May 2024. What should I drink now?",
    "def mean(xs):\n    return sum(xs) / len(xs)  # 12.5, naïve, 北京",
)
FACTORS = 1e-5  # fp32 rounding of rotary frequencies
PEER = 1e-4  # of the largest logit, as in tests/test_parity.py


def main() -> int:
    args = parse()
    import jax

    from bfm import lm, weights
    from bfm.export import ExportError, check_target

    if check_target(args.out) == lm.find(args.model).resolve():
        raise ExportError(f"--out: {args.out}: is the model itself; name another folder")
    files = lm.open_model(args.model)
    tokenizer, stored = files.scaffold.tokenizer, files.source.dtype
    dtype = args.dtype or stored
    # There a product of fp32 is one, and memory is the host's.
    jax.config.update("jax_platforms", "cpu")
    frame = files.scaffold
    prompts = [[*frame.head, *tokenizer.encode(text), *frame.tail] for text in PROMPTS]

    same = FACTORS if files.config.rope.factors else 0.0
    model = logits(written(files, dtype, args.out), prompts)
    found = logits(read(weights.open_source(args.out), dtype, "reading the export"), prompts)
    held = report("the export against the model", difference(found, model), same)
    if (stored, dtype) == ("float32", "bfloat16"):
        whole = logits(read(files.source, stored, f"reading {files.path.name}"), prompts)
        print(f"rounding to {dtype} moved logits by {difference(model, whole):.1e} of the largest")
    held &= peer(args.out, tokenizer, prompts, found)
    return 0 if held else 1


def parse() -> argparse.Namespace:
    """Parse the flags. Raises UsageError (one line)."""

    parser = _door.Parser(__doc__.split("\n", 1)[1])
    parser.add_argument("--model", required=True, help="folder, .gguf file or hub name")
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"),
        help="of the weights; default: bfloat16 if they are stored so, else float32, which holds "
        "every stored value (fp16 and dequantized ones too) exactly",
    )  # fmt: skip
    return parser.parse_args()


def written(files, dtype: str, out: str):
    """Read the model and write it to `out`; return its decoder."""
    import jax

    from bfm.export import export
    from bfm.progress import Meter

    decoder = read(files.source, dtype, f"reading {files.path.name}")
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(decoder))
    with Meter(f"writing {out}", size, "bytes") as meter:
        export(decoder, out, files.scaffold.tokenizer, on_bytes=meter.add)
    print(f"{out}: {files.config.family}, {dtype} (stored: {files.source.dtype}), {size:,} bytes")
    return decoder


def read(source, dtype: str, title: str):
    """Read weights, with progress on stderr."""
    from bfm import weights
    from bfm.progress import Meter

    with Meter(title, len(source.shapes), "tensors") as meter:

        def counted(name: str) -> np.ndarray:
            meter.add(1)
            return source.read(name)

        return weights.read(source._replace(read=counted), dtype)


def logits(decoder, prompts: list[list[int]]) -> list[np.ndarray]:
    """Return fp32 logits [T, V] of each prompt, computed in fp32 whatever the weights' dtype."""
    import jax
    import jax.numpy as jnp

    from bfm.model.decoder import decode
    from bfm.model.matmul import dot

    parts, tree = jax.tree.flatten(decoder)
    del decoder
    for i, part in enumerate(parts):  # one at a time: never a second whole model
        parts[i] = part.astype(jnp.float32)
    decoder = jax.tree.unflatten(tree, parts)
    lengths = [len(ids) for ids in prompts]
    place = np.arange(max(lengths))[None]
    tokens = np.array([ids + [0] * (max(lengths) - len(ids)) for ids in prompts], np.int32)
    segments = (place < np.array(lengths)[:, None]).astype(np.int32)
    x_BTD, _ = jax.jit(decode)(decoder, tokens, np.broadcast_to(place, tokens.shape), segments)
    return [
        np.asarray(dot(x_TD[:n], decoder.unembed_VD.T))
        for x_TD, n in zip(x_BTD, lengths, strict=True)
    ]


def difference(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    """Return the largest difference, over the largest logit of b in the same prompt."""
    return max(float(np.abs(x - y).max() / np.abs(y).max()) for x, y in zip(a, b, strict=True))


def report(what: str, found: float, limit: float) -> bool:
    held = found <= limit  # not so for nan
    print(f"{what}: {found:.1e} of the largest logit, {'' if held else 'NOT '}within {limit:g}")
    return held


def peer(folder: str, tokenizer, prompts: list[list[int]], ours: list[np.ndarray]) -> bool:
    """Compare logits, and for the reader's eyes ids, with transformers on the folder."""
    from transformers import AutoTokenizer

    other = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ids = (other(text, add_special_tokens=False)["input_ids"] for text in PROMPTS)
    same = sum(a == tokenizer.encode(text) for a, text in zip(ids, PROMPTS, strict=True))
    print(f"AutoTokenizer on the export: the same ids for {same} of {len(PROMPTS)} texts")
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError:
        print("transformers on the export: not compared, torch is not installed")
        return True
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()
    with torch.no_grad():
        theirs = [model(torch.tensor([ids])).logits[0].numpy() for ids in prompts]
    return report("the export against transformers", difference(ours, theirs), PEER)


if __name__ == "__main__":
    _door.guarded(main)
