# SPDX-License-Identifier: Apache-2.0
"""What a memory system calls: a chat model and a sentence encoder, here or at an endpoint.

`side_by_side` runs many users at once, each in a thread of its own, and makes one batched call of the
model of what they all wait for.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")
Messages = Sequence[Mapping[str, str]]
Request = tuple[Messages, int]  # messages {"role", "content"}, max_tokens

KEY = "BFM_API_KEY"  # the environment variable that holds an endpoint's key


class BackendError(RuntimeError):
    """A model or endpoint that did not answer; one line. The store is as it was before the call."""


class Cut(str):
    """A reply that was stopped at max_tokens: its end is missing."""


@dataclasses.dataclass(frozen=True)
class Backend:
    """A chat model and a sentence encoder.

    Attributes:
      generate: (messages, max_tokens) -> reply, a `Cut` where it was stopped.
      embed: texts -> vectors [n, d].
      count_tokens: text -> tokens; prompts are kept to `room` by it and costs are reported in it.
      room: the most tokens that the texts of one prompt may take.
      generate_many: several requests in one call, where the model has a better way than one by one.
      name: the chat model's; stores say by whom they were written.
    """

    generate: Callable[[Messages, int], str]
    embed: Callable[[Sequence[str]], np.ndarray]
    count_tokens: Callable[[str], int]
    room: int = 3000
    generate_many: Callable[[Sequence[Request]], list[str]] | None = None
    name: str = ""


def ask(backend: Backend, messages: Messages, max_tokens: int) -> tuple[str, float]:
    """Return a reply and the seconds it cost: inside `side_by_side` the user's share of the batch."""
    gather = getattr(_here, "gather", None)
    if gather is not None and gather.backend is backend:
        return gather.ask(_here.index, (messages, max_tokens))
    started = time.perf_counter()
    text = backend.generate(messages, max_tokens)
    return text, time.perf_counter() - started


# --- many users at once ------------------------------------------------------------------------

_here = threading.local()  # the gather and the job of this thread


class _Stopped(Exception):
    """Another user's job failed."""


class _Gather:
    def __init__(self, backend: Backend, jobs: Sequence[Callable[[], Any]], live: int):
        self.backend = backend
        self.changed = threading.Condition()
        self.live = live  # threads that are not done
        self.todo = iter(enumerate(jobs))
        self.waiting: dict[int, Request] = {}
        self.answers: dict[int, tuple[str, float] | BaseException] = {}
        self.results: dict[int, Any] = {}
        self.errors: dict[int, Exception] = {}
        self.closed: BaseException | None = None

    def ask(self, index: int, request: Request) -> tuple[str, float]:
        with self.changed:
            self.waiting[index] = request
            self.changed.notify_all()
            self.changed.wait_for(lambda: index in self.answers or self.closed)
            answer = self.answers.pop(index, self.closed)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def work(self) -> None:
        _here.gather = self
        try:
            while True:
                with self.changed:
                    index, job = next(self.todo, (-1, None))
                if job is None:
                    return
                _here.index = index
                try:
                    self.results[index] = job()
                except _Stopped:
                    pass
                except Exception as error:
                    self.errors[index] = error
        finally:
            with self.changed:
                self.live -= 1
                self.changed.notify_all()

    def serve(self) -> None:
        """Answer until no thread is left; a batch is made when every live thread waits."""
        with self.changed:
            while True:
                self.changed.wait_for(lambda: len(self.waiting) == self.live)
                if not self.live:
                    return
                indices = sorted(self.waiting)
                requests = [self.waiting.pop(i) for i in indices]
                try:
                    if self.errors:
                        raise _Stopped
                    self.answers.update(zip(indices, _batch(self.backend, requests), strict=True))
                except Exception as error:
                    self.answers.update(dict.fromkeys(indices, error))
                self.changed.notify_all()


def side_by_side(jobs: Sequence[Callable[[], T]], backend: Backend, width: int = 32) -> list[T]:
    """Run jobs, one a user, `width` at a time, and return their results in order.

    A job uses systems made with `backend`; a request of theirs waits until every running job waits,
    and then all go to the model as one call, sorted by job. So batches depend on jobs and `width`, not
    on the timing of threads. When a job fails, the others stop at their next request, and the error of
    the first one (by order) is raised.
    """
    live = min(width, len(jobs))
    gather = _Gather(backend, jobs, live)
    threads = [threading.Thread(target=gather.work, daemon=True) for _ in range(live)]
    try:
        for thread in threads:
            thread.start()
        gather.serve()
    except BaseException as error:  # an interrupt: let the threads end, too
        with gather.changed:
            gather.closed = error
            gather.changed.notify_all()
        raise
    if gather.errors:
        raise gather.errors[min(gather.errors)]
    return [gather.results[i] for i in range(len(jobs))]


def _batch(backend: Backend, requests: Sequence[Request]) -> list[tuple[str, float]]:
    started = time.perf_counter()
    if backend.generate_many is None:
        texts = [backend.generate(*request) for request in requests]
    else:
        texts = backend.generate_many(requests)
    if len(texts) != len(requests):
        raise BackendError(f"{len(requests)} requests got {len(texts)} replies")
    share = (time.perf_counter() - started) / len(requests)
    return [(text, share) for text in texts]


# --- a model of ours ---------------------------------------------------------------------------


