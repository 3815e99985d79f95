# SPDX-License-Identifier: Apache-2.0
"""RMM (arXiv 2503.08026): topics with their raw turns, and a reranker that learns from citations.

There is no code of the authors. Scores are the retriever's until `reranker` is set to what
`bfm.baselines.rmm_training.train` gives.

| what | paper | here |
|---|---|---|
| extraction | a call a session and speaker | a call a person who speaks; long sessions in portions |
| turns a summary refers to | messages | turns as the harness cuts them |
| merging | K nearest entries, several actions a reply | 5 nearest, the first action; none stored: ADD |
| the open session | in the prompt, as context | ended by the question, which comes later |
| initial weights | not given | zeros: the retriever's own order |
| scale of the scores | not given | alpha = 1 / (mean std of K scores over the first 50 questions) |
| P of what is shown | product of softmax | the same; Plackett-Luce by `policy` |
| clipping | not given | gradient norm of at most 1 |
| test time | learns on | frozen, no noise |
| no brackets in an answer | not given | asked for the numbers alone; else the question is skipped |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from bfm.baselines import replies, turns
from bfm.baselines.backend import Backend
from bfm.baselines.ledger import Client, Entry
from bfm.baselines.protocol import Note, resumed, saved
from bfm.baselines.replies import Decision
from bfm.baselines.reranker import M, Reranker
from bfm.baselines.tasks import CITE, MERGE, TOPICS, Task
from bfm.baselines.turns import Line
from bfm.baselines.vectors import Index
from bfm.dialogue import Message, Question, Turn

K, NEIGHBOURS = 20, 5


@dataclasses.dataclass
class Topic:
    """A topic: its summary is the search key, its turns are the value."""

    summary: str
    time: str
    turns: tuple[int, ...]


class RMM:
    """The memory of one user; see `bfm.baselines.protocol.System`."""

    name = "rmm"

    def __init__(self, backend: Backend, *, reranker: Reranker | None = None):
        self.client = Client(backend)
        self.log: list[Entry] = []
        self.reranker = reranker
        self.topics: list[Topic] = []  # by row of the index
        self.index = Index()
        self.raw: dict[int, str] = {}  # turn -> its text
        self.session = ""
        self.open: list[Line] = []

    def add(self, turn: Turn) -> None:
        """Take in a turn; a new session first ends the last one."""
        with self.client.counting("add"):
            lines = turns.lines_of(turn)
            if not lines:
                return
            time = turns.time_of(turn)
            session = turn.messages[0].session or f"day {turns.day_number(time)}"
            if session != self.session:
                self._reflect()
                self.session = session
            self.raw[turn.index] = turns.dated(turns.render(m for _, m in lines), time)
            self.open += lines

    def end(self) -> None:
        """End the open session."""
        with self.client.counting("add", 0):
            self._reflect()

    def _reflect(self) -> None:
        """Prospective reflection: extract the session's topics, merge each into the memory."""
        lines = self.open
        times = {turn: message.time[:40] for turn, message in lines if message.time}
        for who in dict.fromkeys(map(turns.speaker, turns.said_by_people(m for _, m in lines))):
            task = dataclasses.replace(TOPICS, what=TOPICS.what.replace("{who}", who))
            task = dataclasses.replace(task, again=TOPICS.again.replace("{who}", who))
            room = self.client.left(task) * 2 // 3
            for part in turns.portions(lines, room, self.client.backend.count_tokens):
                if any(turns.speaker(message) == who for _, message in part):
                    for summary, own in self._topics(task, who, part):
                        time = next((times[turn] for turn in reversed(own) if turn in times), "")
                        self._apply(summary, time, own)
        self.open = []

    def _topics(self, task: Task, who: str, part: list[Line]) -> list[tuple[str, tuple[int, ...]]]:
        order = [*dict.fromkeys(turn for turn, _ in part)]
        texts = [turns.render(m for turn, m in part if turn == t) for t in order]
        data = "TURNS:\n" + "\n".join(f"{i}. {text}" for i, text in enumerate(texts))
        asked = self.client.ask(task, data, lambda text: replies.topics(text, len(order)))
        if asked.value is None:
            said = [(turn, m) for turn, m in part if turns.said_by_people([m])]
            firsts: dict[int, str] = {}
            for turn, message in said:
                if turns.speaker(message) == who:
                    firsts.setdefault(turn, turns.sentences(message.content)[0])
            found = [(text, (turn,)) for turn, text in firsts.items()]
        else:
            found = [(text, tuple(sorted({order[i] for i in refs}))) for text, refs in asked.value]
        after = "\n".join(f"{text} | {own}" for text, own in found)
        self.log.append(Entry("EXTRACT", tuple(order), "", after, asked.kind, asked.reply))
        return found

    def _apply(self, summary: str, time: str, own: tuple[int, ...]) -> None:
        vector = self.client.embed([summary])[0]
        near = [row for row, _ in self.index.nearest(vector, NEIGHBOURS)]
        kind, reply, event = "rule", "", Decision("ADD")
        if near:
            left = self.client.left(MERGE)
            shown = [
                f"{n}. {self.client.clip(' '.join(self.topics[row].summary.split()), left // 10)}"
                for n, row in enumerate(near, start=1)
            ]
            new = self.client.clip(summary, left // 4)
            data = "TOPICS:\n" + "\n".join(shown) + f"\n\nNEW TOPIC: {new}"
            asked = self.client.ask(
                MERGE, data, lambda text: _merging(replies.decision(text, len(near)))
            )
            kind, reply, event = asked.kind, asked.reply, asked.value or event
        if event.event == "ADD":
            self.index.add(vector)
            self.topics.append(Topic(summary, time, own))
            self.log.append(Entry("ADD", own, "", summary, kind, reply))
            return
        row = near[event.at]
        topic = self.topics[row]
        text = event.text or topic.summary
        if not event.text:  # it says where, not what: the summary stays, the turns are united
            self.client.counts.fallbacks += 1
            kind = "fallback"
        vector = self.client.embed([text])[0]
        merged = Topic(text, time or topic.time, tuple(sorted({*topic.turns, *own})))
        self.index.replace(row, vector)
        self.topics[row] = merged
        self.log.append(Entry("MERGE", own, topic.summary, text, kind, reply))

    def search(self, question: Question) -> list[Note]:
        """Return the M best of the K nearest topics, by the reranker, without noise."""
        self.end()
        with self.client.counting("ask"):
            found = self.candidates(question)
            if found is None:
                return []
            rows, query, memories = found
            scores = self.reranker.scores(query, memories) if self.reranker else memories @ query
            best = np.argsort(-np.round(scores, 6), kind="stable")[:M]
            return [self._note(rows[i]) for i in best]

    def candidates(self, question: Question) -> tuple[list[int], np.ndarray, np.ndarray] | None:
        """Return the K nearest: rows, the question's vector [d], theirs [K, d]; None without topics."""
        if not self.topics:
            return None
        query = self.client.embed([question.query])[0].astype(np.float64)
        near = self.index.nearest(query.astype(np.float32), K)
        rows = [row for row, _ in near]
        return rows, query, np.array([self.index.vector(row) for row in rows], np.float64)

    def cite(self, question: Question, rows: Sequence[int]) -> list[int] | None:
        """Answer from the rows and return which were cited; None where no reply says it."""
        left = self.client.left(CITE)
        asked_for = [question.query, *(f"- {option}" for option in question.options)]
        each = left // 2 // max(1, len(rows))
        shown = [f"[{i}] {self.client.clip(self._note(r).text, each)}" for i, r in enumerate(rows)]
        query = self.client.clip("\n".join(asked_for), left // 3)
        data = "MEMORIES:\n" + "\n\n".join(shown) + f"\n\nQUESTION: {query}"
        asked = self.client.ask(CITE, data, lambda text: replies.citations(text, len(rows)))
        own = tuple(sorted({turn for row in rows for turn in self.topics[row].turns}))
        self.log.append(Entry("CITE", own, "", str(asked.value), asked.kind, asked.reply))
        return asked.value

    def _note(self, row: int) -> Note:
        topic = self.topics[row]
        raw = [self.raw[turn] for turn in topic.turns]
        return Note("\n".join([topic.summary, *raw]), topic.time, topic.turns)

    def size(self) -> dict[str, int]:
        characters = sum(len(topic.summary) for topic in self.topics)
        characters += sum(map(len, self.raw.values()))
        return {"records": len(self.topics), "characters": characters}

    def to_json(self) -> dict[str, Any]:
        return saved(
            self, self.index, topics=[dataclasses.asdict(topic) for topic in self.topics],
            raw=sorted(self.raw.items()), session=self.session,
            open=[[turn, dataclasses.asdict(message)] for turn, message in self.open],
            reranker=self.reranker and self.reranker.to_json(),
        )  # fmt: skip

    @classmethod
    def from_json(cls, data: dict[str, Any], backend: Backend) -> Self:
        made = cls(backend)
        made.client, made.index, made.log = resumed(data, backend, cls.name)
        made.topics = [Topic(**t | {"turns": tuple(t["turns"])}) for t in data["topics"]]
        made.raw = {turn: text for turn, text in data["raw"]}
        made.session = data["session"]
        made.open = [(turn, Message(**message)) for turn, message in data["open"]]
        made.reranker = data["reranker"] and Reranker.from_json(data["reranker"])
        return made


def _merging(found: Decision | None) -> Decision | None:
    return found if found is not None and found.event in ("ADD", "MERGE") else None
