"""Embeddings of a length that the receiver does not know: the scenarios of the design note, and what else may come between.

Each on both kinds of transports: the producer writes, or the consumer copies.
"""

from __future__ import annotations

import logging

import pytest
from embedding_world import EmbeddingWorld, EncodeSide, Plan, PrefillSide

from kvrelay.ids import new_transfer_id, new_worker_id
from kvrelay.states import EMBEDDING_EDGES, EmbeddingState
from kvrelay.transfer.embedding.room import EmbeddingSettings
from kvrelay.transfer.engines.base import Mover
from kvrelay.wire.embedding import Done, Init, Partial, Received, Resume
from kvrelay.wire.relay import Abort, AbortAck, HeartbeatAck, Hello, Message, Refused

BEGUN = [EmbeddingState.BOOTSTRAPPING, EmbeddingState.WAITING_FOR_INPUT]
FITS = [*BEGUN, EmbeddingState.SUCCESS]
RESUMED = [*BEGUN, EmbeddingState.TRANSFERRING, EmbeddingState.SUCCESS]
BROKEN = [*BEGUN, EmbeddingState.TRANSFERRING, EmbeddingState.FAILED]  # by way of DRAINING, which the note has no word for

both_movers = pytest.mark.parametrize("mover", Mover)


class Pair:
    """One encode and one prefill worker, and an embedding that both have heard of."""

    def __init__(self, world: EmbeddingWorld, num_tokens: int, *, offered: bool = True) -> None:
        self.world = world
        self.encoder = world.add_producer()
        self.prefill = world.add_consumer()
        self.plan = self.another(num_tokens, offered=offered)

    def another(self, num_tokens: int, *, offered: bool = True) -> Plan:
        plan = self.world.plan(self.encoder, self.prefill, num_tokens=num_tokens)
        self.encoder.expect(plan)
        self.prefill.expect(plan)
        if offered:
            self.encoder.offer(plan)
        return plan

    def check_arrived(self, states: list[EmbeddingState], num_resumes: int) -> None:
        for side in (self.encoder, self.prefill):
            assert side.states[self.plan.transfer_id] == states
        assert self.prefill.outcomes[self.plan.transfer_id] == ["arrived"]
        assert self.encoder.outcomes[self.plan.transfer_id] == ["sent"]
        assert self.encoder.machine.counts.resumes == self.prefill.machine.counts.resumes == num_resumes
        assert self.moved_tokens() == self.plan.num_tokens, "every token moves once"
        self.world.check_idle()

    def check_failed(self, *why: str) -> None:
        """On both sides, each with its reason, and with every buffer back."""
        for side in (self.encoder, self.prefill):
            assert side.states[self.plan.transfer_id][-1] is EmbeddingState.FAILED
        reasons = self.prefill.outcomes[self.plan.transfer_id] + self.encoder.outcomes[self.plan.transfer_id]
        assert any(word in reason for reason in reasons for word in why), reasons
        self.world.check_idle()

    def moved_tokens(self) -> int:
        return self.encoder.machine.counts.moved_tokens + self.prefill.machine.counts.moved_tokens


# The design note's scenarios


@both_movers
def test_small_data_500_of_1024_needs_no_resume(mover: Mover) -> None:
    pair = Pair(EmbeddingWorld(mover), 500)
    pair.world.settle()
    pair.check_arrived(FITS, 0)
    assert pair.world.count(Partial) == 0


@both_movers
def test_large_data_2000_of_1024_needs_one_resume(mover: Mover) -> None:
    pair = Pair(EmbeddingWorld(mover), 2000)
    pair.world.settle()
    pair.check_arrived(RESUMED, 1)
    resume = next(message for message in pair.world.said if isinstance(message, Resume))
    assert (resume.sent_tokens, resume.allocated_tokens, len(resume.blocks)) == (1024, 976, 8)
    first, last = pair.prefill.arrivals[pair.plan.transfer_id]
    assert (first.num_tokens, first.is_complete) == (1024, False), "the first images can be used before the last arrive"
    assert (last.num_tokens, last.is_complete) == (2000, True)


