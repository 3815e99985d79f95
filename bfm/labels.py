# SPDX-License-Identifier: Apache-2.0
"""One record: text -> ids -> scores -> label. The library call `bfm.score` is here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence

import numpy as np

from bfm import saliency
from bfm.dialogue import (
    Example,
    Label,
    RecordError,
    Turn,
    evidence_turns,
    parse_example,
    turns_of,
)
from bfm.lm import LM, load
from bfm.prompts import NEUTRAL, PromptError, Scaffold, check_letters, has_answer, turn_messages
from bfm.saliency import Job, Scored, Scorer
from bfm.settings import Settings
from bfm.shortlist import shortlist


@dataclasses.dataclass(frozen=True)
class Rendered:
    """One record as ids. Job prefix k is turn `turns[k]`; one more prefix is the neutral turn."""

    id: str
    n_turns: int
    turns: tuple[int, ...]  # the turns that are scored: all, or a shortlist
    job: Job
    cut: tuple[int, ...]  # tokens that were cut, a turn
    evidence: tuple[int, int]  # evidence turns that are scored, and all of them


def score(
    lm: LM | None,
    history: Sequence[Mapping[str, str]],
    query: str,
    *,
    answer: str = "",
    options: Sequence[str] = (),
    query_time: str = "",
    settings: Settings | None = None,
) -> Label:
    """Score one history: how much does each turn change log p(query) and log p(answer)?

    history: messages `{"role", "content", "name"?, "time"?, "session"?}` in time order. lm None loads
    the default model. Returns a Label: sal_q and sal_a (nats, one a turn), gate, focus. Raises
    RecordError (a bad field) or PromptError (it does not fit).
    """
    record = {"id": "history", "turns": list(history), "query": query, "query_time": query_time}
    record |= {"options": list(options) or None, "answer": answer or None}
    lm, settings = lm or load(), settings or Settings()
    rendered = render(parse_example(record), lm.scaffold, lm.config.window, settings)
    scorer = Scorer(lm.decoder, lm.scaffold.head, batch_size=settings.batch_size)
    return label(rendered, scorer.score([rendered.job])[0], settings)


def render(example: Example, scaffold: Scaffold, window: int, settings: Settings) -> Rendered:
    """Turn a record into ids. Raises RecordError when it cannot be labelled as the settings ask."""
    form = settings.label.answer
    try:
        if form != "text" and not has_answer(example, form) and example.answer:
            raise PromptError(
                f"answer_index: missing, and answer is no option (label.answer={form} needs one)"
            )
        if form != "text":
            check_letters(example)
        suffixes = scaffold.suffixes(example, form, settings.label.permutations)
        room = window - len(scaffold.head) - max(len(s.ids) for s in suffixes)
        if room < 1:
            raise PromptError(
                f"query: question, options and answer take {window - room} of {window} tokens; "
                "they are never cut"
            )
        turns = turns_of(example.question.messages, settings.unit)
        chosen = _shortlisted(example, turns, settings.shortlist)
        groups = [turn_messages(turns, i, settings.context_turns) for i in chosen]
        prefixes, cuts = zip(
            *(scaffold.prefix(group, room) for group in (*groups, NEUTRAL.messages)), strict=True
        )
        if any(cuts) and settings.on_overflow == "refuse":
            named = zip((*chosen, "without preference, the neutral one,"), cuts, strict=True)
            turn, cut = next((i, cut) for i, cut in named if cut)
            raise PromptError(
                f"turns: turn {turn} is {cut} tokens too long for the model's window of "
                f"{window}; on_overflow=truncate cuts its oldest tokens"
            )
    except PromptError as error:
        field, _, reason = str(error).partition(": ")
        raise RecordError(field, reason) from None
    cut = dict(zip(chosen, cuts, strict=False))
    evidence = evidence_turns(example, settings.unit)
    return Rendered(
        id=example.question.id,
        n_turns=len(turns),
        turns=tuple(chosen),
        job=Job(prefixes, suffixes),
        cut=tuple(cut.get(i, 0) for i in range(len(turns))),
        evidence=(len(set(evidence) & set(chosen)), len(evidence)),
    )


def _shortlisted(example: Example, turns: Sequence[Turn], n: int) -> Sequence[int]:
    if not n or n >= len(turns):
        return range(len(turns))
    texts = [" ".join(message.content for message in turn.messages) for turn in turns]
    return shortlist(example.question.query, texts, n)


def label(rendered: Rendered, scored: Sequence[Sequence[Scored]], settings: Settings) -> Label:
    """Turn the scores of a record's sequences (baseline first) into its label."""
    suffix = rendered.job.suffixes[0]
    q_tokens = suffix.q[1] - suffix.q[0]
    a_tokens = suffix.a[1] - suffix.a[0] if suffix.a else None
    per_q, per_a = (q_tokens, a_tokens) if settings.label.norm == "token" else (1, 1)
    logp_q = [orders[0].logp_q for orders in scored]
    logp_a = [answer_logp(orders) for orders in scored]
    sal_q = [(value - logp_q[0]) / per_q for value in logp_q[1:]]
    sal_a = [(value - logp_a[0]) / per_a for value in logp_a[1:]] if suffix.a else None
    chosen = None
    if sal_a is not None and settings.threshold is not None:
        best = saliency.focus(sal_a[:-1], settings.threshold, settings.max_focus)
        chosen = tuple(rendered.turns[k] for k in best)

    def spread(values: Sequence[float]) -> tuple[float | None, ...]:
        by_turn = dict(zip(rendered.turns, values, strict=False))  # the last is the neutral turn
        return tuple(by_turn.get(i) for i in range(rendered.n_turns))

    return Label(
        id=rendered.id,
        n_turns=rendered.n_turns,
        q_tokens=q_tokens,
        a_tokens=a_tokens,
        logp_q=logp_q[0],
        logp_a=logp_a[0],
        sal_q=spread(sal_q),
        sal_a=None if sal_a is None else spread(sal_a),
        gate=None if chosen is None else int(bool(chosen)),
        focus=chosen,
        truncated=rendered.cut,
        tau=settings.threshold,
        neutral={"sal_q": sal_q[-1], "sal_a": None if sal_a is None else sal_a[-1]},
    )


def answer_logp(orders: Sequence[Scored]) -> float | None:
    """log p(a), or the log posterior of the right option averaged over the orders shown."""
    if orders[0].log_choice is None:
        return orders[0].logp_a
    return float(np.mean([scored.log_choice for scored in orders], dtype=np.float64))


def token_lines(rendered: Rendered, scored: Sequence[Sequence[Scored]], head: Sequence[int]) -> str:
    """The lines of tokens.jsonl for a record: the baseline (turn -1) and each turn, each order."""
    lines = []
    prefixes = ((), *rendered.job.prefixes[:-1])
    for turn, prefix, results in zip((-1, *rendered.turns), prefixes, scored[:-1], strict=True):
        start = len(head) + len(prefix)
        orders = zip(rendered.job.suffixes, results, strict=True)
        for shift, (suffix, result) in enumerate(orders):
            line = {
                "id": rendered.id,
                "turn": turn,
                "ids": [*head, *prefix, *suffix.ids],
                "q_span": [start + i for i in suffix.q],
                "a_span": [start + i for i in suffix.a] if suffix.a else None,
                "logp_q": result.logp_q,
                "logp_a": result.logp_a,
            }
            if len(rendered.job.suffixes) > 1:
                line["shift"] = shift
            lines.append(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
    return "".join(lines)
