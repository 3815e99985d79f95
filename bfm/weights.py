# SPDX-License-Identifier: Apache-2.0
"""Weights: a Hugging Face folder or a GGUF file -> Decoder, tensor by tensor, without torch.

One table names, for every parameter, its Hugging Face and its GGUF tensor; a name that is missing,
extra or misshapen stops the load with one message that lists them all. `bfm.export` writes by the
same table.
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
from bfm.model import config_gguf, config_hf
from bfm.model.config import ConfigError, ModelConfig
from bfm.model.decoder import Decoder


class WeightsError(ValueError):
    """A model file that cannot be used; one line that names the path and every fault."""


class Entry(NamedTuple):
    """Where a parameter lives in files. `{i}` is the layer; `inputs` counts its input axes.

    A linear kernel of shape (inputs.., outputs..) is stored as (prod outputs, prod inputs), that is
    transposed; `inputs=0` marks a tensor that is stored as it is (norms, embeddings). `filters` marks
    a depthwise convolution [C, W], which Hugging Face stores as [C, 1, W].
    """

    hf: str
    gguf: str
    inputs: int = 0
    filters: bool = False


def _entries(mixer: str, hf: str, entries: dict[str, tuple]) -> dict[str, Entry]:
    """Spell out the names of one kind of layer: mixer.name -> (hf name, gguf name, ..)."""
    return {
        f"{mixer}.{name}": Entry(f"model.layers.{{i}}.{hf}{a}", f"blk.{{i}}.{b}", *rest)
        for name, (a, b, *rest) in entries.items()
    }


_MLP = {
    "mixer_norm_D": ("input_layernorm.weight", "attn_norm.weight"),
    "mlp_norm_D": ("post_attention_layernorm.weight", "ffn_norm.weight"),
    "gate_DF": ("mlp.gate_proj.weight", "ffn_gate.weight", 1),
    "up_DF": ("mlp.up_proj.weight", "ffn_up.weight", 1),
    "down_FD": ("mlp.down_proj.weight", "ffn_down.weight", 1),
}
_ATTENTION = {
    "q_DNh": ("q_proj.weight", "attn_q.weight", 1),
    "k_DKh": ("k_proj.weight", "attn_k.weight", 1),
    "v_DKh": ("v_proj.weight", "attn_v.weight", 1),
    "o_NhD": ("o_proj.weight", "attn_output.weight", 2),
    "q_norm_h": ("q_norm.weight", "attn_q_norm.weight"),
    "k_norm_h": ("k_norm.weight", "attn_k_norm.weight"),
}
_DELTA = {
    "qkv_DC": ("in_proj_qkv.weight", "attn_qkv.weight", 1),
    "z_DHv": ("in_proj_z.weight", "attn_gate.weight", 1),
    "beta_DH": ("in_proj_b.weight", "ssm_beta.weight", 1),
    "step_DH": ("in_proj_a.weight", "ssm_alpha.weight", 1),
    "conv_CW": ("conv1d.weight", "ssm_conv1d.weight", 0, True),
    "log_rate_H": ("A_log", "ssm_a"),
    "step_bias_H": ("dt_bias", "ssm_dt.bias"),
    "out_norm_v": ("norm.weight", "ssm_norm.weight"),
    "out_HvD": ("out_proj.weight", "ssm_out.weight", 2),
}
TABLE: dict[str, Entry] = {
    "embed_VD": Entry("model.embed_tokens.weight", "token_embd.weight"),
    "norm_D": Entry("model.norm.weight", "output_norm.weight"),
    "head_VD": Entry("lm_head.weight", "output.weight"),
    **_entries("full", "", _MLP),
    **_entries("full", "self_attn.", _ATTENTION),
    **_entries("linear", "", _MLP),
    **_entries("linear", "linear_attn.", _DELTA),
}
# Families that call a norm by another name.
_RENAMED: dict[str, dict[str, Entry]] = {
    "gemma3": _entries("full", "", {
        "mixer_post_norm_D": ("post_attention_layernorm.weight", "post_attention_norm.weight"),
        "mlp_norm_D": ("pre_feedforward_layernorm.weight", "ffn_norm.weight"),
        "mlp_post_norm_D": ("post_feedforward_layernorm.weight", "post_ffw_norm.weight"),
    }),
    "qwen3_5": {
        f"{mixer}.mlp_norm_D": Entry(
            "model.layers.{i}.post_attention_layernorm.weight", "blk.{i}.post_attention_norm.weight"
        )
        for mixer in ("full", "linear")
    },
}  # fmt: skip


def tensors(config: ModelConfig, name: str) -> tuple[Entry, list[int]]:
    """Return the table's entry of a parameter ("full.q_DNh") and the layers it stacks, if any."""
    entry = _RENAMED.get(config.family, {}).get(name) or TABLE[name]
    mixer = name.partition(".")[0]
    return entry, config.layers_of(mixer == "linear") if mixer in ("full", "linear") else []


