# SPDX-License-Identifier: Apache-2.0
"""Tokenizer: data never becomes a control token, text survives, the frame is the template's own."""

import json
import threading

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from bfm import gguf_tokenizer, tokenizer_json
from bfm import tokenizer as tok
from bfm.tokenizer import TokenizerError

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Qwen3: the generation header closes the thinking block only when thinking is off.
QWEN3 = CHATML.replace(
    "assistant\n' }}",
    "assistant\n' }}{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}",
)
# As Llama 3.2: BOS in the template, a date, a system block that is always there, trimmed content.
LLAMA3 = """{{- bos_token }}
{%- set date = strftime_now("%d %b %Y") %}
{{- "<|start_header_id|>system<|end_header_id|>\n\nToday Date: " + date + "\n\n<|eot_id|>" }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
{{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}"""
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
WORDS = "I'd like 2 cats, the 12 cats and 123 dogs; naïve café ½ ² über — 北京\n\n  the\tcat. "
SLOW = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def chain(vocab: dict[str, int], merges: list, text: str) -> None:
    """Add the merges that build `text` letter by letter, and what they need."""
    for end in range(1, len(text) + 1):
        vocab.setdefault(text[:end], len(vocab))
        vocab.setdefault(text[end - 1], len(vocab))
        if end > 1 and (merge := (text[: end - 1], text[end - 1])) not in merges:
            merges.append(merge)


def byte_level(words=("the", "Ġcat", "Ġ12"), ignore_merges=False, hidden="<think>"):
    """Byte-level BPE with control tokens outside the vocabulary, inside it, and not special."""
    vocab: dict[str, int] = {}
    for letter in tokenizer_json.byte_letters():
        vocab[letter] = len(vocab)
    merges: list = []
    for word in words:
        chain(vocab, merges, word)
    chain(vocab, merges, hidden)  # a control token that merges would reach
    vocab["dog"] = len(vocab)  # no merges build it
    vocab["<|pad|>"] = len(vocab)
    made = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=ignore_merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(r"\s?\S+|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<|pad|>", "<s>"]
    special += ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    made.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    plain = [hidden, "</think>", "[TOOL]", "\n\n\n", "Straße"]
    made.add_tokens([AddedToken(t, special=False, normalized=False) for t in plain])
    return made


def with_bos(made: tokenizers.Tokenizer, bos="<s>") -> tokenizers.Tokenizer:
    made.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, made.token_to_id(bos))]
    )
    return made


