# SPDX-License-Identifier: Apache-2.0
"""A model's own tokenizer and chat template, from a Hugging Face folder or a GGUF file, no torch.

Both sources become the content of a tokenizer.json, and from it two tokenizers are made:

    scaffold  the JSON as it is: for the chat template's text, where <|im_start|> is one id
    data      the JSON without control tokens: for people's text, where <|im_start|> is several ids

Neither adds a space in front of a text, so pieces tokenized apart decode to exactly their text.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers

from bfm import gguf_tokenizer, tokenizer_json
from bfm.gguf import GgufError

DATE_STRING = "26 Jul 2024"  # the only date a template ever sees
_DATE = datetime.datetime(2024, 7, 26)
_USER, _REPLY = "bfmUserText7301", "bfmReplyText7301"  # sentinels: plain words survive trimming


class TokenizerError(ValueError):
    """A tokenizer, template or text that cannot be used; one line that says what to do."""


@dataclasses.dataclass(frozen=True)
class ChatFrame:
    """The chat template around one user message, as ids.

    Attributes:
      head: before the user's text; starts with BOS, once, if the template or the folder gives one.
      tail: after it: end of the message, generation header, a closed thinking block if any.
      end: the id that ends the assistant's turn.
    """

    head: tuple[int, ...]
    tail: tuple[int, ...]
    end: int


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """Text to ids and back, and the chat template. Made by `load` or `from_spec`.

    Attributes:
      path: where it came from; errors name it.
      template: the chat template's Jinja text, or None.
      specials: the named tokens a template sees, such as {"bos_token": "<s>"}.
      vocab_size: the number of ids, added tokens included: the largest id + 1.
      control_ids: the ids that data never give.
      bos_ids: the ids that the folder's post-processor puts before a text.
      sha256: hash of the tokenizer's JSON.
      template_sha256: hash of the template's text (of "" if there is none).
    """

    path: str
    template: str | None = dataclasses.field(repr=False)
    specials: Mapping[str, str]
    vocab_size: int
    control_ids: frozenset[int]
    bos_ids: tuple[int, ...]
    sha256: str
    template_sha256: str
    _scaffold: tokenizers.Tokenizer = dataclasses.field(repr=False)
    _data: tokenizers.Tokenizer = dataclasses.field(repr=False)
    _unspelled: bytes = dataclasses.field(repr=False)  # the bytes that have no token
    _verbatim: Mapping[int, str] = dataclasses.field(repr=False)  # ids the decoder would garble

    @property
    def eos_id(self) -> int | None:
        """The id of the end-of-sequence token that the folder names, or None."""
        return self._scaffold.token_to_id(self.specials.get("eos_token", ""))

    def encode(self, text: str) -> list[int]:
        """Encode data: control tokens written in the text stay text, and nothing is added.

        A character that the vocabulary cannot spell becomes U+FFFD. (SmolLM2 lacks U+0004 and a
        few others; its own tokenizer drops them, which could leave a target empty.)

        Raises:
          TokenizerError: the text holds a lone surrogate, or a control id came out nevertheless.
        """
        return self._checked(self._data.encode(self._clean(text), add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode each text as `encode` does, on several threads."""
        texts = [self._clean(text) for text in texts]
        batch = self._data.encode_batch_fast(texts, add_special_tokens=False)
        return [self._checked(encoding.ids) for encoding in batch]

    def encode_template(self, text: str) -> list[int]:
        """Encode scaffold text: control tokens are single ids; no BOS is added."""
        return self._scaffold.encode(self._clean(text), add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """Return the exact text of ids, control tokens included.

        Raises:
          TokenizerError: an id lies outside the vocabulary.
        """
        ids = list(ids)
        if any(not 0 <= i < self.vocab_size for i in ids):
            raise TokenizerError(f"{self.path}: an id outside 0..{self.vocab_size - 1}")
        pieces = []
        for verbatim, run in itertools.groupby(ids, self._verbatim.__contains__):
            if verbatim:
                pieces += [self._verbatim[i] for i in run]
            else:
                pieces.append(self._scaffold.decode(list(run), skip_special_tokens=False))
        return "".join(pieces)

    def to_json(self) -> dict[str, Any]:
        """Return the content of a tokenizer.json that encodes as `encode_template` does."""
        return json.loads(self._scaffold.to_str())

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool,
        thinking: bool = False,
    ) -> str:
        """Return the chat template's text for messages {"role", "content"}.

        The date is always DATE_STRING: the clock never enters a prompt.

        Raises:
          TokenizerError: there is no chat template, or it fails on these messages.
        """
        if self.template is None:
            raise TokenizerError(
                f"{self.path}: no chat template; use the model's instruct version, or put its "
                "chat_template.jinja into the folder"
            )
        given = {"add_generation_prompt": add_generation_prompt, "enable_thinking": thinking}
        given |= {"date_string": DATE_STRING, "tools": None, "documents": None}
        try:
            template = _compile(self.template)
            return template.render({**self.specials, **given, "messages": [*map(dict, messages)]})
        except Exception as error:  # a template is a program and can fail in any way
            raise TokenizerError(
                f"{self.path}: the chat template failed ({_reason(error)}); give another one"
            ) from None

    def scaffold(self) -> ChatFrame:
        """Return the template around one user message: rendered once and cut at a sentinel.

        Thinking is off; a generation header that leaves a block open gets it closed, empty.

        Raises:
          TokenizerError: no template, one that drops or repeats the message, or no end of turn.
        """
        chat = [{"role": "user", "content": _USER}, {"role": "assistant", "content": _REPLY}]
        before, after = self._cut(self.render(chat[:1], add_generation_prompt=True), _USER)
        after = _closed(after)
        head = self.encode_template(before)
        if tuple(head[: len(self.bos_ids)]) != self.bos_ids:
            head = [*self.bos_ids, *head]
        _, closing = self._cut(self.render(chat, add_generation_prompt=False), _REPLY)
        controls = (i for i in self.encode_template(closing) if i in self.control_ids)
        end = next(controls, self.eos_id)
        if end is None:
            raise TokenizerError(
                f"{self.path}: no control token ends a turn; name an eos_token in "
                "tokenizer_config.json"
            )
        return ChatFrame(tuple(head), tuple(self.encode_template(after)), end)

    def thinking(self) -> tuple[tuple[int, ...], int]:
        """Return what stands between a user's message and the model's thoughts, and what ends them.

        Raises:
          TokenizerError: the template knows no thinking, or `</think>` is no token of its own.
        """
        close = self._scaffold.token_to_id("</think>")
        if self.template is None or "think" not in self.template or close is None:
            raise TokenizerError(
                f"{self.path}: no thinking block in the chat template; eval.thinking needs a model "
                "that thinks"
            )
        chat = [{"role": "user", "content": _USER}]
        _, after = self._cut(self.render(chat, add_generation_prompt=True, thinking=True), _USER)
        if not after.rstrip().endswith("<think>"):
            after += "<think>\n"  # such templates let the model open the block itself
        return tuple(self.encode_template(after)), close

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return a whole conversation {"role", "content"} as ids, ready for the assistant's reply.

        The template is rendered around sentinels; the messages' texts are encoded as data, so nothing
        in them is a control token. A thinking block is closed as in `scaffold`.

        Raises:
          TokenizerError: no template, or one that drops, repeats or reorders these roles.
        """
        marks = [f"bfmText{i:05d}x" for i in range(len(messages))]
        shown = [{"role": m["role"], "content": s} for m, s in zip(messages, marks, strict=True)]
        rest, ids = self.render(shown, add_generation_prompt=True), []
        for message, mark in zip(messages, marks, strict=True):
            before, rest = self._cut(rest, mark)
            ids += [*self.encode_template(before), *self.encode(message["content"])]
        ids += self.encode_template(_closed(rest))
        return ids if tuple(ids[: len(self.bos_ids)]) == self.bos_ids else [*self.bos_ids, *ids]

    def _cut(self, text: str, sentinel: str) -> list[str]:
        parts = text.split(sentinel)
        if len(parts) != 2:
            raise TokenizerError(
                f"{self.path}: the chat template shows a message {len(parts) - 1} times, not once; "
                "give another one"
            )
        return parts

    def _clean(self, text: str) -> str:
        try:
            raw = text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"{self.path}: a lone surrogate (character {error.start}) has no ids; replace it"
            ) from None
        if len(raw.translate(None, self._unspelled)) == len(raw):
            return text
        if not {*"\ufffd".encode()}.isdisjoint(self._unspelled):
            raise TokenizerError(f"{self.path}: the vocabulary cannot spell {_reason(text)!r}")
        spelled = (c if {*c.encode()}.isdisjoint(self._unspelled) else "\ufffd" for c in text)
        return "".join(spelled)

    def _checked(self, ids: list[int]) -> list[int]:
        if not self.control_ids.isdisjoint(ids):
            found = sorted(self.control_ids.intersection(ids))
            raise TokenizerError(f"{self.path}: plain text gave the control ids {found}")
        return ids


def load(path: str | Path) -> Tokenizer:
    """Load the tokenizer of a Hugging Face folder or a .gguf file.

    Raises:
      TokenizerError: nothing is there, or data could not be kept apart from control tokens.
    """
    path = Path(path)
    try:
        if path.is_dir():
            return from_spec(*_from_folder(path), str(path))
        if path.is_file():
            return from_spec(*gguf_tokenizer.read(path), str(path))
    except TokenizerError:
        raise
    except GgufError as error:
        raise TokenizerError(str(error)) from None
    except Exception as error:  # transformers and the Rust library raise many kinds
        raise TokenizerError(
            f"{path}: no usable tokenizer ({_reason(error)}); a folder needs a tokenizer.json"
        ) from None
    raise TokenizerError(f"{path}: no such folder or file; give a model folder or a .gguf file")


def from_spec(
    spec: Mapping[str, Any], specials: Mapping[str, str], template: str | None, path: str
) -> Tokenizer:
    """Make a tokenizer from the content of a tokenizer.json, named tokens and a chat template.

    Raises:
      TokenizerError: the model cannot keep data apart from control tokens, or loses text.
    """
    spec = tokenizer_json.exact(spec)
    text = json.dumps(spec, ensure_ascii=False)
    scaffold = tokenizers.Tokenizer.from_str(text)
    try:
        data, controls, unspelled = tokenizer_json.without_control(spec, scaffold)
    except tokenizer_json.SpecError as error:
        raise TokenizerError(f"{path}: {error}") from None
    bare, full = scaffold.encode("a", add_special_tokens=False).ids, scaffold.encode("a").ids
    start = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
    added = {i: token.content for i, token in scaffold.get_added_tokens_decoder().items()}
    decoded = {i: scaffold.decode([i], skip_special_tokens=False) for i in added}
    return Tokenizer(
        path=path,
        template=template,
        specials=dict(specials),
        vocab_size=max(itertools.chain(spec["model"]["vocab"].values(), added)) + 1,
        control_ids=controls,
        bos_ids=tuple(full[:start]),
        sha256=hashlib.sha256(text.encode()).hexdigest(),
        template_sha256=hashlib.sha256((template or "").encode()).hexdigest(),
        _scaffold=scaffold,
        _data=data,
        _unspelled=unspelled,
        _verbatim={i: token for i, token in added.items() if decoded[i] != token},
    )


# --- the chat template -------------------------------------------------------------------------


def _closed(header: str) -> str:
    """Close the thinking block that a generation header leaves open, empty."""
    if header.rstrip().endswith("<think>"):
        return header.rstrip() + "\n\n</think>\n\n"
    return header


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, by which some templates mark the assistant's text, shows its content."""

    tags = frozenset({"generation"})

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    """Compile a chat template in the environment that transformers gives it, but for the clock."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": _DATE.strftime}
    return environment.from_string(template)


# --- a Hugging Face folder ---------------------------------------------------------------------


def _from_folder(path: Path) -> tuple[dict[str, Any], dict[str, str], str | None]:
    """Return the content of its tokenizer.json, its named tokens and its chat template."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.utils import logging

    # AutoTokenizer 5.24 rebuilds some classes (GPT2Tokenizer, which SmolLM2 names) from their
    # vocabulary and loses the pre-tokenizer that tokenizer.json states; the plain class keeps it.
    reader = PreTrainedTokenizerFast if (path / "tokenizer.json").is_file() else AutoTokenizer
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        made = reader.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    finally:
        logging.set_verbosity(verbosity)
    template = made.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return json.loads(made.backend_tokenizer.to_str()), dict(made.special_tokens_map), template


def _reason(error: object) -> str:
    """Return a message on one line of at most 200 characters."""
    return " ".join(str(error).split())[:200] or type(error).__name__
