# SPDX-License-Identifier: Apache-2.0
"""The scaffold: a history turn and a question as ids, inside the model's own chat template.

    head     template up to the user's message (system text, BOS)        -- shared by everything
    prefix   MEMORY [date] User: ... / Assistant: ...                    -- one turn; the turn state
    suffix   [date] Question: q, options, end of message, generation header, answer

The reader's prompt is the same with the selected turns, in time order, as its memory. The controller's
has the candidates in time order too, each under its rank by Sal_q, and asks for an action
(`bfm.actions`):

    head     CANDIDATES [2] [date] User: ... / Assistant: ... [1] ...
             [date] Question: q, options, CHOOSE, end of message, generation header, action

Every piece is tokenized apart and joined as ids, so the same q and a ids stand in all terms, and data
never merges with, or becomes, a control token.
"""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Sequence

from bfm.dialogue import Example, Message, Question, Turn
from bfm.saliency import Suffix
from bfm.tokenizer import Tokenizer

MEMORY = "Earlier conversation with the user:\n"
CANDIDATES = "Earlier exchanges with the user:\n"
CHOOSE = (
    "Does the answer depend on any of these exchanges? "
    "Write read and their numbers, most useful first, or none."
)
ANSWER_LETTER = "Answer with the letter of one option."
LETTERS = string.ascii_uppercase
ANSWER_FORMS = ("text", "letter", "options")
# A fixed exchange that carries no preference: what the mere presence of a memory block does.
NEUTRAL = Turn(-1, (Message("user", "Hello."), Message("assistant", "Hello! How can I help you?")))


class PromptError(ValueError):
    """A question that cannot be rendered; one line that names the field."""


@dataclasses.dataclass(frozen=True)
class Scaffold:
    """Renders turns and questions as ids for one tokenizer."""

    tokenizer: Tokenizer
    head: tuple[int, ...]
    tail: tuple[int, ...]
    end: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Scaffold:
        frame = tokenizer.scaffold()
        return cls(tokenizer, frame.head, frame.tail, frame.end)

    def same_frame(self, other: Scaffold) -> bool:
        """Say whether two models are asked through the same template, in the same ids."""
        return (self.head, self.tail, self.end) == (other.head, other.tail, other.end)

    @property
    def ends(self) -> frozenset[int]:
        """The ids that end a reply: of the turn, and of a text where the folder names one."""
        return frozenset({self.end, self.tokenizer.eos_id} - {None})

    def prefix(self, messages: Sequence[Message], room: int = 0) -> tuple[tuple[int, ...], int]:
        """Return the memory block of the messages and the number of its tokens that were cut.

        With room > 0 the block is cut to at most `room` tokens, oldest first; the marker stays.
        """
        encode = self.tokenizer.encode
        open_ids, ids = encode(MEMORY), [*self._block(messages), *encode("\n")]
        cut = max(0, len(open_ids) + len(ids) - room) if room else 0
        if cut > len(ids):
            raise PromptError(f"query: no room for a memory block ({room} tokens are left)")
        return (*open_ids, *ids[cut:]), cut

    def _block(self, messages: Sequence[Message]) -> list[int]:
        encode, ids, last_time = self.tokenizer.encode, [], ""
        for message in messages:
            if message.time and message.time != last_time:
                ids += [*encode("["), *encode(message.time), *encode("] ")]
                last_time = message.time
            name = message.name or message.role.capitalize()
            ids += [*encode(name), *encode(":"), *encode(" " + message.content), *encode("\n")]
        return ids

    def controller(
        self, question: Question, candidates: Sequence[tuple[int, Sequence[Message]]]
    ) -> tuple[int, ...]:
        """Return the controller's prompt: candidates, a number and a turn's messages each, in order."""
        encode = self.tokenizer.encode
        ids = [*self.head, *encode(CANDIDATES)]
        for number, messages in candidates:
            ids += [*encode(f"[{number}] "), *self._block(messages)]
        return (*ids, *encode("\n"), *self.suffix(question, note=CHOOSE).ids)

    def suffix(
        self, question: Question, shift: int = 0, letters: bool = False, note: str = ""
    ) -> Suffix:
        """Return the suffix without an answer, options in cyclic order from `shift`.

        Option j of the rendering is options[(j + shift) % n], shown as "A. text", "B. text", ...
        `letters` asks for a letter; `note` is a last line of our own.
        """
        encode = self.tokenizer.encode
        ids: list[int] = []
        if question.query_time:
            ids += [*encode("["), *encode(question.query_time), *encode("] ")]
        ids += encode("Question:\n")
        q_ids = encode(question.query)
        span = (len(ids), len(ids) + len(q_ids))
        ids += q_ids
        options = rotate(question.options, shift)
        if options:
            ids += encode("\nOptions:")
            for letter, option in zip(LETTERS, options, strict=False):
                ids += [*encode(f"\n{letter}."), *encode(" " + option)]
            if letters:
                ids += encode("\n" + ANSWER_LETTER)
        if note:
            ids += encode("\n" + note)
        return Suffix(ids=(*ids, *self.tail), q=span)

    def suffixes(self, example: Example, form: str, permutations: int = 1) -> tuple[Suffix, ...]:
        """Return the suffixes whose scores make Sal_a in the given form (`label.answer`).

        text: the answer's text and the end-of-turn token. letter: the letter of the right option.
        options: the right letter against all letters, once in each of `permutations` cyclic orders.
        An example without an answer gives one suffix without one.
        """
        question = example.question
        if not has_answer(example, form):
            return (self.suffix(question, letters=form != "text"),)
        if form == "text":
            bare = self.suffix(question)
            ids = (*self.tokenizer.encode(example.answer), self.end)
            return (_answered(bare, ids),)
        n = len(question.options)
        check_letters(example)
        letters = [self.tokenizer.encode(letter) for letter in LETTERS[:n]]
        orders = 1 if form == "letter" else min(permutations, n)
        if form == "options" and any(len(ids) != 1 for ids in letters):
            raise PromptError("options: this tokenizer splits a letter into several tokens")
        made = []
        for shift in range(orders):
            bare = self.suffix(question, shift, letters=True)
            right = (example.answer_index - shift) % n
            made.append(_answered(bare, letters[right]))
            if form == "options":
                choices = tuple(ids[0] for ids in letters)
                made[-1] = dataclasses.replace(made[-1], choices=choices, right=right)
        return tuple(made)


def _answered(bare: Suffix, answer: Sequence[int]) -> Suffix:
    start = len(bare.ids)
    return dataclasses.replace(bare, ids=(*bare.ids, *answer), a=(start, start + len(answer)))


def rotate(options: Sequence[str], shift: int) -> tuple[str, ...]:
    """Return the options in cyclic order starting at index `shift`."""
    return (*options[shift:], *options[:shift])


def has_answer(example: Example, form: str) -> bool:
    """Say whether Sal_a in this form is defined for the example."""
    return bool(example.answer) if form == "text" else example.answer_index >= 0


def check_letters(example: Example) -> None:
    """Raise PromptError when the options cannot be lettered."""
    if len(example.question.options) > len(LETTERS):
        raise PromptError(f"options: {len(example.question.options)} options, letters name 26")


def turn_messages(turns: Sequence[Turn], index: int, context_turns: int) -> tuple[Message, ...]:
    """Return the messages rendered for turn `index`: its own, after those of `context_turns` before."""
    chosen = turns[max(0, index - context_turns) : index + 1]
    return tuple(message for turn in chosen for message in turn.messages)
