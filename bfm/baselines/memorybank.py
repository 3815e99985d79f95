# SPDX-License-Identifier: Apache-2.0
"""MemoryBank (arXiv 2305.10250): exchanges, a summary a day, a portrait of the user, forgetting.

| what | paper (P) or code (C) | here |
|---|---|---|
| a day | the clock's | the date of the messages as written; without one the session; else one day |
| documents | C: exchanges and day summaries | the same |
| globals | C: made anew from all days at each refresh | from the last ones and the new days, at `end` |
| forgetting | P: exp(-t / S); C: off, exp(-t * S / 5), a slip | off; exp(-t / (c * S)), c = 1 or 5 |
| draws | C: unseeded, at each start, for good | one a memory and recall, by seed: gone until t is 0 |
| day summaries | C: kept until every exchange of the day is gone | the same |
| strengthened | what a user's message recalls | the same, as history is replayed; no question does |
| hits | C: 6, widened within the day to 200 characters | the same |
| prompt | hits, portrait, summary, last 7 exchanges | portrait, summary, hits, in one budget |
| empty reply | C: the empty text | sentences of the user, 80 words; his last 5 sentences |

The global texts rest on the whole history, so they name no turns: they would make any recall perfect.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Self

import numpy as np

from bfm.baselines import replies, turns
from bfm.baselines.backend import Backend
from bfm.baselines.ledger import Client, Entry
from bfm.baselines.protocol import Note, resumed, saved
from bfm.baselines.tasks import ALL_EVENTS, ALL_PERSON, EVENTS, GLOBAL_WORDS, PERSON, Task
from bfm.baselines.turns import Line
from bfm.baselines.vectors import Grown, Index, pack, unpack
from bfm.dialogue import Message, Question, Turn, generator

WIDEST = 200  # characters, up to which a hit takes in its neighbours of the day
DAY_WORDS = 80
DAY, PAIR, STRENGTH, RECALLED, DRAW = range(5)  # columns of what forgetting needs

_FIRST_PERSON = re.compile(r"\b(?:i|i'm|i've|my|me|mine|we|our)\b", re.I)


@dataclasses.dataclass
class Document:
    """An exchange, or the summary of a day (`pair` False)."""

    text: str
    time: str
    day: str
    turns: tuple[int, ...]
    pair: bool


class MemoryBank:
    """The memory of one user; see `bfm.baselines.protocol.System`.

    forget: c of exp(-t / (c * S)), t in days of the data since the last recall; 0: forgetting is off.
    """

    def __init__(self, backend: Backend, seed: int = 0, *, forget: float = 0.0, k: int = 6):
        self.name = "memorybank" if not forget else f"memorybank_c{forget:g}"
        self.client = Client(backend)
        self.log: list[Entry] = []
        self.seed, self.forget, self.k = seed, forget, k
        self.documents: list[Document] = []  # by row of the index
        self.index = Index()
        self.memory = Grown(np.zeros((0, 5)))  # by row, columns as above
        self.summary = self.portrait = ""
        self.day, self.number = "", 0.0  # the open day: its key, and its place in time
        self.open: list[Line] = []
        self.new_days: list[tuple[str, str, str]] = []  # (day, summary, portrait) since the globals
        self.said: list[str] = []  # the user's last sentences on himself

    def add(self, turn: Turn) -> None:
        """Store an exchange under its day; a new day closes the last one (two requests)."""
        with self.client.counting("add"):
            lines = turns.lines_of(turn)
            if not lines:
                return
            time = turns.time_of(turn)
            number = turns.day_number(time)
            session = (
                f"session {turn.messages[0].session}" if turn.messages[0].session else self.day
            )
            day = str(number) if number is not None else session
            if day != self.day or not self.documents:
                self._close()
                # A day without a date counts as the one after the last.
                self.number = float(self.number + 1 if number is None else number)
                self.day = day
            self._recall([message for _, message in lines])
            text = turns.render(message for _, message in lines)
            self._store(Document(text, time, day, (turn.index,), pair=True))
            self.open += lines
            own = [s for _, s in turns.statements(message for _, message in lines)]
            personal = [s for s in own if _FIRST_PERSON.search(s)] or own
            self.said = [*self.said, *personal][-5:]

    def _store(self, document: Document) -> None:
        title = "Conversation" if document.pair else "Summary of the conversation"
        when = document.time or document.day
        vector = self.client.embed([f"{title} on {when}: {document.text}"])[0]
        row = self.index.add(vector)
        self.documents.append(document)
        draw = self._draw(row, self.number)
        self.memory.append(np.array([self.number, document.pair, 1, self.number, draw]))
        if document.pair:
            self.log.append(Entry("STORE", document.turns, "", document.text, "rule"))

    def _draw(self, row: int, day: float) -> float:
        """Return a number in [0, 1) that depends on seed, memory and the day of its last recall."""
        return float(generator(self.seed, f"memorybank {row} {day:g}").random())

    def survival(self, row: int, day: float) -> float:
        """Return the probability that a memory is still there on a day: exp(-t / (c * S))."""
        held = self.memory.rows[row]
        return float(_survival(max(0.0, day - held[RECALLED]), held[STRENGTH], self.forget))

    def remembered(self, day: float) -> np.ndarray:
        """Return which documents are not forgotten on a day: bool [rows]."""
        held = self.memory.rows
        pair = held[:, PAIR] == 1
        if not self.forget:
            return np.ones(len(held), bool)
        age = np.maximum(0.0, day - held[:, RECALLED])
        kept = held[:, DRAW] < _survival(age, held[:, STRENGTH], self.forget)
        return np.where(pair, kept, np.isin(held[:, DAY], held[kept & pair, DAY]))

    def _recall(self, messages: list[Message]) -> None:
        """Strengthen what the user's message recalls, as it does in the deployed system."""
        said = "\n".join(message.content for message in turns.said_by_people(messages))
        if not self.forget or not said or not self.documents:
            return
        vector = self.client.embed([said])[0]
        for row, _ in self.index.nearest(vector, self.k, self.remembered(self.number)):
            held = self.memory.rows[row]
            held[STRENGTH] += 1
            held[RECALLED] = self.number
            held[DRAW] = self._draw(row, self.number)

    def _close(self) -> None:
        """Summarise the open day: events and person."""
        if not self.open:
            return
        own = tuple(sorted({turn for turn, _ in self.open}))
        time = next((message.time for _, message in self.open if message.time), "")
        said = [
            turns.sentences(m.content)[:1] for m in turns.said_by_people(m for _, m in self.open)
        ]
        fallback = turns.first_words(" ".join(s for first in said for s in first), DAY_WORDS)
        summary = self._over_day(EVENTS, own, fallback)
        portrait = self._over_day(PERSON, own, " ".join(self.said))
        if summary:
            self._store(Document(summary, time, self.day, own, pair=False))
        self.new_days.append((time or self.day, summary, portrait))
        self.open = []

    def _over_day(self, task: Task, own: tuple[int, ...], fallback: str) -> str:
        """Summarise a day; a long one in portions, each with the summary so far."""
        left = self.client.left(task)
        text = ""
        for part in turns.portions(self.open, left // 2, self.client.backend.count_tokens):
            shown = turns.render(message for _, message in part)
            so_far = f"SO FAR: {self.client.clip(text, left // 4)}\n\n" if text else ""
            asked = self.client.ask(task, f"{so_far}CONVERSATION:\n{shown}", replies.prose)
            text = turns.first_words(asked.value or text or fallback, DAY_WORDS)
            event = "DAY SUMMARY" if task is EVENTS else "DAY PORTRAIT"
            self.log.append(Entry(event, own, "", text, asked.kind, asked.reply))
        return text

    def end(self) -> None:
        """Close the open day, and bring the global summary and portrait up to date."""
        with self.client.counting("add", 0):
            self._close()
            if self.new_days:
                days = " ".join(summary for _, summary, _ in self.new_days[-5:])
                made = [
                    self._over_days(ALL_EVENTS, self.summary, 1, days),
                    self._over_days(ALL_PERSON, self.portrait, 2, " ".join(self.said)),
                ]
                (self.summary, self.portrait), self.new_days = made, []

    def _over_days(self, task: Task, before: str, column: int, fallback: str) -> str:
        left = self.client.left(task)
        lines = [
            (0, Message("user", turns.dated(day[column], day[0][:40]), name="Day"))
            for day in self.new_days
            if day[column]
        ]
        text = before
        for part in turns.portions(lines, left // 2, self.client.backend.count_tokens):
            earlier = f"EARLIER: {self.client.clip(text, left // 4)}\n\n" if text else ""
            shown = turns.render(message for _, message in part)
            asked = self.client.ask(task, f"{earlier}DAYS:\n{shown}", replies.prose)
            after = turns.first_words(asked.value or fallback or text, GLOBAL_WORDS)
            event = "SUMMARY" if task is ALL_EVENTS else "PORTRAIT"
            self.log.append(Entry(event, (), text, after, asked.kind, asked.reply))
            text = after
        return text

    def search(self, question: Question) -> list[Note]:
        """Return portrait, summary and the k nearest documents that are not forgotten.

        It strengthens nothing: questions that test a memory must not depend on each other.
        """
        self.end()
        with self.client.counting("ask"):
            if not self.documents:
                return []
            asked = turns.day_number(question.query_time)
            # Without dates in the history, no time has passed since its end.
            day = self.number if asked is None or not self.day.isdigit() else float(asked)
            vector = self.client.embed([question.query])[0]
            kept = self.remembered(day)
            hits = self.index.nearest(vector, self.k, kept)
            globals_ = (("The user: ", self.portrait), ("Earlier: ", self.summary))
            notes = [Note(title + text, "", ()) for title, text in globals_ if text]
            shown: set[int] = set()
            for row, _ in hits:
                rows = self._widened(row, kept)
                if row not in shown:
                    notes.append(self._note(rows))
                shown.update(rows)
            return notes

    def _widened(self, row: int, kept: np.ndarray) -> list[int]:
        """Return a hit with the exchanges of its day around it, as long as they stay short."""
        if not self.documents[row].pair:
            return [row]
        rows = [row]
        for step in (-1, 1):
            near = row + step
            while 0 <= near < len(self.documents) and self._beside(near, rows, kept):
                rows.append(near)
                near += step
        return sorted(rows)

    def _beside(self, near: int, rows: list[int], kept: np.ndarray) -> bool:
        document = self.documents[near]
        length = sum(len(self.documents[row].text) for row in rows) + len(document.text)
        same = document.pair and self.memory.rows[near, DAY] == self.memory.rows[rows[0], DAY]
        return bool(same and kept[near] and length <= WIDEST)

    def _note(self, rows: list[int]) -> Note:
        found = [self.documents[row] for row in rows]
        own = tuple(sorted({turn for document in found for turn in document.turns}))
        return Note("\n".join(document.text for document in found), found[0].time, own)

    def size(self) -> dict[str, int]:
        texts = [document.text for document in self.documents]
        texts += [text for text in (self.summary, self.portrait) if text]
        return {"records": len(texts), "characters": sum(map(len, texts))}

    def to_json(self) -> dict[str, Any]:
        return saved(
            self, self.index, seed=self.seed, forget=self.forget, k=self.k,
            documents=[dataclasses.asdict(document) for document in self.documents],
            memory=pack(self.memory.rows), summary=self.summary, portrait=self.portrait,
            day=self.day, number=self.number, new_days=self.new_days, said=self.said,
            open=[[turn, dataclasses.asdict(message)] for turn, message in self.open],
        )  # fmt: skip

    @classmethod
    def from_json(cls, data: dict[str, Any], backend: Backend) -> Self:
        made = cls(backend, data["seed"], forget=data["forget"], k=data["k"])
        made.client, made.index, made.log = resumed(data, backend, made.name)
        documents = [d | {"turns": tuple(d["turns"])} for d in data["documents"]]
        made.documents = [Document(**document) for document in documents]
        made.memory = Grown(unpack(data["memory"]))
        made.new_days = [tuple(day) for day in data["new_days"]]
        made.open = [(turn, Message(**message)) for turn, message in data["open"]]
        for key in ("summary", "portrait", "day", "number", "said"):
            setattr(made, key, data[key])
        return made


def _survival(age, strength, c: float):
    return np.exp(-age / (c * strength)) if c else np.ones_like(np.asarray(age, float))
