# SPDX-License-Identifier: Apache-2.0
"""The action grammar: every action written and read back, nothing else, gate and focus coupled."""

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bfm import arch
from bfm.actions import Action, ActionError, Grammar

BYTES = arch.byte_tokenizer()
END = BYTES.scaffold().end


def grammar(n, max_focus=3, coupled=True):
    return Grammar.of(BYTES, END, n, max_focus, coupled)


@pytest.mark.parametrize("coupled", [True, False])
def test_the_grammar_writes_exactly_the_actions(coupled):
    g = grammar(11, 2, coupled)  # 1 begins 10 and 11: numbers that begin others
    written, front = set(), [()]
    while front:
        ids = front.pop()
        following = g.allowed(ids)
        if not following:
            written.add(ids)
        front += [(*ids, i) for i in following]
    lists = [f for k in (1, 2) for f in itertools.permutations(range(1, 12), k)]
    expected = {Action(True, f) for f in lists}
    expected |= {Action(False, f) for f in lists} if not coupled else {Action(False, ())}
    assert {g.parse(ids) for ids in written} == expected
    assert {g.encode(action) for action in expected} == written


def test_text_of_an_action():
    g = grammar(12)
    assert BYTES.decode(g.encode(Action(True, (12, 3)))) == "read 12, 3<|im_end|>"
    assert BYTES.decode(g.encode(Action(False, ()))) == "none<|im_end|>"
    assert grammar(0).allowed(()) == BYTES.encode("n")
    assert grammar(0).allowed(BYTES.encode("none")) == [END]
    assert g.gate == (BYTES.encode("r")[0], BYTES.encode("n")[0])


@pytest.mark.parametrize(
    "action",
    [
        Action(True, ()), Action(False, (1,)), Action(True, (1, 1)), Action(True, (0,)),
        Action(True, (13,)), Action(True, (1, 2, 3, 4)),
    ],
)  # fmt: skip
def test_what_contradicts_cannot_be_written(action):
    with pytest.raises(ActionError):
        grammar(12).encode(action)


@settings(deadline=None, max_examples=60)
@given(st.text(alphabet="readno 123,", max_size=12))
@example("read")  # the gate opens on nothing
@example("none 1")
@example("read 1,")
def test_nothing_else_is_an_action(text):
    g = grammar(12)
    ids = (*BYTES.encode(text), END)
    try:
        action = g.parse(ids)
    except ActionError:
        return
    assert g.encode(action) == ids
