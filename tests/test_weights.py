# SPDX-License-Identifier: Apache-2.0
"""Loading: every tensor lands where it belongs, every fault is named, GGUF equals Hugging Face."""

import functools
import json
import shutil

import gguf
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bfm import weights
from bfm.export import export
from bfm.model.config import ConfigError, inverse_frequencies
from bfm.model.config_hf import from_hf
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


def write_gguf(
    folder, path, rope_freqs: np.ndarray | None, q8: bool = False, also=lambda writer: None
) -> None:
    """Convert a tiny folder as llama.cpp does: q and k rows interleaved, rope scaling in a tensor.

    `also(writer)` adds fields, such as a tokenizer's.
    """
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
    also(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_equals_its_folder(folder, tmp_path):
    """q and k rows unpermuted; rope_freqs stands for the config's llama3 scaling."""
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


# --- families ------------------------------------------------------------------------------------

LLAMA_31_8B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 500000.0,
    "rope_scaling": models.LLAMA["rope_scaling"] | {"original_max_position_embeddings": 8192},
}  # fmt: skip
QWEN_35_9B = {
    "model_type": "qwen3_5",
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "image_token_id": 248056,
    "vision_config": {"depth": 27},
    "text_config": {
        "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 4096,
        "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 256, "full_attention_interval": 4,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "mtp_num_hidden_layers": 1,
        "max_position_embeddings": 262144, "attn_output_gate": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "mrope_interleaved": True,
                            "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]},
    },
}  # fmt: skip
MLP = {"gate_proj.weight": (12288, 4096), "up_proj.weight": (12288, 4096),
       "down_proj.weight": (4096, 12288)}  # fmt: skip


def published() -> dict[str, dict[str, tuple[int, ...]]]:
    """Names and shapes of the published files, written out by hand (models.md, A.6)."""
    llama = {"model.embed_tokens.weight": (128256, 4096), "model.norm.weight": (4096,),
             "lm_head.weight": (128256, 4096)}  # fmt: skip
    qwen = {"model.embed_tokens.weight": (248320, 4096), "model.norm.weight": (4096,),
            "lm_head.weight": (248320, 4096)}  # fmt: skip
    for i in range(32):
        at = f"model.layers.{i}."
        norms = {at + "input_layernorm.weight": (4096,),
                 at + "post_attention_layernorm.weight": (4096,)}  # fmt: skip
        llama |= norms | {
            at + "self_attn.q_proj.weight": (4096, 4096),
            at + "self_attn.k_proj.weight": (1024, 4096),
            at + "self_attn.v_proj.weight": (1024, 4096),
            at + "self_attn.o_proj.weight": (4096, 4096),
            at + "mlp.gate_proj.weight": (14336, 4096),
            at + "mlp.up_proj.weight": (14336, 4096),
            at + "mlp.down_proj.weight": (4096, 14336),
        }
        qwen |= norms | {at + "mlp." + name: shape for name, shape in MLP.items()}
        if i % 4 == 3:
            qwen |= {
                at + "self_attn.q_proj.weight": (8192, 4096),
                at + "self_attn.k_proj.weight": (1024, 4096),
                at + "self_attn.v_proj.weight": (1024, 4096),
                at + "self_attn.o_proj.weight": (4096, 4096),
                at + "self_attn.q_norm.weight": (256,),
                at + "self_attn.k_norm.weight": (256,),
            }
        else:
            at += "linear_attn."
            qwen |= {
                at + "in_proj_qkv.weight": (8192, 4096), at + "in_proj_z.weight": (4096, 4096),
                at + "in_proj_b.weight": (32, 4096), at + "in_proj_a.weight": (32, 4096),
                at + "conv1d.weight": (8192, 1, 4), at + "A_log": (32,), at + "dt_bias": (32,),
                at + "norm.weight": (128,), at + "out_proj.weight": (4096, 4096),
            }  # fmt: skip
    return {"llama": llama, "qwen": qwen}


