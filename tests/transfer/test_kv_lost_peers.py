"""Peers that a router takes for gone. That is no proof: each of them is stopped, not dead, and wakes up in the middle of what
it was doing. Transfers fail at once; no block that is in use again is touched."""

from __future__ import annotations

import pytest
from patience import until
from relay_pair import Consumer, Producer, info
from test_kv_faults import MODES, MOVERS, Pair

from kvrelay.engine.fence import PASSED
from kvrelay.ids import new_request_id
from kvrelay.states import ConsumerState, ProducerState
from kvrelay.transfer.engines.base import Mover
from kvrelay.wire.codec import encode
from kvrelay.wire.kv import WriteDone, decode_for_consumer
from kvrelay.wire.serving import FirstToken

LOST = "a router considers it gone"
STAGES = pytest.mark.parametrize("stage", ["expected", "started", "reserved", "moving"])


def pair_at(stage: str, mover: Mover, mode: str) -> Pair:
    pair = Pair(mover, mode)
    if stage == "started":
        pair.producer.start(pair.plan)
        pair.world.settle()
    elif stage == "reserved":
        pair.reserved()
    elif stage == "moving":
        pair.moving()
    return pair


@MOVERS
@MODES
@STAGES
def test_a_lost_producer_fails_its_transfers_at_once_and_wakes_to_no_harm(mover: Mover, mode: str, stage: str) -> None:
    pair = pair_at(stage, mover, mode)
    pair.world.stopped.add(pair.producer.id)
    pair.world.suspect(pair.producer.id)
    assert pair.outcomes[1] == [f"the producer was lost: {LOST}"]
    pair.consumer.engine.advance()  # where it copies, its own reads must end
    pair.world.pump()
    held = pair.consumer.pool.layout.num_blocks - len(pair.consumer.pool.free)
    written_by_the_producer = mover is Mover.PRODUCER and mode == "write"
    assert (held > 0) == (written_by_the_producer and stage in ("reserved", "moving"))
    pair.world.stopped.clear()
    pair.producer.engine.advance()  # it wakes, and its writes go on
    pair.world.check()
    pair.world.run(5)
    pair.world.check_idle()


def test_a_lost_writers_blocks_are_quarantined_until_it_says_that_it_drained() -> None:
    pair = Pair(Mover.PRODUCER).moving()
    pair.world.stopped.add(pair.producer.id)
    pair.world.suspect(pair.producer.id)
    free = len(pair.consumer.pool.free)
    pair.world.run(200)
    assert pair.state()[1] is ConsumerState.DRAINING
    assert len(pair.consumer.pool.free) == free < pair.consumer.pool.layout.num_blocks
    pair.producer.engine.advance()  # the stopped process wakes in the middle of its write
    pair.world.check()
    pair.world.stopped.clear()
    pair.world.run(5)
    assert len(pair.outcomes_of_consumer) == 1
    pair.world.check_idle()


def test_proof_of_death_after_the_suspicion_ends_the_quarantine() -> None:
    pair = Pair(Mover.PRODUCER).moving()
    pair.world.suspect(pair.producer.id)
    assert pair.state()[1] is ConsumerState.DRAINING
    pair.world.kill(pair.producer)
    pair.world.run(5)
    assert pair.state()[1] is ConsumerState.DRAINING
    pair.world.tell_of_death(pair.producer.id)
    assert pair.outcomes_of_consumer == [f"the producer was lost: {LOST}"]
    pair.world.check_idle()


@MODES
def test_a_lost_reader_that_wakes_within_its_lease_reads_what_it_was_told(mode: str) -> None:
    """It was told that everything is there, and its lease holds: the producer may not reuse the blocks yet."""
    pair = Pair(Mover.CONSUMER, mode).moving()
    pair.world.settle_messages()
    pair.world.stopped.add(pair.consumer.id)
    pair.world.suspect(pair.consumer.id)
    assert pair.state()[0] is ProducerState.DRAINING
    assert len(pair.producer.pool.free) < pair.producer.pool.layout.num_blocks
    pair.world.now += 10.0
    pair.world.stopped.clear()
    pair.consumer.engine.advance()  # before it has read the producer's Abort
    pair.world.pump()
    assert pair.outcomes_of_consumer == ["arrived"]  # its bytes were compared
    pair.world.run(3)
    assert pair.outcomes[0] == [f"the consumer was lost: {LOST}"]
    pair.world.check_idle()


