"""Each way in which a hand-over can go wrong, by name: messages that come early, late, twice or never, peers that stop, die or
come back as another, requests that end in the middle. Every test ends with nothing held on either side."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from kv_world import ConsumerSide, KVWorld, Plan, ProducerSide
from relay_world import Frame

from kvrelay.errors import WrongIdError
from kvrelay.ids import RequestId, TransferId, new_request_id, new_transfer_id, new_worker_id
from kvrelay.states import ConsumerState, ProducerState
from kvrelay.transfer.engines.base import Mover
from kvrelay.transfer.kv.counts import transfer_counts
from kvrelay.transfer.relay.link import TransferSettings
from kvrelay.wire.codec import encode
from kvrelay.wire.kv import Computed, Pull, ReadDone, Ready, Release, Reserve, Starting, WriteDone, decode_for_producer
from kvrelay.wire.relay import Abort, AbortAck, Heartbeat, Hello, Map, Mapped, Message, Refused, Welcome
from kvrelay.wire.serving import FirstToken, TransferInfo

MOVERS = pytest.mark.parametrize("mover", list(Mover), ids=lambda mover: f"{mover.value}_moves")
MODES = pytest.mark.parametrize("mode", ["write", "read"])


class Pair:
    """One producer, one consumer, one transfer that both have heard of."""

    def __init__(
        self, mover: Mover = Mover.PRODUCER, mode: str = "write", *, num_tokens: int = 10, connect: bool = True
    ) -> None:
        self.world = KVWorld(mover)
        self.producer: ProducerSide = self.world.add_producer()
        self.consumer: ConsumerSide = self.world.add_consumer()
        self.plan: Plan = self.world.plan(self.producer, self.consumer, num_tokens, mode)
        if connect:
            self.producer.expect(self.plan)
            self.consumer.expect(self.plan)
            self.world.settle()

    def reserved(self) -> Pair:
        """The consumer has reserved (write mode) or pulled (read mode), and its word is on the network."""
        assert self.producer.start(self.plan)
        if self.plan.info.mode == "read":
            self.producer.compute_all(self.plan)
        self.world.settle()
        assert self.consumer.reserve(self.plan)
        self.world.pump()
        return self

    def moving(self) -> Pair:
        """Moves are under way, with nothing moved yet, on whichever side moves."""
        self.reserved()
        self.world.settle_messages()
        if self.plan.info.mode == "write":
            self.producer.begin_step(self.plan, 1000)
            while self.producer.step is not None:
                self.producer.compute_layer()
            self.world.settle_messages()
        assert self.mover_side.machine.counts.num_moves == 1
        return self

    @property
    def mover_side(self) -> ProducerSide | ConsumerSide:
        producer_moves = self.plan.info.mode == "write" and self.world.mover is Mover.PRODUCER
        return self.producer if producer_moves else self.consumer

    @property
    def outcomes(self) -> tuple[list[str], list[str]]:
        return self.producer.outcomes[self.plan.on_producer], self.consumer.outcomes[self.plan.on_consumer]

    @property
    def outcomes_of_consumer(self) -> list[str]:
        return self.consumer.outcomes[self.plan.on_consumer]

    def state(self) -> tuple[ProducerState | None, ConsumerState | None]:
        sending = self.producer.machine.table.named(self.plan.on_producer)
        receiving = self.consumer.machine.table.named(self.plan.on_consumer)
        return sending and sending.state, receiving and receiving.state

    def finish(self) -> None:
        """Works on until everything is over."""
        for _ in range(40):
            self.world.settle()
            self.producer.start(self.plan)
            self.producer.compute_all(self.plan)
            self.world.settle()
            self.consumer.reserve(self.plan)
            self.world.settle()
            self.world.pass_time(1.0)
        self.world.check_idle()


# Lost messages: each is repaired by the next heartbeat


@MOVERS
@pytest.mark.parametrize("kind", [Hello, Welcome, Map, Mapped, Starting, Reserve, Computed, WriteDone, ReadDone, Heartbeat])
def test_a_lost_message_of_write_mode_is_repaired(mover: Mover, kind: type[Message]) -> None:
    if kind in (Computed, ReadDone) and mover is Mover.PRODUCER:
        return  # not part of it
    _one_loss(Pair(mover, connect=False), kind)


@MOVERS
@pytest.mark.parametrize("kind", [Ready, Pull, ReadDone, Heartbeat])
def test_a_lost_message_of_read_mode_is_repaired(mover: Mover, kind: type[Message]) -> None:
    _one_loss(Pair(mover, "read", connect=False), kind)


def _one_loss(pair: Pair, kind: type[Message]) -> None:
    world, plan, lost = pair.world, pair.plan, 0
    pair.producer.expect(plan)
    pair.consumer.expect(plan)
    for turn in range(600):
        world.pump()
        lost += world.drop(kind) if not lost else 0
        for side in (pair.producer, pair.consumer):
            side.engine.advance()
        if world.network:
            world.deliver()
        if turn % 20 == 0:
            pair.producer.start(plan)
            pair.producer.begin_step(plan, 4)
            pair.consumer.reserve(plan)
        pair.producer.compute_layer()
        world.pass_time(0.05)
    assert lost, f"no {kind.__name__} was ever sent"
    assert pair.outcomes == (["released"], ["arrived"])
    world.check_idle()


@MOVERS
@pytest.mark.parametrize("kind", [Hello, Welcome, Map, Mapped, Reserve, WriteDone])
def test_what_is_said_again_after_a_loss_is_counted(mover: Mover, kind: type[Message]) -> None:
    def repeats(*, is_lost: bool) -> int:
        pair = Pair(mover, connect=kind in (Reserve, WriteDone))
        if kind in (Reserve, WriteDone):
            pair.reserved()
        else:
            pair.producer.expect(pair.plan)
            pair.consumer.expect(pair.plan)
        if kind is WriteDone:
            pair.world.settle()
            pair.producer.compute_all(pair.plan)
        pair.world.deliver_until(kind)
        if is_lost:
            assert pair.world.drop(kind)
        pair.finish()
        assert pair.outcomes == (["released"], ["arrived"])
        return sum(transfer_counts(side.machine).repeats for side in (pair.producer, pair.consumer))

    assert repeats(is_lost=False) == 0 < repeats(is_lost=True)


@MOVERS
@pytest.mark.parametrize("kind", [Abort, AbortAck])
def test_a_lost_abort_or_its_ack_is_repaired(mover: Mover, kind: type[Message]) -> None:
    pair = Pair(mover).moving()
    pair.consumer.abort(pair.plan)
    pair.world.pump()
    pair.producer.engine.advance()
    pair.consumer.engine.advance()
    if kind is AbortAck:
        while pair.world.kinds().count("Abort"):
            pair.world.deliver()
        pair.world.pump()
    dropped = pair.world.drop(kind)
    assert dropped or mover is Mover.CONSUMER
    pair.world.run(5)
    assert transfer_counts(pair.consumer.machine).repeats == (dropped if mover is Mover.PRODUCER else 0)  # else it has ended
    pair.world.check_idle()


def test_a_lost_release_is_repaired() -> None:
    pair = Pair()
    pair.producer.start(pair.plan)
    pair.world.settle()
    pair.consumer.abort(pair.plan)
    pair.world.pump()
    assert pair.world.drop(Release) == 1
    pair.world.run(5)
    assert pair.outcomes == (["released"], ["aborted"])
    pair.world.check_idle()


# Early, late and repeated messages


@MODES
def test_the_producers_word_comes_before_the_consumer_has_heard_of_the_transfer(mode: str) -> None:
    """P's ack before D's mapping: it is held back, and matched when the request comes."""
    pair = Pair(mode=mode)  # opens the connection
    plan = pair.world.plan(pair.producer, pair.consumer, mode=mode)
    pair.producer.expect(plan)
    pair.producer.start(plan)
    if mode == "read":
        pair.producer.compute_all(plan)
    pair.world.settle()
    assert pair.consumer.machine.table.num_held_back == 1
    pair.consumer.expect(plan)
    pair.world.pump()
    assert pair.consumer.requests[plan.on_consumer].startable
    assert pair.consumer.machine.table.num_held_back == 0
    pair.consumer.reserve(plan)
    pair.producer.compute_all(plan)
    pair.world.settle()
    assert pair.consumer.outcomes[plan.on_consumer] == ["arrived"]
    pair.finish()


def test_what_is_held_back_is_bounded_in_number_and_age() -> None:
    world = KVWorld(settings=TransferSettings(max_held_back=3, held_back_s=5.0))
    producer, consumer = world.add_producer(), world.add_consumer()
    first = world.plan(producer, consumer)
    consumer.expect(first)
    producer.expect(first)
    world.settle()
    plans = [world.plan(producer, consumer, num_tokens=1) for _ in range(5)]
    for plan in plans:
        producer.expect(plan)
        producer.start(plan)
    world.settle()
    machine = consumer.machine
    assert (machine.table.num_held_back, machine.counts.held_back_dropped) == (3, 2)
    world.pass_time(6.0)
    assert (machine.table.num_held_back, machine.counts.held_back_dropped) == (0, 5)
    for plan in plans:  # a word that was held back and that was lost is repaired like any other
        consumer.expect(plan)
    world.run(5)
    assert all(consumer.requests[plan.on_consumer].startable for plan in plans)


def test_a_reserve_for_an_unknown_transfer_waits_for_it_and_is_never_fatal() -> None:
    pair = Pair(connect=False)
    world, plan = pair.world, pair.plan
    other = world.plan(pair.producer, pair.consumer)
    pair.consumer.expect(other)
    world.settle()
    message = Reserve(transfer_id=plan.transfer_id, blocks=[0, 1, 2], skip_tokens=0)
    pair.producer.machine.on_message(pair.consumer.id, message, world.now)
    assert pair.producer.machine.table.num_held_back == 1
    pair.producer.expect(plan)
    assert pair.producer.machine.table.num_held_back == 0
    assert pair.state()[0] is ProducerState.QUEUED
    pair.producer.start(plan)
    assert pair.state()[0] is ProducerState.SENDING


@MOVERS
def test_the_consumer_reserves_after_the_producer_has_finished(mover: Mover) -> None:
    pair = Pair(mover)
    pair.producer.start(pair.plan)
    pair.producer.compute_all(pair.plan)
    pair.world.run(10)
    assert pair.state() == (ProducerState.STARTED, ConsumerState.STARTING)
    pair.consumer.reserve(pair.plan)
    pair.world.settle()
    assert pair.outcomes == (["released"], ["arrived"])
    pair.world.check_idle()


@MOVERS
def test_a_repeated_write_done_is_ignored_and_counted(mover: Mover) -> None:
    pair = Pair(mover).moving()
    pair.producer.engine.advance()
    pair.world.pump()
    frames = [frame for frame in pair.world.network if pair.world.said_in(frame) == "WriteDone"]
    pair.world.settle()
    if mover is Mover.CONSUMER:
        done = WriteDone(transfer_id=pair.plan.transfer_id, first_tokens=[FirstToken(0, 1)], blocks=[0, 1, 2])
        frames = [Frame(pair.producer.id, pair.consumer.id, encode(done))]
    assert pair.outcomes == (["released"], ["arrived"])
    before = pair.consumer.machine.counts.duplicates
    pair.world.network += frames * 2
    pair.world.settle()
    assert pair.consumer.machine.counts.duplicates == before + 2
    pair.world.check_idle()


def test_an_old_state_in_an_ack_does_not_end_a_transfer_that_has_moved_on() -> None:
    pair = Pair(connect=False)
    other = pair.world.plan(pair.producer, pair.consumer)
    pair.consumer.expect(other)
    pair.consumer.expect(pair.plan)
    while "HeartbeatAck" not in pair.world.kinds():
        pair.world.deliver() if pair.world.network else pair.world.pass_time(1.0)
    stale = [frame for frame in pair.world.network if pair.world.said_in(frame) == "HeartbeatAck"]  # says: unknown
    pair.world.drop()
    pair.producer.expect(pair.plan)
    pair.producer.start(pair.plan)
    pair.world.settle()
    assert pair.consumer.reserve(pair.plan)
    pair.world.network = stale + pair.world.network
    pair.producer.compute_all(pair.plan)
    pair.world.settle()
    assert pair.outcomes == (["released"], ["arrived"])


def test_messages_of_another_worker_about_a_known_transfer_are_ignored_and_counted() -> None:
    pair = Pair().moving()
    stranger = pair.world.add_consumer()
    other = pair.world.plan(pair.producer, stranger)
    stranger.expect(other)
    pair.world.settle_messages()
    for message in (
        Abort(transfer_id=pair.plan.transfer_id, reason="not mine"),
        Reserve(transfer_id=pair.plan.transfer_id, blocks=[0], skip_tokens=0),
        ReadDone(transfer_id=pair.plan.transfer_id),
    ):
        pair.producer.machine.on_message(stranger.id, message, pair.world.now)
    assert pair.producer.machine.counts.foreign == 3
    assert pair.state() == (ProducerState.SENDING, ConsumerState.RESERVED)
    pair.world.settle()
    assert pair.outcomes == (["released"], ["arrived"])


# Ids


def test_ids_of_the_wrong_kind_are_refused_naming_both() -> None:
    pair = Pair()
    info = pair.plan.info
    wrong = TransferInfo(
        transfer_id=TransferId(new_request_id()),
        mode="write",
        producer=info.producer,
        consumer=info.consumer,
        signal_address="",
    )
    for side in (pair.producer, pair.consumer):
        with pytest.raises(WrongIdError, match=r"expected a TransferId, got .*which is RequestId"):
            side.expect(Plan(9, wrong, 4, new_request_id(), new_request_id()))
        with pytest.raises(WrongIdError, match=r"expected a RequestId, got .*which is TransferId"):
            side.expect(Plan(9, info, 4, RequestId(new_transfer_id()), RequestId(new_transfer_id())))
    frame = encode(ReadDone(transfer_id=TransferId(new_worker_id("decode"))))
    with pytest.raises(WrongIdError, match=r"expected a TransferId, got .*which is WorkerId"):
        decode_for_producer(frame)
    beat = encode(Heartbeat(number=1, transfers=[(TransferId(new_request_id()), ConsumerState.QUEUED)]))
    with pytest.raises(WrongIdError, match="which is RequestId"):
        decode_for_producer(beat)


def test_a_transfer_id_is_used_once() -> None:
    pair = Pair().moving()
    pair.world.settle()
    again = Plan(99, pair.plan.info, 4, new_request_id(), new_request_id())
    pair.producer.expect(again)
    pair.consumer.expect(again)
    pair.world.settle()
    assert pair.producer.outcomes[again.on_producer] != []
    assert "used before" in pair.consumer.outcomes[again.on_consumer][0]
    pair.world.check_idle()


# The request ends in the middle


@MOVERS
@MODES
@pytest.mark.parametrize("who", ["producer", "consumer"])
@pytest.mark.parametrize("when", ["queued", "started", "reserving", "moving"])
def test_an_abort_gives_all_blocks_back(mover: Mover, mode: str, who: str, when: str) -> None:
    pair = Pair(mover, mode)
    if when == "started":
        pair.producer.start(pair.plan)
        pair.world.settle()
    elif when == "reserving":
        pair.reserved()
    elif when == "moving":
        pair.moving()
    if who == "producer":
        pair.producer.abort(pair.plan)
    else:
        pair.consumer.abort(pair.plan)
    pair.world.run(5)
    ended = pair.outcomes
    assert all(len(outcome) == 1 for outcome in ended)
    assert (ended[0] if who == "producer" else ended[1]) == ["aborted"]
    pair.world.check_idle()


def test_a_request_that_ends_at_its_first_token_is_released() -> None:
    pair = Pair()
    pair.producer.start(pair.plan)
    pair.producer.compute_all(pair.plan)
    pair.world.settle()
    pair.consumer.abort(pair.plan)
    pair.world.pump()
    assert pair.world.kinds() == ["Release"]
    pair.world.settle()
    assert pair.outcomes == (["released"], ["aborted"])
    pair.world.check_idle()


def test_a_release_before_the_producer_has_heard_of_the_transfer() -> None:
    pair = Pair(connect=False)
    pair.consumer.expect(pair.plan)
    pair.world.settle()
    pair.consumer.abort(pair.plan)
    pair.world.settle()
    pair.producer.expect(pair.plan)
    pair.world.settle()
    assert pair.outcomes == (["released"], ["aborted"])
    pair.world.check_idle()


def test_the_consumers_blocks_are_not_freed_before_the_writer_has_drained() -> None:
    pair = Pair(Mover.PRODUCER).moving()
    pair.consumer.abort(pair.plan)
    pair.world.settle_messages()
    assert pair.state() == (ProducerState.DRAINING, ConsumerState.DRAINING)
    pair.world.stopped.add(pair.producer.id)
    pair.world.run(300)
    assert pair.state()[1] is ConsumerState.DRAINING, "time is no proof"
    assert len(pair.consumer.pool.free) < pair.consumer.pool.layout.num_blocks
    pair.world.stopped.clear()
    pair.world.run(5)
    pair.world.check_idle()


def test_a_silent_writer_fails_the_request_at_once_but_keeps_the_blocks_quarantined() -> None:
    pair = Pair(Mover.PRODUCER).moving()
    pair.world.stopped.add(pair.producer.id)
    pair.world.run(31)
    assert pair.outcomes[1] == ["the producer has not answered for 30 s"]
    assert pair.state()[1] is ConsumerState.DRAINING
    pair.producer.engine.advance()  # the stopped process wakes in the middle of its write
    pair.world.check()
    pair.world.stopped.clear()
    pair.world.run(5)
    pair.world.check_idle()


def test_proven_death_of_the_writer_frees_the_blocks() -> None:
    pair = Pair(Mover.PRODUCER).moving()
    pair.world.kill(pair.producer)
    pair.world.run(40)
    assert pair.state()[1] is ConsumerState.DRAINING
    pair.world.tell_of_death(pair.producer.id)
    pair.world.settle()
    pair.world.check_idle()


@MODES
def test_what_was_copied_after_the_lease_is_not_used(mode: str) -> None:
    """The consumer is stopped in the middle of its copy; the producer's lease ends and its blocks are reused."""
    pair = Pair(Mover.CONSUMER, mode).moving()
    pair.consumer.engine.advance(1)
    pair.world.stopped.add(pair.consumer.id)
    pair.world.run(31)
    assert pair.outcomes[0] == ["the consumer has not asked for it for 30 s"]
    pair.world.stopped.clear()
    pair.consumer.engine.advance()
    pair.world.pump()
    assert pair.outcomes[1] == ["the producer's lease ran out before everything was copied"]
    pair.world.run(5)
    pair.world.check_idle()


