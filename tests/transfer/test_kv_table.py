"""The translation table forgets what it must, remembers what it should, and stays bounded."""

from __future__ import annotations

from typing import Any

from kv_world import KVWorld

from kvrelay.ids import new_request_id, new_transfer_id, new_worker_id
from kvrelay.states import ProducerState
from kvrelay.transfer.engines.base import Mover
from kvrelay.transfer.kv.plan import Coverage, Progress
from kvrelay.transfer.relay.desk import RelayCounts
from kvrelay.transfer.relay.kind import End
from kvrelay.transfer.relay.link import TransferSettings
from kvrelay.transfer.relay.table import TransferTable
from kvrelay.wire.kv import WriteDone


class Live:
    """As much of a transfer as the table looks at."""

    def __init__(self) -> None:
        self.transfer_id = new_transfer_id()
        self.name = new_request_id()
        self.peers = (new_worker_id("decode"),)
        self.state = ProducerState.DONE
        self.end = End(self.state, self.peers)


def a_table() -> TransferTable[Any]:
    return TransferTable(TransferSettings(max_held_back=4, held_back_s=1.0, max_ended=4), RelayCounts())


def test_an_entry_lives_from_the_request_to_its_outcome() -> None:
    table, live = a_table(), Live()
    [peer], stranger = live.peers, new_worker_id("decode")
    table.add(live)
    assert table.find(live.transfer_id, peer) is live
    assert table.find(live.transfer_id, stranger) is None
    assert table.named(live.name) is live
    assert (table.num_live, table.num_remembered) == (1, 0)
    table.end(live)
    assert table.find(live.transfer_id, peer) is None
    assert table.named(live.name) is None
    assert table.ended(live.transfer_id, peer) == live.end
    assert table.ended(live.transfer_id, stranger) is None
    assert (table.num_live, table.num_remembered) == (0, 1)


def test_only_so_many_ended_transfers_are_remembered() -> None:
    table, lives = a_table(), [Live() for _ in range(10)]
    for live in lives:
        table.add(live)
        table.end(live)
    assert table.num_remembered == 4
    assert [table.knows(live.transfer_id) for live in lives] == [False] * 6 + [True] * 4


def test_a_consumer_whose_transfer_was_forgotten_by_the_producer_fails_and_gets_its_blocks_back() -> None:
    world = KVWorld(Mover.PRODUCER, settings=TransferSettings(max_ended=1))
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
