"""Finds stop strings in text that arrives in pieces. Text is held back only while it may begin one."""

from __future__ import annotations

from collections.abc import Sequence


class StopSearch:
    """Of one sample. Of several matches, the one that ends first counts, and among those the longest.

    `push(piece)` returns the text that is safe to show. Once `stopped`, it returns the last text and nothing follows.
    """

    __slots__ = ("_held", "_include", "_starts", "_stops", "stopped")

    def __init__(self, stops: Sequence[str], *, include_stop: bool) -> None:
        self._stops = tuple(stops)
        self._starts = frozenset(stop[0] for stop in stops)
        self._include = include_stop
        self._held = ""
        self.stopped: str | None = None  # the stop string that was found

    def push(self, piece: str, *, armed: bool = True) -> str:
        """`armed` is false while matches that end in this piece do not count, because there are too few tokens yet."""
        held = len(self._held)
        text = self._held + piece
        if armed:
            match = self._find(text, held)
            if match is not None:
                start, end = match
                self.stopped = text[start:end]
                self._held = ""
                return text[: end if self._include else start]
        keep = self._suffix_to_hold(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text ends here. Returns what was held back: it is no stop string after all."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, held: int) -> tuple[int, int] | None:
        """The match that ends in the newest piece; earlier ones were found before, or did not count."""
        best: tuple[int, int] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, held - len(stop) + 1))
            if start >= 0:
                end = start + len(stop)
                if best is None or (end, start) < (best[1], best[0]):
                    best = (start, end)
        return best

    def _suffix_to_hold(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = 0
        if self._starts.isdisjoint(text):
            return 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