@MODES
def test_heartbeats_keep_a_long_copy_alive(mode: str) -> None:
    pair = Pair(Mover.CONSUMER, mode).moving()
    for _ in range(200):
        pair.world.pass_time(0.5)
        pair.world.settle_messages()
    pair.world.settle()
    assert pair.outcomes == (["released"], ["arrived"])
    pair.world.check_idle()


def test_a_producer_that_aborts_does_not_reuse_what_is_being_copied() -> None:
    pair = Pair(Mover.CONSUMER).moving()
    pair.producer.abort(pair.plan)
    pair.world.pump()
    assert pair.state()[0] is ProducerState.DRAINING
    pair.world.network.clear()  # the consumer does not hear of it
    pair.consumer.engine.advance()
    pair.world.pump()
    assert pair.outcomes[1] == ["arrived"], "the copy was sound: nothing was reused meanwhile"
    pair.world.run(5)
    pair.world.check_idle()


def test_an_ack_is_a_lease_from_when_the_heartbeat_was_sent_not_from_when_it_came_back() -> None:
    pair = Pair(Mover.CONSUMER).moving()
    pair.world.pass_time(2.0)
    beats = [frame for frame in pair.world.network if pair.world.said_in(frame) == "Heartbeat"]
    assert beats
    pair.world.settle_messages(only=pair.producer.id)
    acks = [frame for frame in pair.world.network if pair.world.said_in(frame) == "HeartbeatAck"]
    pair.world.network.clear()
    pair.world.now += 28.9  # the producer's lease ends at 30; the ack is nearly as old when it arrives
    pair.world.network += acks
    pair.world.settle_messages()
    pair.consumer.engine.advance()
    pair.world.pump()
    assert pair.outcomes[1] == ["the producer's lease ran out before everything was copied"]


