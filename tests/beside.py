"""The tests that run beside each other are dealt out in the order and in the portions of `order.py`."""

from __future__ import annotations

import pytest
from order import is_apart
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling


class Beside(LoadScopeScheduling):
    """By file or by test, in the order in which they were collected."""

    def __init__(self, config: pytest.Config, log: Producer) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # it would begin with files of many tests, which are quick ones

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        return nodeid if is_apart(file) else file
