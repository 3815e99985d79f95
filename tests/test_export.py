# SPDX-License-Identifier: Apache-2.0
"""Export: what transformers and bfm load again is the same model, and it is there whole or not."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from bfm import lm, weights
from bfm import tokenizer as tokenizers
from bfm.export import MARKER, ExportError, check_target, export
from bfm.model.config import ConfigError, inverse_frequencies
from bfm.model.config_hf import from_hf
from tests import models
from tests.test_weights import leaves, write_gguf

TEXTS = (
    "I have 12345 cats, the rest is naïve.",
    "北京\n\n  def f(x):\n",
    "<|im_end|> half½ e\u0301",
)
SCALING = models.LLAMA["rope_scaling"] | {"original_max_position_embeddings": 8192}


def add_tokenizer(writer) -> None:
    """The tokenizer of `bfm.arch.byte_bpe`, as llama.cpp's converter would write it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*models.CONTROL, *alphabet])
    writer.add_token_types([3] * len(models.CONTROL) + [1] * len(alphabet))
    writer.add_token_merges([])
    for name, i in (("unk", 0), ("bos", 1), ("eos", 0), ("pad", 2)):
        getattr(writer, f"add_{name}_token_id")(i)
    writer.add_add_bos_token(True)
    writer.add_chat_template(models.TEMPLATE)


def gguf_file(folder: Path, scaling=SCALING) -> Path:
    """Write a tiny llama as GGUF, whose end of turn (2) is not its end of sequence (0)."""
    made = models.llama_folder(folder / "in", rope_scaling=scaling)
    config = json.loads((made / "config.json").read_text())
    plain = inverse_frequencies(from_hf(config | {"rope_scaling": None}))
    factors = plain / inverse_frequencies(from_hf(config))
    write_gguf(made, folder / "m.gguf", factors, also=add_tokenizer)
    return folder / "m.gguf"


def exported(path: Path, out: Path, **options) -> lm.LM:
    model = lm.load(str(path))
    assert export(model.decoder, out, model.scaffold.tokenizer, **options) == out
    return model


def assert_same(mine: lm.LM, again: lm.LM) -> None:
    """The same bits of weights, ids of texts, and head, tail and end of the scaffold."""
    assert again.config.rope.theta == mine.config.rope.theta
    a, b = leaves(mine.decoder), leaves(again.decoder)
    assert a.keys() == b.keys() and all((a[name] == b[name]).all() for name in a)
    ours, theirs = mine.scaffold, again.scaffold
    assert (ours.head, ours.tail, ours.end) == (theirs.head, theirs.tail, theirs.end)
    assert ours.tokenizer.encode_batch(TEXTS) == theirs.tokenizer.encode_batch(TEXTS)
    assert ours.tokenizer.bos_ids == theirs.tokenizer.bos_ids


def assert_auto(mine: lm.LM, out: Path) -> None:
    """AutoTokenizer gives the ids of control tokens, of text and of a chat that bfm gives."""
    auto, tokenizer = AutoTokenizer.from_pretrained(out), mine.scaffold.tokenizer
    for text in TEXTS:
        assert auto(text, add_special_tokens=False)["input_ids"] == tokenizer.encode_template(text)
    chat = auto.apply_chat_template(
        [{"role": "user", "content": "Hi 12"}], add_generation_prompt=True, return_dict=False
    )
    assert chat == [*mine.scaffold.head, *tokenizer.encode("Hi 12"), *mine.scaffold.tail]
    assert set(auto("Hi")) == {"input_ids", "attention_mask"}