# Workers that go and come back


@MOVERS
@MODES
def test_a_restarted_consumer_gets_nothing_of_the_old_one(mover: Mover, mode: str) -> None:
    pair = Pair(mover, mode).moving()
    pair.world.kill(pair.consumer)
    fresh = pair.world.add_consumer()
    plan = pair.world.plan(pair.producer, fresh, num_tokens=6, mode=mode)
    pair.producer.expect(plan)
    fresh.expect(plan)
    pair.world.settle()
    pair.producer.start(plan)
    pair.world.settle()
    fresh.reserve(plan)
    pair.producer.compute_all(plan)
    pair.world.settle()
    fresh.reserve(plan)
    pair.world.settle()
    assert fresh.outcomes[plan.on_consumer] == ["arrived"]
    pair.world.run(40)
    assert len(pair.outcomes[0]) == 1
    assert pair.outcomes[0] != ["released"]
    pair.world.check_idle()


@MOVERS
def test_a_producer_that_restarted_at_the_same_address_ends_the_old_transfers(mover: Mover) -> None:
    pair = Pair(mover).moving()
    pair.world.kill(pair.producer)
    fresh = pair.world.add_producer()
    welcome = fresh.desk.local.welcome()
    pair.consumer.machine.on_message(pair.producer.id, welcome, pair.world.now)
    pair.world.settle()
    assert fresh.id in pair.outcomes[1][0]
    pair.world.check_idle()


