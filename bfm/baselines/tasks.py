# SPDX-License-Identifier: Apache-2.0
"""Every request that the memory systems make of the chat model, on one page.

The data stand between `what` and `form`; the retry shows the data and `again` alone.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Task:
    """One kind of request: `what` stands before the data, `form` after it, `again` alone in the retry.

    prose: a reply that was stopped keeps its whole sentences; else it keeps its whole lines.
    """

    what: str
    form: str
    again: str
    max_tokens: int
    prose: bool = False


# --- Mem0

SUMMARY_WORDS = 150
FACTS = Task(
    "You take notes on the people in a chat. Read the NEW EXCHANGE only; the rest is context. Write "
    "each lasting fact that a person states about themselves: likes, plans, people they know. "
    "Say whom a fact is about, keep dates, keep the language. One fact a line, each line starts with "
    "- and a space. If there is none, write NONE.",
    "Facts in the new exchange:",
    "Write the facts that people stated in the NEW EXCHANGE, a line each, starting with - . Or NONE.",
    256,
)
ADD_ONLY = dataclasses.replace(
    FACTS,
    what="You take notes on a chat. Read the NEW EXCHANGE; the rest is context. Write what is worth "
    "remembering from either speaker and is not among the STORED NOTES, each as a full sentence "
    "of its own with names and dates, in the language of the exchange. One a line, each line starts "
    "with - and a space. If there is none, write NONE.",
)
DECIDE = Task(
    "A store holds the numbered notes below. Say what the NEW FACT does to it, in one line:\n"
    "ADD - no note says this\nUPDATE n: text - note n is about the same and the text, old and new "
    "together, replaces it\nDELETE n - the new fact contradicts note n\nNOOP - it is stored already",
    "One line:",
    "Answer with one line: ADD, or UPDATE n: new text, or DELETE n, or NOOP.",
    96,
)
SUMMARISE = Task(
    f"Rewrite the summary of a chat so that it covers the new messages too, in at most {SUMMARY_WORDS} "
    "words. Keep what people said about themselves.",
    "New summary:",
    "Summarise the messages above in a few sentences.",
    240,
    prose=True,
)

# --- A-MEM

DESCRIBE = Task(
    "Describe a piece of a conversation so that it can be found again, in three lines:\n"
    "KEYWORDS: three or more words that say what it is about, most telling first, no names, no times\n"
    "CONTEXT: one sentence on its topic and purpose\nTAGS: three or more broad categories",
    "Three lines:",
    "Three lines about the text above:\nKEYWORDS: a, b, c\nCONTEXT: one sentence\nTAGS: a, b, c",
    160,
)
LINK = Task(
    "A NEW NOTE joins a memory. Which OLD NOTES are truly related to it: the same subject, cause "
    "or person? Answer in two lines:\nLINKS: their numbers, or none\nTAGS: the tags of the new note, "
    "better ones if the old notes suggest them",
    "Two lines:",
    "Two lines:\nLINKS: numbers of the related old notes, or none\nTAGS: a, b, c",
    64,
)
EVOLVE = Task(
    "A NEW NOTE was linked to the OLD NOTES. Does it change how an old note is to be understood? Write "
    "one line for each old note:\nn: KEEP\nor\nn: CONTEXT: a new sentence | TAGS: a, b, c",
    "One line for each:",
    "For each old note one line. n: KEEP, or n: CONTEXT: sentence | TAGS: a, b, c",
    200,
)
KEYWORDS = Task(
    "Which keywords find the memories that answer this question? Write them on one line, with commas.",
    "Keywords:",
    "Write keywords of the question above on one line, with commas.",
    48,
)

# --- MemoryBank

GLOBAL_WORDS = 120
EVENTS = Task(
    "Summarise what happened and was said in this part of a conversation, in a few sentences. Keep "
    "what the user told, with names and dates.",
    "Summary:",
    "Summarise the conversation above in two sentences.",
    200,
    prose=True,
)
PERSON = Task(
    "What does this part of a conversation show of the user: character, mood, likes and dislikes, and "
    "how to talk to them? Answer in a few sentences.",
    "The user:",
    "Describe the user of the conversation above in two sentences.",
    200,
    prose=True,
)
ALL_EVENTS = Task(
    f"Write one summary of a user's history from the earlier summary and the days since, in at most "
    f"{GLOBAL_WORDS} words. Where they disagree, the later day is right.",
    "Summary:",
    "Summarise the days above in three sentences.",
    240,
    prose=True,
)
ALL_PERSON = Task(
    f"Write one portrait of a user from the earlier portrait and the days since, in at most "
    f"{GLOBAL_WORDS} words: character, likes, dislikes, how to talk to them. The later day is right.",
    "Portrait:",
    "Describe the user above in three sentences.",
    240,
    prose=True,
)

# --- RMM

TOPICS = Task(
    "From the numbered turns of a chat session, list the topics on which {who} tells something "
    "personal: likes, plans, people, experiences. One a line, as\nsummary | numbers of the turns it "
    "rests on\nEach summary is one full sentence in the language of the chat. If there is none, write "
    "NO_TRAIT.",
    "Topics:",
    "List what {who} tells of personal matters, a line each: summary | turn numbers. Or NO_TRAIT.",
    256,
)
MERGE = Task(
    "A memory holds the numbered topics below. Does the NEW TOPIC belong to one of them? Answer in "
    "one line:\nADD - it is a topic of its own\nMERGE n: text - topic n is about the same; the text, "
    "old and new together, replaces it; where they disagree the new one is right",
    "One line:",
    "Answer with one line: ADD, or MERGE n: text.",
    96,
)
CITE = Task(
    "Answer the question. After the answer, write the numbers of the memories whose original turns you "
    "used in brackets, as in [0, 2], or [NO_CITE] if none helped.",
    "Answer and numbers:",
    "Which memories help to answer? Write only their numbers in brackets, as in [0, 2], or [NO_CITE].",
    160,
)