def sentencepiece() -> tokenizers.Tokenizer:
    """BPE as converted from SentencePiece, with merges that reach <s>, </s> and a byte token."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    merges: list = []
    for word in ("<s>", "</s>", "<0x0A>", "▁the", "▁cat", "cat"):
        chain(vocab, merges, word)
    bpe = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    made = tokenizers.Tokenizer(bpe)
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.add_special_tokens([AddedToken(t, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    made.add_tokens([AddedToken("\n\n", normalized=False)])
    return with_bos(made)


def make(made, template=CHATML, **specials) -> tok.Tokenizer:
    return tok.from_spec(json.loads(made.to_str()), specials, template, "made")


SMALL = {
    "byte_level": make(byte_level()),
    "ignore_merges": make(byte_level(ignore_merges=True)),
    "sentencepiece": make(sentencepiece()),
}
small = pytest.mark.parametrize("tokenizer", SMALL.values(), ids=SMALL)


def controls(tokenizer: tok.Tokenizer) -> list[str]:
    return [tokenizer.decode([i]) for i in sorted(tokenizer.control_ids)]


# --- data --------------------------------------------------------------------------------------


@small
def test_control_text_in_data_stays_text(tokenizer):
    for text in [*controls(tokenizer), "<s>", "<think>", "<|im_end|>"]:
        for data in (text, f" {text} ", f"a{text}the\n{text}{text}"):
            ids = tokenizer.encode(data)
            assert tokenizer.control_ids.isdisjoint(ids), (data, ids)
            assert tokenizer.decode(ids) == data


def test_which_tokens_are_control():
    expected = "<|pad|> <|im_start|> <|im_end|> <s> <|start_header_id|> <|end_header_id|> "
    expected += "<|eot_id|> <think> </think> [TOOL]"
    assert set(controls(SMALL["byte_level"])) == set(expected.split())
    assert set(controls(SMALL["sentencepiece"])) == {"<unk>", "<s>", "</s>"}


@small
@given(data=st.data())
@SLOW
def test_any_text_survives(tokenizer, data):
    words = st.sampled_from(
        [*controls(tokenizer), " ", "\n\n\n", "Straße", "the", " cat", "<0x0A>"]
    )
    text = "".join(data.draw(st.lists(words | TEXT, max_size=6))).replace("▁", "_")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.control_ids.isdisjoint(ids)
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.encode_batch([text, "the cat"]) == [ids, tokenizer.encode("the cat")]
    assert bool(ids) == bool(text)


def test_ids_are_those_of_the_full_tokenizer_where_no_control_token_is_written():
    for name in ("byte_level", "ignore_merges"):
        full = byte_level(ignore_merges=name == "ignore_merges")
        for text in (WORDS, "Straße\n\n\nthe", "the cat"):
            assert SMALL[name].encode(text) == full.encode(text).ids
    # SentencePiece puts a space in front of the text; pieces tokenized apart must not have one.
    spm = SMALL["sentencepiece"]
    assert [spm.decode(spm.encode(text)) for text in ("the", " cat")] == ["the", " cat"]
    assert spm.encode(" cat") == sentencepiece().encode("cat").ids[1:]


def test_added_tokens_that_stay_keep_their_ids():
    full, tokenizer = byte_level(), SMALL["byte_level"]
    for text in ("\n\n\n", "Straße"):
        assert tokenizer.encode(text) == [full.token_to_id(text)]
        assert tokenizer.decode([full.token_to_id(text)]) == text
    assert tokenizer.vocab_size == max(full.get_vocab().values()) + 1


def test_a_letter_marked_special_is_still_a_letter():
    made = byte_level()
    made.add_special_tokens(["!"])  # as CLIP's padding
    tokenizer = make(made)
    assert tokenizer.encode("the!") == [made.token_to_id("the"), made.token_to_id("!")]
    assert tokenizer.control_ids == SMALL["byte_level"].control_ids


def test_a_written_byte_token_is_not_the_byte():
    tokenizer = SMALL["sentencepiece"]
    assert tokenizer.encode("\n") == [3 + 10]
    assert 3 + 10 not in tokenizer.encode("<0x0A>")
    assert sentencepiece().encode("<0x0A>").ids[-1] == 3 + 10  # what it would have been


def test_metaspace_adds_no_space():
    made = sentencepiece()
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = decoders.Sequence([decoders.Metaspace(prepend_scheme="always")])
    tokenizer = make(made)
    for text in ("cat", " cat", "  the cat "):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_empty_and_impossible_text():
    tokenizer = SMALL["byte_level"]
    assert tokenizer.encode("") == [] == tokenizer.encode_template("")
    assert tokenizer.decode([]) == ""
    for call in (
        tokenizer.encode,
        tokenizer.encode_template,
        lambda t: tokenizer.encode_batch([t]),
    ):
        with pytest.raises(TokenizerError, match=r"made: a lone surrogate \(character 1\)"):
            call("a\ud800")
    for bad in (-1, tokenizer.vocab_size):
        with pytest.raises(TokenizerError, match="an id outside"):
            tokenizer.decode([bad])


def test_a_character_without_bytes_is_shown_as_replaced():
    spec = json.loads(byte_level().to_str())
    del spec["model"]["vocab"]["ĉ"]  # the letter of U+0009
    tokenizer = tok.from_spec(spec, {}, None, "made")
    assert tokenizer.decode(tokenizer.encode("a\tb")) == "a\ufffdb"
    del spec["model"]["vocab"]["½"]  # a byte of U+FFFD itself
    with pytest.raises(TokenizerError, match="cannot spell"):
        tok.from_spec(spec, {}, None, "made").encode("a\tb")


def test_unknown_words_are_allowed_where_the_model_needs_them():
    vocab = {"[UNK]": 0, "[PAD]": 1, "hello": 2, "world": 3}
    made = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["[UNK]", "[PAD]"])
    tokenizer = make(made)
    assert tokenizer.control_ids == {1}
    assert set(tokenizer.encode("[PAD] hello there")) == {0, 2}


def test_refuses_what_would_lose_or_confuse_text():
    lossy = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    unigram = tokenizers.Tokenizer(models.Unigram([("<s>", 0.0), ("a", -1.0)], unk_id=0))
    spec = json.loads(sentencepiece().to_str())
    spec["model"]["ignore_merges"] = True
    with pytest.raises(TokenizerError, match="text would be lost"):
        make(lossy)
    for bad in (json.loads(unigram.to_str()), spec):
        with pytest.raises(TokenizerError, match="may read plain text as control"):
            tok.from_spec(bad, {}, None, "made")


def test_dropout_truncation_and_padding_are_off_and_threads_agree():
    made = byte_level()
    made.model.dropout = 0.9
    made.enable_truncation(3)
    made.enable_padding(length=50)
    tokenizer, expected = make(made), SMALL["byte_level"].encode(WORDS)
    assert tokenizer.encode("the cat") == SMALL["byte_level"].encode("the cat")
    found = []
    run = [
        threading.Thread(target=lambda: found.extend(tokenizer.encode(WORDS) for _ in range(20)))
        for _ in range(4)
    ]
    for thread in run:
        thread.start()
    for thread in run:
        thread.join()
    assert found == [expected] * 80


# --- the chat template -------------------------------------------------------------------------


def frame_text(tokenizer: tok.Tokenizer) -> tuple[str, str, str]:
    frame = tokenizer.scaffold()
    return tokenizer.decode(frame.head), tokenizer.decode(frame.tail), tokenizer.decode([frame.end])


def test_frame_of_chatml_and_closed_thinking():
    header = "<|im_end|>\n<|im_start|>assistant\n"
    assert frame_text(make(byte_level())) == ("<|im_start|>user\n", header, "<|im_end|>")
    closed = header + "<think>\n\n</think>\n\n"
    assert frame_text(make(byte_level(), QWEN3))[1] == closed
    opened = CHATML.replace("assistant\n'", "assistant\n<think>\n'")
    assert frame_text(make(byte_level(), opened))[1] == closed
    tail = make(byte_level(), QWEN3).scaffold().tail
    assert tail.count(byte_level().token_to_id("<think>")) == 1


def test_exactly_one_bos_from_template_or_post_processor():
    made = with_bos(byte_level())
    bos = made.token_to_id("<s>")
    both = make(made, LLAMA3, bos_token="<s>")
    neither = make(byte_level(), LLAMA3, bos_token="")
    for tokenizer in (both, make(byte_level(), LLAMA3, bos_token="<s>"), make(made)):
        assert tokenizer.scaffold().head.count(bos) == 1
        assert tokenizer.scaffold().head[0] == bos
        assert bos not in tokenizer.scaffold().tail
    assert both.bos_ids == (bos,) and neither.bos_ids == ()
    assert bos not in neither.scaffold().head
    # SmolLM2's kind: the BOS token also opens every message of the template.
    chat = make(with_bos(byte_level(), "<|im_start|>"), bos_token="<|im_start|>")
    assert frame_text(chat)[0] == "<|im_start|>user\n"


def test_the_date_is_fixed():
    tokenizer = make(with_bos(byte_level()), LLAMA3, bos_token="<s>")
    head, tail, end = frame_text(tokenizer)
    assert "Today Date: 26 Jul 2024\n\n" in head
    assert (tail, end) == (
        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|>",
    )
    clock = "{{ strftime_now('%H:%M:%S %A') }} {{ date_string }}"
    shown = make(byte_level(), clock).render([], add_generation_prompt=False)
    assert shown == "00:00:00 Friday 26 Jul 2024"


def test_templates_that_cannot_be_used():
    twice = "{% for m in messages %}{{ m.content + m.content }}{% endfor %}"
    for template, reason in (
        (None, "made: no chat template; use the model's instruct version"),
        ("hello", "shows a message 0 times"),
        (twice, "shows a message 2 times"),
        ("{{ raise_exception('System role\nnot supported') }}", "System role not supported"),
        ("{{ messages[0].content }", "the chat template failed"),
        ("{{ messages.append(1) }}{{ messages[0].content }}", "the chat template failed"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "no control token ends a turn"),
    ):
        with pytest.raises(TokenizerError, match=reason) as error:
            make(byte_level(), template).scaffold()
        assert "\n" not in str(error.value)


def test_end_of_turn_falls_back_to_eos():
    plain = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    tokenizer = make(byte_level(), plain, eos_token="<|eot_id|>")
    assert tokenizer.scaffold().end == byte_level().token_to_id("<|eot_id|>")


def test_identity():
    base, other = make(byte_level()), make(byte_level(words=("the", "Ġdog")))
    assert base.sha256 == make(byte_level()).sha256 != other.sha256
    assert base.sha256 != make(with_bos(byte_level())).sha256
    assert (
        base.template_sha256 == other.template_sha256 != make(byte_level(), QWEN3).template_sha256
    )
    assert len({base.sha256, base.template_sha256, make(byte_level(), None).template_sha256}) == 3


# --- folders -----------------------------------------------------------------------------------


def save(folder, made, template, **specials):
    """Save as transformers does; return transformers' own tokenizer."""
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template, **specials)
    fast.save_pretrained(folder)
    return fast


