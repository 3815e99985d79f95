# SPDX-License-Identifier: Apache-2.0
"""One rule reads replies: a table, and properties that hold for any reply."""

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bfm.extract import answer_of, choice, exact, f1

DRINKS = ["green tea", "black coffee", "milk", "A glass of water"]

TABLE = [
    ("B", 1), ("b", 1), ("(b)", 1), ("B.", 1), ("**B**", 1), ("B) black coffee", 1), ("  C:\n", 2),
    ("Answer: C", 2), ("The answer is (c).", 2), ("Final answer: D", 3), ("\\boxed{A}", 0),
    ("<choice>C</choice>", 2), ("<final_answer>(b)", 1), ("<final_answer> b </final_answer>", 1),
    ("I thought the answer is A. But the final answer is B.", 1),  # the last cue wins
    ("Answer: A\nAnswer: A", 0),
    ("\uff22", 1), ("\uff08\uff22\uff09", 1), ("答案:\uff23", 2), ("Answer: \u0412", 1),  # Cyrillic В
    ("black coffee", 1), ("Black  Coffee.", 1), ("Answer: milk", 2), ("The answer is green tea.", 0),
    ("A glass of water", 3),  # a text, though it begins with a letter
    ("D. A glass of water", 3), ("A. green tea", 0),
    ("Option B", 1) , ("The best option is B because it keeps you awake.", 1),
    ("<think>A, or B?</think>C", 2), ("<think>Answer: A</think>\n\nAnswer: B", 1),
    ("</think>B", 1),
    # nothing, unfinished, out of range, ambiguous, or only words
    ("", None), ("   ", None), ("<think>The answer is B", None), ("<think>", None),
    ("E", None), ("Answer: Z", None), ("A or B", None), ("Answer: A or B", None), ("A, B", None),
    ("Answer: (A) and (B)", None), ("I like a cat", None), ("A good question", None),
    ("The answer is a warm drink", None), ("I cannot tell.", None), ("AB", None), ("Answer:", None),
    ("Answer: B, no, Answer: I do not know", None),
]  # fmt: skip


@pytest.mark.parametrize(("reply", "expected"), TABLE)
def test_the_table(reply, expected):
    assert choice(reply, DRINKS) == expected


def test_equal_texts_are_not_told_apart_by_text():
    same = ["tea", "tea", "milk"]
    assert choice("tea", same) is None and choice("Answer: tea", same) is None
    assert choice("B", same) == 1 and choice("milk", same) == 2


@settings(deadline=None, max_examples=300)
@given(st.text(max_size=60), st.integers(1, 26))
def test_any_reply_names_one_option_or_none(reply, n):
    found = choice(reply, [f"option text {i}" for i in range(n)])
    assert found is None or 0 <= found < n


@settings(deadline=None)
@given(st.integers(2, 26), st.data())
def test_a_cued_letter_is_read_whatever_stands_before(n, data):
    i = data.draw(st.integers(0, n - 1))
    before = data.draw(st.text(alphabet="xyz ABC\n", max_size=30))
    letter = string.ascii_uppercase[i]
    assert choice(f"{before}\nFinal answer: {letter}", [f"text {k}" for k in range(n)]) == i


def test_thinking():
    assert answer_of("<think>a</think> b ") == "b"
    assert answer_of("<think>a") is None
    assert answer_of("a") == "a"


def test_free_answers():
    assert f1("The cat sat", "a cat sat") == 1.0 and exact("The cat sat!", "cat sat") == 1.0
    assert f1("cat", "dog") == 0.0 and f1("", "") == 1.0 and f1("", "x") == 0.0
    assert f1("cat cat", "cat") == pytest.approx(2 / 3)
    assert f1("蓝色的车", "红色的车") == pytest.approx(3 / 4)
