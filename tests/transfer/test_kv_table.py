"""The translation table forgets what it must, remembers what it should, and stays bounded."""

from __future__ import annotations

import msgspec
from relay_world import World

from kvrelay.ids import new_request_id, new_transfer_id, new_worker_id
from kvrelay.transfer.engines.base import Mover
from kvrelay.transfer.plan import Coverage, Progress, TransferMeta
from kvrelay.transfer.session import TransferSettings
from kvrelay.transfer.table import TransferTable
from kvrelay.wire.transfer import WriteDone


class Live:
    def __init__(self) -> None:
        self.meta = TransferMeta(
            transfer_id=new_transfer_id(),
            request_id=new_request_id(),
            peer=new_worker_id("decode"),
            mode="write",
            num_tokens=1,
        )


class End(msgspec.Struct, frozen=True):
    reason: str


def test_an_entry_lives_from_the_request_to_its_outcome() -> None:
    table: TransferTable[Live, End] = TransferTable(max_parked=4, parked_s=1.0, max_ended=4)
    live = Live()
    meta = live.meta
    table.add(live)
    assert table.find(meta.transfer_id, meta.peer) is live
    assert table.find(meta.transfer_id, new_worker_id("decode")) is None
    assert table.of_request(meta.request_id) is live
    table.remove(meta.request_id)
    assert table.snapshot().size == 1, "it has no outcome yet"
    table.end(live, End("done"))
    assert table.find(meta.transfer_id, meta.peer) is None
    assert table.ended(meta.transfer_id, meta.peer) == End("done")
    assert table.ended(meta.transfer_id, new_worker_id("decode")) is None
    assert table.snapshot().size == 1, "the scheduler has not been told yet"
    table.remove(meta.request_id)
    assert table.of_request(meta.request_id) is None
    stats = table.snapshot()
    assert (stats.size, stats.lookups, stats.remembered) == (0, 3, 1)
    assert stats.lookup_s > 0


def test_only_so_many_ended_transfers_are_remembered() -> None:
    table: TransferTable[Live, End] = TransferTable(max_parked=4, parked_s=1.0, max_ended=4)
    lives = [Live() for _ in range(10)]
    for live in lives:
        table.add(live)
        table.end(live, End(""))
        table.remove(live.meta.request_id)
    assert table.snapshot().remembered == 4
    assert [table.knows(live.meta.transfer_id) for live in lives] == [False] * 6 + [True] * 4


def test_a_consumer_whose_transfer_was_forgotten_by_the_producer_fails_and_gets_its_blocks_back() -> None:
    world = World(Mover.PRODUCER, settings=TransferSettings(max_ended=1))
    producer, consumer = world.add_producer(), world.add_consumer()
    plans = [world.plan(producer, consumer, num_tokens=4) for _ in range(2)]
    for plan in plans:
        producer.expect(plan)
        consumer.expect(plan)
        producer.start(plan)
        world.settle()
        consumer.reserve(plan)
        world.settle()
        producer.compute_all(plan)
        while producer.engine.busy:
            producer.engine.advance()
            world.pump()
        world.drop(WriteDone)
    world.run(5)
    assert consumer.outcomes[plans[0].on_consumer] == ["the producer does not know it any more"]
    assert consumer.outcomes[plans[1].on_consumer] == ["arrived"]
    world.check_idle()


def test_what_is_handed_over_is_the_difference_to_what_was() -> None:
    coverage = Coverage(new_transfer_id(), num_layers=4, skip_tokens=3)
    taken = coverage.take(Progress(5, 9, 2), limit=9)
    assert [(plan.tokens, plan.layers) for plan in taken] == [((3, 9), (0, 2)), ((3, 5), (2, 4))]
    assert coverage.take(Progress(5, 9, 2), limit=9) == []
    taken = coverage.take(Progress(9, 12, 1), limit=1)
    assert [(plan.tokens, plan.layers) for plan in taken] == [((9, 12), (0, 1))]
    assert not coverage.complete(9)
    taken = coverage.take(Progress(12), limit=9)
    assert [(plan.tokens, plan.layers) for plan in taken] == [((9, 12), (1, 2)), ((5, 12), (2, 4))]
    assert coverage.complete(12)


def test_what_the_consumer_has_already_is_not_handed_over() -> None:
    coverage = Coverage(new_transfer_id(), num_layers=2, skip_tokens=8)
    assert coverage.take(Progress(4, 8, 1), limit=9) == []
    assert [plan.tokens for plan in coverage.take(Progress(10), limit=9)] == [(8, 10)]
