# SPDX-License-Identifier: Apache-2.0
"""A backend for tests of the memory systems: replies by script, vectors by words, tokens by words."""

import re
import zlib

import numpy as np

from bfm.baselines.backend import Backend
from bfm.baselines.tasks import Task
from bfm.dialogue import Message, Question, Turn
from bfm.shortlist import words

WIDTH = 64


def embed(texts) -> np.ndarray:
    """Bag of hashed words, unit length: equal words give equal vectors, common words a high cosine."""
    rows = np.zeros((len(texts), WIDTH), np.float32)
    for row, text in zip(rows, texts, strict=True):
        for word in words(text):
            row[zlib.crc32(word.encode()) % WIDTH] += 1
        row /= max(1e-9, np.linalg.norm(row))
    return rows


def count(text: str) -> int:
    return len(re.findall(r"\w+|[^\w\s]", text))


class Script:
    """Replies in order, by the task that asks: a list for each, the last one again and again.

    A reply may be a function of the prompt. `asked` keeps (task, prompt, whether it was the retry).
    """

    def __init__(self, replies, tasks: dict[str, Task], room: int = 3000):
        self.replies = {name: list(own) for name, own in replies.items()}
        self.tasks = tasks
        self.asked: list[tuple[str, str, bool]] = []
        self.backend = Backend(self.generate, embed, count, room)

    def generate(self, messages, max_tokens) -> str:
        assert [set(m) for m in messages] == [{"role", "content"}] and max_tokens > 0
        prompt = messages[0]["content"]
        for name, task in self.tasks.items():
            if prompt.startswith(task.what.split("{who}")[0]) or prompt.endswith(
                task.again.split("{who}")[-1]
            ):
                again = prompt.endswith(task.again.split("{who}")[-1])
                self.asked.append((name, prompt, again))
                own = self.replies[name]
                reply = own.pop(0) if len(own) > 1 else own[0]
                return reply(prompt) if callable(reply) else reply
        raise AssertionError(f"a prompt of no known task: {prompt!r}")

    def of(self, name: str) -> list[str]:
        return [prompt for task, prompt, _ in self.asked if task == name]


def turn(index: int, user: str = "", reply: str = "", time: str = "", **fields) -> Turn:
    found = []
    if user:
        found.append(Message("user", user, time=time, **fields))
    if reply:
        found.append(Message("assistant", reply, time=time, session=fields.get("session", "")))
    return Turn(index, tuple(found) or (Message("user", "", time=time),))


def question(query: str, time: str = "", id: str = "q", options: tuple[str, ...] = ()) -> Question:
    return Question(id, (), query, time, options)


def events(system) -> list[tuple[str, tuple[int, ...], str]]:
    return [(entry.event, entry.turns, entry.kind) for entry in system.log]
