# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a GGUF file as the content of a tokenizer.json, named tokens and a template."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bfm import gguf
from bfm.gguf import GgufError

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace("{1,3}", "")
_QWEN35_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# tokenizer.ggml.pre -> where text is split before merging; "" is GPT-2's own expression.
_SPLITS = {
    **dict.fromkeys(("default", "gpt-2", "smollm"), ""),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3_SPLIT),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2_SPLIT),
    "qwen35": _QWEN35_SPLIT,
}
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5  # token_type; 6 is a byte


def read(path: Path) -> tuple[dict[str, Any], dict[str, str], str | None]:
    """Read the content of a tokenizer.json, the named tokens and the chat template, if any.

    Raises:
      GgufError: the file cannot be read, or has no tokenizer of a kind that is known here.
    """
    metadata = gguf.open(path).metadata
    meta = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    if lacking := {"model", "tokens", "token_type"} - meta.keys():
        raise GgufError(f"{path}: no tokenizer.ggml.{min(lacking)}; convert the model again")
    tokens, types, kind = meta["tokens"], meta["token_type"], meta["model"]
    vocab = {t: i for i, t in enumerate(tokens) if types[i] != _UNUSED}
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: meta.get(f"{key}_token_id", len(tokens)) for name, key in keys.items()}
    specials = {name: tokens[i] for name, i in ids.items() if 0 <= i < len(tokens)}
    build = {"gpt2": _byte_level_parts, "llama": _sentencepiece_parts}.get(kind)
    if build is None:
        raise GgufError(
            f"{path}: tokenizer.ggml.model {kind!r} is not known (known: gpt2, llama); "
            "use the model's Hugging Face folder"
        )
    spec, add_bos = build(path, meta, vocab)
    control = {*specials.values(), *(t for t in vocab if types[vocab[t]] in (_UNKNOWN, _CONTROL))}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    spec["added_tokens"] = [
        {"id": i, "content": token, "special": token in control, **flags}
        for token, i in vocab.items()
        if token in control or types[i] == _USER_DEFINED
    ]
    if meta.get("add_bos_token", add_bos) and "bos_token" in specials:
        bos, text = specials["bos_token"], {"Sequence": {"id": "A", "type_id": 0}}
        spec["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, text],
            "pair": [text, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {bos: {"id": bos, "ids": [ids["bos_token"]], "tokens": [bos]}},
        }
    return spec, specials, meta.get("tokenizer.chat_template")


def _byte_level_parts(
    path: Path, meta: Mapping[str, Any], vocab: dict[str, int]
) -> tuple[dict[str, Any], bool]:
    """Return tokenizer.json of a "gpt2" vocabulary, and whether it adds BOS if not told."""
    pre = meta.get("pre", "default")
    if pre not in _SPLITS:
        raise GgufError(
            f"{path}: tokenizer.ggml.pre {pre!r} is not known (known: {', '.join(_SPLITS)}); "
            "use the model's Hugging Face folder"
        )
    split, llama3 = _SPLITS[pre], _SPLITS[pre] == _LLAMA3_SPLIT
    spell = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps = [{**spell, "use_regex": not split}]
    if split:
        cut = {"pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
        steps.insert(0, {"type": "Split", **cut})
    if pre == "smollm":
        steps.insert(0, {"type": "Digits", "individual_digits": True})
    merges = [_parts(merge) for merge in meta.get("merges", ())]
    model = {"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": llama3}
    return {
        "normalizer": {"type": "NFC"} if "qwen" in pre else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": spell,
        "model": model,
    }, llama3


def _parts(merge: str) -> tuple[str, str]:
    left, _, right = merge[1:].partition(" ")  # the first character may be a space itself
    return merge[0] + left, right


def _sentencepiece_parts(
    path: Path, meta: Mapping[str, Any], vocab: dict[str, int]
) -> tuple[dict[str, Any], bool]:
    """Return tokenizer.json of a "llama" vocabulary, and whether it adds BOS if not told.

    The file has scores instead of merges: every cut of a piece into two pieces is one, best first.
    """
    if "scores" not in meta:
        raise GgufError(f"{path}: no tokenizer.ggml.scores; convert the model again")
    types, scores = meta["token_type"], meta["scores"]
    normal = {t: i for t, i in vocab.items() if types[i] == _NORMAL}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in sorted(normal, key=lambda t: (-scores[normal[t]], normal[t]))
        for cut in range(len(piece) - 1, 0, -1)
        if piece[:cut] in normal and piece[cut:] in normal
    ]
    model = {"type": "BPE", "vocab": vocab, "merges": merges, "byte_fallback": True}
    model["unk_token"] = next((t for t, i in vocab.items() if types[i] == _UNKNOWN), None)
    text = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    return {
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [text, {"type": "ByteFallback"}]},
        "model": model,
    }, True