@both_movers
@pytest.mark.parametrize(
    ("num_tokens", "level", "rounds"), [(1024, "INFO", {}), (10_000, "WARNING", {"first_round": 1024, "resumes": 9})]
)
def test_an_embedding_is_one_line_with_its_numbers_and_a_warning_if_it_took_several_rounds(
    mover: Mover,
    num_tokens: int,
    level: str,
    rounds: dict[str, int],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("kvrelay"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="kvrelay.relay"):
        pair = Pair(EmbeddingWorld(mover, pool_tokens=(16384, 1024)), num_tokens)
        pair.world.settle()
    (record,) = caplog.records
    fields = record.__dict__["fields"]
    layout = pair.prefill.pool.layout
    assert record.levelname == level
    assert fields.pop("ms") >= 0.0
    assert fields == {
        "request": "a request",
        "transfer": pair.plan.transfer_id,
        "producer": pair.encoder.id,
        "tokens": num_tokens,
        "bytes": num_tokens * layout.token_bytes + layout.aux_bytes,
        "transport": "memory",
        **rounds,
        "trace": "a trace",
    }


@both_movers
def test_extreme_data_10000_of_1024_takes_one_resume_where_there_is_room(mover: Mover) -> None:
    pair = Pair(EmbeddingWorld(mover), 10_000)
    pair.world.settle()
    pair.check_arrived(RESUMED, 1)


@both_movers
def test_extreme_data_10000_of_1024_takes_many_resumes_through_a_small_pool(mover: Mover) -> None:
    pair = Pair(EmbeddingWorld(mover, pool_tokens=(16384, 1024)), 10_000)
    pair.world.settle()
    pair.check_arrived(RESUMED, 9)


@both_movers
@pytest.mark.parametrize("policy", ["wait", "shrink"])
def test_no_memory_at_resume_goes_on_with_the_blocks_it_has(mover: Mover, policy: str) -> None:
    settings = EmbeddingSettings(buffer_tokens=1024, full=policy)  # type: ignore[arg-type]
    pair = Pair(EmbeddingWorld(mover, pool_tokens=(16384, 2048), settings=settings), 3000)
    taken = pair.prefill.pool.take(1024)
    assert taken is not None
    pair.world.settle()
    pair.prefill.pool.give_back(taken)
    pair.check_arrived(RESUMED, 2)


@both_movers
def test_no_memory_at_resume_fails_where_the_policy_says_so(mover: Mover) -> None:
    settings = EmbeddingSettings(buffer_tokens=1024, full="fail")
    pair = Pair(EmbeddingWorld(mover, pool_tokens=(16384, 2048), settings=settings), 3000)
    taken = pair.prefill.pool.take(1024)
    assert taken is not None
    pair.world.settle()
    pair.prefill.pool.give_back(taken)
    pair.check_failed("no room for the 1976 tokens that remain")
    assert pair.encoder.states[pair.plan.transfer_id] == BROKEN


@both_movers
def test_an_interrupted_transfer_fails_on_both_sides(mover: Mover) -> None:
    pair = Pair(EmbeddingWorld(mover), 2000)
    pair.world.deliver_until(Resume)
    mover_side: EncodeSide | PrefillSide = pair.encoder if mover is Mover.PRODUCER else pair.prefill
    mover_side.engine.fail_next = True
    pair.world.settle()
    pair.check_failed("injected")
    assert pair.prefill.states[pair.plan.transfer_id] == BROKEN


@both_movers
@pytest.mark.parametrize("kind", [Init, Partial, Resume, Done])
def test_a_dead_session_fails_on_both_sides(mover: Mover, kind: type[Message]) -> None:
    """Neither side hears the other any more, from this message on."""
    pair = Pair(EmbeddingWorld(mover), 2000)
    pair.world.deliver_until(kind)
    for _ in range(100):
        pair.world.network.clear()
        pair.world.pass_time(0.5)
        for side in pair.world.running():
            side.engine.advance()
    assert pair.prefill.outcomes[pair.plan.transfer_id] == ["the producer has not answered for 30 s"]
    counts = pair.prefill.pool.counts()
    assert (counts.quarantined > 0) == (mover is Mover.PRODUCER), "time is no proof that the producer does not write"
    assert counts.held == 0
    pair.world.run(10)  # the network is back
    pair.world.check_idle()


# Lengths and blocks


@both_movers
@pytest.mark.parametrize("around", [-1, 0, 1])
@pytest.mark.parametrize("block_sizes", [(16, 16), (16, 24), (24, 16), (16, 7)])
def test_lengths_around_whole_blocks_and_blocks_of_other_sizes(mover: Mover, around: int, block_sizes: tuple[int, int]) -> None:
    for num_blocks in (1, 4, 8, 9):
        settings = EmbeddingSettings(buffer_tokens=50)
        world = EmbeddingWorld(mover, block_sizes=block_sizes, pool_tokens=(480, 112), settings=settings)
        pair = Pair(world, num_blocks * 16 + around)
        world.settle()
        assert pair.prefill.outcomes[pair.plan.transfer_id] == ["arrived"]
        assert pair.moved_tokens() == pair.plan.num_tokens
        world.check_idle()


def test_the_default_may_end_inside_a_block_and_the_rest_may_too() -> None:
    pair = Pair(EmbeddingWorld(settings=EmbeddingSettings(buffer_tokens=1000)), 2500)
    pair.world.settle()
    pair.check_arrived(RESUMED, 1)
    init = next(message for message in pair.world.said if isinstance(message, Init))
    resume = next(message for message in pair.world.said if isinstance(message, Resume))
    assert (init.allocated_tokens, len(init.blocks)) == (1000, 8)
    assert (resume.sent_tokens, resume.allocated_tokens, len(resume.blocks)) == (1000, 1500, 12)


# Early, late, twice, never


@both_movers
def test_room_that_is_told_before_the_encode_worker_has_heard_of_the_image_is_kept(mover: Mover) -> None:
    world = EmbeddingWorld(mover)
    encoder, prefill = world.add_producer(), world.add_consumer()
    plan = world.plan(encoder, prefill, num_tokens=500)
    prefill.expect(plan)
    world.settle()
    encoder.expect(plan)
    world.settle()
    assert encoder.machine.table.state_of(plan.transfer_id) is EmbeddingState.WAITING_FOR_INPUT
    encoder.offer(plan)
    world.settle()
    assert prefill.outcomes[plan.transfer_id] == ["arrived"]
    world.check_idle()


@both_movers
@pytest.mark.parametrize("kind", [Init, Partial, Resume, Done, Received])
def test_whatever_comes_twice_or_late_is_skipped_and_counted(mover: Mover, kind: type[Message]) -> None:
    pair = Pair(EmbeddingWorld(mover, pool_tokens=(16384, 1024)), 3000)
    pair.world.deliver_until(kind)
    repeated = [frame for frame in pair.world.network if pair.world.said_in(frame) == kind.__name__]
    pair.world.network += repeated * 2
    pair.world.settle()
    pair.world.network += repeated
    pair.world.settle()
    pair.check_arrived(RESUMED, 2)
    counts = (pair.encoder if kind in (Init, Resume, Received) else pair.prefill).machine.counts
    assert counts.duplicates >= 3


@both_movers
@pytest.mark.parametrize("kind", [Init, Partial, Resume, Done, Received])
def test_whatever_gets_lost_is_said_again(mover: Mover, kind: type[Message]) -> None:
    pair = Pair(EmbeddingWorld(mover, pool_tokens=(16384, 1024)), 3000)
    pair.world.deliver_until(kind)
    assert pair.world.drop(kind)
    pair.world.settle()
    assert pair.prefill.machine.counts.repeats == 0
    pair.world.run(10)
    pair.check_arrived(RESUMED, 2)
    assert (pair.prefill.machine.counts.repeats > 0) == (kind is not Received)  # heartbeats tell of that one


def test_an_answer_to_an_old_heartbeat_tells_nothing_new() -> None:
    world = EmbeddingWorld()
    encoder, prefill = world.add_producer(), world.add_consumer()
    plan = world.plan(encoder, prefill, num_tokens=500)
    prefill.expect(plan)
    world.deliver_until(HeartbeatAck)
    old = [frame for frame in world.network if isinstance(world.decode(frame), HeartbeatAck)]
    world.settle()
    encoder.expect(plan)
    world.run(3)
    world.network += old  # in which the producer has not heard of it
    world.settle()
    encoder.offer(plan)
    world.settle()
    assert prefill.outcomes[plan.transfer_id] == ["arrived"]
    world.check_idle()


@both_movers
def test_a_resume_that_does_not_fit_what_was_sent_ends_the_transfer(mover: Mover) -> None:
    pair = Pair(EmbeddingWorld(mover), 3000)
    pair.world.deliver_until(Resume)
    pair.world.drop(Resume)
    wrong = Resume(
        transfer_id=pair.plan.transfer_id, sent_tokens=1100, block_size=128, allocated_tokens=128, blocks=[9],
        required_dst_info_num=1,
    )  # fmt: skip
    pair.world.inject(pair.prefill.id, pair.encoder.id, wrong)
    pair.world.settle()
    pair.check_failed("a resume at token 1100, where 1024 were sent")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"allocated_tokens": 1025}, "8 blocks of 128 tokens for 1025 allocated tokens"),
        ({"allocated_tokens": 896}, "8 blocks of 128 tokens for 896 allocated tokens"),
        ({"allocated_tokens": 0, "blocks": []}, "0 blocks of 128 tokens for 0 allocated tokens"),
        ({"block_size": 122}, "the pool that was mapped has blocks of 128"),
        ({"blocks": [0, 1, 2, 3, 4, 5, 6, 128]}, "where there are 128 blocks"),
        ({"blocks": [0, 1, 2, 3, 4, 5, 6, -1]}, "where there are 128 blocks"),
        ({"blocks": [0, 1, 2, 3, 4, 5, 6, 6]}, "named twice"),
        ({"required_dst_info_num": 2}, "2 destinations, not 1"),
    ],
)
def test_an_inconsistent_set_is_refused(change: dict[str, object], why: str) -> None:
    pair = Pair(EmbeddingWorld(), 500)
    pair.world.deliver_until(Init)
    pair.world.drop(Init)
    said = {"block_size": 128, "allocated_tokens": 1024, "blocks": list(range(8)), "required_dst_info_num": 1}
    message = Init(transfer_id=pair.plan.transfer_id, **{**said, **change})  # type: ignore[arg-type]
    pair.world.inject(pair.prefill.id, pair.encoder.id, message)
    pair.world.settle()
    pair.check_failed(why)


