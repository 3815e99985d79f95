# SPDX-License-Identifier: Apache-2.0
"""A written reply -> the option it names, by one rule for every method; free text -> F1 and match.

The rule: thinking goes, an explicit cue decides and the last cue wins, else the reply itself must be
one option. Whatever names two options, or none, is unparsed and counts as wrong.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence

OPEN, CLOSE = "<think>", "</think>"
# Letters of other scripts that look like A to K; NFKC leaves them alone.
_LOOKALIKE = str.maketrans("АВСЕНІЈКавсеіјΑΒΕΗΙΚ", "ABCEHIJKabceijABEHIK")
_CUE = re.compile(
    r"<\s*(?:final_?answer|choice|answer)\s*>"
    r"|\\boxed\s*\{"
    r"|\b(?:final\s+)?(?:answer|choice|option)(?:\s+(?:letter|option))?\s*(?:is|are|would\s+be|[:=])"
    r"|答案\s*(?:是|为|[::])",
    re.IGNORECASE,
)
# What a cue or a reply may hold around its letter: brackets, quotes, emphasis.
_AROUND = " \t\n\"'`*_()[]{}<>.:,;。、“”‘’"
_BREAK = re.compile(r"[\n<}]|[.!?。](?:\s|$)")


def answer_of(reply: str) -> str | None:
    """Return what stands after the thinking block; None where a block was never closed."""
    before, closed, after = reply.rpartition(CLOSE)
    if closed:
        return after.strip()
    return None if OPEN in reply else before.strip() or after.strip()


def choice(reply: str, options: Sequence[str], letters: str = string.ascii_uppercase) -> int | None:
    """Return the index of the one option that a reply names, or None (unparsed).

    letters[i] stands for options[i]. Full-width and look-alike letters are read as Latin ones.

    >>> choice("I first thought A. Final answer: (b)", ["tea", "milk"])
    1
    >>> choice("A or B", ["tea", "milk"]) is None
    True
    """
    text = answer_of(_plain(reply))
    if not text:
        return None
    known = {letter: i for i, letter in enumerate(letters[: len(options)])}
    cues = [match.end() for match in _CUE.finditer(text)]
    if cues:
        return _named(text[cues[-1] :].lstrip(), known, options, cued=True)
    return _named(text, known, options, cued=False)


def _plain(text: str) -> str:
    return unicodedata.normalize("NFKC", text).translate(_LOOKALIKE)


def _named(text: str, known: dict[str, int], options: Sequence[str], cued: bool) -> int | None:
    """Return the option that `text` begins with and that nothing in its first statement disputes."""
    whole = [i for i, option in enumerate(options) if _key(option) == _key(text)]
    if whole:
        return whole[0] if len(whole) == 1 else None
    start = re.match(r"[\s\"'`*_(\[{<]*", text).end()
    match = re.match(r"(?:option\s+|choice\s+)?([A-Za-z])(?![\w'’-])", text[start:], re.IGNORECASE)
    if match is None or match[1].upper() not in known:
        return _told(text, options) if cued else None
    letter, rest = match[1], text[start + match.end() :]
    marked = start > 0 or rest[:1] in (".", ")", ":", "]", "}", "*", "<") or not rest.strip(_AROUND)
    if not cued and not marked:
        return None  # "A good choice", "I ..": words, not letters
    if cued and letter == "a" and not marked:
        return None  # "the answer is a warm drink"
    found = known[letter.upper()]
    # A second letter disputes the first, unless it stands inside the text of the option named.
    said = rest.strip(_AROUND)
    if _key(said).startswith(_key(options[found])):
        said = said[len(options[found]) :]
    statement = said if not cued else said[: _first(_BREAK, said)]
    others = {
        m[1] or m[2]
        for m in re.finditer(r"\(([A-Za-z])\)|(?<![\w'’-])([B-HJ-Z])(?![\w'’-])", statement)
    }
    return None if {o.upper() for o in others} & known.keys() - {letter.upper()} else found


def _told(text: str, options: Sequence[str]) -> int | None:
    """Return the option whose text is all that the cue's statement says."""
    statement = _key(text[: _first(_BREAK, text)])
    found = [i for i, option in enumerate(options) if _key(option) == statement]
    return found[0] if len(found) == 1 else None


def _first(pattern: re.Pattern, text: str) -> int:
    match = pattern.search(text)
    return match.start() if match else len(text)


def _key(text: str) -> str:
    return " ".join(_plain(text).casefold().split()).strip(_AROUND)


# --- free text ---------------------------------------------------------------------------------


def tokens(text: str) -> list[str]:
    """Return the words that a free answer is compared by (SQuAD's, arXiv 1606.05250).

    Lower case, no punctuation, no articles; a character of a script without spaces is a word.
    """
    text = _spaced(unicodedata.normalize("NFKC", text).casefold())
    text = "".join(c for c in text if not unicodedata.category(c).startswith("P"))
    return [word for word in text.split() if word not in ("a", "an", "the")]


def _spaced(text: str) -> str:
    return re.sub(r"([\u2e80-\u9fff\uf900-\ufaff\uac00-\ud7af])", r" \1 ", text)


def f1(said: str, right: str) -> float:
    """Return the F1 of words, 0 to 1; two empty answers agree.

    >>> round(f1("the green tea", "green tea, hot"), 3)
    0.8
    """
    a, b = tokens(said), tokens(right)
    if not a or not b:
        return float(a == b)
    shared = (Counter(a) & Counter(b)).total()
    return 2 * shared / (len(a) + len(b))


def exact(said: str, right: str) -> float:
    """Return 1 where the words are the same in the same order, else 0."""
    return float(tokens(said) == tokens(right))
