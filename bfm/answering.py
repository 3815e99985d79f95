# SPDX-License-Identifier: Apache-2.0
"""The reader's whole answer: its belief in the options, and text where text is asked for.

Written text comes from the same prompt that options are scored after. With a thinking budget the model
first thinks aloud for so many tokens, then the block is closed and it answers.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

from bfm.dialogue import Question
from bfm.extract import CLOSE, choice
from bfm.generate import Reply, reply
from bfm.lm import LM
from bfm.policy import Reading, asked, option_suffixes, read_options, reading_of
from bfm.saliency import Job, Scorer, Suffix
from bfm.settings import Settings

Block = tuple[int, ...]  # a memory block's ids; () is no memory


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a reader made of a question under one memory block.

    reading: belief in the options; None for a question without. text: what it wrote; None where it was
    not asked to. status: ok, unparsed (names no option) or unfinished (cut by the limit). written:
    tokens generated, thinking included.
    """

    reading: Reading | None
    text: str | None = None
    status: str = "ok"
    written: int = 0


def answers(
    reader: LM,
    scorer: Scorer,
    questions: Sequence[Question],
    blocks: Sequence[Sequence[Block]],
    settings: Settings,
) -> list[list[Answer]]:
    """Return the reader's answer to each question under each of its blocks.

    Questions without options are written, others too with eval.answer=generate. Equal blocks of a
    question are answered once. Raises PromptError where the model has no thinking block to open.
    """
    distinct = [list(dict.fromkeys(own)) for own in blocks]
    places = [(i, block) for i, own in enumerate(distinct) for block in own]
    thoughts = _think(reader, questions, places, settings)
    readings = _believe(scorer, reader, questions, distinct, thoughts, settings)
    replies = _write(reader, questions, places, thoughts, settings)
    found = {}
    for (i, block), thought in zip(places, thoughts, strict=True):
        written, wrote = replies.get((i, block)), len(thought)
        text, status = None, "ok"
        if written is not None:
            text, wrote = reader.scaffold.tokenizer.decode(written.ids), wrote + len(written.ids)
            if not written.ended:
                status = "unfinished"
            elif questions[i].options and choice(text, questions[i].options) is None:
                status = "unparsed"
        found[i, block] = Answer(readings.get((i, block)), text, status, wrote)
    return [[found[i, block] for block in own] for i, own in enumerate(blocks)]


def written_to(question: Question, settings: Settings) -> bool:
    """Say whether the reader writes its answer to a question, rather than score its options."""
    return not question.options or settings.eval.answer == "generate"


def reference_logp(
    scorer: Scorer,
    reader: LM,
    questions: Sequence[Question],
    answers: Sequence[str],
    blocks: Sequence[Sequence[Block]],
) -> list[list[float]]:
    """Return log p(reference answer) under each block, nats: graded after everything is predicted."""
    scaffold, jobs = reader.scaffold, []
    for question, text, own in zip(questions, answers, blocks, strict=True):
        bare = asked(scaffold, question, "text")
        ids = (*bare.ids, *scaffold.tokenizer.encode(text), scaffold.end)
        suffix = Suffix(ids, bare.q, (len(bare.ids), len(ids)))
        jobs.append(Job(tuple(b for b in dict.fromkeys(own) if b), (suffix,)))
    found = []
    for job, own, scored in zip(jobs, blocks, scorer.score(jobs), strict=True):
        by_block = dict(zip(((), *job.prefixes), scored, strict=True))
        found.append([by_block[block][0].logp_a for block in own])
    return found


def _think(reader: LM, questions, places, settings: Settings) -> list[tuple[int, ...]]:
    """Return the thinking block of every place, () without a budget."""
    if not settings.eval.thinking:
        return [()] * len(places)
    scaffold, form = reader.scaffold, settings.label.answer
    opening, close = scaffold.tokenizer.thinking()
    prompts = [
        (*scaffold.head, *block, *asked(scaffold, questions[i], form, opening).ids)
        for i, block in places
    ]
    thought = reply(
        reader.decoder, prompts, (close, *scaffold.ends), settings.eval.thinking,
        vocab=scaffold.tokenizer.vocab_size, batch_size=settings.batch_size,
    )  # fmt: skip
    closing = scaffold.tokenizer.encode_template(f"\n{CLOSE}\n\n")
    return [(*opening, *t.ids, *closing) for t in thought]


def _believe(scorer, reader, questions, distinct, thoughts, settings) -> dict:
    """Return (question, block) -> belief in its options."""
    found, at, scaffold = {}, iter(thoughts), reader.scaffold
    if not settings.eval.thinking:
        own = [i for i, question in enumerate(questions) if question.options]
        readings = read_options(
            scorer,
            scaffold,
            [questions[i] for i in own],
            [distinct[i] for i in own],
            settings.label,
        )
        for i, by_block in zip(own, readings, strict=True):
            found |= {(i, b): r for b, r in zip(distinct[i], by_block, strict=True)}
        return found
    # What was thought differs by block, so each block continues with a suffix of its own.
    places, jobs = [], []
    for i, blocks in enumerate(distinct):
        for block in blocks:
            thought = next(at)
            if questions[i].options:
                suffixes = option_suffixes(scaffold, questions[i], settings.label.answer, thought)
                places.append((i, block))
                jobs.append(Job((block,) if block else (), suffixes))
    for place, scored in zip(places, scorer.score(jobs), strict=True):
        found[place] = reading_of(scored[-1], settings.label.norm)
    return found


def _write(reader, questions, places, thoughts, settings) -> dict[tuple[int, Block], Reply]:
    """Return (question, block) -> what was written, for the questions that are answered so."""
    scaffold, form = reader.scaffold, settings.label.answer
    asking = [k for k, (i, _) in enumerate(places) if written_to(questions[i], settings)]
    prompts = [
        (*scaffold.head, *places[k][1],
         *asked(scaffold, questions[places[k][0]], form, thoughts[k]).ids)
        for k in asking
    ]  # fmt: skip
    written = reply(
        reader.decoder, prompts, scaffold.ends, settings.eval.max_tokens,
        vocab=scaffold.tokenizer.vocab_size, temperature=settings.eval.temperature,
        seeds=[_seed(questions[places[k][0]], settings) for k in asking],
        batch_size=settings.batch_size,
    )  # fmt: skip
    return {places[k]: w for k, w in zip(asking, written, strict=True)}


def _seed(question: Question, settings: Settings) -> int:
    named = f"answer {settings.seed} {question.id}"
    return int.from_bytes(
        hashlib.sha256(named.encode("utf-8", "surrogatepass")).digest()[:4], "big"
    )
