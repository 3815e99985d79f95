# SPDX-License-Identifier: Apache-2.0
"""Read what a model replied, leniently: short line formats, JSON where it prefers JSON.

Every reader takes any text, never raises, and returns None for what it cannot read, so that the caller
asks again or falls back, and counts it. Only replies are read here, never texts of users.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

_THOUGHT = re.compile(r"<(think|thinking|thought)>.*?(</\1>|\Z)", re.S | re.I)
_THOUGHT_END = re.compile(r"\A.*</(?:think|thinking|thought)>", re.S | re.I)
_FENCE = re.compile(r"^[ \t]*(?:```|~~~)[^\n]*$", re.M)
_BULLET = re.compile(r"^\s*(?:[-•–·‣]\s*|\*\s+|\(?\d{1,3}[.):]\s+)(.*)$")
_SENTENCE_END = re.compile(r".*[.!?。！？…][\"'”’)]*", re.S)
_NONE = re.compile(r"(?:none|no_trait|no trait|no facts?|nothing|n/a|null)[\s.!]*", re.I)
_STARTS, _DEEPEST = 8, 50  # brackets that JSON is looked for at; how deep it may be nested
_LONGEST = 20_000  # characters; a reply is a few hundred tokens
_QUOTED = re.compile(r"(?<=[\[{,:\s])'((?:[^'\\\n]|\\.|(?<=\w)'(?=\w))*)'(?=\s*[\]},:])")
_DECODER = json.JSONDecoder()


def clean(text: str, cut: bool = False, prose: bool = False) -> str:
    """Return a reply without thoughts and code fences; of one that was cut, what is whole.

    A thought that does not end was cut itself: nothing is left of it. JSON is left as it is:
    `first_json` finds its whole parts.
    """
    text = _THOUGHT.sub("", text[:_LONGEST])
    text = _FENCE.sub("", _THOUGHT_END.sub("", text)).strip().strip("\ufeff\u200b")
    if not cut or text[:1] in ("{", "["):
        return text
    if prose:
        whole = _SENTENCE_END.match(text)
        return whole[0] if whole else text
    return text.rpartition("\n")[0].rstrip()


def is_none(text: str) -> bool:
    """Say whether a reply, or its first line, is the word that stands for nothing."""
    lines = text.strip().splitlines() or [""]
    return bool(_NONE.fullmatch(_bare(lines[0])))


def first_json(text: str) -> dict | list | None:
    """Return the first JSON object or list in a text.

    Single quotes, commas too many and a missing end are mended; a truncated one keeps its whole parts.
    """
    for start in [found.start() for found in re.finditer(r"[{\[]", text)][:_STARTS]:
        rest = text[start:]
        for mend in (str, _closed, _requoted):  # the mildest first: apostrophes are no quotes
            try:
                return _DECODER.raw_decode(mend(rest))[0]
            except (ValueError, RecursionError):
                continue
    return None


def _requoted(text: str) -> str:
    """Turn single quotes to double ones, drop commas before a bracket, close what is open."""
    text = _QUOTED.sub(lambda found: json.dumps(found[1].replace("\\'", "'")), text)
    return _closed(re.sub(r",(\s*[\]}])", r"\1", text))


def _closed(text: str) -> str:
    """Return JSON up to its last whole element, with the open brackets closed."""
    closers: list[str] = []
    quoted = escaped = False
    whole = ""  # the text up to the last element that is complete, with its brackets closed
    for i, char in enumerate(text):
        if quoted:
            quoted = escaped or char != '"'
            escaped = char == "\\" and not escaped
        elif char == '"':
            quoted = True
        elif char in "{[":
            closers.append("}" if char == "{" else "]")
            if len(closers) > _DEEPEST:
                break
        elif char in "}]":
            if not closers or closers.pop() != char:
                break
            if not closers:
                return text[: i + 1]
            whole = text[: i + 1] + "".join(reversed(closers))
        elif char == "," and closers:
            whole = text[:i] + "".join(reversed(closers))
    return whole


def bullets(text: str) -> list[str]:
    """Return the bulleted or numbered lines of a text, without bullets; other lines are chatter."""
    found = (_BULLET.match(line) for line in text.splitlines())
    return [item for line in found if line and re.search(r"\w", item := _bare(line[1]))]


def facts(text: str) -> list[str] | None:
    """Read a list of facts: bulleted lines, JSON, or NONE for []."""
    lines = bullets(text)
    if lines and text[:1] not in ("{", "["):
        return [*dict.fromkeys(line for line in lines if not _NONE.fullmatch(line))]
    value = first_json(text)
    if isinstance(value, dict):
        value = next((v for v in value.values() if isinstance(v, list)), None)
    if isinstance(value, list):
        lines = [_bare(found) for item in value if (found := _text_of(item))] or lines
        if not value:
            return []
    return [*dict.fromkeys(lines)] or ([] if is_none(text) else None)


class Decision(NamedTuple):
    """An operation on a store: "ADD", "UPDATE", "DELETE", "NOOP" or "MERGE"; `at` counts from 0."""

    event: str
    at: int = -1
    text: str = ""


_EVENTS = {"ADD": "ADD", "UPDATE": "UPDATE", "DELETE": "DELETE", "NOOP": "NOOP", "NONE": "NOOP",
           "NO-OP": "NOOP", "NO OP": "NOOP", "NO_OP": "NOOP", "MERGE": "MERGE"}  # fmt: skip
_EVENT = re.compile(
    r"(?:(?:the )?(?:final )?(?:decision|answer|operation|action|event|line)s?\s*(?:is)?\s*[:=]\s*)?"
    r"(add|update|delete|noop|none|no[-_ ]op|merge)\b(.*)",
    re.I,
)
_TARGET = re.compile(r"[\s(\[#]*(?:note|memory|entry|id|number)?[\s#:=\[]*(\d{1,6})\b(.*)", re.I)


def decision(text: str, shown: int, first: int = 1) -> Decision | None:
    """Read one operation on `shown` records, numbered from `first`; None where a number was not shown.

    Lines such as "UPDATE 2: text", in any case, or an object or list of them in JSON. NOOP stands alone
    on its line; an UPDATE needs a text; a MERGE without one keeps "".
    """
    found = first_json(text) if "{" in text else None
    if found is not None:
        items = next(
            (v for v in found.values() if isinstance(v, list)), [found]
        ) if isinstance(found, dict) else found  # fmt: skip
        for item in items:
            if isinstance(item, dict):
                named = {str(k).lower(): v for k, v in item.items()}
                event = next((named[k] for k in ("event", "operation", "action") if k in named), "")
                at = next((named[k] for k in ("id", "index", "n", "number") if k in named), "")
                whole = str(event).strip().upper() in ("ADD", "NOOP", "NONE")
                rest = "" if whole else f"{at}: {_text_of(item)}"
                made = _decided(str(event), rest, shown, first)
                if made:
                    return made
    for line in text.splitlines():
        bullet = _BULLET.match(line)
        match = _EVENT.fullmatch(_bare(bullet[1] if bullet else line))
        if match and (made := _decided(match[1], match[2], shown, first)):
            return made
    return None


def _decided(event: str, rest: str, shown: int, first: int) -> Decision | None:
    event = _EVENTS.get(event.strip().upper().removesuffix("()"), "")
    if event in ("ADD", "NOOP"):
        others = re.findall(r"\b(?:add|update|delete|noop|merge)\b", rest, re.I)
        alone = event == "ADD" or not re.search(r"[^\W\d_]", rest.replace("None", ""))
        return Decision(event) if alone and not others else None
    target = _TARGET.match(rest) if event else None
    if target is None or not first <= int(target[1]) < first + shown:
        return None
    if event == "DELETE":
        return Decision(event, int(target[1]) - first)
    body = target[2].removesuffix(")") if rest.lstrip().startswith("(") else target[2]
    body = _bare(body.lstrip(" \t:.,;)]=-–>"))
    return Decision(event, int(target[1]) - first, body) if body or event == "MERGE" else None


def labelled(text: str, *labels: str) -> dict[str, str]:
    """Return what stands after each label ("TAGS: a, b"), in lines or on one line parted by "|".

    JSON objects give their strings and lists under the labels as keys. Labels are upper case here and
    any case there.
    """
    value = first_json(text) if text[:1] in ("{", "[") else None
    if isinstance(value, list):
        value = next((item for item in value if isinstance(item, dict)), None)
    if isinstance(value, dict):
        named = {str(key).upper(): item for key, item in value.items()}
        listed = {k: ", ".join(map(str, v)) if isinstance(v, list) else v for k, v in named.items()}
        return {k: str(listed[k]) for k in labels if isinstance(listed.get(k), str | int)}
    pattern = re.compile(rf"^[\s\-*#|]*({'|'.join(labels)})\b[\s*]*[:=][\s*]*(.*)$", re.I)
    made: dict[str, str] = {}
    for line in re.split(r"\n|\|", text):
        if (match := pattern.match(line)) and (body := _bare(match[2])):
            made.setdefault(match[1].upper(), body)
    return made


def items(text: str) -> list[str]:
    """Split "a, b; c" into its parts, each once, in order."""
    found = (_bare(part).strip("[]\"'") for part in re.split(r"[,;、，；\n]", text))
    return [*dict.fromkeys(part for part in found if part)]


def numbers(text: str, shown: int, first: int = 0) -> list[int] | None:
    """Return the shown numbers that a text lists, each once, counted from 0; [] for none.

    None where it names no number that was shown, or no number at all.
    """
    listed = [int(n) - first for n in re.findall(r"(?<![\w.])\d{1,6}(?![\w.]*\d)", text)]
    if not listed:
        return [] if is_none(text) or not text.strip(" []().") else None
    return [*dict.fromkeys(n for n in listed if 0 <= n < shown)] or None


def citations(text: str, shown: int) -> list[int] | None:
    """Return the records cited in brackets, as in "[0, 2]"; [] for [NO_CITE]; None without brackets."""
    cited: dict[int, None] = {}
    lists = re.findall(r"\[\s*(\d{1,6}(?:\s*[,;]\s*\d{1,6})*)\s*\]", text)
    for found in lists:
        cited |= dict.fromkeys(n for n in map(int, re.findall(r"\d+", found)) if n < shown)
    if cited:
        return sorted(cited)
    return [] if re.search(r"\bno[_ -]?cite\b", text, re.I) else None


def topics(text: str, shown: int) -> list[tuple[str, list[int]]] | None:
    """Read topic summaries with the turns they rest on: lines "summary | 0, 2", JSON, NONE for [].

    Numbers that were not shown are left out; a summary without a turn is none.
    """
    found: list[tuple[str, list[int]]] = []
    value = first_json(text) if "{" in text else None
    if isinstance(value, dict):
        value = next((v for v in value.values() if isinstance(v, list)), [value])
    if isinstance(value, list):
        if not value:
            return []
        for item in value:
            if isinstance(item, dict):
                named = {str(k).lower(): v for k, v in item.items()}
                refs = next(
                    (named[k] for k in ("reference", "turns", "references") if k in named), ""
                )
                found.append((_text_of(item), numbers(str(refs), shown) or []))
    else:
        for line in text.splitlines():
            bullet = _BULLET.match(line)
            summary, bar, refs = (bullet[1] if bullet else line).strip("| ").rpartition("|")
            if bar:
                found.append((_bare(summary), numbers(refs, shown) or []))
    found = [(summary, refs) for summary, refs in found if summary and refs]
    return found or ([] if is_none(text) else None)


def prose(text: str) -> str | None:
    """Return a free text on one line, without a leading label such as "Summary:"; None for nothing."""
    text = " ".join(text.split())
    text = re.sub(
        r"^[*#\s]*(?:summary|portrait|here is [^:]{0,60})[*\s]*:[*\s]*", "", text, flags=re.I
    )
    return None if not re.search(r"\w", text) or _NONE.fullmatch(text) else text


def _text_of(item: Any) -> str:
    """Return a text, or the one that an object holds under a usual name."""
    if isinstance(item, dict):
        named = {str(key).lower(): value for key, value in item.items()}
        keys = ("fact", "text", "memory", "summary", "content")
        item = next((named[k] for k in keys if isinstance(named.get(k), str)), "")
    return " ".join(item.split()) if isinstance(item, str) else ""


def _bare(text: str) -> str:
    """Return a line without emphasis, quotes and code marks around it."""
    text = " ".join(text.split()).strip("*`_ ")
    return (
        text[1:-1].strip() if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text
    )
