# SPDX-License-Identifier: Apache-2.0
"""The reader's whole answer: its belief in the options, and text where text is asked for.

Written text comes from the same prompt that options are scored after. With a thinking budget the model
first thinks aloud for so many tokens, then the block is closed and it answers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from bfm.dialogue import Question, generator
from bfm.extract import CLOSE, choice
from bfm.generate import Reply, reply
from bfm.lm import LM
from bfm.policy import Reading, asked, read_options
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
    places = [(i, block) for i, own in enumerate(blocks) for block in dict.fromkeys(own)]
    thoughts = _think(reader, questions, places, settings)
    prompts = {
        (i, block): (*block, *asked(reader.scaffold, questions[i], settings.label.answer, thought))
        for (i, block), thought in zip(places, thoughts, strict=True)
    }
    readings = _believe(scorer, reader, questions, prompts, settings)
    replies = _write(reader, questions, prompts, settings)
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


def longest(question: Question, settings: Settings) -> int:
    """Return the tokens to keep free for thinking and for a written answer."""
    thinking = settings.eval.thinking + 16 if settings.eval.thinking else 0  # 16: around the block
    return thinking + (settings.eval.max_tokens if written_to(question, settings) else 0)


def reference_logp(
    scorer: Scorer,
    reader: LM,
    questions: Sequence[Question],
    answers: Sequence[str],
    blocks: Sequence[Sequence[Block]],
) -> list[list[float]]:
    """Return log p(reference answer) under each block, nats: graded after everything is predicted."""
    scaffold, jobs = reader.scaffold, []
    prompts = [
        [(*block, *asked(scaffold, question, "text")) for block in own]
        for question, own in zip(questions, blocks, strict=True)
    ]
    for text, own in zip(answers, prompts, strict=True):
        ids = (*scaffold.tokenizer.encode(text), scaffold.end)
        jobs.append(Job(tuple(dict.fromkeys(own)), (Suffix(ids, (0, 0), (0, len(ids))),)))
    found = []
    for job, own, scored in zip(jobs, prompts, scorer.score(jobs), strict=True):
        by_prompt = dict(zip(job.prefixes, scored[1:], strict=True))
        found.append([by_prompt[prompt][0].logp_a for prompt in own])
    return found


def _think(reader: LM, questions, places, settings: Settings) -> list[tuple[int, ...]]:
    """Return the thinking block of every place, () without a budget."""
    if not settings.eval.thinking:
        return [()] * len(places)
    scaffold, form = reader.scaffold, settings.label.answer
    opening, close = scaffold.tokenizer.thinking()
    prompts = [
        (*scaffold.head, *block, *asked(scaffold, questions[i], form, opening))
        for i, block in places
    ]
    thought = reply(
        reader.decoder, prompts, (close, *scaffold.ends), settings.eval.thinking,
        vocab=scaffold.tokenizer.vocab_size, batch_size=settings.batch_size,
    )  # fmt: skip
    closing = scaffold.tokenizer.encode_template(f"\n{CLOSE}\n\n")
    return [(*opening, *t.ids, *closing) for t in thought]


def _believe(scorer, reader, questions, prompts, settings) -> dict[tuple[int, Block], Reading]:
    """Return place -> belief in the options of its question, where it has any."""
    places = {}
    for i, block in prompts:
        if questions[i].options:
            places.setdefault(i, []).append((i, block))
    readings = read_options(
        scorer, reader.scaffold, [questions[i] for i in places],
        [[prompts[place] for place in own] for own in places.values()], settings.label,
    )  # fmt: skip
    found = {}
    for own, by_prompt in zip(places.values(), readings, strict=True):
        found |= dict(zip(own, by_prompt, strict=True))
    return found


def _write(reader, questions, prompts, settings) -> dict[tuple[int, Block], Reply]:
    """Return place -> what was written, for the questions that are answered so."""
    scaffold = reader.scaffold
    places = [place for place in prompts if written_to(questions[place[0]], settings)]
    written = reply(
        reader.decoder, [(*scaffold.head, *prompts[place]) for place in places], scaffold.ends,
        settings.eval.max_tokens, vocab=scaffold.tokenizer.vocab_size,
        temperature=settings.eval.temperature,
        seeds=[_seed(questions[i], settings) for i, _ in places],
        batch_size=settings.batch_size,
    )  # fmt: skip
    return dict(zip(places, written, strict=True))


def _seed(question: Question, settings: Settings) -> int:
    return int(generator(settings.seed, f"answer {question.id}").integers(1 << 31))
