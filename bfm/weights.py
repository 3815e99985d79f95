# SPDX-License-Identifier: Apache-2.0
"""Weights: a Hugging Face folder or a GGUF file -> Decoder, tensor by tensor, without torch.

One table names, for every parameter, its Hugging Face and its GGUF tensor; a name that is missing,
extra or misshapen stops the load with one message that lists them all.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bfm import gguf
from bfm.model import config as model_config
from bfm.model.config import ConfigError, ModelConfig
from bfm.model.decoder import Decoder


class WeightsError(ValueError):
    """A model file that cannot be used; one line that names the path and every fault."""


class Entry(NamedTuple):
    """Where a parameter lives in files. `{i}` is the layer; `inputs` counts its input axes.

    A linear kernel of shape (inputs.., outputs..) is stored as (prod outputs, prod inputs), that is
    transposed; `inputs=0` marks a tensor that is stored as it is (norms, embeddings).
    """

    hf: str
    gguf: str
    inputs: int = 0


TABLE: dict[str, Entry] = {
    "embed_VD": Entry("model.embed_tokens.weight", "token_embd.weight"),
    "norm_D": Entry("model.norm.weight", "output_norm.weight"),
    "head_VD": Entry("lm_head.weight", "output.weight"),
    "layers.attn_norm_D": Entry(
        "model.layers.{i}.input_layernorm.weight", "blk.{i}.attn_norm.weight"
    ),
    "layers.q_DNh": Entry("model.layers.{i}.self_attn.q_proj.weight", "blk.{i}.attn_q.weight", 1),
    "layers.k_DKh": Entry("model.layers.{i}.self_attn.k_proj.weight", "blk.{i}.attn_k.weight", 1),
    "layers.v_DKh": Entry("model.layers.{i}.self_attn.v_proj.weight", "blk.{i}.attn_v.weight", 1),
    "layers.o_NhD": Entry(
        "model.layers.{i}.self_attn.o_proj.weight", "blk.{i}.attn_output.weight", 2
    ),
    "layers.mlp_norm_D": Entry(
        "model.layers.{i}.post_attention_layernorm.weight", "blk.{i}.ffn_norm.weight"
    ),
    "layers.gate_DF": Entry("model.layers.{i}.mlp.gate_proj.weight", "blk.{i}.ffn_gate.weight", 1),
    "layers.up_DF": Entry("model.layers.{i}.mlp.up_proj.weight", "blk.{i}.ffn_up.weight", 1),
    "layers.down_FD": Entry("model.layers.{i}.mlp.down_proj.weight", "blk.{i}.ffn_down.weight", 1),
}
# Buffers of old Llama checkpoints that transformers recomputes and ignores as well.
_SKIPPED_SUFFIXES = (".rotary_emb.inv_freq",)


class Source(NamedTuple):
    """Tensors of a model on disk: shapes known at once, values read one at a time."""

    config: ModelConfig
    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]
    sha256: Callable[[], str]  # of the files' bytes
    column: int  # of Entry: 0 Hugging Face names, 1 GGUF names


def open_source(path: str | Path) -> Source:
    """Open a Hugging Face folder (single or sharded safetensors) or a .gguf file and check it.

    Every tensor that the config asks for must be there in its shape, and no other. Reads no values.
    Raises WeightsError or ConfigError (one line each, all faults).
    """
    path = Path(path)
    source = _open_gguf(path) if path.suffix == ".gguf" else _open_hf(path)
    _check(path, source)
    return source


def read(
    source: Source, dtype: str = "float32", sharding: Callable[[str], Any] | None = None
) -> Decoder:
    """Read a checked source into a decoder whose parameters all have `dtype`.

    dtype: "float32" or "bfloat16". `sharding(path)` gives the placement of a parameter
    ("layers.q_DNh"); default: the first device. Host memory holds one stacked parameter in the
    wanted dtype at a time, never the model in fp32.
    """
    abstract = abstract_decoder(source.config, dtype)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(abstract)

    def value(name: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        entry, target = TABLE[name], np.dtype(leaf.dtype)

        def stored(tensor: str, shape: tuple[int, ...]) -> np.ndarray:
            array = source.read(tensor).astype(target)
            return (array.T if entry.inputs else array).reshape(shape)

        if name.startswith("layers."):
            array = np.empty(leaf.shape, target)
            for i in range(source.config.n_layers):
                array[i] = stored(entry[source.column].format(i=i), leaf.shape[1:])
        else:
            array = stored(entry[source.column], leaf.shape)
        return jax.device_put(array, sharding(name) if sharding else None)

    arrays = [value(param_path(key), leaf) for key, leaf in leaves]
    return jax.tree_util.tree_unflatten(treedef, arrays)


def abstract_decoder(config: ModelConfig, dtype: str = "float32") -> Decoder:
    """Return the decoder with ShapeDtypeStruct leaves: no memory, no device."""
    return jax.eval_shape(lambda: Decoder(config, nnx.Rngs(0), jnp.dtype(dtype)))


def param_path(key: tuple) -> str:
    """Turn a tree path into a parameter's name, such as "layers.q_DNh"."""
    return ".".join(str(k.name) for k in key if hasattr(k, "name") and k.name != "value")


