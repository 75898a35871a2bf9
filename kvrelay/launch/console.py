"""Progress on a terminal (bars) or in a log file (a line now and then), always on standard error."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from kvrelay.progress import Progress

_LINE_EVERY_S = 5.0


def console_progress(*, plain: bool = False, stream: TextIO | None = None) -> Progress:
    """Bars where there is a terminal, lines where there is none (or `plain` asks for them)."""
    stream = stream or sys.stderr
    return PlainProgress(stream) if plain or not stream.isatty() else _Bars(stream)


class _Bars:
    """One rich bar per task. It goes away when the task is done."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream)
        self._bars: RichProgress | None = None

    def start(self, title: str, total: int, *, unit: str) -> None:
        self.done()
        count: ProgressColumn = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
        columns = [TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn()]
        self._bars = RichProgress(*columns, console=self._console, transient=True)
        self._task = self._bars.add_task(title, total=total or None)
        self._bars.start()

    def advance(self, count: int) -> None:
        if self._bars is not None:
            self._bars.advance(self._task, count)

    def done(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None


class PlainProgress:
    """A line at the start, one every few seconds, and one at the end with the time it took."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._title = ""

    def start(self, title: str, total: int, *, unit: str) -> None:
        self._title, self._total, self._unit, self._count = title, total, unit, 0
        self._began_at = self._told_at = time.monotonic()
        self._say("...")

    def advance(self, count: int) -> None:
        self._count += count
        if time.monotonic() - self._told_at >= _LINE_EVERY_S:
            self._told_at = time.monotonic()
            share = f" ({100 * self._count // self._total} %)" if self._total else ""
            self._say(f"{_amount(self._count, self._unit)}{share}")

    def done(self) -> None:
        if self._title:
            self._say(f"done in {time.monotonic() - self._began_at:.1f} s")
            self._title = ""

    def _say(self, text: str) -> None:
        print(f"{self._title}: {text}", file=self._stream, flush=True)


def _amount(count: int, unit: str) -> str:
    return f"{count / 1e6:.1f} MB" if unit == "bytes" else f"{count} {unit}"
