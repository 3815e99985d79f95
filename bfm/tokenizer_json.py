# SPDX-License-Identifier: Apache-2.0
"""Edits of a tokenizer.json's content: no added space, and no control tokens in data."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Mapping
from typing import Any

import tokenizers

BYTE_FALLBACK = tuple(f"<0x{byte:02X}>" for byte in range(256))  # SentencePiece's byte tokens


class SpecError(ValueError):
    """A tokenizer.json that cannot be used; one line without its path."""


def exact(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a tokenizer.json that neither adds, strips, cuts, pads nor drops."""
    parts = ("normalizer", "pre_tokenizer", "decoder")
    spec = {**spec, "truncation": None, "padding": None}
    spec["model"] = {**spec["model"], "dropout": None}
    return spec | {part: _exact(spec.get(part), part) for part in parts}


def _exact(node: dict[str, Any] | None, part: str) -> dict[str, Any] | None:
    """Return a part of a tokenizer.json without the space it would put before, or strip after."""
    kind = node and node["type"]
    if kind in (None, "Prepend") or (part == "decoder" and kind == "Strip"):
        return None
    if kind == "Sequence":
        key = next(key for key in node if key != "type")
        steps = [_exact(step, part) for step in node[key]]
        return {**node, key: [step for step in steps if step is not None]}
    plain = {"Metaspace": {"prepend_scheme": "never"}, "ByteLevel": {"add_prefix_space": False}}
    plain["WordPiece"] = {"cleanup": False}
    return {**node, **plain.get(kind, {})}


def without_control(
    spec: Mapping[str, Any], scaffold: tokenizers.Tokenizer
) -> tuple[tokenizers.Tokenizer, frozenset[int], bytes]:
    """Return the tokenizer without control tokens, their ids, and the bytes it cannot spell.

    `scaffold` is the tokenizer of `spec` as it is.

    Raises:
      SpecError: the model cannot keep data apart from control tokens, or loses text.
    """
    model, vocab = spec["model"], spec["model"]["vocab"]
    bpe, fallback = model["type"] == "BPE", bool(model.get("byte_fallback"))
    if not isinstance(vocab, dict) or (fallback and model.get("ignore_merges")):
        raise SpecError(
            f"this kind of {model['type']} tokenizer may read plain text as control or "
            "byte tokens; convert it to BPE"
        )
    byte_level = bpe and _mentions([spec["pre_tokenizer"], spec["normalizer"]], "ByteLevel")
    units = byte_letters() if byte_level else BYTE_FALLBACK if fallback else ()
    absent = bytes(byte for byte, unit in enumerate(units) if unit not in vocab)
    # Where every byte has a token nothing is unknown: the unknown token is a control token too.
    unk = None if byte_level or (units and not absent) else model.get("unk_token")
    if unk is None and not byte_level and (absent or not units):
        raise SpecError(
            "neither byte tokens nor an unknown token, so text would be lost; "
            "add an unk_token to tokenizer.json"
        )
    added = [token for token in spec["added_tokens"] if token["content"] not in units]
    kept = [token for token in added if not _is_control(token)]
    banned = {token["content"] for token in added if _is_control(token)}
    controls = banned - {unk}
    vocab = {token: i for token, i in vocab.items() if token not in controls}
    # An added token outside the vocabulary gets the next free id, so those that stay go inside.
    vocab |= {token["content"]: scaffold.token_to_id(token["content"]) for token in kept}
    model = {**model, "vocab": vocab}
    if bpe:
        banned.update(BYTE_FALLBACK if fallback else ())
        cut = len(model.get("continuing_subword_prefix") or "")
        model |= {"unk_token": unk, "merges": _merges(model["merges"], vocab, banned, cut)}
    data = {**spec, "model": model, "added_tokens": kept, "post_processor": None}
    made = tokenizers.Tokenizer.from_str(json.dumps(data, ensure_ascii=False))
    return made, frozenset(map(scaffold.token_to_id, controls)), absent if byte_level else b""


def _is_control(token: Mapping[str, Any]) -> bool:
    """Tell control tokens from whitespace runs and words that were only added to a vocabulary."""
    text = token["content"].strip(" \n\t▁")
    return token["special"] or (len(text) > 2 and text[0] + text[-1] in ("<>", "[]"))


def _merges(merges: list, vocab: Mapping[str, int], banned: set[str], cut: int) -> list:
    """Keep the merges whose parts and result are all in the vocabulary, and the result not banned.

    `cut` is the length of the prefix that marks a piece inside a word.
    """
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in merges)
    known = vocab.keys() - banned
    return [p for p in pairs if p[0] in vocab and p[1] in vocab and p[0] + p[1][cut:] in known]


def _mentions(node: Any, kind: str) -> bool:
    if isinstance(node, dict):
        return node.get("type") == kind or _mentions([*node.values()], kind)
    return isinstance(node, list) and any(_mentions(part, kind) for part in node)


@functools.cache
def byte_letters() -> tuple[str, ...]:
    """Return the letter that byte-level BPE writes for each byte (GPT-2's table)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = itertools.count(256)
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))
