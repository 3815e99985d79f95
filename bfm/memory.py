# SPDX-License-Identifier: Apache-2.0
"""The online memory: keeps each user's turns in one file and finds those that move a question.

    memory = BayesFactorMemory("memory.db")
    memory.add("I gave up coffee in May.", "ann", time="2024-05-02")
    selection = memory.select("What should I drink now?", "ann")
    prompt = selection.render() + "What should I drink now?"  # for any other model

Adding writes a row and needs no model. A question is scored against the turns by Sal_q, the log Bayes
factor log p(q | turn) - log p(q) in nats. Turns above a threshold are read, or what a policy (the
export of launch/sft.py) decides. Each turn is a batch of its own, so its number is the same bits
whatever else is remembered.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from bfm import generate, lora
from bfm.batching import bucket
from bfm.dialogue import Question, RecordError, Turn
from bfm.heads import ReaderPrompt, controller_prompt, reader_prompt, reader_room
from bfm.lm import LM, ModelError, adapted, open_model
from bfm.memory_input import about, asking, by_time, exchanges, numbered, same_words, text_of, user
from bfm.memory_store import Entry, TurnFile
from bfm.opening import SHIPPED, adapter_at, open_base, open_tuned
from bfm.policy import asked, decide, read_options
from bfm.prompts import PromptError, turn_messages
from bfm.recall import Answer, Cost, Deleted, Hit, Hits, Selection
from bfm.saliency import Job, Scorer, unanswered
from bfm.saliency import focus as above
from bfm.settings import Settings
from bfm.shortlist import shortlist
from bfm.store import TurnStates

SHORTLIST = 64  # turns that are scored where settings.shortlist names no number
_WHOLE = object()  # an argument that was not given; None, an empty variable, must not delete a user


@dataclasses.dataclass(frozen=True)
class _Loaded:
    """The models at work: the base model scores, the tuned one (or the base) decides and reads."""

    base: LM
    scorer: Scorer
    policy: LM | None
    reader: LM
    reading: Scorer
    settings: Settings


@dataclasses.dataclass(frozen=True)
class _Weighed:
    """A user's turns in time order with Sal_q (None: not scored), and the hits among them by place."""

    turns: tuple[Turn, ...]
    sal_q: tuple[float | None, ...]
    hits: dict[int, Hit]
    cost: Cost


