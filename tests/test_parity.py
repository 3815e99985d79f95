# SPDX-License-Identifier: Apache-2.0
"""Parity with transformers on torch: logits, and every sequence of tokens.jsonl re-scored."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bfm import labeling, weights
from bfm.export import export
from bfm.labeling import TOKENS
from bfm.model.decoder import decode
from bfm.model.matmul import dot
from bfm.settings import Settings
from tests import models
from tests.test_labeling import lines, record, write

torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # the suite has a worker on every core
pytestmark = pytest.mark.torch

LOGITS = 1e-4  # relative to the largest logit, fp32
SPAN = 2e-3  # nats, the sum over a span, fp32
run = jax.jit(decode)
TOKEN_BF16 = 0.02  # nats a token, on average, bf16 against fp32


def theirs(folder, **options):
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", **options
    )
    if isinstance(loaded, tuple):
        return loaded[0].eval(), loaded[1]
    return loaded.eval()


def rescore(model, line):
    with torch.no_grad():
        logits = model(torch.tensor([line["ids"]])).logits[0].double()
    logp = torch.log_softmax(logits, -1)
    spans = [line["q_span"], line["a_span"]]
    return [sum(logp[i - 1, line["ids"][i]].item() for i in range(*span)) for span in spans]


CASES = {
    **{name: (base, {}) for name, base in models.FAMILIES.items()},
    "llama tied": (models.LLAMA, {"tie_word_embeddings": True, "rope_scaling": None}),
    "llama linear": (models.LLAMA, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "qwen3 tied": (models.QWEN3, {"tie_word_embeddings": True, "num_key_value_heads": 3}),
    "qwen3_5 tied": (models.QWEN35, {"tie_word_embeddings": True, "full_attention_interval": 4}),
    "gemma3 default pattern": (models.GEMMA3, {"layer_types": None, "num_hidden_layers": 7}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits(tmp_path, case):
    """Also of the folder that we export; every tensor's name is known to transformers."""
    base, overrides = CASES[case]
    folder = models.folder(tmp_path, base, **overrides)
    model = weights.read(weights.open_source(folder))
    export(model, tmp_path / "out")
    reference, info = theirs(folder, output_loading_info=True)
    exported, exported_info = theirs(tmp_path / "out", output_loading_info=True)
    assert not any([*info.values(), *exported_info.values()])
    for length in (1, 3, 63, 64, 65, 200):
        ids = np.random.default_rng(length).integers(0, 384, (1, length))
        with torch.no_grad():
            expected = reference(torch.tensor(ids)).logits[0].numpy()
            assert (exported(torch.tensor(ids)).logits[0].numpy() == expected).all()
        padded = np.pad(ids, ((0, 0), (0, 208 - length)))  # one program for all lengths
        segments = (np.arange(208) < length).astype(np.int32)[None]
        x, _ = run(model, jnp.array(padded), jnp.arange(208)[None], jnp.array(segments))
        got = np.asarray(dot(x, model.unembed_VD.T))[0, :length]
        assert np.abs(got - expected).max() <= LOGITS * np.abs(expected).max()


@pytest.mark.parametrize(
    ("family", "form"),
    [("llama", "letter"), *((family, "text") for family in models.FAMILIES)],
)
def test_every_dumped_sequence(tmp_path, family, form):
    """What the scorer makes of shared states equals the whole sequence in transformers."""
    folder = models.folder(tmp_path / "model", models.FAMILIES[family])
    records = 1 if family == "qwen3_5" else 3  # transformers steps through its tokens in Python
    data = write(tmp_path / "data.jsonl", [record(i) for i in range(records)])
    config = {"model": {"path": str(folder)}, "data": data, "dump_tokens": True}
    labeling.run(Settings.of(config | {"label": {"answer": form}}), tmp_path / "w")
    model = theirs(folder)
    for line in lines(tmp_path / "w" / TOKENS):
        np.testing.assert_allclose(
            rescore(model, line), [line["logp_q"], line["logp_a"]], atol=SPAN, rtol=0
        )


@pytest.fixture(scope="module")
def real(smollm2_path):
    return theirs(smollm2_path.parent, gguf_file=smollm2_path.name)


@pytest.mark.real
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_real_model(smollm2_path, real, tmp_path, dtype):
    config = {"model": {"path": str(smollm2_path), "dtype": dtype}, "limit": 1}
    labeling.run(Settings.of(config | {"dump_tokens": True}), tmp_path)
    errors, tokens = [], 0
    for line in lines(tmp_path / TOKENS):
        got = np.array([line["logp_q"], line["logp_a"]])
        errors.append(np.abs(got - rescore(real, line)))
        tokens += sum(end - start for start, end in (line["q_span"], line["a_span"]))
    if dtype == "float32":
        assert np.max(errors) <= SPAN
    else:
        assert np.sum(errors) / tokens <= TOKEN_BF16


@pytest.mark.real
def test_the_real_models_prompt(smollm2, smollm2_path):
    """The scaffold equals transformers' own rendering of the same message."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = smollm2.scaffold.tokenizer
    hf = PreTrainedTokenizerFast(tokenizer_object=models.byte_bpe())
    hf.chat_template = tokenizer.template
    text = hf.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    frame = smollm2.scaffold
    ids = (*frame.head, *tokenizer.encode("Hi"), *frame.tail)
    assert tokenizer.decode(ids) == text
    assert json.dumps(text)
