"""What a check says."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass


class Grade(enum.StrEnum):
    OK = "ok"
    WARN = "warn"  # works, but slower or with something missing
    FAIL = "fail"  # does not work


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found. `remedy` says what to do, unless all is well."""

    grade: Grade
    found: str
    remedy: str = ""


Checks = dict[str, Callable[[], Finding]]


def ok(found: str) -> Finding:
    return Finding(Grade.OK, found)


def warn(found: str, remedy: str) -> Finding:
    return Finding(Grade.WARN, found, remedy)


def fail(found: str, remedy: str) -> Finding:
    return Finding(Grade.FAIL, found, remedy)