class BayesFactorMemory:
    """Turns of any number of users, kept in an SQLite file and selected by Bayes factors.

    Every method names one user and sees that user's turns only. Safe under threads: models work for one
    call at a time, adding never waits for them. Other processes may use the file too, but each keeps
    its own turn states: a delete empties the file and the states of the process that deletes.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        model: LM | str | os.PathLike[str] = "",
        policy: LM | str | os.PathLike[str] | None = "",
        settings: Settings | None = None,
        states: int = 1 << 30,
    ):
        """Open or create a memory; models are loaded when a question first needs them.

        path: an SQLite file, or ":memory:". model: what scores, loaded or a path ("": what
        `settings.model` names). policy: the fine-tuned controller and reader, loaded or the export/ or
        adapter.safetensors of launch/sft.py, or "shipped" ("": what `settings.policy` names). Without
        one the turns of Sal_q above `settings.eval.tau_q` are read: with "" and the default model by
        the reader that comes with bfm, with None by the base model. states: bytes of turn states to
        keep. Raises MemoryFileError.
        """
        self._settings = settings or Settings()
        self._model = model
        self._policy = self._settings.policy if policy == "" else policy
        self._states = TurnStates(states)
        self._device = threading.RLock()  # models and turn states: one call at a time
        self._models: _Loaded | None = None
        self._file = TurnFile(path)

    def __enter__(self) -> BayesFactorMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    # Writing

    def add(self, turn: Any, user_id: str, time: str = "") -> int:
        """Remember one exchange and return its number, counted from 1 for each user, never given again.

        turn: a text (a user's message), a message {"role", "content", "name"?, "time"?, "session"?},
        a list of messages (a user's and the replies to it), or a bfm.dialogue Message or Turn. time:
        for messages without one; any text, ISO 8601 where order is to follow it. The clock is never
        read. Raises RecordError for what is no exchange or holds no text; nothing is stored then.
        """
        split = exchanges(turn, time, self._settings.unit)
        if len(split) > 1:
            raise RecordError("turn", f"holds {len(split)} exchanges; extend() takes several")
        return self._file.add(user(user_id), split)[0]

    def extend(self, messages: Any, user_id: str, time: str = "") -> tuple[int, ...]:
        """Remember a conversation, all its exchanges or none; return their numbers. See `add`."""
        return self._file.add(user(user_id), exchanges(messages, time, self._settings.unit))

    def delete(
        self, *, user_id: str, turn: Any = _WHOLE, topic: Any = _WHOLE, dry_run: bool = False
    ) -> Deleted:
        """Delete a user, or one turn, or a topic: the turns that hold every word of it.

        Words are those of BM25 (whole, lower case; each CJK character is one), of contents and names.
        With a user the numbering goes too. What is deleted leaves the file (rewritten without it),
        its log and the turn states. dry_run: only says what would go.
        """
        if turn is not _WHOLE and topic is not _WHOLE:
            raise RecordError("turn", "is given beside topic; give one of them")
        goes = about(topic) if topic is not _WHOLE else None
        goes = numbered(turn) if turn is not _WHOLE else goes
        gone, wiped = self._file.delete(user(user_id), goes, dry_run)
        if not dry_run:
            # A question that still saw these turns holds the device: its states are dropped after it.
            with self._device:
                self._states.drop(user_id)
        return Deleted(gone, wiped)

    # Reading without a model

    def get_all(self, user_id: str) -> list[Entry]:
        """Return every turn of a user in the order of adding."""
        return self._file.read(user(user_id))

    def export(self, user_id: str) -> dict[str, Any]:
        """Return all that is kept of a user as JSON data; each turn's messages can be added again."""
        return {"user_id": user_id, "turns": [entry.to_json() for entry in self.get_all(user_id)]}

    # Questions

    def search(self, query: str, user_id: str, k: int = 10, query_time: str = "") -> Hits:
        """Return the k turns of highest Sal_q, best first, ties by the lower number.

        A history longer than the shortlist (`settings.shortlist`, here 64 where that is 0) is cut to
        it by BM25 and recency before scoring. Of turns with the same words only the latest is scored.
        """
        if type(k) is not int or k < 1:
            raise RecordError("k", f"must be a positive integer, not {k!r}")
        question, user_id = asking(query, query_time), user(user_id)
        with self._device:
            weighed = self._weigh(question, user_id)
        hits = sorted(weighed.hits.values(), key=lambda hit: (-hit.saliency, hit.turn))
        return Hits(tuple(hits[:k]), weighed.cost)

    def select(
        self, query: str, user_id: str, query_time: str = "", options: Sequence[str] = ()
    ) -> Selection:
        """Decide whether to open the user's memory for a question, and what to read.

        options: texts to choose an answer from, which a policy sees too.
        """
        question, user_id = asking(query, query_time, options), user(user_id)
        with self._device:
            return self._select(question, user_id)[0]

    def answer(
        self,
        query: str,
        user_id: str,
        options: Sequence[str] | None = None,
        query_time: str = "",
        max_tokens: int = 128,
    ) -> Answer:
        """Answer from what `select` chose: with options the reader's belief in each, else a text.

        max_tokens: the longest text, in tokens of the model. Raises PromptError where question,
        options and answer do not fit.
        """
        if type(max_tokens) is not int or max_tokens < 1:
            raise RecordError("max_tokens", f"must be a positive integer, not {max_tokens!r}")
        question, user_id = asking(query, query_time, options or ()), user(user_id)
        with self._device:
            selection, weighed, ranked = self._select(question, user_id)
            started = time.perf_counter()
            models = self._load()
            shown = _shown(models, question, weighed.turns, ranked, 0 if options else max_tokens)
            read = tuple(weighed.hits[i].turn for i in shown.evidence)
            scaffold, before = models.reader.scaffold, _tokens(models.reading)
            beliefs, ids, ended = (), (), True
            if options:
                bare = asked(scaffold, question, models.settings.label.answer)
                prompts = [[(*shown.prefix, *bare)]]
                [[reading]] = read_options(
                    models.reading, scaffold, [question], prompts, models.settings.label
                )
                beliefs = tuple(float(p) for p in np.exp(reading.log_posterior))
                text = question.options[reading.best[0]]
            else:
                ids = (*scaffold.head, *shown.prefix, *scaffold.suffix(question).ids)
                decoder = models.reader.decoder
                vocab = scaffold.tokenizer.vocab_size
                [reply] = generate.reply(decoder, [ids], scaffold.ends, max_tokens, vocab=vocab)
                ids, ended = (*ids, *reply.ids), reply.ended
                text = scaffold.tokenizer.decode(reply.ids)
            spent = _tokens(models.reading) - before + len(ids)
            cost = selection.cost.plus(spent, time.perf_counter() - started)
        return Answer(text, beliefs, ended, read, selection, cost)

    # The device is held in everything below

    def _load(self) -> _Loaded:
        if self._models is None:
            settings = self._settings
            base = self._model
            if not isinstance(base, LM):
                files = open_model(os.fspath(base)) if base else open_base(settings)
                base = files.load(settings.model.dtype)
            policy = self._tuned(base)
            reader = policy or base
            weights, ours = json.loads(base.identity).get("weights"), SHIPPED["shipped"]
            if policy is None and self._policy == "" and weights == lora.base_of(ours):
                reader = adapted(base, lora.read(ours, base.config))
            tokens = min(base.config.window, reader.config.window, settings.train.tokens)
            train = dataclasses.replace(settings.train, tokens=tokens)
            settings, head = dataclasses.replace(settings, train=train), base.scaffold.head
            # One turn a batch: a turn's state and score depend on no other turn.
            kept = {"store": self._states, "identity": base.identity}
            scorer = Scorer(base.decoder, head, batch_size=1, **kept)
            reading = Scorer(reader.decoder, head, batch_size=1)
            self._models = _Loaded(base, scorer, policy, reader, reading, settings)
        return self._models

    def _tuned(self, base: LM) -> LM | None:
        """Return the policy, loaded; None where none decides."""
        policy = self._policy
        if policy is None:
            return None
        if isinstance(policy, LM):
            if not base.scaffold.same_frame(policy.scaffold):
                raise ModelError("policy: another chat template than the base model's")
            return policy
        path = os.fspath(policy)
        if place := adapter_at(path):
            return adapted(base, lora.read(place, base.config))
        files = open_tuned(path, "policy", base)
        return files.load(self._settings.model.dtype) if files else None

    def _weigh(self, question: Question, user_id: str) -> _Weighed:
        """Score a question against a user's turns."""
        started = time.perf_counter()
        # Read while the device is held: a turn deleted later has its state dropped after this.
        entries = by_time(self._file.read(user_id))
        turns = tuple(Turn(i, entry.messages) for i, entry in enumerate(entries))
        if not turns:
            return _Weighed((), (), {}, Cost(0, 0, 0, 0, time.perf_counter() - started))
        groups = same_words(entries)
        places = sorted(group[-1] for group in groups)
        limit = self._settings.shortlist or SHORTLIST
        if len(places) > limit:
            texts = [text_of(entries[i]) for i in places]
            places = [places[i] for i in shortlist(question.query, texts, limit)]
        models = self._load()
        scaffold, context = models.base.scaffold, models.settings.context_turns
        suffix, window = scaffold.suffix(question), models.base.config.window
        # The suffix's bucket, not its length, so that a long turn is cut alike for like questions.
        room = window - len(scaffold.head) - bucket(len(suffix.ids))
        if room < 1:
            raise PromptError(
                f"query: question and options take {window - room} of {window} tokens; they are "
                "never cut"
            )
        blocks = [scaffold.prefix(turn_messages(turns, i, context), room) for i in places]
        job = unanswered(Job(tuple(ids for ids, _ in blocks), (suffix,)))
        before = _tokens(models.scorer)
        [[alone], *scored] = models.scorer.score([job], owner=user_id)[0]
        repeats = {group[-1]: group[:-1] for group in groups}
        hits, sal_q = {}, [None] * len(turns)
        for i, (_, cut), [one] in zip(places, blocks, scored, strict=True):
            sal_q[i] = one.logp_q - alone.logp_q
            earlier = tuple(entries[j].turn for j in repeats[i])
            hits[i] = Hit(entries[i].turn, entries[i].messages, sal_q[i], cut, earlier)
        spent = _tokens(models.scorer) - before
        cost = Cost(len(turns), len(places), 0, spent, time.perf_counter() - started)
        return _Weighed(turns, tuple(sal_q), hits, cost)

    def _select(
        self, question: Question, user_id: str
    ) -> tuple[Selection, _Weighed, tuple[int, ...]]:
        """Return the selection, what it was made from, and the places to read, most useful first."""
        weighed, tau = self._weigh(question, user_id), self._settings.eval.tau_q
        if not weighed.turns:
            reasons = ("closed: nothing is remembered of this user",)
            return Selection(False, None, (), (), reasons, weighed.cost, len), weighed, ()
        models, started = self._load(), time.perf_counter()
        cost, opened = weighed.cost, None
        if models.policy:
            prompt = controller_prompt(
                models.policy.scaffold, question, weighed.turns, weighed.sal_q, models.settings
            )
            [decision] = decide(models.policy, [prompt], models.settings)
            ranked, opened = decision.focus, decision.open_probability
            cost = dataclasses.replace(cost, dropped=prompt.dropped)
            cost = cost.plus(len(prompt.ids), time.perf_counter() - started)
        else:
            scores = [-math.inf if value is None else value for value in weighed.sal_q]
            ranked = tuple(above(scores, tau, self._settings.max_focus))
        order = [weighed.hits[i].turn for i in ranked]
        focus = tuple(weighed.hits[i] for i in sorted(ranked))
        rule = f"above {tau:.2f} (eval.tau_q; no policy decides)"
        if opened is not None:
            rule = f"the controller opens with probability {opened:.2f}"
        reasons = tuple(_reason(hit, order, rule) for hit in focus)
        if not focus:
            best = max(weighed.hits.values(), key=lambda hit: (hit.saliency, -hit.turn))
            rule = rule if opened is not None else f"none {rule}"
            highest = f"highest Sal_q {best.saliency:.2f} nats (turn {best.turn})"
            reasons = (f"closed: {highest}; {rule}",)
        encode = models.base.scaffold.tokenizer.encode
        selection = Selection(
            bool(focus), opened, focus, tuple(order), reasons, cost, lambda text: len(encode(text))
        )
        return selection, weighed, ranked


def _reason(hit: Hit, order: Sequence[int], rule: str) -> str:
    place = f"{order.index(hit.turn) + 1} of {len(order)}"
    return f"turn {hit.turn}: read as {place}, Sal_q {hit.saliency:.2f} nats, {rule}"


def _shown(
    models: _Loaded, question: Question, turns: Sequence[Turn], ranked: Sequence[int], answer: int
) -> ReaderPrompt:
    """Render the turns for the reader; room is kept for `answer` tokens, or the longest option."""
    scaffold, settings = models.reader.scaffold, models.settings
    room = reader_room(scaffold, question, settings, answer)
    if room < 0:
        raise PromptError(
            f"query: question, options and answer take {settings.train.tokens - room} of "
            f"{settings.train.tokens} tokens (train.tokens, the model's window); they are never cut"
        )
    return reader_prompt(scaffold, turns, ranked, settings, min(room, settings.eval.budget))


def _tokens(scorer: Scorer) -> int:
    return scorer.timing.prefix_tokens + scorer.timing.suffix_tokens