def test_a_notice_that_does_not_fit_the_room_ends_the_transfer() -> None:
    for total, sent in ((2000, 900), (2000, 1025), (1024, 1024), (500, 400)):
        pair = Pair(EmbeddingWorld(), 500, offered=False)
        pair.world.settle()
        message = Partial(transfer_id=pair.plan.transfer_id, sent_tokens=sent, total_tokens=total)
        pair.world.inject(pair.encoder.id, pair.prefill.id, message)
        pair.world.settle()
        pair.check_failed("invalid announcement from the producer")


def test_a_length_that_the_aux_data_do_not_confirm_ends_the_transfer() -> None:
    pair = Pair(EmbeddingWorld(), 500, offered=False)
    pair.world.settle()
    pair.world.inject(pair.encoder.id, pair.prefill.id, Done(transfer_id=pair.plan.transfer_id, total_tokens=400))
    pair.world.settle()
    pair.check_failed("the aux data say 0 tokens, the producer 400")


@both_movers
def test_the_rest_may_be_there_before_the_first_part_was_moved_out(mover: Mover) -> None:
    pair = Pair(EmbeddingWorld(mover), 2000)
    pair.world.deliver_until(Resume)
    pair.world.stopped.add(pair.prefill.id)
    pair.world.settle()
    assert pair.prefill.num_tokens(pair.plan) == 0
    pair.world.stopped.discard(pair.prefill.id)
    pair.world.deliver(next(at for at, frame in enumerate(pair.world.network) if isinstance(pair.world.decode(frame), Done)))
    pair.world.settle()
    pair.check_arrived(RESUMED, 1)


