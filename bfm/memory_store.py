# SPDX-License-Identifier: Apache-2.0
"""The file of a memory: users and their turns in SQLite, every change whole or not at all.

Write-ahead log with synchronous=NORMAL: what was added survives the end of the process in any way; a
power cut may lose the newest turns, never the file. Imports neither jax nor a model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence

from bfm.dialogue import TURN_FIELDS, Message

_APPLICATION = 0x42464D31  # "BFM1" in the header of the file
_VERSION = 1
_WAIT_S = 30  # for another process that writes
# A turn's number is counted for its user and outlives the turn, so it is never given again. `wipe`
# holds a row from a delete until the deleted bytes are out of the file.
_SCHEMA = (
    "CREATE TABLE users (key INTEGER PRIMARY KEY, user_id TEXT NOT NULL UNIQUE,"
    " last INTEGER NOT NULL)",
    "CREATE TABLE turns (user INTEGER NOT NULL REFERENCES users ON DELETE CASCADE,"
    " turn INTEGER NOT NULL, messages TEXT NOT NULL, PRIMARY KEY (user, turn)) WITHOUT ROWID",
    "CREATE TABLE wipe (pending INTEGER NOT NULL)",
)


class MemoryFileError(ValueError):
    """A file that is no memory, or cannot be read or written; one line that names it."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A turn as it was added. turn: its number, counted from 1 for each user."""

    turn: int
    messages: tuple[Message, ...]

    @property
    def time(self) -> str:
        """The first time that the messages name, as the caller wrote it; "" without one."""
        return next((message.time for message in self.messages if message.time), "")

    def to_json(self) -> dict:
        """Return the turn as JSON data; its messages are what `add` takes."""
        return {"turn": self.turn, "messages": [_fields(message) for message in self.messages]}


