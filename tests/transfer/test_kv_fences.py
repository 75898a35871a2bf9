"""Nothing leaves a producer before its device has computed it, and nothing is written before a consumer's device is done.

The device here computes when the test says so, long after its work was launched: a fence per layer, as on a card."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kv_world import KVWorld
from patience import until
from relay_pair import Consumer, Producer, info, kv

from kvrelay.engine.fence import PASSED
from kvrelay.ids import RequestId, new_request_id
from kvrelay.transfer.engines.base import Mover
from kvrelay.transfer.engines.memory import MemoryNetwork
from kvrelay.transfer.kv.sending import Sending
from kvrelay.wire.serving import FirstToken

TOKENS, CHUNK, LAYERS = 10, 5, 2
BLOCKS, MINE = [3, 1, 2], [9, 4, 7]


class LateFence:
    def __init__(self) -> None:
        self.is_over = False

    def passed(self) -> bool:
        return self.is_over


class LateDevice:
    """Launched work waits in a queue, in order."""

    def __init__(self, producer: Producer, blocks: list[int], value: float) -> None:
        self.producer = producer
        self.blocks = blocks
        self.value = value
        self.queue: list[tuple[range, int, LateFence]] = []

    def launch(self, request: RequestId, tokens: range) -> None:
        """One pass, as an engine launches it: when this returns, nothing is computed."""
        relay = self.producer.relay
        relay.begin_step([(request, tokens.stop)])
        for layer in range(LAYERS):
            fence = LateFence()
            self.queue.append((tokens, layer, fence))
            relay.layer_done(layer, fence)
        relay.end_step()

    def compute(self) -> int:
        """The oldest layer. Returns its bytes."""
        tokens, layer, fence = self.queue.pop(0)
        size = self.producer.layout.block_size
        for token in tokens:
            self.producer.memory[layer, :, self.blocks[token // size], token % size] = kv(self.value, token, layer)
        fence.is_over = True
        return len(tokens) * 2 * self.producer.layout.token_bytes


@pytest.fixture(params=list(Mover), ids=lambda mover: f"{mover.value}_moves")
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Producer, Consumer]]:
    network = MemoryNetwork()
    producer, consumer = Producer(network, mover=request.param), Consumer(network, mover=request.param)
    yield producer, consumer
    producer.close()
    consumer.close()


def rest(*sides: Producer | Consumer) -> None:
    """Both threads have had every chance to do something."""
    for side in sides:
        for _ in range(5):
            turn(side)


def turn(side: Producer | Consumer) -> None:
    turns = side.relay._turns
    before = turns.num_turns
    turns.call(lambda: None)
    until(lambda: turns.num_turns > before)


def moved(producer: Producer, consumer: Consumer) -> int:
    return producer.relay.counts().bytes + consumer.relay.counts().bytes


def until_moved(producer: Producer, consumer: Consumer, size_bytes: int) -> None:
    until(lambda: moved(producer, consumer) == size_bytes)


def expected(producer: Producer, consumer: Consumer) -> tuple[RequestId, RequestId]:
    here, there, transfer = new_request_id(), new_request_id(), info(producer, consumer)
    producer.relay.expect(here, transfer, TOKENS)
    consumer.relay.expect(there, transfer, TOKENS)
    return here, there


def test_layers_leave_one_by_one_behind_their_fences_while_two_passes_are_under_way(pair: tuple[Producer, Consumer]) -> None:
    producer, consumer = pair
    here, there = expected(producer, consumer)
    producer.relay.start(here, BLOCKS, 0, PASSED)
    until(lambda: consumer.is_started(there))
    consumer.relay.reserve(there, MINE, 0, PASSED)
    device = LateDevice(producer, BLOCKS, 7.0)
    device.launch(here, range(CHUNK))
    device.launch(here, range(CHUNK, TOKENS))
    sent = 0
    while device.queue:
        rest(producer, consumer, producer)
        assert moved(producer, consumer) == sent
        sent += device.compute()
        until_moved(producer, consumer, sent)
    producer.relay.finish(here, [FirstToken(0, 7)])
    until(lambda: there in consumer.arrivals())
    assert consumer.arrivals()[there].error == ""
    assert consumer.holds(MINE, 0, TOKENS, 7.0)
    until(lambda: producer.is_released(here))


def test_the_first_token_is_not_told_before_the_pass_it_came_from_has_passed(pair: tuple[Producer, Consumer]) -> None:
    """It never is on a real device; should it be, nothing may be lost by it."""
    producer, consumer = pair
    here, there = expected(producer, consumer)
    producer.relay.start(here, BLOCKS, 0, PASSED)
    until(lambda: consumer.is_started(there))
    consumer.relay.reserve(there, MINE, 0, PASSED)
    device = LateDevice(producer, BLOCKS, 3.0)
    device.launch(here, range(TOKENS))
    producer.relay.finish(here, [FirstToken(0, 3)])
    rest(producer, consumer, producer)
    assert moved(producer, consumer) == 0
    assert there not in consumer.arrivals()
    while device.queue:
        device.compute()
    until(lambda: there in consumer.arrivals())
    assert consumer.holds(MINE, 0, TOKENS, 3.0)
    until(lambda: producer.is_released(here))


def test_a_cached_prefix_leaves_when_the_pass_that_computed_it_has_ended(pair: tuple[Producer, Consumer]) -> None:
    """The prefix cache hands out blocks of a chunk that was launched and not computed yet."""
    producer, consumer = pair
    here, there = expected(producer, consumer)
    fence = LateFence()
    producer.relay.start(here, BLOCKS, 8, fence)
    until(lambda: consumer.is_started(there))  # the consumer may make room meanwhile
    consumer.relay.reserve(there, MINE, 0, PASSED)
    rest(producer, consumer, producer)
    assert moved(producer, consumer) == 0
    device = LateDevice(producer, BLOCKS, 5.0)
    device.queue = [(range(8), layer, LateFence()) for layer in range(LAYERS)]
    size = device.compute() + device.compute()
    fence.is_over = True
    until_moved(producer, consumer, size)
    device.launch(here, range(8, TOKENS))
    device.compute()
    device.compute()
    producer.relay.finish(here, [FirstToken(0, 5)])
    until(lambda: there in consumer.arrivals())
    assert consumer.holds(MINE, 0, TOKENS, 5.0)
    until(lambda: producer.is_released(here))


def test_blocks_are_written_when_the_passes_that_used_them_before_have_ended(pair: tuple[Producer, Consumer]) -> None:
    producer, consumer = pair
    here, there = expected(producer, consumer)
    producer.relay.start(here, BLOCKS, 0, PASSED)
    until(lambda: consumer.is_started(there))
    fence = LateFence()
    consumer.relay.reserve(there, MINE, 0, fence)
    producer.compute(here, BLOCKS, TOKENS, 6.0)
    rest(consumer, producer, consumer)
    assert moved(producer, consumer) == 0
    fence.is_over = True
    until(lambda: there in consumer.arrivals())
    assert consumer.holds(MINE, 0, TOKENS, 6.0)
    until(lambda: producer.is_released(here))


def test_an_abort_does_not_wait_for_a_fence(pair: tuple[Producer, Consumer]) -> None:
    producer, consumer = pair
    here, there = expected(producer, consumer)
    producer.relay.start(here, BLOCKS, 8, LateFence())
    until(lambda: consumer.is_started(there))
    fence = LateFence()
    consumer.relay.reserve(there, MINE, 0, fence)
    producer.relay.abort(here)
    consumer.relay.abort(there)
    until(lambda: producer.is_released(here))
    fence.is_over = True
    until(lambda: consumer.is_freed(there))
    assert moved(producer, consumer) == 0


def test_what_is_said_of_blocks_set_aside_is_not_taken_for_later_ones() -> None:
    """A fence may pass after the prompt was set aside, wanted again and given other blocks."""
    world = KVWorld(Mover.PRODUCER)
    producer, consumer = world.add_producer(), world.add_consumer()
    plan = world.plan(producer, consumer, TOKENS)
    producer.expect(plan)
    consumer.expect(plan)
    assert producer.start(plan)
    world.settle()
    rows, fence = [(plan.on_producer, producer.requests[plan.on_producer].given, TOKENS)], LateFence()
    producer.steps.begin(rows)
    producer.steps.layer_done(rows, 1, fence)
    producer.steps.ended(rows)
    producer.machine.tell(plan.on_producer, Sending.set_aside)
    world.settle()
    assert consumer.reserve(plan)
    world.settle()
    assert producer.start(plan)
    fence.is_over = True
    producer.steps.look()
    world.settle()
    assert world.consumers[plan.info.consumer].outcomes[plan.on_consumer] == []
    producer.compute_all(plan)
    world.settle()
    assert consumer.outcomes[plan.on_consumer] == ["arrived"]
    world.check_idle()