def test_a_peer_of_another_version_model_or_width_is_refused() -> None:
    world = EmbeddingWorld()
    encoder, prefill = world.add_producer(), world.add_consumer()
    stranger = new_worker_id("prefill")
    world.inject(stranger, encoder.id, Hello(version=9, worker_id=stranger, fingerprint="tiny"))
    world.settle()
    world.fingerprint = "another"
    other = world.add_consumer()
    for side in (prefill, other):
        plan = world.plan(encoder, side, num_tokens=5)
        side.expect(plan)
    world.settle()
    refusals = [message.reason for message in world.said if isinstance(message, Refused)]
    assert len(refusals) == 2
    assert "speaks embedding relay protocol 9, this process embedding relay protocol 2" in refusals[0]
    assert "not the same model" in refusals[1]
    assert prefill.outcomes[world.plans[0].transfer_id] == []
    assert "refused" in other.outcomes[world.plans[1].transfer_id][0]


def test_messages_of_a_worker_that_has_no_part_in_it_are_ignored() -> None:
    pair = Pair(EmbeddingWorld(), 500, offered=False)
    other = pair.world.add_consumer()
    stray = pair.world.plan(pair.encoder, other, num_tokens=5)
    other.expect(stray)
    pair.world.settle()
    pair.world.inject(other.id, pair.encoder.id, Abort(transfer_id=pair.plan.transfer_id, reason="mischief"))
    pair.world.settle()
    assert pair.encoder.machine.counts.foreign == 1
    assert pair.world.count(AbortAck) == 1, "nothing is written for it, and that is what an ack says"
    pair.encoder.offer(pair.plan)
    pair.world.settle()
    assert pair.prefill.outcomes[pair.plan.transfer_id] == ["arrived"]


