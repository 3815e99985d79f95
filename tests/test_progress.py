# SPDX-License-Identifier: Apache-2.0
"""What a long job says where no one watches a terminal."""

from bfm.progress import Meter


def told(capsys, *, skipped: int, done: int, total: int = 8) -> str:
    with Meter("scoring", total, "tokens") as meter:
        meter.skip(skipped)
        meter.add(done)
    return capsys.readouterr().err


def test_what_an_earlier_run_did_is_no_pace(capsys):
    assert told(capsys, skipped=8, done=0) == "scoring: 8 of 8 tokens (100%), by an earlier run\n"
    rest = told(capsys, skipped=4, done=4)
    assert rest.startswith("scoring: 8 of 8 tokens (100%), ") and rest.endswith("/s, ETA 0 s\n")
    assert told(capsys, skipped=2, done=0).endswith("0 tokens/s, ETA unknown\n")


def test_without_a_total_there_is_no_eta(capsys):
    line = told(capsys, skipped=0, done=3, total=0)
    assert line.startswith("scoring: 3 tokens, ") and "ETA" not in line