class TurnFile:
    """Turns by user, in one SQLite file or in memory; any number of threads may use it.

    One connection serves all threads, one call at a time; another process waits up to 30 seconds.
    """

    def __init__(self, path: str | os.PathLike[str]):
        """Open or create a file, or ":memory:". Raises MemoryFileError; no foreign file is touched."""
        self.path = os.fspath(path)
        self._lock = threading.Lock()
        if not self.path:
            raise MemoryFileError("path: is empty; name a file, or ':memory:'")
        try:
            # Every statement commits by itself unless `_writing` holds it.
            self._db = sqlite3.connect(
                self.path, timeout=_WAIT_S, isolation_level=None, check_same_thread=False
            )
        except (sqlite3.Error, ValueError) as error:
            raise self._error(error) from None
        try:
            self._open()
        except BaseException as error:
            self._db.close()
            if isinstance(error, sqlite3.Error):
                raise self._error(error) from None
            raise

    def _open(self) -> None:
        application, version = self._value("PRAGMA application_id"), self._version()
        if (application or version or self._value("SELECT count(*) FROM sqlite_master")) and (
            application != _APPLICATION or not 1 <= version <= _VERSION
        ):
            what = "is a database, but no memory"
            if application == _APPLICATION:
                what = f"has schema {version}, this version of bfm reads {_VERSION}"
            raise MemoryFileError(f"{self.path}: {what}; name another file")
        if (mode := self._value("PRAGMA journal_mode=WAL")) not in ("wal", "memory"):
            raise MemoryFileError(f"{self.path}: its place gives no write-ahead log, only {mode}")
        for pragma in ("synchronous=NORMAL", "foreign_keys=ON", "secure_delete=ON"):
            self._db.execute(f"PRAGMA {pragma}")
        with self._writing():
            if not self._version():
                for statement in _SCHEMA:
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA application_id={_APPLICATION}")
                self._db.execute(f"PRAGMA user_version={_VERSION}")
        if self._value("SELECT count(*) FROM wipe"):
            self.wipe()

    def add(self, user_id: str, turns: Sequence[Sequence[Message]]) -> tuple[int, ...]:
        """Append turns to a user, all or none; return their numbers. Takes constant time a turn."""
        texts = [
            json.dumps([_fields(message) for message in messages], ensure_ascii=False)
            for messages in turns
        ]
        with self._writing():
            self._db.execute(
                "INSERT OR IGNORE INTO users (user_id, last) VALUES (?, 0)", (user_id,)
            )
            key, last = self._user(user_id)
            numbers = tuple(range(last + 1, last + 1 + len(texts)))
            self._db.execute("UPDATE users SET last = ? WHERE key = ?", (last + len(texts), key))
            self._db.executemany(
                "INSERT INTO turns VALUES (?, ?, ?)",
                ((key, n, text) for n, text in zip(numbers, texts, strict=True)),
            )
        return numbers

    def read(self, user_id: str) -> list[Entry]:
        """Return every turn of a user in the order of their numbers; none for a user never seen."""
        with self._using():
            return self._entries(user_id)

    def delete(
        self, user_id: str, goes: Callable[[Entry], bool] | None, dry_run: bool
    ) -> tuple[tuple[Entry, ...], bool]:
        """Delete the turns of a user for which `goes`, or (None) the user with all turns.

        Returns the turns, and whether their bytes are out of the file (see `wipe`). dry_run: changes
        nothing.
        """
        with self._using() if dry_run else self._writing():
            user = self._user(user_id)
            gone = tuple(e for e in self._entries(user_id) if goes is None or goes(e))
            if dry_run or user is None or not (gone or goes is None):
                return gone, False
            if goes is None:  # the user's turns go with the user
                self._db.execute("DELETE FROM users WHERE key = ?", user[:1])
            self._db.executemany(
                "DELETE FROM turns WHERE user = ? AND turn = ?", ((user[0], e.turn) for e in gone)
            )
            self._db.execute("INSERT INTO wipe VALUES (1)")
        return gone, self.wipe()

    def wipe(self) -> bool:
        """Rewrite the file without deleted bytes; False where another process holds it, or no room.

        secure_delete alone is not enough: where SQLite moved rows between pages it leaves copies in
        the gaps. What fails now is done by the next delete, or when the file is next opened.
        """
        with self._using():
            try:
                self._db.execute("VACUUM")
                if self._value("PRAGMA wal_checkpoint(TRUNCATE)"):  # 1: busy
                    return False
                self._db.execute("DELETE FROM wipe")
            except sqlite3.OperationalError:
                return False
        return True

    def close(self) -> None:
        """Close the file; every later call raises MemoryFileError."""
        with self._lock:
            self._db.close()

    def _user(self, user_id: str) -> tuple[int, int] | None:
        """Return a user's key and last number, or None."""
        return self._db.execute(
            "SELECT key, last FROM users WHERE user_id = ?", (user_id,)
        ).fetchone()

    def _entries(self, user_id: str) -> list[Entry]:
        rows = self._db.execute(
            "SELECT turn, messages FROM turns JOIN users ON user = key WHERE user_id = ? ORDER BY turn",
            (user_id,),
        )
        return [self._entry(*row) for row in rows]

    def _entry(self, turn: int, text: str) -> Entry:
        try:
            return Entry(turn, tuple(Message(**fields) for fields in json.loads(text)))
        except (ValueError, TypeError) as error:
            raise MemoryFileError(f"{self.path}: turn {turn} cannot be read ({error})") from None

    def _value(self, statement: str):
        """Return the first column of a statement's first row."""
        return self._db.execute(statement).fetchone()[0]

    def _version(self) -> int:
        return self._value("PRAGMA user_version")

    @contextlib.contextmanager
    def _using(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except sqlite3.Error as error:
                raise self._error(error) from None

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Hold one transaction; it is undone where anything is raised, an interrupt included."""
        with self._using():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def _error(self, error: Exception) -> MemoryFileError:
        return MemoryFileError(f"{self.path}: {error}")


def _fields(message: Message) -> dict[str, str]:
    """Return a message as JSON data, without what is empty (its content may be)."""
    fields = {name: getattr(message, name) for name in TURN_FIELDS}
    return {name: value for name, value in fields.items() if value or name == "content"}