@MODES
def test_a_lost_reader_that_wakes_after_its_lease_uses_nothing(mode: str) -> None:
    pair = Pair(Mover.CONSUMER, mode).moving()
    pair.world.settle_messages()
    pair.world.stopped.add(pair.consumer.id)
    pair.world.suspect(pair.consumer.id)
    pair.world.run(31)
    assert len(pair.producer.pool.free) == pair.producer.pool.layout.num_blocks
    pair.world.stopped.clear()
    pair.consumer.engine.advance()
    pair.world.pump()
    assert pair.outcomes_of_consumer == ["the producer's lease ran out before everything was copied"]
    pair.world.run(5)
    pair.world.check_idle()


@STAGES
def test_a_lost_consumer_fails_its_transfers_on_the_producer(stage: str) -> None:
    pair = pair_at(stage, Mover.PRODUCER, "write")
    pair.world.stopped.add(pair.consumer.id)
    pair.world.suspect(pair.consumer.id)
    pair.producer.engine.advance()  # what was being written comes to rest
    pair.world.pump()
    assert pair.outcomes[0] == [f"the consumer was lost: {LOST}"]
    assert len(pair.producer.pool.free) == pair.producer.pool.layout.num_blocks
    pair.world.stopped.clear()
    pair.world.run(5)
    assert len(pair.outcomes_of_consumer) == 1
    pair.world.check_idle()


@MOVERS
def test_late_words_of_a_lost_producer_are_ignored_and_counted(mover: Mover) -> None:
    pair = Pair(mover).moving()
    pair.world.suspect(pair.producer.id)
    pair.consumer.engine.advance()
    pair.world.pump()

    def counted() -> int:
        return int(pair.consumer.machine.counts.duplicates)

    before = counted()
    done = WriteDone(transfer_id=pair.plan.transfer_id, first_tokens=[FirstToken(0, 1)])
    for _ in range(2):
        pair.consumer.machine.on_message(pair.producer.id, decode_for_consumer(encode(done)), pair.world.now)
    pair.consumer.poll()
    assert counted() == before + 2
    assert pair.outcomes_of_consumer == [f"the producer was lost: {LOST}"]
    pair.world.run(5)
    pair.world.check_idle()


@MOVERS
def test_a_peer_that_was_only_suspected_serves_the_next_transfer(mover: Mover) -> None:
    pair = Pair(mover).moving()
    pair.world.suspect(pair.producer.id)
    pair.world.suspect(pair.consumer.id)
    pair.world.settle()
    plan = pair.world.plan(pair.producer, pair.consumer, num_tokens=5)
    pair.producer.expect(plan)
    pair.consumer.expect(plan)
    pair.producer.start(plan)
    pair.world.settle()
    assert pair.consumer.reserve(plan)
    pair.producer.compute_all(plan)
    pair.world.settle()
    assert pair.consumer.outcomes[plan.on_consumer] == ["arrived"]
    pair.finish()


# As an engine sees it: real threads and sockets


@MOVERS
def test_a_relay_that_hears_of_a_lost_producer_fails_the_transfer_and_frees_when_it_lets_go(mover: Mover) -> None:
    producer = Producer(mover=mover)
    consumer = Consumer(producer.network, mover=mover)
    try:
        here, there, waiting = new_request_id(), new_request_id(), new_request_id()
        transfer = info(producer, consumer)
        producer.relay.expect(here, transfer, 8)
        consumer.relay.expect(there, transfer, 8)
        consumer.relay.expect(waiting, info(producer, consumer), 8)  # the producer has not heard of this one
        producer.relay.start(here, [0, 1], 0, PASSED)
        until(lambda: consumer.is_started(there))
        consumer.relay.reserve(there, [5, 6], 0, PASSED)
        consumer.relay.peer_lost(producer.id)
        until(lambda: {there, waiting} <= set(consumer.arrivals()))
        assert {arrival.error for arrival in consumer.arrivals().values()} == {f"the producer was lost: {LOST}"}
        until(lambda: consumer.is_freed(there))  # the producer lives, and says that it drained
        until(lambda: here in producer.failures())
        producer.relay.peer_lost(consumer.id)  # nothing is left to fail
        assert consumer.relay.counts().in_flight == producer.relay.counts().in_flight == 0
    finally:
        consumer.close()
        producer.close()
