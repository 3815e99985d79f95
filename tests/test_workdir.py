# SPDX-License-Identifier: Apache-2.0
"""Files of lines that grow by groups: whatever was torn, whoever goes on, the same bytes."""

import json
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bfm import workdir
from bfm.workdir import PARTS, Spool, WorkdirError, claim

FILES = ("a.jsonl", "b.jsonl")


def texts(k: int, counts) -> dict[str, str]:
    return {
        name: "".join(f'{{"group": {k}, "line": {i}, "é": "{name}"}}\n' for i in range(own[k]))
        for name, own in counts.items()
    }


def run(place, counts, processes: int, dies_after: int | None = None) -> list[int]:
    """Do what is missing, the first process last; return the groups done. dies_after: puts in all."""
    put = []
    for index in (*range(1, processes), 0):
        with (
            mock.patch.object(workdir.jax, "process_index", lambda index=index: index),
            mock.patch.object(workdir.jax, "process_count", lambda: processes),
        ):
            spool = Spool(place, counts)
            for k in spool.todo():
                if dies_after is not None and len(put) >= dies_after:
                    return put
                spool.put(k, texts(k, counts), k)
                put.append(k)
            if not index and dies_after is None:
                spool.finish()
    return put


@st.composite
def jobs(draw):
    n = draw(st.integers(1, 6))
    sizes = st.lists(st.integers(0, 3), min_size=n, max_size=n)
    counts = {FILES[0]: [1 + size for size in draw(sizes)], FILES[1]: draw(sizes)}
    return counts, draw(st.integers(0, n)), draw(st.tuples(*[st.floats(0, 1)] * 2))


@given(jobs(), st.integers(1, 3), st.integers(1, 3))
@settings(deadline=None)
def test_a_job_that_died_goes_on_to_the_same_bytes(tmp_path_factory, job, before, after):
    counts, dies_after, cut = job
    place = tmp_path_factory.mktemp("spool")
    run(place, counts, before, dies_after)
    for name, share in zip(FILES, cut, strict=True):  # a tail that the disk never saw
        if (place / name).exists():
            held = (place / name).read_bytes()
            (place / name).write_bytes(held[: round(len(held) * share)])
    run(place, counts, after)
    for name in FILES:
        whole = "".join(texts(k, counts)[name] for k in range(len(counts[name])))
        assert (place / name).read_text("utf-8") == whole
    assert not (place / PARTS).exists()
    assert run(place, counts, after) == []  # nothing is done twice


def test_parts_wait_for_those_before_them(tmp_path):
    counts, told = {"a.jsonl": [1, 1, 2]}, []
    spool = Spool(tmp_path, counts, told.append)
    for k in (2, 1):
        spool.put(k, texts(k, counts), k)
    assert not (tmp_path / "a.jsonl").exists() and spool.done() == 0 and told == []
    assert spool.todo() == [0]
    spool.put(0, texts(0, counts), 0)
    assert told == [0, 1, 2] and spool.done() == 3
    spool.finish()
    assert not (tmp_path / PARTS).exists()


def test_more_lines_than_the_run_makes_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}\n" * 3)
    with pytest.raises(
        WorkdirError, match=r"a\.jsonl has 3 lines, but this run makes 2; remove it"
    ):
        Spool(tmp_path, {"a.jsonl": [1, 1]})


def test_a_folder_belongs_to_one_run(tmp_path):
    meta = {"identity": {"data": "x", "code": "y"}}
    claim(tmp_path / "w", "w.json", "labels", meta, FILES)
    claim(tmp_path / "w", "w.json", "labels", meta, FILES)
    with pytest.raises(WorkdirError, match=r"holds labels of another run \(data differ\)"):
        claim(tmp_path / "w", "w.json", "labels", {"identity": {"data": "z", "code": "y"}}, FILES)
    assert json.loads((tmp_path / "w" / "w.json").read_text()) == meta
    (tmp_path / "v").mkdir()
    (tmp_path / "v" / "b.jsonl").touch()
    with pytest.raises(WorkdirError, match=r"holds b\.jsonl but no w\.json"):
        claim(tmp_path / "v", "w.json", "labels", meta, FILES)
    (tmp_path / "v" / "w.json").write_text("{")
    with pytest.raises(WorkdirError, match=r"w\.json cannot be read"):
        claim(tmp_path / "v", "w.json", "labels", meta, FILES)
    (tmp_path / "file").touch()
    with pytest.raises(WorkdirError, match="is not a folder"):
        claim(tmp_path / "file", "w.json", "labels", meta, FILES)
