"""Logging: one line per event, `key=value` pairs after the message, on standard error.

What strangers can cause as often as they like is logged by `seldom`, so that no stranger can fill a disk.
"""

from __future__ import annotations

import logging
import sys
import time

SELDOM_S = 1.0  # between two lines of `Log.seldom` with the same message
_MAX_VALUE_CHARACTERS = 1000  # a peer's words may be long


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        fields = record.__dict__.get("fields")
        if fields:
            line += " " + " ".join(f"{key}={_one_line(value)}" for key, value in fields.items())
        return line


def _one_line(value: object) -> str:
    """A value that came from a peer can neither begin a line of its own nor fill the log."""
    return str(value)[:_MAX_VALUE_CHARACTERS].replace("\r", "\\r").replace("\n", "\\n")


def configure(level: str, process: str) -> None:
    """Called once per process. `process` names it in every line, such as "router" or a worker id."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(f"%(asctime)s %(levelname)-7s {process} %(message)s", datefmt="%H:%M:%S"))
    root = logging.getLogger("kvrelay")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False


def take_over(library: str) -> None:
    """From now on a library's lines come out as ours do, and of equal ones at most one in SELDOM_S."""
    logger = logging.getLogger(library)
    logger.handlers[:] = logging.getLogger("kvrelay").handlers
    logger.propagate = False
    logger.addFilter(_Seldom())


class _Seldom(logging.Filter):
    def __init__(self) -> None:
        super().__init__()
        self._quiet_until: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """By the text before its arguments are filled in, of which there are only so many."""
        now, text = time.monotonic(), str(record.msg)
        if now < self._quiet_until.get(text, 0.0):
            return False
        self._quiet_until[text] = now + SELDOM_S
        return True


class Log:
    """`log.info("request finished", request=id, tokens=5)`."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(f"kvrelay.{name}")
        self._quiet_until: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def debug(self, message: str, **fields: object) -> None:
        self._logger.debug(message, extra={"fields": fields})

    def info(self, message: str, **fields: object) -> None:
        self._logger.info(message, extra={"fields": fields})

    def warning(self, message: str, **fields: object) -> None:
        self._logger.warning(message, extra={"fields": fields})

    def seldom(self, message: str, **fields: object) -> None:
        """A warning about what others do: at most one line in SELDOM_S, which says how many were left out before it."""
        now = time.monotonic()
        if now < self._quiet_until.get(message, 0.0):
            self._left_out[message] = self._left_out.get(message, 0) + 1
            return
        self._quiet_until[message] = now + SELDOM_S
        left_out = self._left_out.pop(message, 0)
        self.warning(message, **fields, **({"left_out": left_out} if left_out else {}))

    def error(self, message: str, **fields: object) -> None:
        self._logger.error(message, extra={"fields": fields})

    def exception(self, message: str, **fields: object) -> None:
        """With the traceback of the exception being handled."""
        self._logger.error(message, exc_info=True, extra={"fields": fields})
