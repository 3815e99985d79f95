# SPDX-License-Identifier: Apache-2.0
"""Progress of a long job on stderr: a bar with rate and ETA on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

LINE_EVERY_S = 10.0


class Meter:
    """Counts work done against a total: `with Meter("scoring", total, "tokens") as meter`.

    A total of 0 is one that is not known: counts and rate are shown, no share and no ETA. Within
    another meter it is a second bar. Threads may add.
    """

    _bars: Progress | None = None  # of the outermost meter on a terminal

    def __init__(self, title: str, total: int, unit: str):
        self.title, self.total, self.unit = title, total, unit
        self.done = self.skipped = 0
        self._told = -1  # what was done when the last line was printed
        self._started = self._printed = time.monotonic()
        self._bar: Progress | None = None
        self._outermost = False
        self._lock = threading.Lock()

    def __enter__(self) -> Meter:
        if sys.stderr.isatty():
            if Meter._bars is None:
                self._outermost = True
                Meter._bars = Progress(
                    TextColumn("{task.description}"),
                    BarColumn(),
                    TaskProgressColumn(),
                    TextColumn("{task.fields[rate]}"),
                    TimeElapsedColumn(),
                    TextColumn("ETA"),
                    TimeRemainingColumn(),
                    console=Console(stderr=True),
                )
                Meter._bars.start()
            self._bar = Meter._bars
            self._task = self._bar.add_task(self.title, total=self.total or None, rate="")
        return self

    def __exit__(self, kind, value, traceback) -> None:
        if self._outermost:
            Meter._bars = None
            self._bar.stop()
        elif self._bar:
            self._bar.remove_task(self._task)
        elif kind is None and self._told != self.done:
            self._line()

    def skip(self, amount: int) -> None:
        """Count work that an earlier run did; it does not enter the rate."""
        self.skipped += amount
        self.add(amount)

    def add(self, amount: int) -> None:
        with self._lock:
            self.done += amount
            if self._bar:
                self._bar.update(self._task, completed=self.done, rate=self._rate_text())
            elif time.monotonic() - self._printed >= LINE_EVERY_S:
                self._line()

    def _rate(self) -> float:
        elapsed = time.monotonic() - self._started
        return (self.done - self.skipped) / elapsed if elapsed > 0 else 0.0

    def _rate_text(self) -> str:
        rate = self._rate()
        return f"{1 / rate:,.1f} s each" if 0 < rate < 1 else f"{rate:,.0f} {self.unit}/s"

    def _line(self) -> None:
        self._printed, self._told = time.monotonic(), self.done
        rate = self._rate()
        if not self.total:
            text = f"{self.title}: {self.done:,} {self.unit}, {self._rate_text()}"
            print(text, file=sys.stderr, flush=True)
            return
        eta = f"{(self.total - self.done) / rate:,.0f} s" if rate else "unknown"
        pace = f"{self._rate_text()}, ETA {eta}"
        if self.skipped == self.total:
            pace = "by an earlier run"
        print(
            f"{self.title}: {self.done:,} of {self.total:,} {self.unit} "
            f"({self.done / self.total:.0%}), {pace}",
            file=sys.stderr,
            flush=True,
        )