# Buffers of old Llama checkpoints that transformers recomputes and ignores as well.
_SKIPPED_SUFFIXES = (".rotary_emb.inv_freq",)
# Qwen3.5: the vision tower and the multi-token prediction head, which no text score reads.
_OTHER_HEADS = ("model.visual.", "mtp.")


class Source(NamedTuple):
    """Tensors of a model on disk: shapes known at once, values read one at a time."""

    config: ModelConfig
    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]
    sha256: Callable[[], str]  # of the files' bytes
    column: int  # of Entry: 0 Hugging Face names, 1 GGUF names
    bf16: frozenset[str] = frozenset()  # the tensors that are stored so

    @property
    def dtype(self) -> str:
        """The narrower dtype of `read` that holds every stored value: "bfloat16" or "float32"."""
        leaves = jax.tree_util.tree_flatten_with_path(abstract_decoder(self.config, "bfloat16"))[0]
        narrow = (tensors(self.config, param_path(k)) for k, x in leaves if x.dtype == jnp.bfloat16)
        names = {e[self.column].format(i=i) for e, layers in narrow for i in layers or (0,)}
        return "bfloat16" if names <= self.bf16 else "float32"


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
    """Read a checked source into a decoder whose parameters have `dtype`.

    dtype: "float32" or "bfloat16" (decay rates and the norm behind them stay fp32, as published).
    `sharding(path)` gives the placement of a parameter ("full.q_DNh"); default: the first device. Host
    memory holds one stacked parameter in the wanted dtype at a time, never the model in fp32.
    """
    abstract = abstract_decoder(source.config, dtype)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(abstract)

    def value(name: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        (entry, layers), target = tensors(source.config, name), np.dtype(leaf.dtype)

        def stored(tensor: str, shape: tuple[int, ...]) -> np.ndarray:
            array = source.read(tensor).astype(target)
            return (array.T if entry.inputs else array).reshape(shape)

        if layers:
            array = np.empty(leaf.shape, target)
            for row, i in enumerate(layers):
                array[row] = stored(entry[source.column].format(i=i), leaf.shape[1:])
        else:
            array = stored(entry[source.column], leaf.shape)
        return jax.device_put(array, sharding(name) if sharding else None)

    arrays = [value(param_path(key), leaf) for key, leaf in leaves]
    return jax.tree_util.tree_unflatten(treedef, arrays)


def abstract_decoder(config: ModelConfig, dtype: str = "float32") -> Decoder:
    """Return the decoder with ShapeDtypeStruct leaves: no memory, no device."""
    return jax.eval_shape(lambda: Decoder(config, nnx.Rngs(0), jnp.dtype(dtype)))


def param_path(key: tuple) -> str:
    """Turn a tree path into a parameter's name, such as "full.q_DNh"."""
    return ".".join(str(k.name) for k in key if hasattr(k, "name") and k.name != "value")


def expected(config: ModelConfig, column: int = 0) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of a model file (column 0: Hugging Face, 1: GGUF)."""
    shapes: dict[str, tuple[int, ...]] = {}
    for key, leaf in jax.tree_util.tree_flatten_with_path(abstract_decoder(config))[0]:
        entry, layers = tensors(config, param_path(key))
        shape = stored_shape(entry, leaf.shape[1:] if layers else leaf.shape, column)
        shapes |= {entry[column].format(i=i): shape for i in layers or (0,)}
    return shapes


def stored_shape(entry: Entry, shape: tuple[int, ...], column: int) -> tuple[int, ...]:
    """Return the shape in which a file holds one layer's parameter of `shape`."""
    if entry.filters and column == 0:
        return shape[0], 1, shape[1]
    if not entry.inputs:
        return shape
    return math.prod(shape[entry.inputs :]), math.prod(shape[: entry.inputs])


def _check(path: Path, source: Source) -> None:
    """Compare every expected tensor with the file: missing, misshapen and extra, all in one error."""
    shapes, wanted = source.shapes, expected(source.config, source.column)
    faults = [f"{name}: missing" for name in wanted if name not in shapes]
    faults += [
        f"{name}: expected {shape} from the config, found {shapes[name]}"
        for name, shape in wanted.items()
        if name in shapes and shapes[name] != shape
    ]
    extra = [name for name in shapes if name not in wanted]
    faults += [f"{name}: unknown tensor" for name in extra if not name.endswith(_SKIPPED_SUFFIXES)]
    if faults:
        raise WeightsError(f"{path}: {len(faults)} tensor fault(s): " + "; ".join(faults))


# --- Hugging Face ------------------------------------------------------------------------------


def _open_hf(path: Path) -> Source:
    if not path.is_dir():
        raise WeightsError(f"{path}: no such model folder")
    raw = read_json(path / "config.json")
    try:
        config = config_hf.from_hf(raw)
    except ConfigError as error:
        raise ConfigError(f"{path / 'config.json'}: {error}") from None
    files = _safetensors_files(path)
    handles, shapes, names, bf16 = {}, {}, {}, set()
    for file in files:
        import safetensors

        try:
            handle = safetensors.safe_open(file, framework="numpy")
            for name in handle.keys():  # noqa: SIM118  (a safe_open is no dict)
                if name in names.values():
                    raise WeightsError(f"{path}: {name}: in two files")
                if config.family == "qwen3_5" and name.startswith(_OTHER_HEADS):
                    continue
                # A model that also sees keeps its text model one level down.
                short = name.replace("model.language_model.", "model.", 1)
                handles[short], names[short] = handle, name
                stored = handle.get_slice(name)
                shapes[short] = tuple(stored.get_shape())
                bf16 |= {short} if stored.get_dtype() == "BF16" else set()
        except (safetensors.SafetensorError, OSError) as error:
            raise WeightsError(f"{file}: not a complete safetensors file ({error})") from None

    def read(name: str) -> np.ndarray:
        return handles[name].get_tensor(names[name])

    if config.tied and "lm_head.weight" in shapes:
        # Some exporters store the tied head as well; a different one contradicts the config.
        if not np.array_equal(read("lm_head.weight"), read("model.embed_tokens.weight")):
            raise WeightsError(
                f"{path}: lm_head.weight differs from the embedding, but config.json says "
                "tie_word_embeddings=true"
            )
        del shapes["lm_head.weight"]
    return Source(
        config, shapes, read, lambda: file_hash(path / "config.json", *files), 0, frozenset(bf16)
    )


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
        config = config_gguf.from_gguf(file.metadata, vocab, tied, factors)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None

    # The block of the multi-token prediction head stands behind the layers.
    for name in [n for n in shapes if n.startswith(f"blk.{config.n_layers}.")]:
        if config.family == "qwen3_5":
            del shapes[name]
    return Source(
        config, shapes, lambda name: _from_gguf(config, name, file.read(name)),
        lambda: file_hash(path), 1,
    )  # fmt: skip


def _from_gguf(c: ModelConfig, name: str, array: np.ndarray) -> np.ndarray:
    """Undo what llama.cpp's converter did to a tensor; sources: its `convert_hf_to_gguf.py`."""
    shape = array.shape
    part = name.split(".", 2)[-1]  # without blk.{i}.
    if c.family == "llama" and part in ("attn_q.weight", "attn_k.weight"):
        # q and k rows are stored for interleaved rotary pairs.
        heads = c.n_heads if part == "attn_q.weight" else c.n_kv
        return array.reshape(heads, c.d_head // 2, 2, -1).swapaxes(1, 2).reshape(shape)
    if c.norm_offset and name.endswith("norm.weight") and part != "ssm_norm.weight":
        return array - np.float32(c.norm_offset)  # stored as what is multiplied
    if c.delta is None:
        return array
    # Value heads are stored tiled over the key heads (g, K); they read key head j // g here.
    keys, groups = c.delta.n_keys, c.delta.n_values // c.delta.n_keys

    def grouped(rows: np.ndarray) -> np.ndarray:
        return rows.reshape(groups, keys, -1).swapaxes(0, 1).reshape(rows.shape)

    if part in ("attn_qkv.weight", "ssm_conv1d.weight"):
        start = 2 * keys * c.delta.d_key
        return np.concatenate([array[:start], grouped(array[start:])])
    if part == "ssm_out.weight":
        return grouped(array.T).T
    if part == "ssm_a":
        return np.log(-grouped(array))  # stored as -exp(A_log)
    if part in ("attn_gate.weight", "ssm_alpha.weight", "ssm_beta.weight", "ssm_dt.bias"):
        return grouped(array)
    return array