# Several destinations


@both_movers
def test_the_state_changes_when_every_destination_has_reported(mover: Mover) -> None:
    world = EmbeddingWorld(mover)
    encoder, one, two = world.add_producer(), world.add_consumer(), world.add_consumer()
    plan = world.plan(encoder, one, two, num_tokens=2000)
    encoder.expect(plan)
    encoder.offer(plan)
    one.expect(plan)
    world.settle()
    assert encoder.machine.table.state_of(plan.transfer_id) is EmbeddingState.BOOTSTRAPPING
    assert world.count(Partial) == 0, "nothing is sent before everybody has room"
    two.expect(plan)
    world.stopped.add(two.id)
    world.settle()
    assert encoder.machine.table.state_of(plan.transfer_id) is EmbeddingState.BOOTSTRAPPING
    world.stopped.discard(two.id)
    world.settle()
    assert encoder.states[plan.transfer_id] == RESUMED
    for side in (one, two):
        assert side.outcomes[plan.transfer_id] == ["arrived"]
        assert side.states[plan.transfer_id] == RESUMED
    world.check_idle()


def test_a_part_that_one_destination_has_does_not_change_the_state_of_all() -> None:
    world = EmbeddingWorld()
    encoder, one, two = world.add_producer(), world.add_consumer(), world.add_consumer()
    plan = world.plan(encoder, one, two, num_tokens=2000)
    for side in (encoder, one, two):
        side.expect(plan)
    encoder.offer(plan)
    world.settle_messages()
    encoder.engine.advance()  # one of two writes
    world.pump()
    assert world.count(Partial) == 1
    assert encoder.machine.table.state_of(plan.transfer_id) is EmbeddingState.WAITING_FOR_INPUT
    encoder.engine.advance()
    world.pump()
    assert encoder.machine.table.state_of(plan.transfer_id) is EmbeddingState.TRANSFERRING
    world.settle()
    world.check_idle()


