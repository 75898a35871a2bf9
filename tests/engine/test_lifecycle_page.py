"""docs/lifecycle.md names functions, tests, states and reasons that exist, and leaves none of the last two out."""

from __future__ import annotations

import importlib
import itertools
import re
from pathlib import Path

import pytest

from kvrelay.states import KV_EDGES, FreeReason, KVState

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs/lifecycle.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| ")][1:]
MODULES = {
    "Scheduler": "scheduler", "Queue": "queue", "KVCache": "memory.kv_cache", "Swap": "memory.swap", "Engine": "engine",
    "BlockPool": "memory.block_pool", "PrefixCache": "memory.prefix_cache", "Endings": "requests.endings",
}  # fmt: skip


def test_every_row_names_a_function_and_a_test_that_exist() -> None:
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests/engine").glob("test_*.py"))
    assert len(ROWS) >= 18
    for _, _, _, _, where, test in ROWS:
        functions = re.findall(r"`(\w+)\.(\w+)`", where)
        assert functions
        for owner, name in functions:
            assert callable(vars(getattr(importlib.import_module(f"kvrelay.engine.{MODULES[owner]}"), owner))[name])
        assert f"def {test.strip('`')}(" in tests, test


def test_every_step_from_state_to_state_is_an_edge() -> None:
    for row in ROWS:
        states = [KVState[word] for word in re.findall(r"[A-Z]{5,}", row[1])]
        for before, after in itertools.pairwise(states):
            assert after in KV_EDGES[before], row


@pytest.mark.parametrize("reason", FreeReason)
def test_every_reason_is_in_the_table(reason: FreeReason) -> None:
    assert any(f"({reason})" in row[3] for row in ROWS)


@pytest.mark.parametrize("state", KVState)
def test_every_state_is_drawn(state: KVState) -> None:
    assert state.name in PAGE.split("```")[1]