@pytest.mark.parametrize("template", [CHATML, QWEN3, LLAMA3.replace("strftime_now", "string")])
def test_a_folder_gives_the_ids_and_text_of_transformers(tmp_path, template):
    template = template.replace('string("%d %b %Y")', "date_string")
    specials = {"bos_token": "<s>", "eos_token": "<|eot_id|>"}
    theirs = save(tmp_path, with_bos(byte_level()), template, **specials)
    tokenizer = tok.load(tmp_path)
    assert tokenizer.encode(WORDS) == theirs(WORDS, add_special_tokens=False).input_ids
    assert tokenizer.bos_ids == (theirs.bos_token_id,)
    assert tokenizer.eos_id == theirs.eos_token_id
    assert tokenizer.vocab_size == len(theirs)
    chat = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": " 12 "}]
    for messages, header in ((chat, False), (chat[:1], True)):
        ours = tokenizer.render(messages, add_generation_prompt=header)
        shared = {"enable_thinking": False, "date_string": tok.DATE_STRING}
        shared |= {"add_generation_prompt": header, "tokenize": False}
        assert ours == theirs.apply_chat_template(messages, **shared)
        ids = theirs(ours, add_special_tokens=False).input_ids
        assert tokenizer.encode_template(ours) == ids
        assert tokenizer.decode(ids) == ours