@both_movers
def test_destinations_go_at_their_own_pace_and_success_waits_for_the_slowest(mover: Mover) -> None:
    world = EmbeddingWorld(mover)
    encoder, one, two = world.add_producer(), world.add_consumer(), world.add_consumer()
    taken = two.pool.take(15 * 1024)  # two has but 1024 tokens
    assert taken is not None
    plan = world.plan(encoder, one, two, num_tokens=5000)
    for side in (encoder, one, two):
        side.expect(plan)
    encoder.offer(plan)
    world.settle()
    two.pool.give_back(taken)
    assert encoder.outcomes[plan.transfer_id] == ["sent"]
    assert (one.machine.counts.resumes, two.machine.counts.resumes) == (1, 4)
    world.check_idle()


def test_a_destination_that_does_not_know_that_it_has_everything_may_abort() -> None:
    world = EmbeddingWorld()
    encoder, one, two = world.add_producer(), world.add_consumer(), world.add_consumer()
    plan = world.plan(encoder, one, two, num_tokens=500)
    for side in (encoder, one, two):
        side.expect(plan)
    encoder.offer(plan)
    world.settle_messages()
    encoder.engine.advance()  # one of two writes
    world.pump()
    assert world.drop(Done) == 1
    for side in (one, two):
        side.abort(plan)
    world.settle()
    world.check_idle()


@both_movers
def test_a_destination_that_fails_ends_the_transfer_for_those_that_are_not_done(mover: Mover) -> None:
    world = EmbeddingWorld(mover)
    encoder, one, two = world.add_producer(), world.add_consumer(), world.add_consumer()
    plan = world.plan(encoder, one, two, num_tokens=2000)
    for side in (encoder, one, two):
        side.expect(plan)
    world.settle()
    two.abort(plan)
    world.settle()
    assert "does not want it" in encoder.outcomes[plan.transfer_id][0]
    assert "the producer ended it" in one.outcomes[plan.transfer_id][0]
    world.check_idle()


# Room


@both_movers
def test_a_transfer_that_finds_the_pool_full_waits_for_its_turn(mover: Mover) -> None:
    pair = Pair(EmbeddingWorld(mover, pool_tokens=(16384, 1024)), 1000)
    pair.world.releases_at_once = False
    second, third = pair.another(800), pair.another(100)
    pair.world.settle()
    assert pair.prefill.outcomes[pair.plan.transfer_id] == ["arrived"]
    assert pair.prefill.states[second.transfer_id] == [EmbeddingState.BOOTSTRAPPING]
    pair.world.run(5)
    for plan, following in ((pair.plan, second), (second, third)):
        pair.prefill.release(plan.transfer_id)
        pair.world.settle()
        assert pair.prefill.outcomes[following.transfer_id] == ["arrived"]
    pair.prefill.release(third.transfer_id)
    pair.world.check_idle()


def test_after_the_deadline_a_smaller_room_is_taken_and_without_any_it_fails() -> None:
    pair = Pair(EmbeddingWorld(pool_tokens=(16384, 1024)), 500)
    pair.world.releases_at_once = False
    first = pair.prefill.pool.take(500)
    assert first is not None
    pair.world.run(9)
    assert pair.prefill.states[pair.plan.transfer_id] == [EmbeddingState.BOOTSTRAPPING]
    pair.world.run(2)
    assert pair.prefill.outcomes[pair.plan.transfer_id] == ["arrived"]
    assert next(message for message in pair.world.said if isinstance(message, Init)).allocated_tokens == 512
    rest = pair.prefill.pool.take_up_to(10_000)
    second = pair.another(500)
    pair.world.run(11)
    assert pair.prefill.outcomes[second.transfer_id] == ["the embedding pool had no room for 10 s"]
    assert "ended it" in pair.encoder.outcomes[second.transfer_id][0]
    pair.prefill.release(pair.plan.transfer_id)
    pair.prefill.pool.give_back(first)
    pair.prefill.pool.give_back(rest)
    pair.world.check_idle()


