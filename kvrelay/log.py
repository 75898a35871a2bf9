"""Logging: one line per event, `key=value` pairs after the message, on standard error."""

from __future__ import annotations

import logging
import sys


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        fields = record.__dict__.get("fields")
        if fields:
            line += " " + " ".join(f"{key}={value}" for key, value in fields.items())
        return line


def configure(level: str, process: str) -> None:
    """Called once per process. `process` names it in every line, such as "router" or a worker id."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(f"%(asctime)s %(levelname)-7s {process} %(message)s", datefmt="%H:%M:%S"))
    root = logging.getLogger("kvrelay")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False


class Log:
    """`log.info("request finished", request=id, tokens=5)`."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(f"kvrelay.{name}")

    def debug(self, message: str, **fields: object) -> None:
        self._logger.debug(message, extra={"fields": fields})

    def info(self, message: str, **fields: object) -> None:
        self._logger.info(message, extra={"fields": fields})

    def warning(self, message: str, **fields: object) -> None:
        self._logger.warning(message, extra={"fields": fields})

    def error(self, message: str, **fields: object) -> None:
        self._logger.error(message, extra={"fields": fields})

    def exception(self, message: str, **fields: object) -> None:
        """With the traceback of the exception being handled."""
        self._logger.error(message, exc_info=True, extra={"fields": fields})