@MOVERS
def test_a_consumer_that_was_stopped_for_long_opens_its_connection_again(mover: Mover) -> None:
    pair = Pair(mover)
    pair.world.stopped.add(pair.consumer.id)
    pair.world.run(70)
    pair.world.stopped.clear()
    pair.world.run(5)
    plan = pair.world.plan(pair.producer, pair.consumer, num_tokens=5)
    pair.producer.expect(plan)
    pair.consumer.expect(plan)
    pair.producer.start(plan)
    pair.world.run(5)
    pair.consumer.reserve(plan)
    pair.producer.compute_all(plan)
    pair.world.settle()
    assert pair.consumer.outcomes[plan.on_consumer] == ["arrived"]
    pair.finish()


def test_blocks_that_the_producer_never_heard_of_are_not_quarantined() -> None:
    """The connection breaks before Reserve could be said, and the producer never answers again."""
    pair = Pair(Mover.PRODUCER)
    pair.producer.start(pair.plan)
    pair.world.settle()
    refused = Refused(reason="forgotten", about="sender")
    pair.consumer.machine.on_message(pair.producer.id, refused, pair.world.now)
    assert transfer_counts(pair.consumer.machine).reconnects == 1
    pair.world.stopped.add(pair.producer.id)
    assert pair.consumer.reserve(pair.plan)
    pair.world.run(31)
    assert pair.outcomes[1] == ["the producer has not answered for 30 s"]
    assert len(pair.consumer.pool.free) == pair.consumer.pool.layout.num_blocks


