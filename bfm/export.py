# SPDX-License-Identifier: Apache-2.0
"""Decoder and tokenizer -> a Hugging Face folder that transformers, vLLM and bfm itself load.

The folder is written beside its place and renamed when it is whole, so a kill leaves the old export
or the new one. `bfm_export.json` lists its files: only a folder that holds no other is replaced.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import safetensors
from safetensors.numpy import save_file

from bfm import tokenizer as tokenizers
from bfm import weights
from bfm.jsonl import write_json
from bfm.model.config_write import to_hf
from bfm.model.decoder import Decoder
from bfm.tokenizer import Tokenizer

MARKER = "bfm_export.json"
SHARD_BYTES = 5_000_000_000  # of a file, as transformers cut them
# What a model's folder says beside its weights, where there is a tokenizer.json.
_COPIED = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json"),
    *("special_tokens_map.json", "chat_template.jinja", "additional_chat_templates/*.jinja"),
    *("LICENSE*", "NOTICE*"),
)


class ExportError(weights.WeightsError):
    """An export that cannot be written; one line that names the folder and the reason."""


def export(
    decoder: Decoder,
    folder: str | Path,
    tokenizer: Tokenizer | None = None,
    dtype: str | None = None,
    *,
    shard_bytes: int = SHARD_BYTES,
    on_bytes: Callable[[int], None] = lambda n: None,
) -> Path:
    """Write a decoder, and its tokenizer if given, as a Hugging Face folder; return its path.

    Text models only: one that was read from inside a model that also sees is written by itself
    (`Qwen3_5ForCausalLM`). Every leaf of the decoder has to be addressable from this process.

    Args:
      decoder: the model, adapters merged.
      folder: where to; made whole or not at all. An earlier export there is replaced.
      tokenizer: as `bfm.tokenizer.load` gave it. Where its `path` is a folder with a tokenizer.json
        the tokenizer's files, templates, generation_config.json and licence are taken from there;
        else (GGUF) they are written from what was read. The result is loaded again and compared.
      dtype: "float32" or "bfloat16" to round to (what `weights.read` keeps in fp32 stays so); None
        is as held.
      shard_bytes: the most a safetensors file holds (a larger tensor stands alone); the host holds
        twice that beside the decoder.
      on_bytes: called after each tensor with its size.

    Raises:
      ExportError: `check_target`, a write that failed, or a tokenizer that is not the same again.
      ConfigError: GGUF rope factors that no config.json can state.
    """
    place = check_target(folder)
    scratch = place.with_name(f".{place.name}.part")
    config = {**to_hf(decoder.config), "dtype": dtype or str(decoder.embed_VD.dtype)}
    try:
        shutil.rmtree(scratch, ignore_errors=True)  # of a killed run
        scratch.mkdir(parents=True)
        if tokenizer is not None:
            config |= _write_tokenizer(tokenizer, decoder.config.window, scratch)
        write_json(scratch / "config.json", config)
        if tokenizer is not None:
            _check_tokenizer(tokenizer, scratch)
        _write_weights(_tensors(decoder, dtype), scratch, shard_bytes, on_bytes)
        files = sorted({MARKER, *_files(scratch)})
        write_json(scratch / MARKER, {"dtype": config["dtype"], "files": files})
        _rename(scratch, place)
    except (OSError, safetensors.SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ExportError(f"{folder}: not written ({reason})") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Path(folder)


def check_target(folder: str | Path) -> Path:
    """Return the absolute place of an export that can be written, before any work is done.

    Raises:
      ExportError: it holds what no export wrote, or cannot be made.
    """
    place = Path(folder).expanduser().resolve()
    if place.exists() and not place.is_dir():
        raise ExportError(f"{folder}: is a file; name a folder")
    if place.is_dir() and (others := _files(place) - _listed(place)):
        raise ExportError(
            f"{folder}: holds {min(others)}, which no export wrote; name another folder"
        )
    parent = next(p for p in place.parents if p.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        raise ExportError(f"{folder}: cannot be made, as {parent} is no folder to write to")
    return place


def _files(place: Path) -> set[str]:
    return {p.relative_to(place).as_posix() for p in place.rglob("*") if not p.is_dir()}


def _listed(place: Path) -> set[str]:
    """Return the files of the export that a folder says it is."""
    try:
        return set(json.loads((place / MARKER).read_text("utf-8"))["files"])
    except (OSError, ValueError, TypeError, KeyError):
        return set()


def _rename(scratch: Path, place: Path) -> None:
    """Put a whole folder in its place. What was there is aside while two renames are made."""
    for path in (*scratch.rglob("*"), scratch):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    aside = place.with_name(f".{place.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    if place.exists():
        os.rename(place, aside)
    os.rename(scratch, place)
    shutil.rmtree(aside, ignore_errors=True)


# --- weights -----------------------------------------------------------------------------------


class _Tensor(NamedTuple):
    name: str
    nbytes: int
    make: Callable[[], np.ndarray]


def _tensors(decoder: Decoder, dtype: str | None) -> Iterator[_Tensor]:
    """Yield every tensor under its Hugging Face name, layer by layer, made when asked for."""
    flat = jax.tree_util.tree_flatten_with_path(decoder)[0]
    wanted = jax.tree.leaves(weights.abstract_decoder(decoder.config, dtype)) if dtype else None
    for (key, leaf), target in zip(flat, wanted or [leaf for _, leaf in flat], strict=True):
        entry, layers = weights.tensors(decoder.config, weights.param_path(key))

        def make(leaf=leaf, entry=entry, to=target.dtype, row=None) -> np.ndarray:
            array = np.asarray(leaf if row is None else leaf[row]).astype(to, copy=False)
            shape = weights.stored_shape(entry, array.shape, 0)
            array = array.reshape(shape[::-1]).T if entry.inputs else array.reshape(shape)
            return np.ascontiguousarray(array)

        nbytes = leaf.size * target.dtype.itemsize // max(1, len(layers))
        for row, i in enumerate(layers) if layers else ((None, 0),):
            yield _Tensor(entry.hf.format(i=i), nbytes, functools.partial(make, row=row))


def _write_weights(
    tensors: Iterator[_Tensor], folder: Path, shard_bytes: int, on_bytes: Callable[[int], None]
) -> None:
    """Write safetensors, a file at a time, and their index where there are several."""
    shards: list[list[_Tensor]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(t.nbytes for t in shards[-1]) + tensor.nbytes > shard_bytes:
            shards.append([])
        shards[-1].append(tensor)

    def made(tensor: _Tensor) -> np.ndarray:
        array = tensor.make()
        on_bytes(array.nbytes)
        return array

    index = {}
    for n, shard in enumerate(shards, 1):
        file = f"model-{n:05d}-of-{len(shards):05d}.safetensors"
        file = file if len(shards) > 1 else "model.safetensors"
        save_file({t.name: made(t) for t in shard}, folder / file, {"format": "pt"})
        index |= {t.name: file for t in shard}
    if len(shards) > 1:
        total = sum(t.nbytes for shard in shards for t in shard)
        write_json(folder / "model.safetensors.index.json", {
            "metadata": {"total_size": total}, "weight_map": index,
        })  # fmt: skip


# --- tokenizer ---------------------------------------------------------------------------------


def _write_tokenizer(tokenizer: Tokenizer, window: int, folder: Path) -> dict[str, Any]:
    """Write the tokenizer's files; return what config.json says of its tokens."""
    base = Path(tokenizer.path or os.devnull)  # "" would be the current folder
    settings, generation = (
        weights.read_json(base / name) if (base / name).is_file() else {}
        for name in ("tokenizer_config.json", "generation_config.json")
    )
    if (base / "tokenizer.json").is_file():
        for path in (p for pattern in _COPIED for p in base.glob(pattern) if p.is_file()):
            target = folder / path.relative_to(base)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)
    else:
        write_json(folder / "tokenizer.json", tokenizer.to_json(), indent=None)
        settings = {
            "clean_up_tokenization_spaces": False, "model_max_length": window, **tokenizer.specials
        }  # fmt: skip
        if tokenizer.template is not None:
            (folder / "chat_template.jinja").write_text(tokenizer.template, "utf-8", newline="")
    # AutoTokenizer 5 builds some classes anew from the vocabulary and drops the pre-tokenizer that
    # tokenizer.json states; this class, which `bfm.tokenizer` reads with as well, takes it as it is.
    settings.pop("auto_map", None)
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings.setdefault("model_input_names", ["input_ids", "attention_mask"])
    write_json(folder / "tokenizer_config.json", settings)

    named = {}
    for token in ("bos_token", "eos_token", "pad_token"):
        ids = tokenizer.encode_template(tokenizer.specials.get(token, ""))
        named[f"{token}_id"] = ids[0] if len(ids) == 1 else None  # null: no default of the class
    told = generation.get("eos_token_id")
    ends = [told] if isinstance(told, int) else list(told or ())
    turn = tokenizer.scaffold().end if tokenizer.template is not None else None
    ends += [i for i in dict.fromkeys((turn, named["eos_token_id"])) if i not in (None, *ends)]
    named["eos_token_id"] = ends if len(ends) > 1 else ends[0] if ends else None
    generation = {**named, **generation, "eos_token_id": named["eos_token_id"]}
    write_json(
        folder / "generation_config.json", {k: v for k, v in generation.items() if v is not None}
    )
    return named


def _check_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Compare ids, BOS and chat frame of a written folder with the tokenizer in use."""

    def facts(t: Tokenizer) -> tuple:
        # The post-processor of a folder is named anew by transformers; what it does is bos_ids.
        frame = t.scaffold() if t.template is not None else None
        return {**t.to_json(), "post_processor": None}, t.bos_ids, frame

    if facts(tokenizers.load(folder)) != facts(tokenizer):
        raise ExportError(
            f"{tokenizer.path}: the tokenizer written from it gives other ids than the one in use; "
            "have its files changed since it was loaded?"
        )
