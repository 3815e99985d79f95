# SPDX-License-Identifier: Apache-2.0
"""Loading: every tensor lands where it belongs, every fault is named, GGUF equals Hugging Face."""

import json
import shutil

import gguf
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bfm import weights
from bfm.model.config import ConfigError
from bfm.weights import WeightsError
from tests import models


def leaves(model):
    flat, _ = jax.tree_util.tree_flatten_with_path(model)
    return {weights.param_path(key): np.asarray(leaf) for key, leaf in flat}


@pytest.fixture
def folder(tiny_folder, tmp_path):
    return shutil.copytree(tiny_folder, tmp_path / "model")


def edit(folder, change):
    """Rewrite the tensors of a folder through `change(dict)`."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_sharded_equals_single(folder):
    one = leaves(weights.read(weights.open_source(folder)))
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    two = leaves(weights.read(weights.open_source(folder)))
    assert one.keys() == two.keys()
    assert all((one[name] == two[name]).all() for name in one)
    (folder / "b.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"incomplete, missing b\.safetensors"):
        weights.open_source(folder)


def test_bfloat16_is_the_nearest(folder):
    exact = leaves(weights.read(weights.open_source(folder)))
    rounded = leaves(weights.read(weights.open_source(folder), "bfloat16"))
    for name, array in rounded.items():
        assert array.dtype.name == "bfloat16"
        np.testing.assert_allclose(array.astype(np.float32), exact[name], rtol=2**-8, atol=1e-38)


def test_bfloat16_files_load_without_torch(folder):
    import ml_dtypes

    edit(folder, lambda t: t.update({k: v.astype(ml_dtypes.bfloat16) for k, v in t.items()}))
    model = leaves(weights.read(weights.open_source(folder)))
    stored = load_file(folder / "model.safetensors")["model.norm.weight"]
    np.testing.assert_array_equal(model["norm_D"], stored.astype(np.float32))


def test_parameters_go_where_the_caller_says(folder):
    devices = jax.devices()
    mesh = jax.make_mesh((2,), ("tensor",), devices=devices[:2],
                         axis_types=(jax.sharding.AxisType.Auto,))  # fmt: skip
    spec = jax.sharding.PartitionSpec
    place = {"full.gate_DF": spec(None, None, "tensor")}
    model = weights.read(
        weights.open_source(folder),
        sharding=lambda name: jax.sharding.NamedSharding(mesh, place.get(name, spec())),
    )
    assert model.full.gate_DF[...].sharding.spec == place["full.gate_DF"]
    shard = model.full.gate_DF[...].addressable_shards[0].data
    assert shard.shape == (3, 48, 36)


def drop(name):
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (drop("model.layers.1.mlp.up_proj.weight"), "model.layers.1.mlp.up_proj.weight: missing"),
        (drop("lm_head.weight"), "lm_head.weight: missing"),
        (lambda t: t.update(extra=np.zeros(3, np.float32)), "extra: unknown tensor"),
        (
            lambda t: t.update({"model.norm.weight": np.zeros(7, np.float32)}),
            r"model.norm.weight: expected \(48,\) from the config, found \(7,\)",
        ),
        (
            lambda t: [t.pop("model.norm.weight"), t.update(a=np.zeros(1), b=np.zeros(1))],
            "3 tensor fault.*model.norm.weight: missing; a: unknown tensor; b: unknown tensor",
        ),
    ],
)
def test_every_tensor_fault_is_in_one_message(folder, change, named):
    edit(folder, change)
    with pytest.raises(WeightsError, match=named) as caught:
        weights.open_source(folder)
    assert "\n" not in str(caught.value)


def test_old_rotary_buffers_are_skipped_by_rule(folder):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(folder, lambda t: t.update({name: np.zeros(8, np.float32)}))
    weights.open_source(folder)


def test_a_tied_head_that_differs_is_refused(tmp_path):
    folder = models.llama_folder(tmp_path / "tied", tie_word_embeddings=True)
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    edit(folder, lambda t: t.update({"lm_head.weight": table}))
    weights.open_source(folder)
    edit(folder, lambda t: t.update({"lm_head.weight": table + 1}))
    with pytest.raises(WeightsError, match=r"lm_head.weight differs .* tie_word_embeddings=true"):
        weights.open_source(folder)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda f: shutil.rmtree(f), "no such model folder"),
        (lambda f: (f / "config.json").unlink(), "config.json: No such file"),
        (lambda f: (f / "config.json").write_text("{"), "config.json: not JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "config.json: not a JSON object"),
        (lambda f: (f / "model.safetensors").unlink(), "no model.safetensors"),
        (lambda f: (f / "model.safetensors").write_bytes(b"123"), "not a complete safetensors"),
        (
            lambda f: (f / "model.safetensors").write_bytes(
                (f / "model.safetensors").read_bytes()[:-100]
            ),
            "not a complete safetensors",
        ),
    ],
)
def test_a_broken_folder_is_named(folder, spoil, named):
    spoil(folder)
    with pytest.raises((WeightsError, ConfigError), match=named) as caught:
        weights.open_source(folder)
    assert "\n" not in str(caught.value)


# --- GGUF, written here with llama.cpp's own conventions ------------------------------------------

GGUF_NAMES = {entry.hf: entry.gguf for entry in weights.TABLE.values()}


def write_gguf(folder, path, rope_freqs: np.ndarray | None, q8: bool = False) -> None:
    """Convert a tiny folder as llama.cpp does: q and k rows interleaved, rope scaling in a tensor."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    for name, array in load_file(folder / "model.safetensors").items():
        layer = name.split(".")[2] if ".layers." in name else ""
        target = GGUF_NAMES[name.replace(f".{layer}.", ".{i}.", 1) if layer else name]
        if ".q_proj" in name or ".k_proj" in name:
            heads = array.shape[0] // config["head_dim"]
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        array = np.ascontiguousarray(array)
        if q8 and array.ndim == 2 and array.shape[1] % 32 == 0:
            quantized = gguf.quantize(array, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(target.format(i=layer), quantized,
                              raw_dtype=gguf.GGMLQuantizationType.Q8_0)  # fmt: skip
        else:
            writer.add_tensor(target.format(i=layer), array)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_equals_its_folder(folder, tmp_path):
    """q and k rows unpermuted; rope_freqs stands for the config's llama3 scaling."""
    from bfm.model.config import from_hf, inverse_frequencies

    raw = json.loads((folder / "config.json").read_text())
    scaled = inverse_frequencies(from_hf(raw))
    plain = inverse_frequencies(from_hf(raw | {"rope_scaling": None}))
    write_gguf(folder, tmp_path / "m.gguf", plain / scaled)
    theirs = weights.open_source(tmp_path / "m.gguf")
    mine, other = leaves(weights.read(weights.open_source(folder))), leaves(weights.read(theirs))
    assert mine.keys() == other.keys()
    assert all((mine[name] == other[name]).all() for name in mine)
    np.testing.assert_allclose(inverse_frequencies(theirs.config), scaled, rtol=1e-6)
    assert theirs.config.window == 2048 and not theirs.config.tied


def test_quantized_gguf_is_dequantized(folder, tmp_path):
    write_gguf(folder, tmp_path / "m.gguf", None, q8=True)
    mine = leaves(weights.read(weights.open_source(folder)))
    other = leaves(weights.read(weights.open_source(tmp_path / "m.gguf"), "bfloat16"))
    for name, array in mine.items():
        assert np.abs(other[name].astype(np.float32) - array).max() < 0.02 * np.abs(array).max()


def test_a_gguf_of_another_architecture_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"general\.architecture: 'mamba' is not supported"):
        weights.open_source(tmp_path / "m.gguf")


def test_no_fp32_copy_of_a_model_is_held(folder):
    """Reading in bf16 keeps at most one stacked parameter beside the model: measured on the host."""
    import tracemalloc

    source = weights.open_source(folder)
    tracemalloc.start()
    model = weights.read(source, "bfloat16")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
    assert peak < 2 * total + 500_000  # fp32 would be twice the model on top of it