def test_nothing_is_said_of_a_transfer_before_the_connection_is_open() -> None:
    pair = Pair(connect=False)
    pair.producer.expect(pair.plan)
    pair.producer.start(pair.plan)
    pair.consumer.expect(pair.plan)
    pair.world.pump()
    said: list[str] = []
    while "Mapped" not in said:
        said += pair.world.kinds()
        pair.world.deliver()
    assert set(said) == {"Hello", "Welcome", "Map", "Mapped", "Starting"}
    assert said.index("Starting") > said.index("Mapped")
    pair.finish()
    assert pair.outcomes == (["released"], ["arrived"])


# Setting aside


@MOVERS
@MODES
def test_a_prompt_that_was_set_aside_is_computed_again_when_the_consumer_wants_it(mover: Mover, mode: str) -> None:
    pair = Pair(mover, mode)
    pair.producer.start(pair.plan)
    pair.producer.compute_all(pair.plan)
    pair.world.settle()
    pair.producer.set_aside(pair.plan)
    pair.world.settle()
    assert len(pair.producer.pool.free) == pair.producer.pool.layout.num_blocks
    assert not pair.producer.requests[pair.plan.on_producer].wanted
    pair.world.run(60)
    assert pair.state()[0] is ProducerState.SET_ASIDE
    assert pair.consumer.reserve(pair.plan)
    pair.world.settle()
    assert pair.producer.requests[pair.plan.on_producer].wanted, "poll said restart"
    pair.producer.start(pair.plan, num_cached=8)
    pair.producer.compute_all(pair.plan)
    pair.world.run(3)
    assert pair.outcomes == (["released"], ["arrived"])
    counts = transfer_counts(pair.producer.machine)
    assert (counts.set_aside, counts.recomputed) == (1, 1)
    pair.world.check_idle()


