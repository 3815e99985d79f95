# SPDX-License-Identifier: Apache-2.0
"""A-MEM (arXiv 2502.12110): notes with metadata of their own, linked to and rewriting older notes.

| what | paper (P) or code (C, the robust files of its authors) | here |
|---|---|---|
| a note | one message | one turn as the harness cuts it, an exchange by default |
| embedded | content, context, keywords, tags | the same; content cut to 120 words |
| links | P: by the model among the nearest; C: 5 | 5 shown, numbered 0-4 |
| evolution | P: one call a neighbour; C: in the call of the links | one call for the linked ones |
| what evolves | P: keywords, too; C: context and tags | context and tags |
| embedding again | C: all notes after 100 evolving additions | at once (`evo_threshold=100`: as C) |
| query | C: keywords of the question by the model | the question (`query="keywords"`: as C) |
| retrieval | top k, each with up to k + 1 linked notes | the same, k = 10 |
| unreadable reply | C: capitalised words, first sentence, 3 tags | words of tf-idf; the same |
| temperature | C: 0.7 | 0 |
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import Counter
from typing import Any, Self

from bfm.baselines import replies, turns
from bfm.baselines.backend import Backend
from bfm.baselines.ledger import Asked, Client, Entry
from bfm.baselines.protocol import Note, resumed, saved
from bfm.baselines.tasks import DESCRIBE, EVOLVE, KEYWORDS, LINK
from bfm.baselines.vectors import Index
from bfm.dialogue import Question, Turn
from bfm.shortlist import words

NEIGHBOURS = 5
CONTENT_WORDS = 120  # of a note's embedded text; MiniLM reads 256 word pieces


@dataclasses.dataclass
class Memory:
    """A note. Content, time, keywords and turns stay as they are; context and tags may evolve."""

    content: str
    time: str
    keywords: list[str]
    context: str
    tags: list[str]
    links: list[int]
    turns: tuple[int, ...]


class AMem:
    """The memory of one user; see `bfm.baselines.protocol.System`."""

    name = "amem"

    def __init__(
        self,
        backend: Backend,
        *,
        k: int = 10,
        expand: bool = True,
        query: str = "question",
        evo_threshold: int = 1,
    ):
        if query not in ("question", "keywords"):
            raise ValueError(f"query: must be 'question' or 'keywords', not {query!r}")
        self.client = Client(backend)
        self.log: list[Entry] = []
        self.k, self.expand, self.query, self.evo_threshold = k, expand, query, evo_threshold
        self.notes: list[Memory] = []  # by row of the index
        self.index = Index()
        self.holds: Counter[str] = Counter()  # word -> notes that hold it
        self.evolved: set[int] = set()  # rows to embed again
        self.evolutions = 0  # additions that evolved a note since then

    def add(self, turn: Turn) -> None:
        """Make a note, link it, and let it rewrite those it is linked to: at most three requests."""
        with self.client.counting("add"):
            if messages := [message for _, message in turns.lines_of(turn)]:
                content = "\n".join(
                    f"Speaker {turns.speaker(m)} says: {m.content}" for m in messages
                )
                plain = "\n".join(message.content for message in messages)
                self._add(content, plain, turns.time_of(turn), (turn.index,))

    def _add(self, content: str, plain: str, time: str, own: tuple[int, ...]) -> None:
        note, asked = self._described(content, plain, time, own)
        after = f"{', '.join(note.keywords)} / {note.context} / {', '.join(note.tags)}"
        self.log.append(Entry("NOTE", own, "", after, asked.kind, asked.reply))
        vector = self.client.embed([_embedded(note)])[0]
        near = [row for row, _ in self.index.nearest(vector, NEIGHBOURS)]
        if near:
            self._link(note, near)
            if note.links:
                self._evolve(note)
            vector = self.client.embed([_embedded(note)])[0]  # its tags may be new
        self.index.add(vector)
        self.notes.append(note)
        self.holds.update(set(words(content)))
        if self.evolved and self.evolutions >= self.evo_threshold:
            rows = sorted(self.evolved)
            vectors = self.client.embed([_embedded(self.notes[row]) for row in rows])
            for row, vector in zip(rows, vectors, strict=True):
                self.index.replace(row, vector)
            self.evolved, self.evolutions = set(), 0

    def _described(
        self, content: str, plain: str, time: str, own: tuple[int, ...]
    ) -> tuple[Memory, Asked]:
        room = self.client.left(DESCRIBE)
        data = f"TEXT: {self.client.clip(turns.dated(content, time), room * 4 // 5)}"
        asked = self.client.ask(DESCRIBE, data, _description)
        if asked.value:
            keywords, context, tags = asked.value
        else:
            keywords = self._rarest(plain, 5)
            context = (turns.sentences(plain) or [plain])[0]
            tags = keywords[:3]
        return Memory(content, time, keywords, context, tags, [], own), asked

    def _rarest(self, text: str, n: int) -> list[str]:
        """Return the n words of highest tf-idf against the notes so far, ties to the earlier."""
        counts = Counter(word for word in words(text) if len(word) > 1 or not word.isascii())
        total = len(self.notes) + 1
        scores = {w: c * math.log(1 + total / (1 + self.holds[w])) for w, c in counts.items()}
        return sorted(scores, key=lambda w: -scores[w])[:n]

    def _link(self, note: Memory, near: list[int]) -> None:
        left = self.client.left(LINK)
        data = f"NEW NOTE:\n{self._shown(note, left // 3)}\n\nOLD NOTES:\n"
        data += self._listed(near, left // 2)
        asked = self.client.ask(LINK, data, lambda text: _links(text, len(near)))
        if asked.value:
            chosen, tags = asked.value
            note.links = [near[i] for i in chosen]
            note.tags = tags or note.tags
        after = f"links {note.links} / {', '.join(note.tags)}"
        self.log.append(Entry("LINK", note.turns, "", after, asked.kind, asked.reply))

    def _evolve(self, note: Memory) -> None:
        left = self.client.left(EVOLVE)
        data = f"NEW NOTE:\n{self._shown(note, left // 3)}\n\nOLD NOTES:\n"
        data += self._listed(note.links, left // 2)
        asked = self.client.ask(EVOLVE, data, lambda text: _evolution(text, len(note.links)))
        for i, (context, tags) in (asked.value or {}).items():
            row = note.links[i]
            old = self.notes[row]
            was = f"note {row}: {old.context} / {', '.join(old.tags)}"
            old.context, old.tags = context or old.context, tags or old.tags
            now = f"note {row}: {old.context} / {', '.join(old.tags)}"
            self.evolved.add(row)
            self.log.append(Entry("EVOLVE", note.turns, was, now, asked.kind, asked.reply))
        if not asked.value:
            self.log.append(Entry("KEEP", note.turns, "", "", asked.kind, asked.reply))
        self.evolutions += bool(asked.value)

    def _shown(self, note: Memory, room: int) -> str:
        tail = f" (context: {note.context}; keywords: {', '.join(note.keywords)}; "
        tail = self.client.clip(tail + f"tags: {', '.join(note.tags)})", max(8, room // 2))
        text = turns.dated(" ".join(note.content.split()), note.time)
        return self.client.clip(text, max(8, room // 2)) + tail

    def _listed(self, rows: list[int], room: int) -> str:
        each = room // len(rows)
        return "\n".join(f"{i}. {self._shown(self.notes[row], each)}" for i, row in enumerate(rows))

    def end(self) -> None:
        """Nothing is ever open."""

    def search(self, question: Question) -> list[Note]:
        """Return the k notes of highest cosine, each followed by the notes it is linked to."""
        with self.client.counting("ask"):
            if not self.notes:
                return []
            text = question.query
            if self.query == "keywords":
                clipped = self.client.clip(text, self.client.left(KEYWORDS) * 4 // 5)
                asked = self.client.ask(KEYWORDS, f"QUESTION: {clipped}", replies.prose)
                text = asked.value or text
            hits = self.index.nearest(self.client.embed([text])[0], self.k)
            rows: dict[int, None] = {}
            for row, _ in hits:
                linked = self.notes[row].links[: self.k + 1] if self.expand else []
                rows |= dict.fromkeys([row, *linked])
            return [_read(self.notes[row]) for row in rows]

    def size(self) -> dict[str, int]:
        characters = sum(len(_read(note).text) for note in self.notes)
        return {"records": len(self.notes), "characters": characters}

    def to_json(self) -> dict[str, Any]:
        return saved(
            self, self.index, notes=[dataclasses.asdict(note) for note in self.notes],
            k=self.k, expand=self.expand, query=self.query, evo_threshold=self.evo_threshold,
            evolved=sorted(self.evolved), evolutions=self.evolutions,
        )  # fmt: skip

    @classmethod
    def from_json(cls, data: dict[str, Any], backend: Backend) -> Self:
        settings = {key: data[key] for key in ("k", "expand", "query", "evo_threshold")}
        made = cls(backend, **settings)
        made.client, made.index, made.log = resumed(data, backend, cls.name)
        made.notes = [Memory(**note | {"turns": tuple(note["turns"])}) for note in data["notes"]]
        for note in made.notes:
            made.holds.update(set(words(note.content)))
        made.evolved, made.evolutions = set(data["evolved"]), data["evolutions"]
        return made


def _embedded(note: Memory) -> str:
    content = turns.first_words(note.content, CONTENT_WORDS)
    return "\n".join([content, note.context, ", ".join(note.keywords), ", ".join(note.tags)])


def _read(note: Memory) -> Note:
    text = f"{note.content}\nContext: {note.context}\nKeywords: {', '.join(note.keywords)}\n"
    return Note(text + f"Tags: {', '.join(note.tags)}", note.time, note.turns)


def _description(text: str) -> tuple[list[str], str, list[str]] | None:
    found = replies.labelled(text, "KEYWORDS", "CONTEXT", "TAGS")
    if len(found) < 3:
        return None
    return replies.items(found["KEYWORDS"]), found["CONTEXT"], replies.items(found["TAGS"])


def _links(text: str, shown: int) -> tuple[list[int], list[str]] | None:
    found = replies.labelled(text, "LINKS", "TAGS")
    chosen = replies.numbers(found["LINKS"], shown) if "LINKS" in found else None
    if chosen is None:
        return ([], []) if replies.is_none(text) else None
    return chosen, replies.items(found.get("TAGS", ""))


def _evolution(text: str, shown: int) -> dict[int, tuple[str, list[str]]] | None:
    """Return what changes, by the number shown; {} where all is kept, None if no line can be read."""
    value = replies.first_json(text) if text[:1] in ("{", "[") else None
    if isinstance(value, dict):  # {"0": {"context": .., "tags": ..}, "1": "KEEP"} as lines
        text = "\n".join(
            f"{key}: {json.dumps(v) if isinstance(v, dict) else v}" for key, v in value.items()
        )
    made: dict[int, tuple[str, list[str]]] = {}
    kept = re.fullmatch(r"\W*keep(?: all| both)?\W*", text, re.I) is not None
    for line in text.splitlines():
        match = re.match(
            r"[\s*\-#(\[]*(?:note|neighbou?r)?\s*(\d{1,3})\b[\s:.)\]*]*(.*)", line, re.I
        )
        if match and int(match[1]) < shown:
            if found := replies.labelled(match[2], "CONTEXT", "TAGS"):
                tags = replies.items(found.get("TAGS", ""))
                made.setdefault(int(match[1]), (found.get("CONTEXT", ""), tags))
            kept |= re.match(r"\W*keep\b", match[2], re.I) is not None
    return made if made or kept else None