def local(lm, encoder, *, batch_size: int = 16, room: int = 3000) -> Backend:
    """Use a `bfm.lm.LM` (greedy, batched) and a `bfm.embed.Encoder`.

    Raises BackendError where the model's window leaves too little room for a prompt and its reply.
    """
    from bfm.embed import embed
    from bfm.generate import reply

    tokenizer = lm.scaffold.tokenizer

    def many(requests: Sequence[Request]) -> list[str]:
        prompts = [tokenizer.chat(messages) for messages, _ in requests]
        for ids, (_, most) in zip(prompts, requests, strict=True):
            if len(ids) + most > lm.config.window:
                raise BackendError(
                    f"{tokenizer.path}: a prompt of {len(ids)} tokens and a reply of {most} do not "
                    f"fit the window of {lm.config.window}"
                )
        most = max(most for _, most in requests)
        replies = reply(
            lm.decoder, prompts, lm.scaffold.ends, most,
            vocab=tokenizer.vocab_size, batch_size=batch_size,
        )  # fmt: skip
        return [one(r.ids, r.ended, most) for r, (_, most) in zip(replies, requests, strict=True)]

    def one(ids: tuple[int, ...], ended: bool, most: int) -> str:
        text = tokenizer.decode(i for i in ids[:most] if i not in tokenizer.control_ids)
        return text if ended and len(ids) <= most else Cut(text)

    return Backend(
        generate=lambda messages, most: many([(messages, most)])[0],
        embed=lambda texts: embed(encoder, texts),
        count_tokens=lambda text: len(tokenizer.encode(text)),
        room=min(room, lm.config.window - 512),  # 512: the longest reply and the template
        generate_many=many,
        name=f"weights {hashlib.sha256(lm.identity.encode()).hexdigest()[:12]}",
    )


# --- an endpoint -------------------------------------------------------------------------------


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Another host must not get the key."""

    def redirect_request(self, *args: Any) -> None:
        return None


def address(url: str) -> str:
    """Check an endpoint's address and return it as errors show it. Raises BackendError."""
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError as error:
        raise BackendError(f"url: {error}") from None
    host = parts.netloc.rpartition("@")[2]  # what stands before @ may be a key
    shown = f"{parts.scheme}://{host}{parts.path}"
    if parts.scheme not in ("http", "https") or not host:
        raise BackendError(f"{shown}: give an address that begins with http:// or https://")
    if "@" in parts.netloc or parts.query:
        raise BackendError(f"{shown}: the key belongs in {KEY}, not in the address")
    return shown


def endpoint(
    url: str,
    model: str,
    key: str | None = None,
    *,
    embed_model: str = "",
    embed: Callable[[Sequence[str]], np.ndarray] | None = None,
    count_tokens: Callable[[str], int] = lambda text: -(-len(text.encode()) // 4),
    room: int = 3000,
    timeout: float = 120.0,
    tries: int = 3,
    at_once: int = 8,
) -> Backend:
    """Use an OpenAI-compatible server: url/chat/completions and, with `embed_model`, url/embeddings.

    Args:
      url: with the version, as in "http://localhost:8000/v1".
      key: sent as a bearer token; by default what BFM_API_KEY holds, none where it is empty.
      embed: a sentence encoder of ours, to compare systems under one encoder.
      count_tokens: by default four bytes a token; give the tokenizer that costs are compared in.
      timeout: seconds a request; tries: while a server is busy or away, 1 s, 2 s, .. apart.

    Raises BackendError (here: a bad address or key; in use: a reply that is none). It names address and
    status, never the key.
    """
    key = os.environ.get(KEY, "") if key is None else key
    shown = address(url)
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise BackendError(f"{KEY}: holds what no key holds (a space, a line end, ..)")
    if (embed is None) == (not embed_model):
        raise BackendError(f"{shown}: give either `embed` or `embed_model`")
    opener = urllib.request.build_opener(_NoRedirect)

    def post(path: str, body: dict[str, Any]) -> Any:
        place = f"{shown.rstrip('/')}/{path}"
        headers = {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        data = json.dumps(body).encode()
        for attempt in range(1, tries + 1):
            try:
                request = urllib.request.Request(place, data, headers, method="POST")
                with opener.open(request, timeout=timeout) as reply:
                    return json.load(reply)
            except urllib.error.HTTPError as error:
                fault, again = f"status {error.code}", error.code == 429 or error.code >= 500
                error.close()
            except OSError as error:  # no connection, a time-out
                fault, again = str(getattr(error, "reason", error) or "no answer"), True
            except ValueError:
                raise BackendError(f"{place}: the reply is not JSON") from None
            except Exception as error:  # http.client's own kinds
                fault, again = type(error).__name__, True
            if not again or attempt == tries:
                break
            time.sleep(2 ** (attempt - 1))
        raise BackendError(f"{place}: {fault} ({attempt} of {tries} tries)")

    def generate(messages: Messages, max_tokens: int) -> str:
        body = {"model": model, "messages": [*map(dict, messages)], "max_tokens": max_tokens}
        found = post("chat/completions", body | {"temperature": 0})
        try:
            choice = found["choices"][0]
            text = choice["message"]["content"]
            if not isinstance(text, str | None):
                raise TypeError
            return (Cut if choice.get("finish_reason") == "length" else str)(text or "")
        except (KeyError, IndexError, TypeError, AttributeError):
            raise BackendError(f"{shown}: the reply is no chat completion") from None

    def vectors(texts: Sequence[str]) -> np.ndarray:
        found = post("embeddings", {"model": embed_model, "input": [text or " " for text in texts]})
        try:
            rows = sorted(found["data"], key=lambda row: row["index"])
            return np.array([row["embedding"] for row in rows], np.float32)
        except (KeyError, TypeError, ValueError):
            raise BackendError(f"{shown}: the reply holds no embeddings") from None

    def many(requests: Sequence[Request]) -> list[str]:
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda request: generate(*request), requests))

    return Backend(generate, embed or vectors, count_tokens, room, many, model)
