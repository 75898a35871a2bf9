"""Which tests run when, where several run beside each other: what takes longest begins first, and no file is a long tail.

A file is one worker's, so that what it shares (a cluster, a browser, a compiled library) is made once. The tests of a file in
`APART` share nothing that is dear: each goes to whichever worker is free. Files that wait for processes and clocks come first:
beside them the rest, which only computes, fills the cores.
"""

from __future__ import annotations

import functools
import pathlib

import pytest

FIRST = (
    "e2e/test_smollm2.py",
    "e2e/test_chaos.py",
    "contract/test_context_index.py",
    "e2e/",
    "launch/",
    "offline/",
    "worker/",
    "test_fuzz.py",
    "events/",
    "transfer/",
    "relay/",
    "router/",
    "cli/",
    "bench/",
    "discovery/",
    "contract/",
    "kernels/",
    "models/",
    "engine/",
    "test_parity.py",
)
APART = frozenset[str]()

_FOLDER = pathlib.Path(__file__).parent


def turn(item: pytest.Item) -> int:
    """Of its file among the others."""
    return _turn(item.path)


@functools.cache
def _turn(file: pathlib.Path) -> int:
    name = file.relative_to(_FOLDER).as_posix() if file.is_relative_to(_FOLDER) else ""
    return next((index for index, prefix in enumerate(FIRST) if name.startswith(prefix)), len(FIRST))


def is_apart(file: str) -> bool:
    """`file` as the ids of its tests begin."""
    return file.removeprefix("tests/") in APART
