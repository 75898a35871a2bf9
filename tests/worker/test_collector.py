"""The garbage collector of processes that serve."""

from __future__ import annotations

import gc

from kvrelay.worker.collector import spared_collector


def test_the_collector_is_spared_for_a_while_and_then_as_it_was() -> None:
    usual = gc.get_threshold()
    with spared_collector():
        assert gc.get_threshold()[0] > usual[0]
        assert gc.get_freeze_count() > 0
    assert gc.get_threshold() == usual
    assert gc.get_freeze_count() == 0