def test_a_folder_survives(tmp_path):
    folder = models.llama_folder(tmp_path / "in")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 7, "top_k": 3}))
    (folder / "LICENSE.txt").write_text("mine")
    out = tmp_path / "deep" / "out"
    mine = exported(folder, out)
    assert_same(mine, lm.load(str(out)))
    assert_auto(mine, out)
    assert (out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert (out / "LICENSE.txt").read_text() == "mine"
    before, after = (json.loads((f / "tokenizer_config.json").read_text()) for f in (folder, out))
    assert after == before | {"model_input_names": ["input_ids", "attention_mask"]}
    # The template ends a turn with id 2: it stands beside what the folder said.
    assert GenerationConfig.from_pretrained(out).eos_token_id == [7, 2]
    assert GenerationConfig.from_pretrained(out).top_k == 3
    assert AutoConfig.from_pretrained(out).eos_token_id == [7, 2]
    assert AutoConfig.from_pretrained(out).bos_token_id == 1


def test_a_gguf_survives(tmp_path):
    path, out = gguf_file(tmp_path), tmp_path / "out"
    mine = exported(path, out)
    assert_same(mine, lm.load(str(out)))
    assert_auto(mine, out)
    assert (out / "chat_template.jinja").read_text() == models.TEMPLATE
    assert AutoTokenizer.from_pretrained(out)("a")["input_ids"][0] == 1  # BOS, as the file says
    assert GenerationConfig.from_pretrained(out).eos_token_id == [2, 0]
    assert lm.load(str(out)).config.rope.kind == "llama3"


def test_transformers_reads_the_tokenizer_as_it_is(tmp_path):
    """It rebuilds a GPT2Tokenizer, which SmolLM2 names, without the digits it splits."""
    folder, out = models.llama_folder(tmp_path / "in"), tmp_path / "out"
    made = models.byte_bpe()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True),
         pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )  # fmt: skip
    spec = json.loads(made.to_str())
    spec["model"]["vocab"]["12"] = 259
    spec["model"]["merges"] = [["1", "2"]]
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "GPT2Tokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    mine = exported(folder, out)
    assert len(mine.scaffold.tokenizer.encode("12")) == 2
    assert_auto(mine, out)


