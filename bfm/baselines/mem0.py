# SPDX-License-Identifier: Apache-2.0
"""Mem0 (arXiv 2504.19413): facts of an exchange, each added, merged into, or set against stored ones.

`add_only` is what releases from 2.0.0 on do instead: one call that only adds, hybrid ranking.

| what | paper (P) or package (1.x, 2.x) | here |
|---|---|---|
| context | P: summary by a job of its own; 10 messages | summary every 10 exchanges; the same 10 |
| whose words | P: the exchange; 1.x: the user's | users' and named partners'; no assistant's |
| neighbours | P: 10; 1.x: 5, one call for all facts | 10, one call a fact |
| empty store | asks all the same | ADD without a call |
| DELETE | the old note goes, the new fact is lost | the new fact stays ("paper": lost) |
| the same words again | 1.x: may be stored twice | NOOP; the turns are united |
| unreadable reply | lost in silence | retry; sentences verbatim; NOOP or ADD by cosine |
| 2.x: prompt | 33,600 characters | a few lines, so that small windows hold it |
| 2.x: entity boost | where spaCy is installed | left out |
| 2.x: BM25 | where fastembed is installed | `bfm.shortlist.bm25` over the store |
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from typing import Any, Self

from bfm.baselines import replies, turns
from bfm.baselines.backend import Backend
from bfm.baselines.ledger import Asked, Client, Entry, Kind
from bfm.baselines.protocol import Note, resumed, saved
from bfm.baselines.replies import Decision
from bfm.baselines.tasks import ADD_ONLY, DECIDE, FACTS, SUMMARISE, SUMMARY_WORDS, Task
from bfm.baselines.turns import Line
from bfm.baselines.vectors import Index
from bfm.dialogue import Question, Turn
from bfm.shortlist import bm25, words

NEIGHBOURS, RECENT, REFRESH = 10, 10, 10
SAME = 0.95  # cosine at which a fact counts as stored, where no reply says what to do
LEAST, POOL = 0.1, 60  # 2.x: the lowest cosine that is ranked, the least number fetched


@dataclasses.dataclass
class Fact:
    """A stored fact. Only text, `updated` and `turns` ever change."""

    text: str
    created: str
    updated: str
    turns: tuple[int, ...]


class Mem0:
    """The memory of one user; see `bfm.baselines.protocol.System`."""

    def __init__(
        self,
        backend: Backend,
        *,
        add_only: bool = False,
        on_delete: str = "replace",
        k: int = 10,
    ):
        if on_delete not in ("replace", "paper"):
            raise ValueError(f"on_delete: must be 'replace' or 'paper', not {on_delete!r}")
        self.name = "mem0_add" if add_only else "mem0"
        self.client = Client(backend)
        self.log: list[Entry] = []
        self.add_only, self.on_delete, self.k = add_only, on_delete, k
        self.facts: list[Fact | None] = []  # by row of the index; None: deleted
        self.index = Index()
        self.summary = ""
        self.recent: deque[str] = deque(maxlen=RECENT)
        self.unsummarised: list[str] = []

    def add(self, turn: Turn) -> None:
        """Extract facts and apply one operation a fact (or add them all)."""
        lines = turns.lines_of(turn)
        with self.client.counting("add"):
            task = ADD_ONLY if self.add_only else FACTS
            room = self.client.left(task) * 2 // 5
            for part in turns.portions(lines, room, self.client.backend.count_tokens):
                # Without a person's words there is nothing to note; 2.x reads both roles.
                if self.add_only or turns.said_by_people(message for _, message in part):
                    self._note(task, part, turns.time_of(turn))
            shown = [turns.render([message]) for _, message in lines]
            self.recent.extend(shown)
            if not self.add_only and shown:
                self.unsummarised.append("\n".join(shown))
                if len(self.unsummarised) == REFRESH:
                    self._summarise()

    def _note(self, task: Task, part: list[Line], time: str) -> None:
        exchange = turns.render(message for _, message in part)
        own = tuple(sorted({turn for turn, _ in part}))
        left = self.client.left(task)
        context = [self.client.clip(text, left // 5 // RECENT) for text in self.recent]
        shown = [("RECENT MESSAGES", "\n".join(context))]
        if self.add_only:
            near = self.index.nearest(self.client.embed([exchange])[0], NEIGHBOURS)
            shown.insert(0, ("STORED NOTES", self._numbered(near, left // 5)))
        else:
            shown.insert(0, ("SUMMARY", self.client.clip(self.summary, left // 5)))
        shown.append(("NEW EXCHANGE", turns.dated(exchange, time)))
        data = "\n\n".join(f"{title}:\n{text}" for title, text in shown if text)
        asked = self.client.ask(task, data, replies.facts)
        found = asked.value
        if found is None:
            found = [
                turns.dated(f"{turns.speaker(message)}: {sentence}", time)
                for message, sentence in turns.statements(message for _, message in part)
            ]
        self.log.append(Entry("EXTRACT", own, "", "\n".join(found), asked.kind, asked.reply))
        for text in found:
            if self.add_only:
                self._insert(text, time, own, asked.kind)
            else:
                self._apply(text, time, own)

    def _apply(self, text: str, time: str, own: tuple[int, ...]) -> None:
        """Ask for the operation of one fact, and do it."""
        vector = self.client.embed([text])[0]
        near = self.index.nearest(vector, NEIGHBOURS)
        if not near:
            self._insert(text, time, own, "rule", vector)
            return
        left = self.client.left(DECIDE)
        new = self.client.clip(turns.dated(text, time), left // 4)
        data = f"NOTES:\n{self._numbered(near, left // 2)}\n\nNEW FACT: {new}"
        asked = self.client.ask(
            DECIDE, data, lambda reply: _operation(replies.decision(reply, len(near)))
        )
        event = asked.value or Decision("NOOP" if near[0][1] >= SAME else "ADD")
        row = near[event.at][0] if event.at >= 0 else near[0][0]
        fact = self.facts[row]
        if event.event == "UPDATE":
            vector = self.client.embed([event.text])[0]
            after = Fact(event.text, fact.created, time or fact.updated, _united(fact.turns, own))
            self.index.replace(row, vector)
            self.facts[row] = after
            self._log("UPDATE", own, fact.text, event.text, asked)
        elif event.event == "DELETE":
            self.index.remove(row)
            self.facts[row] = None
            self._log("DELETE", own, fact.text, "", asked)
            if self.on_delete == "replace":
                self._insert(text, time, own, asked.kind, vector)
        elif event.event == "ADD":
            self._insert(text, time, own, asked.kind, vector, asked.reply)
        else:
            self._log("NOOP", own, text, "", asked)

    def _insert(
        self, text: str, time: str, own: tuple[int, ...], kind: Kind, vector=None, reply: str = ""
    ) -> None:
        """Store a fact, unless the same words are stored: then their turns are united."""
        vector = self.client.embed([text])[0] if vector is None else vector
        for row, _ in self.index.nearest(vector, NEIGHBOURS):
            if _same(self.facts[row].text, text):
                self.facts[row].turns = _united(self.facts[row].turns, own)
                self.log.append(Entry("NOOP", own, text, "", kind, reply))
                return
        self.index.add(vector)
        self.facts.append(Fact(text, time, time, own))
        self.log.append(Entry("ADD", own, "", text, kind, reply))

    def _log(self, event: str, own: tuple[int, ...], before: str, after: str, asked: Asked) -> None:
        self.log.append(Entry(event, own, before, after, asked.kind, asked.reply))

    def _summarise(self) -> None:
        left = self.client.left(SUMMARISE)
        each = left * 3 // 5 // REFRESH
        new = "\n".join(self.client.clip(text, each) for text in self.unsummarised)
        data = f"SUMMARY:\n{self.client.clip(self.summary, left // 5)}\n\nNEW MESSAGES:\n{new}"
        asked = self.client.ask(SUMMARISE, data, replies.prose)
        before, self.unsummarised = self.summary, []
        if asked.value:  # the fallback keeps the old one
            self.summary = turns.first_words(asked.value, SUMMARY_WORDS)
        self.log.append(Entry("SUMMARY", (), before, self.summary, asked.kind, asked.reply))

    def _numbered(self, near: list[tuple[int, float]], room: int) -> str:
        each = max(8, room // max(1, len(near)))
        found = [self.facts[row] for row, _ in near]
        return "\n".join(
            f"{n}. {self.client.clip(turns.dated(' '.join(f.text.split()), f.updated), each)}"
            for n, f in enumerate(found, start=1)
        )

    def end(self) -> None:
        """Nothing is ever open."""

    def search(self, question: Question) -> list[Note]:
        """Return the k facts of highest cosine; for `add_only`, of highest hybrid score."""
        with self.client.counting("ask"):
            if not len(self.index):
                return []
            vector = self.client.embed([question.query])[0]
            k = max(4 * self.k, POOL) if self.add_only else self.k
            near = self.index.nearest(vector, k)
            if self.add_only:
                near = self._hybrid(question.query, near)[: self.k]
            found = [self.facts[row] for row, _ in near]
            return [Note(fact.text, fact.updated, fact.turns) for fact in found]

    def _hybrid(self, query: str, near: list[tuple[int, float]]) -> list[tuple[int, float]]:
        """Return rows by min(1, (cosine + bm25') / Z), Z = 2 where a word matches anywhere, else 1."""
        raw = bm25(query, [fact.text if fact else "" for fact in self.facts])
        terms = len(set(words(query)))
        steps = ((3, 5, 0.7), (6, 7, 0.6), (9, 9, 0.5), (15, 10, 0.5), (math.inf, 12, 0.5))
        middle, slope = next((m, a) for most, m, a in steps if terms <= most)
        lexical = [1 / (1 + math.exp(slope * (middle - s))) if s > 0 else 0.0 for s in raw]
        whole = 2.0 if any(lexical) else 1.0
        scored = [(row, min(1.0, (s + lexical[row]) / whole)) for row, s in near if s >= LEAST]
        return sorted(scored, key=lambda pair: (-pair[1], pair[0]))

    def size(self) -> dict[str, int]:
        held = [fact for fact in self.facts if fact]
        return {"records": len(held), "characters": sum(len(fact.text) for fact in held)}

    def to_json(self) -> dict[str, Any]:
        return saved(
            self, self.index,
            facts=[fact and dataclasses.asdict(fact) for fact in self.facts],
            on_delete=self.on_delete, k=self.k, summary=self.summary,
            recent=[*self.recent], unsummarised=self.unsummarised,
        )  # fmt: skip

    @classmethod
    def from_json(cls, data: dict[str, Any], backend: Backend) -> Self:
        made = cls(
            backend, add_only=data["system"] == "mem0_add",
            on_delete=data["on_delete"], k=data["k"],
        )  # fmt: skip
        made.client, made.index, made.log = resumed(data, backend, made.name)
        made.facts = [f and Fact(**f | {"turns": tuple(f["turns"])}) for f in data["facts"]]
        made.summary, made.unsummarised = data["summary"], list(data["unsummarised"])
        made.recent.extend(data["recent"])
        return made


def _operation(found: Decision | None) -> Decision | None:
    return None if found is None or found.event == "MERGE" else found


def _united(old: tuple[int, ...], new: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted({*old, *new}))


def _same(a: str, b: str) -> bool:
    return " ".join(a.split()).casefold() == " ".join(b.split()).casefold()