@pytest.mark.parametrize(("policy", "tokens"), [("shrink", 128), ("fail", None)])
def test_the_other_policies_do_not_wait_for_the_default(policy: str, tokens: int | None) -> None:
    settings = EmbeddingSettings(buffer_tokens=1024, full=policy)  # type: ignore[arg-type]
    pair = Pair(EmbeddingWorld(pool_tokens=(16384, 1024), settings=settings), 500, offered=False)
    taken = pair.prefill.pool.take(896)
    assert taken is not None
    pair.encoder.offer(pair.plan)
    pair.world.settle()
    pair.prefill.pool.give_back(taken)
    if tokens is None:
        pair.check_failed("no room for 1024 tokens")
    else:
        assert next(message for message in pair.world.said if isinstance(message, Init)).allocated_tokens == tokens
        pair.check_arrived(RESUMED, 3)


def test_the_adaptive_default_follows_the_lengths_that_came() -> None:
    settings = EmbeddingSettings(buffer_tokens=1024, buffer="adaptive")
    pair = Pair(EmbeddingWorld(settings=settings), 3000)
    pair.world.settle()
    pair.check_arrived(RESUMED, 1)
    for length in [300] * 20 + [3000]:
        pair.another(length)
        pair.world.settle()
    rooms = [message.allocated_tokens for message in pair.world.said if isinstance(message, Init)]
    assert rooms[0] == 1024
    assert rooms[1] == 3000
    assert rooms[-1] == 300
    pair.world.check_idle()


# Ends


@both_movers
@pytest.mark.parametrize("kind", [Init, Partial, Resume, Done])
@pytest.mark.parametrize("who", ["producer", "consumer"])
def test_an_abort_in_any_state_gives_everything_back(mover: Mover, kind: type[Message], who: str) -> None:
    pair = Pair(EmbeddingWorld(mover), 2000)
    pair.world.deliver_until(kind)
    if who == "producer":
        pair.encoder.abort(pair.plan)
    else:
        pair.prefill.abort(pair.plan)
    pair.world.settle()
    pair.world.run(5)
    pair.world.check_idle()


def test_where_the_producer_writes_aborted_blocks_wait_for_the_ack() -> None:
    pair = Pair(EmbeddingWorld(), 2000)
    pair.world.settle_messages()  # the write is under way, and stands still
    pair.prefill.abort(pair.plan)
    pair.world.pump()
    pair.world.settle_messages()
    assert pair.prefill.pool.counts().quarantined == 8
    assert pair.world.count(AbortAck) == 0
    pair.world.settle()
    assert pair.world.count(AbortAck) == 1
    pair.world.check_idle()


def test_where_the_consumer_copies_the_producer_holds_its_blocks_until_the_reader_lets_go() -> None:
    pair = Pair(EmbeddingWorld(Mover.CONSUMER), 2000)
    pair.world.settle_messages()  # the copy is under way, and stands still
    pair.world.stopped.add(pair.prefill.id)
    pair.encoder.abort(pair.plan)
    pair.world.settle()
    assert pair.encoder.pool.counts().held == 16
    pair.world.stopped.discard(pair.prefill.id)
    pair.world.settle()
    pair.world.check_idle()


@both_movers
def test_what_was_copied_is_used_only_within_the_lease(mover: Mover) -> None:
    """The consumer sleeps in the middle of a copy, longer than the producer waits for it."""
    pair = Pair(EmbeddingWorld(mover), 500)
    pair.world.settle_messages()
    pair.world.stopped.add(pair.prefill.id)
    for _ in range(80):
        pair.world.pass_time(0.5)
        pair.encoder.engine.advance() if mover is Mover.PRODUCER else None
    pair.world.pump()
    assert pair.encoder.pool.counts().held == 0
    pair.world.stopped.discard(pair.prefill.id)
    pair.world.settle()
    pair.world.run(40)
    outcome = pair.prefill.outcomes[pair.plan.transfer_id]
    assert outcome != ["arrived"] if mover is Mover.CONSUMER else outcome
    pair.world.check_idle()