@MODES
def test_setting_aside_that_comes_too_late_changes_nothing(mode: str) -> None:
    pair = Pair(Mover.CONSUMER, mode).moving()
    pair.producer.set_aside(pair.plan)
    pair.world.settle()
    assert pair.outcomes == (["released"], ["arrived"])
    pair.world.check_idle()


def test_a_reserve_that_crosses_the_end_of_its_transfer_is_freed() -> None:
    pair = Pair()
    pair.producer.start(pair.plan)
    pair.world.settle()
    pair.producer.abort(pair.plan)
    while pair.world.kinds() != ["Abort"]:
        pair.world.pump()
    frame = pair.world.network.pop()
    pair.consumer.machine.on_message(frame.source, Abort(transfer_id=pair.plan.transfer_id, reason="gone"), pair.world.now)
    assert pair.consumer.reserve(pair.plan)  # the engine has not polled yet
    pair.world.settle()
    pair.world.check_idle()


# Waiting


def test_a_pull_is_repeated_with_growing_pauses_until_it_is_ready_or_too_late() -> None:
    pair = Pair(mode="read")
    pair.producer.start(pair.plan)
    pair.producer.compute_all(pair.plan)
    pair.world.settle()
    pair.producer.set_aside(pair.plan)
    pair.world.settle()
    assert pair.consumer.reserve(pair.plan)
    times: list[float] = []
    while not pair.outcomes[1] and pair.world.now < 1200.0:
        pair.world.pump()
        times += [pair.world.now] * pair.world.kinds().count("Pull")
        pair.world.settle()
        pair.world.pass_time(max(0.001, pair.consumer.machine.next_tick(pair.world.now)))
    pauses = [round(later - earlier, 3) for earlier, later in itertools.pairwise(times)]
    assert pauses[:4] == [0.01, 0.02, 0.04, 0.08]
    assert max(pauses) <= 2.0
    assert pair.outcomes[1] == ["the producer was not ready within 120 s"]
    pair.world.run(5)
    pair.world.check_idle()


