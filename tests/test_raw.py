# SPDX-License-Identifier: Apache-2.0
"""Raw files are fetched whole or not at all, into the cache, and only where that is allowed."""

import hashlib
import http.server
import json
import threading

import pytest

from bfm.datasets import File, build, load, locomo
from bfm.datasets.raw import downloads, fetch
from bfm.jsonl import DataError
from tests.test_datasets import launch  # noqa: F401
from tests.test_locomo import conversation

BODY = json.dumps([conversation()]).encode()
ASKED: list[str] = []  # paths, by all tests


class Server(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        ASKED.append(self.path)
        match self.path:
            case "/whole":
                self.answer(BODY, {"Content-Length": str(len(BODY))})
            case "/short":  # the connection breaks half-way
                self.answer(BODY[: len(BODY) // 2], {"Content-Length": str(len(BODY))})
            case "/endless":  # ends when the connection does: nobody can tell whether it is whole
                self.answer(BODY, {})
            case "/chunks":
                body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
                self.answer(body, {"Transfer-Encoding": "chunked"})
            case "/half_a_chunk":
                body = b"%x\r\n%s" % (len(BODY), BODY[:50])
                self.answer(body, {"Transfer-Encoding": "chunked"})
            case _:
                self.send_error(404)

    def answer(self, body, headers):
        self.send_response(200)
        for header in headers.items():
            self.send_header(*header)
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def host():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("path", ["whole", "chunks"])
def test_a_file_is_fetched_once(host, path, tmp_path):
    told: list[int] = []
    file = File("a/b.json", f"{host}/{path}", "1 KB")
    assert fetch(file, tmp_path, told.append).read_bytes() == BODY
    assert sum(told) == len(BODY)
    assert fetch(File("a/b.json", f"{host}/gone", "1 KB"), tmp_path).read_bytes() == BODY
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["b.json"]


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/short", f"only {len(BODY) // 2:,} of {len(BODY):,} bytes came"),
        ("/half_a_chunk", "IncompleteRead"),
        ("/endless", "does not say how long"),
        ("/gone", "HTTP 404"),
    ],
)
def test_what_is_not_whole_leaves_nothing(host, path, reason, tmp_path):
    with pytest.raises(DataError, match=reason) as error:
        fetch(File("a/b.json", host + path, "1 KB"), tmp_path)
    assert host + path in str(error.value) and "\n" not in str(error.value)
    assert not list((tmp_path / "a").iterdir())


def test_no_server_is_one_line(tmp_path):
    with pytest.raises(DataError, match=r"could not be fetched: .*refused"):
        fetch(File("b.json", "http://127.0.0.1:1/b.json", "1 KB"), tmp_path)


def test_a_missing_file_is_fetched_and_its_hash_recorded(host, tmp_path, monkeypatch):
    def official(path):
        file = File("locomo/locomo10.json", f"{host}/{path}", "1 KB")
        monkeypatch.setitem(locomo.FILES, "locomo", (file,))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ASKED.clear()
    here, empty = {"prepared_dir": tmp_path / "p"}, tmp_path / "given"
    empty.mkdir()
    official("whole")
    with pytest.raises(DataError, match=r"locomo10\.json: is missing: put it there from http"):
        load("locomo", data_dir=empty, download=False, **here)
    assert not ASKED
    official("short")
    with pytest.raises(DataError, match=r"is missing: put it there .* \(http.*bytes came\)"):
        load("locomo", data_dir=empty, **here)
    assert not list((tmp_path / "p").rglob(build.SOURCE)) and not list(downloads().rglob("*.*"))
    official("whole")
    found = load("locomo", data_dir=empty, **here)
    assert len(found) == 6 and not list(empty.iterdir())  # data_dir is only read
    assert found.source["files"] == {"locomo/locomo10.json": hashlib.sha256(BODY).hexdigest()}
    with pytest.raises(DataError, match="is missing; put it there") as error:
        load("membench_high", data_dir=empty, **here)  # a folder in the cloud: no single file
    assert "could not be fetched" not in str(error.value)
    before = len(ASKED)
    assert load("locomo", **here).sha256 == found.sha256 and len(ASKED) == before


def test_the_door_fetches_and_shows_it(host, launch, tmp_path, monkeypatch):  # noqa: F811
    file = File("locomo/locomo10.json", f"{host}/whole", "1 KB")
    monkeypatch.setitem(locomo.FILES, "locomo", (file,))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code, out, err = launch("prepare", "locomo")
    assert code == 0 and "6 examples" in out
    lines = err.splitlines()
    assert lines[0].startswith(f"fetching locomo (1 KB): {len(BODY):,} bytes, ")
    assert [line.split(":")[0] for line in lines[1:]] == ["checking locomo", "writing locomo"]