def test_a_dtype_rounds_as_reading_does(tmp_path):
    folder = models.folder(tmp_path / "in", models.QWEN35)
    source = weights.open_source(folder)
    seen = []
    export(weights.read(source), tmp_path / "out", None, "bfloat16", on_bytes=seen.append)
    again = weights.open_source(tmp_path / "out")
    assert (source.dtype, again.dtype) == ("float32", "bfloat16")
    a, b = leaves(weights.read(source, "bfloat16")), leaves(weights.read(again, "bfloat16"))
    assert all(a[name].dtype == b[name].dtype and (a[name] == b[name]).all() for name in a)
    assert sum(seen) == sum(array.nbytes for array in a.values())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_shards_have_an_index_and_leave_nothing_behind(tmp_path):
    folder, out = models.llama_folder(tmp_path / "in"), tmp_path / "out"
    mine = exported(folder, out, shard_bytes=100_000)
    files = sorted(file.name for file in out.glob("*.safetensors"))
    assert len(files) > 2 and all((out / name).stat().st_size < 110_000 for name in files)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    assert_same(mine, lm.load(str(out)))
    exported(folder, out)  # over the export before
    assert [file.name for file in out.glob("*.safetensors*")] == ["model.safetensors"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in", "out"]


def test_a_sharded_decoder(tiny, tmp_path):
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def place(x):
        dim = next((d for d, n in enumerate(x.shape) if d and n % 8 == 0), None)
        axes = [None if d != dim else "fsdp" for d in range(x.ndim)]
        return jax.device_put(x, jax.sharding.NamedSharding(mesh, spec(*axes)))

    export(jax.tree.map(place, tiny.decoder), tmp_path / "out", tiny.scaffold.tokenizer)
    assert_same(tiny, lm.load(str(tmp_path / "out")))


# --- what is refused, and what a failure leaves ------------------------------------------------


def refusal(tiny, out, tokenizer=None) -> str:
    with pytest.raises(ExportError) as caught:
        export(tiny.decoder, out, tokenizer)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_only_an_export_is_replaced(tiny, tmp_path):
    (tmp_path / "file").write_text("mine")
    assert "is a file" in refusal(tiny, tmp_path / "file")
    assert "is no folder to write to" in refusal(tiny, tmp_path / "file" / "out")
    (tmp_path / "mine" / "sub").mkdir(parents=True)
    (tmp_path / "mine" / "sub" / "thesis.txt").write_text("mine")
    assert "holds sub/thesis.txt, which no export wrote" in refusal(tiny, tmp_path / "mine")
    (tmp_path / "empty").mkdir()
    export(tiny.decoder, tmp_path / "empty")
    (tmp_path / "empty" / "notes.txt").write_text("mine")
    assert "holds notes.txt" in refusal(tiny, tmp_path / "empty")
    (tmp_path / "empty" / MARKER).write_text("{")
    assert f"holds {MARKER}" in refusal(tiny, tmp_path / "empty")
    assert (tmp_path / "mine" / "sub" / "thesis.txt").read_text() == "mine"
    with pytest.raises(ExportError, match=r"holds config\.json, which"):
        check_target(models.llama_folder(tmp_path / "model"))


def test_a_full_disk_leaves_nothing(tiny, tmp_path):
    """The limit on a file's size stands for the disk's end."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))
    try:
        message = refusal(tiny, tmp_path / "out", tiny.scaffold.tokenizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "out: not written (" in message and not list(tmp_path.iterdir())


def test_a_kill_leaves_the_export_before(tiny, tiny_folder, tmp_path):
    out = tmp_path / "out"
    export(tiny.decoder, out, tiny.scaffold.tokenizer)
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    code = (
        "import os, sys\nfrom bfm import weights\nfrom bfm.export import export\n"
        "model, left = weights.read(weights.open_source(sys.argv[1])), [3]\n"
        "def count(n):\n    left[0] -= 1\n    left[0] or os.kill(os.getpid(), 9)\n"
        "export(model, sys.argv[2], shard_bytes=1, on_bytes=count)\n"
    )
    command = [sys.executable, "-c", code, str(tiny_folder), str(out)]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, check=False)
    assert done.returncode == -9, done.stderr
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    assert len(list((tmp_path / ".out.part").glob("*.safetensors"))) == 2
    export(tiny.decoder, out)
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_a_tokenizer_that_changed_on_disk_is_refused(tiny, tmp_path):
    folder = models.llama_folder(tmp_path / "in")
    tokenizer = tokenizers.load(folder)
    models.write_tokenizer(folder, models.TEMPLATE.replace("assistant", "model"))
    message = refusal(tiny, tmp_path / "out", tokenizer)
    assert "gives other ids than the one in use" in message
    assert [file.name for file in tmp_path.iterdir()] == ["in"]


def test_rope_factors_that_no_config_states(tmp_path):
    model = lm.load(str(gguf_file(tmp_path, models.LLAMA["rope_scaling"])))
    with pytest.raises(ConfigError, match="no llama3 scaling of 8 or 32"):
        export(model.decoder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.torch
def test_transformers_computes_the_same_from_a_gguf(tmp_path):
    """1e-4 of the largest logit, fp32; the families from folders are in test_parity."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    from bfm.model.decoder import decode
    from bfm.model.matmul import dot

    mine = exported(gguf_file(tmp_path), tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    ids = np.random.default_rng(0).integers(0, 384, (1, 200))
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits[0].numpy()
    x, _ = jax.jit(decode)(mine.decoder, ids, np.arange(200)[None], np.ones((1, 200), np.int32))
    got = np.asarray(dot(x, mine.decoder.unembed_VD.T))[0]
    assert np.abs(got - expected).max() <= 1e-4 * np.abs(expected).max()
    assert (theirs.generate(torch.tensor(ids[:, :5]), max_new_tokens=2)).shape[1] >= 6