def test_a_producer_that_never_hears_of_the_transfer_ends_it_on_the_consumer() -> None:
    pair = Pair(connect=False)
    pair.consumer.expect(pair.plan)
    pair.world.run(35)
    assert pair.outcomes_of_consumer == ["the producer has not heard of it for 30 s"]
    pair.world.check_idle()


def test_a_consumer_that_never_comes_ends_it_on_the_producer() -> None:
    pair = Pair(connect=False)
    pair.producer.expect(pair.plan)
    pair.world.run(100)
    assert pair.state()[0] is ProducerState.QUEUED, "nothing is held yet"
    pair.producer.start(pair.plan)
    pair.producer.compute_all(pair.plan)
    pair.world.run(31)
    assert pair.producer.outcomes[pair.plan.on_producer] == ["the consumer has not asked for it for 30 s"]
    assert len(pair.producer.pool.free) == pair.producer.pool.layout.num_blocks


def test_a_producer_that_cannot_be_reached_fails_the_request_soon() -> None:
    pair = Pair(connect=False)
    pair.world.stopped.add(pair.producer.id)
    pair.consumer.expect(pair.plan)
    pair.world.run(6)
    assert pair.outcomes_of_consumer == ["the producer has not answered for 5 s"]


def test_a_producer_that_falls_silent_fails_the_request_within_the_lease() -> None:
    pair = Pair()
    pair.world.stopped.add(pair.producer.id)
    pair.world.run(6)
    assert pair.outcomes_of_consumer == []
    pair.world.run(31)
    assert pair.outcomes_of_consumer == ["the producer has not answered for 30 s"]


