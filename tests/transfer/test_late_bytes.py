"""How much of a hand-over is left when the prompt is computed, as the side that moves the bytes counts it."""

from __future__ import annotations

import pytest
from kv_world import LAYERS, KVWorld

from kvrelay.transfer.engines.base import Mover
from kvrelay.transfer.kv.counts import transfer_counts
from kvrelay.wire.registry import TransferCounts

TOKENS = 10


def hand_over(mover: Mover, mode: str, *, settle_between_layers: bool) -> TransferCounts:
    world = KVWorld(mover)
    producer, consumer = world.add_producer(), world.add_consumer()
    plan = world.plan(producer, consumer, TOKENS, mode=mode)
    producer.expect(plan)
    consumer.expect(plan)
    assert producer.start(plan)
    world.settle()
    if mode == "write":
        assert consumer.reserve(plan)
        world.settle()
    assert producer.begin_step(plan, TOKENS)
    for _ in range(LAYERS):
        producer.compute_layer()
        if settle_between_layers:
            world.settle()
    world.settle()
    if mode == "read":
        assert consumer.reserve(plan)
        world.settle()
    assert consumer.outcomes[plan.on_consumer] == ["arrived"]
    world.check_idle()
    side = consumer if mode == "read" or mover is Mover.CONSUMER else producer
    return transfer_counts(side.machine)


@pytest.mark.parametrize("mover", list(Mover), ids=lambda mover: f"{mover.value}_moves")
def test_only_what_moves_after_the_prompt_is_computed_is_late(mover: Mover) -> None:
    counts = hand_over(mover, "write", settle_between_layers=True)
    assert 0 <= counts.late_bytes <= counts.bytes // LAYERS
    assert hand_over(mover, "write", settle_between_layers=False).late_bytes > counts.late_bytes


@pytest.mark.parametrize("mover", list(Mover), ids=lambda mover: f"{mover.value}_moves")
def test_in_read_mode_everything_is_late(mover: Mover) -> None:
    counts = hand_over(mover, "read", settle_between_layers=True)
    assert counts.late_bytes == counts.bytes > 0