def _stored_shape(entry: Entry, shape: tuple[int, ...]) -> tuple[int, ...]:
    if not entry.inputs:
        return shape
    return math.prod(shape[entry.inputs :]), math.prod(shape[: entry.inputs])


def _check(path: Path, source: Source) -> None:
    """Compare every expected tensor with the file: missing, misshapen and extra, all in one error."""
    config, shapes, column = source.config, source.shapes, source.column
    leaves, _ = jax.tree_util.tree_flatten_with_path(abstract_decoder(config))
    expected: dict[str, tuple[int, ...]] = {}
    for key, leaf in leaves:
        name = param_path(key)
        entry = TABLE[name]
        if name.startswith("layers."):
            stored = _stored_shape(entry, leaf.shape[1:])
            expected |= {entry[column].format(i=i): stored for i in range(config.n_layers)}
        else:
            expected[entry[column]] = _stored_shape(entry, leaf.shape)
    faults = [f"{name}: missing" for name in expected if name not in shapes]
    faults += [
        f"{name}: expected {shape} from the config, found {shapes[name]}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]
    extra = [name for name in shapes if name not in expected]
    faults += [f"{name}: unknown tensor" for name in extra if not name.endswith(_SKIPPED_SUFFIXES)]
    if faults:
        raise WeightsError(f"{path}: {len(faults)} tensor fault(s): " + "; ".join(faults))


# --- Hugging Face ------------------------------------------------------------------------------


def _open_hf(path: Path) -> Source:
    if not path.is_dir():
        raise WeightsError(f"{path}: no such model folder")
    raw = read_json(path / "config.json")
    try:
        config = model_config.from_hf(raw)
    except ConfigError as error:
        raise ConfigError(f"{path / 'config.json'}: {error}") from None
    files = _safetensors_files(path)
    handles, shapes = {}, {}
    for file in files:
        import safetensors

        try:
            handle = safetensors.safe_open(file, framework="numpy")
            for name in handle.keys():  # noqa: SIM118  (a safe_open is no dict)
                if name in handles:
                    raise WeightsError(f"{path}: {name}: in two files")
                handles[name] = handle
                shapes[name] = tuple(handle.get_slice(name).get_shape())
        except (safetensors.SafetensorError, OSError) as error:
            raise WeightsError(f"{file}: not a complete safetensors file ({error})") from None

    def read(name: str) -> np.ndarray:
        return handles[name].get_tensor(name)

    if config.tied and "lm_head.weight" in shapes:
        # Some exporters store the tied head as well; a different one contradicts the config.
        if not np.array_equal(read("lm_head.weight"), read("model.embed_tokens.weight")):
            raise WeightsError(
                f"{path}: lm_head.weight differs from the embedding, but config.json says "
                "tie_word_embeddings=true"
            )
        del shapes["lm_head.weight"]
    return Source(config, shapes, read, lambda: file_hash(path / "config.json", *files), 0)


def _safetensors_files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        if absent := [name for name in names if not (path / name).is_file()]:
            raise WeightsError(f"{path}: incomplete, missing {', '.join(absent)}")
        return [path / name for name in names]
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    raise WeightsError(
        f"{path}: no model.safetensors and no model.safetensors.index.json "
        "(weights in another format have to be converted to safetensors first)"
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a model folder. Raises WeightsError (one line)."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise WeightsError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise WeightsError(f"{path}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise WeightsError(f"{path}: not a JSON object")
    return value


def file_hash(*paths: Path) -> str:
    """Return one sha256 over the bytes of the files, in the order given."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


# --- GGUF --------------------------------------------------------------------------------------


def _open_gguf(path: Path) -> Source:
    try:
        file = gguf.open(path)
    except gguf.GgufError as error:
        raise WeightsError(str(error)) from None
    shapes = dict(file.shapes)
    factors = ()
    if "rope_freqs.weight" in shapes:
        factors = tuple(float(x) for x in file.read("rope_freqs.weight"))
        del shapes["rope_freqs.weight"]
    try:
        vocab = shapes.get("token_embd.weight", (0,))[0]
        tied = "output.weight" not in shapes
        config = model_config.from_gguf(file.metadata, vocab, tied, factors)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None

    def read(name: str) -> np.ndarray:
        array = file.read(name)
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            # The llama architecture stores q and k rows for interleaved rotary pairs; undo it.
            heads = config.n_heads if name.endswith("attn_q.weight") else config.n_kv
            array = array.reshape(heads, config.d_head // 2, 2, -1).swapaxes(1, 2)
            array = array.reshape(shapes[name])
        return array

    return Source(config, shapes, read, lambda: file_hash(path), 1)