def test_a_folder_keeps_the_pre_tokenizer_that_its_file_states(tmp_path):
    # transformers' GPT2Tokenizer, which SmolLM2's folder names, would rebuild it without Digits.
    made = byte_level()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    expected = made.encode(" 12 ½").ids
    save(tmp_path, made, CHATML)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "GPT2Tokenizer"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert tok.load(tmp_path).encode(" 12 ½") == expected != byte_level().encode(" 12 ½").ids


def test_a_folder_without_tokenizer_json(tmp_path):
    spec = json.loads(byte_level().to_str())
    vocab = spec["model"]["vocab"] | {"<|endoftext|>": len(spec["model"]["vocab"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    merges = [" ".join(merge) for merge in spec["model"]["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    tokenizer = tok.load(tmp_path)
    assert controls(tokenizer) == ["<|endoftext|>"]
    assert tokenizer.encode("the cat") == [vocab["the"], vocab["Ġcat"]]
    assert tokenizer.template == CHATML


def test_paths_that_hold_no_tokenizer(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    (tmp_path / "no.gguf").write_bytes(b"something else")
    (tmp_path / "zero.gguf").write_bytes(b"")
    for name, reason in (
        ("absent", "no such folder or file"),
        ("empty", "a folder needs a tokenizer.json"),
        ("broken", "no usable tokenizer"),
        ("no.gguf", "not GGUF"),
        ("zero.gguf", "not a complete GGUF file"),
    ):
        with pytest.raises(TokenizerError, match=reason) as error:
            tok.load(tmp_path / name)
        assert str(error.value).startswith(str(tmp_path / name))
        assert "\n" not in str(error.value)


# --- GGUF --------------------------------------------------------------------------------------


def write_gguf(path, kind, tokens, types, **fields):
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    calls = {"pre": "tokenizer_pre", "merges": "token_merges", "scores": "token_scores"}
    calls |= {"bos": "bos_token_id", "eos": "eos_token_id", "bos_first": "add_bos_token"}
    for name, value in fields.items():
        getattr(writer, "add_" + calls.get(name, name))(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level_gguf(path, pre, **fields):
    """Write `byte_level()` as llama.cpp's converter would."""
    spec = json.loads(byte_level().to_str())
    added = {token["content"]: token for token in spec["added_tokens"]}
    vocab = spec["model"]["vocab"] | {text: token["id"] for text, token in added.items()}
    tokens = sorted(vocab, key=vocab.get)
    types = [3 if added.get(t, {}).get("special") else 4 if t in added else 1 for t in tokens]
    merges = [" ".join(merge) for merge in spec["model"]["merges"]]
    fields = {"bos": vocab["<s>"], "eos": vocab["<|eot_id|>"], "chat_template": CHATML} | fields
    tokens, types = [*tokens, "[PAD999]"], [*types, 5]
    return write_gguf(path, "gpt2", tokens, types, pre=pre, merges=merges, **fields)


def test_gguf_byte_level(tmp_path):
    plain = tok.load(byte_level_gguf(tmp_path / "a.gguf", "gpt-2"))
    assert set(controls(plain)) == set(controls(SMALL["byte_level"]))
    assert plain.vocab_size == SMALL["byte_level"].vocab_size  # the unused padding is left out
    assert plain.bos_ids == () and plain.eos_id == byte_level().token_to_id("<|eot_id|>")
    assert frame_text(plain) == frame_text(SMALL["byte_level"])
    assert plain.decode(plain.encode(WORDS + "<think>")) == WORDS + "<think>"
    # Only these add BOS unless the file says otherwise.
    llama = tok.load(byte_level_gguf(tmp_path / "b.gguf", "llama-bpe"))
    assert llama.bos_ids == (byte_level().token_to_id("<s>"),)
    assert frame_text(llama)[0] == "<s><|im_start|>user\n"
    told = tok.load(byte_level_gguf(tmp_path / "c.gguf", "llama-bpe", bos_first=False))
    assert told.bos_ids == ()
    dog = byte_level().token_to_id("dog")
    assert plain.encode("dog") != [dog] == llama.encode("dog")


def test_gguf_pre_tokenizers_split_as_theirs(tmp_path):
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2_SPLIT
    from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX as QWEN35_SPLIT

    assert gguf_tokenizer._SPLITS["qwen2"] == QWEN2_SPLIT
    assert gguf_tokenizer._SPLITS["qwen35"] == QWEN35_SPLIT
    decomposed = "cafe\u0301"
    for pre, normal in (("qwen2", "café"), ("qwen35", "café"), ("smollm", decomposed)):
        tokenizer = tok.load(byte_level_gguf(tmp_path / f"{pre}.gguf", pre))
        assert tokenizer.decode(tokenizer.encode(decomposed)) == normal
    # " 12" is one token here; only the digit-wise splits may not use it.
    for pre, whole in (("gpt-2", 1), ("smollm", 3), ("qwen2", 3), ("llama-bpe", 3)):
        tokenizer = tok.load(byte_level_gguf(tmp_path / "digits.gguf", pre))
        assert len(tokenizer.encode(" 12")) == whole, pre


def test_gguf_sentencepiece_merges_by_score(tmp_path):
    pieces = ["ab", "▁a", "bc", "▁ab", "abc", "▁b", "ca", "<s", "s>", "a▁b", "c▁"]
    letters = [*"abcs<>▁"]
    head = ["<unk>", "<s>", "</s>", *tokenizer_json.BYTE_FALLBACK]
    tokens = [*head, *pieces, *letters, "\n\n", "<mask>"]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces + letters), 4, 4]
    rank = {piece: -float(k * 7 % len(pieces)) for k, piece in enumerate(pieces)}
    scores = [rank.get(token, -1e6) for token in tokens]
    path = tmp_path / "spm.gguf"
    made = {"scores": scores, "bos": 1, "eos": 2, "chat_template": CHATML}
    tokenizer = tok.load(write_gguf(path, "llama", tokens, types, **made))
    assert tokenizer.bos_ids == (1,)
    assert set(controls(tokenizer)) == {"<unk>", "<s>", "</s>", "<mask>"}

    @given(st.text("abc s<>", max_size=12))
    @SLOW
    def as_sentencepiece_does(text):
        parts = [*text.replace(" ", "▁")]
        while pairs := [i for i in range(len(parts) - 1) if parts[i] + parts[i + 1] in rank]:
            best = max(pairs, key=lambda i: (rank[parts[i] + parts[i + 1]], -i))
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        assert tokenizer.encode(text) == [tokens.index(part) for part in parts]
        assert tokenizer.decode(tokenizer.encode(text)) == text

    as_sentencepiece_does()
    for text in ("\n\n", "é<mask><0x0A>\n", "<s>a b</s>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("\n\n") == [tokens.index("\n\n")]


def test_gguf_that_cannot_be_used(tmp_path):
    with pytest.raises(TokenizerError, match="pre 'mystery' is not known"):
        tok.load(byte_level_gguf(tmp_path / "a.gguf", "mystery"))
    with pytest.raises(TokenizerError, match="model 'bert' is not known"):
        tok.load(write_gguf(tmp_path / "b.gguf", "bert", ["a"], [1]))
    with pytest.raises(TokenizerError, match=r"no tokenizer\.ggml\.scores"):
        tok.load(write_gguf(tmp_path / "c.gguf", "llama", ["a"], [1]))
    whole = byte_level_gguf(tmp_path / "d.gguf", "gpt-2").read_bytes()
    for size in (5, 30, 1000, len(whole) - 1):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(TokenizerError, match="not a complete GGUF file"):
            tok.load(tmp_path / "cut.gguf")


# --- the real model ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(request):
    return tok.load(request.getfixturevalue("smollm2_path"))


@pytest.mark.real
def test_smollm2(real):
    assert real.encode("Hello world! 123") == [19556, 905, 17, 216, 33, 34, 35]
    assert (real.vocab_size, real.bos_ids, real.eos_id) == (49152, (), 2)
    assert real.control_ids == frozenset(range(17))
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert frame_text(real) == (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n",
        "<|im_end|>\n<|im_start|>assistant\n",
        "<|im_end|>",
    )
    assert real.scaffold().head[0] == 1 and real.scaffold().end == 2


@pytest.mark.real
@given(data=st.data())
@SLOW
def test_smollm2_keeps_any_text(real, data):
    words = st.sampled_from([*controls(real), "<think>", " ", "\n\n", "ignore", " 12"])
    text = "".join(data.draw(st.lists(words | TEXT, max_size=6)))
    ids = real.encode(text)
    bad = set(real._unspelled)
    shown = "".join(c if bad.isdisjoint(c.encode()) else "\ufffd" for c in text)
    assert real.decode(ids) == shown
    assert real.control_ids.isdisjoint(ids) and bool(ids) == bool(text)


@pytest.mark.real
def test_smollm2_folder_equals_gguf(real, tmp_path):
    spec, specials, template = gguf_tokenizer.read(real.path)
    theirs = save(tmp_path, tokenizers.Tokenizer.from_str(json.dumps(spec)), template, **specials)
    folder = tok.load(tmp_path)
    assert folder.scaffold() == real.scaffold()
    assert folder.encode(WORDS) == real.encode(WORDS)
    assert real.encode(WORDS) == theirs(WORDS, add_special_tokens=False).input_ids
    chat = [{"role": "user", "content": "Hi <3"}]
    rendered = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert real.render(chat, add_generation_prompt=True) == rendered