@both_movers
@pytest.mark.parametrize("kind", [Init, Partial, Resume])
def test_the_death_of_the_encode_worker_is_no_leak(mover: Mover, kind: type[Message]) -> None:
    pair = Pair(EmbeddingWorld(mover), 2000)
    pair.world.deliver_until(kind)
    pair.world.kill(pair.encoder)
    pair.world.run(2)
    pair.world.tell_of_death(pair.encoder.id)
    pair.world.settle()
    assert "the producer is gone" in pair.prefill.outcomes[pair.plan.transfer_id][0]
    pair.world.check_idle()


@both_movers
@pytest.mark.parametrize("kind", [Init, Partial, Resume, Done])
def test_the_death_of_the_prefill_worker_is_no_leak(mover: Mover, kind: type[Message]) -> None:
    pair = Pair(EmbeddingWorld(mover), 2000)
    pair.world.deliver_until(kind)
    pair.world.kill(pair.prefill)
    pair.world.run(40)
    assert pair.encoder.outcomes[pair.plan.transfer_id]
    pair.world.check_idle()


@both_movers
def test_a_worker_that_only_seems_lost_keeps_its_blocks_until_it_lets_go(mover: Mover) -> None:
    pair = Pair(EmbeddingWorld(mover), 2000)
    pair.world.settle_messages()
    pair.world.stopped.add(pair.encoder.id)
    pair.world.suspect(pair.encoder.id)
    assert "lost" in pair.prefill.outcomes[pair.plan.transfer_id][0]
    held = pair.prefill.pool.counts()
    assert held.quarantined == 8
    pair.world.stopped.discard(pair.encoder.id)
    pair.world.settle()
    pair.world.run(5)
    pair.check_failed("lost")


def test_a_transfer_that_is_never_offered_or_known_ends() -> None:
    world = EmbeddingWorld()
    encoder, prefill = world.add_producer(), world.add_consumer()
    plan = world.plan(encoder, prefill, num_tokens=5)
    prefill.expect(plan)
    world.run(40)
    assert prefill.outcomes[plan.transfer_id] == ["the producer has not heard of it for 30 s"]
    world.inject(prefill.id, encoder.id, Received(transfer_id=new_transfer_id()))
    world.settle()
    lonely = world.plan(encoder, world.add_consumer(), num_tokens=5)
    encoder.expect(lonely)
    encoder.offer(lonely)
    world.run(40)
    assert encoder.outcomes[lonely.transfer_id] == ["a consumer has not asked for it for 30 s"]
    assert encoder.machine.counts.unknown == 2  # and the prefill worker's Abort
    world.check_idle()


def test_an_end_that_comes_before_the_request_is_remembered() -> None:
    world = EmbeddingWorld()
    encoder, prefill = world.add_producer(), world.add_consumer()
    plan = world.plan(encoder, prefill, num_tokens=5)
    prefill.expect(plan)
    world.settle()
    prefill.abort(plan)
    world.settle()
    encoder.expect(plan)
    encoder.offer(plan)
    world.settle()
    assert "does not want it" in encoder.outcomes[plan.transfer_id][0]
    assert world.count(Abort) == 1
    world.check_idle()


def test_the_edges_are_those_of_the_note() -> None:
    """With one more state between any other and its failure: what a peer may touch is held until it cannot."""
    failing = [[*path, EmbeddingState.DRAINING, EmbeddingState.FAILED] for path in (BEGUN[:1], BEGUN, RESUMED[:3])]
    paths = [FITS, RESUMED, *failing]
    walked = {(path[at], path[at + 1]) for path in paths for at in range(len(path) - 1)}
    assert walked == {(state, following) for state, many in EMBEDDING_EDGES.items() for following in many}