@pytest.mark.parametrize(
    ("raw", "name", "parameters"),
    [(LLAMA_31_8B, "llama", 8_030_261_248), (QWEN_35_9B, "qwen", 8_953_803_264)],
)
def test_the_papers_models_have_their_published_tensors(raw, name, parameters):
    config = from_hf(raw)
    assert weights.expected(config) == published()[name]
    leaves = jax.tree.leaves(weights.abstract_decoder(config, "bfloat16"))
    assert sum(leaf.size for leaf in leaves) == parameters
    assert config.window == (131072 if name == "llama" else 262144)


@pytest.mark.parametrize("family", models.FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_survives_its_export_bit_for_bit(family, dtype, tmp_path):
    folder = models.folder(tmp_path / "in", models.FAMILIES[family])
    edit(folder, lambda t: t.update({
        name: array.astype(dtype) for name, array in t.items()
        if not name.endswith(("A_log", "linear_attn.norm.weight"))
    }))  # fmt: skip
    model = weights.read(weights.open_source(folder), dtype)
    export(model, tmp_path / "out", shard_bytes=50_000 if dtype == "float32" else 1 << 30)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert (len(files) > 1) == (dtype == "float32")
    out = {name: array for file in files for name, array in load_file(file).items()}
    original = load_file(folder / "model.safetensors")
    assert out.keys() == original.keys()
    for name, array in original.items():
        assert out[name].dtype == array.dtype
        np.testing.assert_array_equal(out[name].view(np.uint8), array.view(np.uint8))
    again = weights.open_source(tmp_path / "out")
    assert again.config == model.config
    assert not list((tmp_path / "out").glob("*.part"))


def test_vision_and_prediction_heads_are_skipped_and_nothing_else(tmp_path):
    folder = models.folder(tmp_path, models.QWEN35)
    plain = leaves(weights.read(weights.open_source(folder)))
    text = json.loads((folder / "config.json").read_text())
    wrapper = {
        "model_type": "qwen3_5",
        "text_config": text,
        "vision_config": {},
        "image_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(wrapper))

    def wrap(t):
        t |= {n.replace("model.", "model.language_model.", 1): t.pop(n) for n in list(t)}
        t["model.visual.patch_embed.weight"] = t["mtp.fc.weight"] = np.zeros((2, 2), np.float32)

    edit(folder, wrap)
    wrapped = leaves(weights.read(weights.open_source(folder)))
    assert all((wrapped[name] == plain[name]).all() for name in plain)
    edit(folder, lambda t: t.update({"model.audio.weight": np.zeros(2, np.float32)}))
    with pytest.raises(WeightsError, match=r"model\.audio\.weight: unknown tensor"):
        weights.open_source(folder)


def _rows(array, order):
    return array.reshape(len(order), -1)[order].reshape(array.shape)


def to_gguf(folder, path):
    """Write a Qwen3, Gemma 3 or Qwen3.5 folder as llama.cpp's converter does, on a table of its own."""
    raw = json.loads((folder / "config.json").read_text())
    kind = {"qwen3": "qwen3", "gemma3_text": "gemma3", "qwen3_5_text": "qwen35"}[raw["model_type"]]
    names = GGUF_NAMES | {
        "model.layers.{i}.self_attn.q_norm.weight": "blk.{i}.attn_q_norm.weight",
        "model.layers.{i}.self_attn.k_norm.weight": "blk.{i}.attn_k_norm.weight",
    }
    after = "model.layers.{i}.post_attention_layernorm.weight"
    if kind == "gemma3":
        names |= {
            after: "blk.{i}.post_attention_norm.weight",
            "model.layers.{i}.pre_feedforward_layernorm.weight": "blk.{i}.ffn_norm.weight",
            "model.layers.{i}.post_feedforward_layernorm.weight": "blk.{i}.post_ffw_norm.weight",
        }
    if kind == "qwen35":
        names |= {after: "blk.{i}.post_attention_norm.weight"}
        names |= {
            f"model.layers.{{i}}.linear_attn.{a}": f"blk.{{i}}.{b}" for a, b in {
                "in_proj_qkv.weight": "attn_qkv.weight", "in_proj_z.weight": "attn_gate.weight",
                "in_proj_b.weight": "ssm_beta.weight", "in_proj_a.weight": "ssm_alpha.weight",
                "conv1d.weight": "ssm_conv1d.weight", "A_log": "ssm_a", "dt_bias": "ssm_dt.bias",
                "norm.weight": "ssm_norm.weight", "out_proj.weight": "ssm_out.weight"}.items()
        }  # fmt: skip
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(raw["num_hidden_layers"] + (kind == "qwen35"))
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_key_length(raw["head_dim"])
    writer.add_value_length(raw["head_dim"])
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    rope = raw.get("rope_parameters", raw)
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if kind == "gemma3":
        writer.add_sliding_window(raw["sliding_window"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["full_attention"]["factor"])
    if kind == "qwen35":
        values = raw["linear_num_value_heads"]
        writer.add_rope_dimension_count(int(raw["head_dim"] * rope["partial_rotary_factor"]))
        writer.add_uint32("qwen35.ssm.conv_kernel", raw["linear_conv_kernel_dim"])
        writer.add_uint32("qwen35.ssm.state_size", raw["linear_key_head_dim"])
        writer.add_uint32("qwen35.ssm.group_count", raw["linear_num_key_heads"])
        writer.add_uint32("qwen35.ssm.time_step_rank", values)
        writer.add_uint32("qwen35.ssm.inner_size", values * raw["linear_value_head_dim"])
        writer.add_uint32("qwen35.full_attention_interval", raw["full_attention_interval"])
        writer.add_uint32("qwen35.nextn_predict_layers", 1)
        writer.add_tensor(
            f"blk.{raw['num_hidden_layers']}.nextn.eh_proj.weight", np.zeros((2, 2), np.float32)
        )
    for name, array in load_file(folder / "model.safetensors").items():
        layer = name.split(".")[2] if ".layers." in name else ""
        target = names[name.replace(f".{layer}.", ".{i}.", 1) if layer else name].format(i=layer)
        if kind != "qwen3" and name.endswith("norm.weight") and "linear_attn" not in name:
            array = array + np.float32(1)
        if "linear_attn" in name:
            keys, d = raw["linear_num_key_heads"], raw["linear_key_head_dim"]
            # grouped (K, g) -> tiled (g, K): value head j = k g + r is stored at r K + k
            order = np.arange(values).reshape(keys, -1).T.ravel()
            tile = functools.partial(_rows, order=order)
            if "qkv" in name or "conv1d" in name:
                array = array.reshape(array.shape[0], -1)
                array = np.concatenate([array[: 2 * keys * d], tile(array[2 * keys * d :])])
            elif "out_proj" in name:
                array = tile(array.T.copy()).T
            elif not name.endswith("norm.weight"):
                array = tile(-np.exp(array) if name.endswith("A_log") else array)
        writer.add_tensor(target, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_5"])
def test_gguf_of_each_family_equals_its_folder(family, tmp_path):
    """Norm offsets, value-head tiling and the decay's form are undone; the extra block is skipped."""
    overrides = {"query_pre_attn_scalar": 16, "layer_types": None} if family == "gemma3" else {}
    folder = models.folder(tmp_path / "hf", models.FAMILIES[family], **overrides)
    to_gguf(folder, tmp_path / "m.gguf")
    source, theirs = weights.open_source(folder), weights.open_source(tmp_path / "m.gguf")
    assert theirs.config == source.config
    mine, other = leaves(weights.read(source)), leaves(weights.read(theirs))
    assert mine.keys() == other.keys()
    for name, array in mine.items():
        np.testing.assert_allclose(other[name], array, rtol=0, atol=3e-7, err_msg=name)