# Moves that fail, and peers that talk nonsense


@MOVERS
@MODES
def test_a_move_that_fails_ends_the_transfer_on_both_sides(mover: Mover, mode: str) -> None:
    pair = Pair(mover, mode).moving()
    pair.mover_side.engine.fail_next = True
    pair.world.run(5)
    assert all("injected" in outcome[0] or "failed" in outcome[0] or "ended it" in outcome[0] for outcome in pair.outcomes)
    pair.world.check_idle()


@pytest.mark.parametrize(
    ("blocks", "skip", "why"),
    [([0], 0, "cannot hold"), ([0, 1, 999], 0, "where there are"), ([0, 1, -1], 0, "where there are"), ([], 11, "skips 11")],
)
def test_a_reserve_that_makes_no_sense_ends_the_transfer(blocks: list[int], skip: int, why: str) -> None:
    pair = Pair()
    pair.producer.start(pair.plan)
    pair.world.settle()
    message = Reserve(transfer_id=pair.plan.transfer_id, blocks=blocks, skip_tokens=skip)
    pair.producer.machine.on_message(pair.consumer.id, message, pair.world.now)
    pair.world.settle()
    assert why in pair.outcomes[0][0]
    assert why in pair.outcomes[1][0]
    pair.world.check_idle()


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (
            Computed(transfer_id=TransferId(""), blocks=[0], num_tokens=10, next_tokens=10, layers=0),
            "cannot hold",
        ),
        (
            Computed(transfer_id=TransferId(""), blocks=[0, 1, 99], num_tokens=9, next_tokens=9, layers=0),
            "there are",
        ),
        (
            Computed(transfer_id=TransferId(""), blocks=[0] * 9, num_tokens=20, next_tokens=9, layers=0),
            "of a prompt",
        ),
        (WriteDone(transfer_id=TransferId(""), first_tokens=[], blocks=[1]), "cannot hold"),
    ],
)
def test_a_notice_that_makes_no_sense_ends_the_transfer(message: Computed | WriteDone, why: str) -> None:
    pair = Pair(Mover.CONSUMER).reserved()
    pair.world.settle()
    sent = msgspec.structs.replace(message, transfer_id=pair.plan.transfer_id)
    pair.consumer.machine.on_message(pair.producer.id, sent, pair.world.now)
    pair.world.run(3)
    assert why in pair.outcomes[1][0]
    pair.world.check_idle()
