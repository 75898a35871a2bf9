"""A hand-over that nothing disturbs: both modes, both movers, unequal block sizes, chunks, prefix hits on either side, many
transfers between many workers. What arrives is compared token by token (in `relay_world`)."""

from __future__ import annotations

import pytest
from kv_world import LAYERS, KVWorld, Plan

from kvrelay.states import ConsumerState, ProducerState
from kvrelay.transfer.engines.base import Mover
from kvrelay.transfer.relay.link import TransferSettings
from kvrelay.wire.kv import Computed, WriteDone, decode_for_consumer

MOVERS = pytest.mark.parametrize("mover", list(Mover), ids=lambda mover: f"{mover.value}_moves")
MODES = pytest.mark.parametrize("mode", ["write", "read"])


def announced(world: KVWorld, kind: type) -> list[object]:
    consumer = next(iter(world.consumers))
    frames = [frame for frame in world.network if frame.target == consumer]
    return [message for frame in frames if isinstance(message := decode_for_consumer(frame.data), kind)]


@MOVERS
@MODES
@pytest.mark.parametrize(
    "sizes", [(16, 16), (16, 32), (32, 16), (16, 24), (24, 16)], ids=lambda sizes: f"{sizes[0]}to{sizes[1]}"
)
@pytest.mark.parametrize("skip_blocks", [0, 1, 2])
def test_every_token_arrives_whatever_the_block_sizes(
    mover: Mover, mode: str, sizes: tuple[int, int], skip_blocks: int
) -> None:
    """With 16 against 24 or 32, `skip_tokens` ends inside a block of the other side."""
    world = KVWorld(mover, sizes=sizes)
    producer, consumer = world.add_producer(), world.add_consumer()
    plan = world.plan(producer, consumer, num_tokens=77, mode=mode)
    producer.expect(plan)
    consumer.expect(plan)
    world.settle()
    assert producer.start(plan, num_cached=16)
    world.settle()
    if mode == "write":
        assert consumer.reserve(plan, skip_blocks)
        world.settle()
    producer.compute_all(plan, chunk=20)
    world.settle()
    if mode == "read":
        assert consumer.reserve(plan, skip_blocks)
        world.settle()
    assert consumer.outcomes[plan.on_consumer] == ["arrived"]
    assert producer.outcomes[plan.on_producer] == ["released"]
    world.check_idle()


@MOVERS
def test_bytes_move_while_later_layers_are_computed(mover: Mover) -> None:
    world = KVWorld(mover)
    producer, consumer = world.add_producer(), world.add_consumer()
    plan = begin_write(world, producer, consumer, num_tokens=10)
    assert producer.begin_step(plan, 10)
    for layer in range(LAYERS):
        producer.compute_layer()
        world.settle()
        side = producer if mover is Mover.PRODUCER else consumer
        assert side.machine.counts.moved_bytes == (layer + 1) * 2 * 10 * 4
    assert consumer.outcomes[plan.on_consumer] == ["arrived"]
    world.check_idle()


def begin_write(world: KVWorld, producer: object, consumer: object, num_tokens: int) -> Plan:
    side, other = next(iter(world.producers.values())), next(iter(world.consumers.values()))
    assert side is producer
    assert other is consumer
    plan = world.plan(side, other, num_tokens)
    side.expect(plan)
    other.expect(plan)
    assert side.start(plan)
    world.settle()
    assert other.reserve(plan)
    world.settle()
    return plan


def test_a_slow_transport_gets_fewer_and_larger_moves() -> None:
    world = KVWorld(Mover.PRODUCER, settings=TransferSettings(max_moves_per_transfer=1))
    producer, consumer = world.add_producer(), world.add_consumer()
    plan = begin_write(world, producer, consumer, num_tokens=12)
    assert producer.begin_step(plan, 4)
    producer.compute_layer()
    world.pump()
    assert producer.machine.counts.num_moves == 1
    producer.compute_layer()
    producer.compute_layer()
    producer.compute_all(plan, chunk=4)
    assert producer.machine.counts.num_moves == 1, "a second move was started before the first had ended"
    producer.engine.advance()
    world.pump()
    assert producer.machine.counts.num_moves == 1
    world.settle()
    assert consumer.outcomes[plan.on_consumer] == ["arrived"]
    world.check_idle()


def test_moves_of_all_transfers_together_are_bounded() -> None:
    world = KVWorld(Mover.PRODUCER, settings=TransferSettings(max_moves=2), blocks=(60, 60))
    producer, consumer = world.add_producer(), world.add_consumer()
    plans = [begin_write(world, producer, consumer, num_tokens=8) for _ in range(5)]
    for plan in plans:
        producer.compute_all(plan)
        assert producer.machine.counts.num_moves <= 2
    world.settle()
    assert [consumer.outcomes[plan.on_consumer] for plan in plans] == [["arrived"]] * 5
    world.check_idle()


def test_a_notice_that_was_not_sent_yet_is_replaced_by_a_newer_one() -> None:
    world = KVWorld(Mover.CONSUMER)
    producer, consumer = world.add_producer(), world.add_consumer()
    plan = begin_write(world, producer, consumer, num_tokens=10)
    assert producer.begin_step(plan, 5)
    producer.compute_layer()
    producer.compute_layer()
    world.pump()
    assert [(notice.num_tokens, notice.next_tokens, notice.layers) for notice in announced(world, Computed)] == [(0, 5, 2)]
    world.settle()
    producer.compute_all(plan)
    world.settle()
    world.check_idle()


def test_the_consumers_prefix_hit_is_never_sent() -> None:
    world = KVWorld(Mover.PRODUCER)
    producer, consumer = world.add_producer(), world.add_consumer()
    plan = world.plan(producer, consumer, num_tokens=10)
    producer.expect(plan)
    consumer.expect(plan)
    producer.start(plan)
    world.settle()
    assert consumer.reserve(plan, skip_blocks=2)
    producer.compute_all(plan)
    world.settle()
    assert producer.machine.counts.moved_bytes == LAYERS * 2 * 2 * 4
    world.check_idle()


def test_a_prompt_that_the_consumer_has_whole_moves_no_byte() -> None:
    world = KVWorld(Mover.PRODUCER)
    producer, consumer = world.add_producer(), world.add_consumer()
    plan = world.plan(producer, consumer, num_tokens=8)
    producer.expect(plan)
    consumer.expect(plan)
    producer.start(plan)
    world.settle()
    assert consumer.reserve(plan, skip_blocks=2)
    producer.compute_all(plan)
    world.settle()
    assert consumer.outcomes[plan.on_consumer] == ["arrived"]
    assert producer.machine.counts.moved_bytes == 0
    world.check_idle()


@MOVERS
@MODES
def test_many_transfers_between_many_workers(mover: Mover, mode: str) -> None:
    world = KVWorld(mover, blocks=(60, 60))
    producers = [world.add_producer() for _ in range(2)]
    consumers = [world.add_consumer() for _ in range(3)]
    plans = [world.plan(producers[i % 2], consumers[i % 3], num_tokens=3 + i, mode=mode) for i in range(12)]
    for plan in plans:
        world.producers[plan.info.producer].expect(plan)
        world.consumers[plan.info.consumer].expect(plan)
    world.settle()
    for plan in plans:
        assert world.producers[plan.info.producer].start(plan)
        world.settle()
        world.consumers[plan.info.consumer].reserve(plan)
        world.producers[plan.info.producer].compute_all(plan, chunk=4)
        world.settle()
        world.consumers[plan.info.consumer].reserve(plan)
        world.settle()
    assert all(world.consumers[plan.info.consumer].outcomes[plan.on_consumer] == ["arrived"] for plan in plans)
    assert len(consumers[0].machine.producers()) == 2, "one connection per producer, made on demand"
    world.check_idle()


def test_the_two_sides_have_their_own_request_ids_and_share_the_transfer_id() -> None:
    world = KVWorld()
    producer, consumer = world.add_producer(), world.add_consumer()
    plan = begin_write(world, producer, consumer, num_tokens=4)
    here = producer.machine.table.find(plan.transfer_id, consumer.id)
    there = consumer.machine.table.find(plan.transfer_id, producer.id)
    assert here is not None
    assert there is not None
    assert here.meta.request_id == plan.on_producer
    assert there.meta.request_id == plan.on_consumer
    assert (here.state, there.state) == (ProducerState.SENDING, ConsumerState.RESERVED)
    assert producer.machine.counts.lookups > 0
    producer.compute_all(plan)
    world.settle()
    assert producer.machine.table.find(plan.transfer_id, consumer.id) is None
    world.check_idle()


def test_write_done_carries_the_first_tokens_and_only_copied_ones_the_blocks() -> None:
    for mover, has_blocks in ((Mover.PRODUCER, False), (Mover.CONSUMER, True)):
        world = KVWorld(mover)
        producer, consumer = world.add_producer(), world.add_consumer()
        plan = begin_write(world, producer, consumer, num_tokens=4)
        producer.begin_step(plan, 4)
        for _ in range(LAYERS):
            producer.compute_layer()
        for _ in range(10):
            world.pump()
            producer.engine.advance()
        (done,) = announced(world, WriteDone)
        assert isinstance(done, WriteDone)
        assert done.first_tokens[0].token == plan.number
        assert bool(done.blocks) is has_blocks
        world.settle()
        world.check_idle()
