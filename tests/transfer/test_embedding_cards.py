"""Embeddings of workers on cards: which memory they move through, and what waits for which fence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from embedding_pair import Consumer, consumer, producer, wide_embedding
from patience import until

from kvrelay.engine.fence import PASSED, Fence
from kvrelay.ids import TransferId, WorkerId, new_transfer_id
from kvrelay.states import EmbeddingState
from kvrelay.transfer.embedding.mover import EmbeddingProducer
from kvrelay.transfer.embedding.room import EmbeddingSettings
from kvrelay.transfer.relay.turns import Front
from tests.devices import ON_A_CARD
from tests.transfer_peers import FAKE_CARD

SETTINGS = EmbeddingSettings(buffer_tokens=1024)
PAIRS = [("shm", FAKE_CARD, "shm"), (FAKE_CARD, "shm", "shm"), (FAKE_CARD, FAKE_CARD, "cuda_ipc")]
REAL_PAIRS = [
    ("shm", "cuda_ipc", "shm"), ("cuda_ipc", "shm", "shm"), ("cuda_ipc", "cuda_ipc", "cuda_ipc"),
    ("nixl", "nixl-cuda", "nixl"), ("nixl-cuda", "nixl", "nixl"), ("nixl-cuda", "nixl-cuda", "nixl"),
    ("mooncake-cuda", "mooncake", "mooncake"), ("mooncake-cuda", "mooncake-cuda", "mooncake"),
]  # fmt: skip


class LateFence:
    def __init__(self) -> None:
        self.is_over = False

    def passed(self) -> bool:
        return self.is_over


class Pair:
    def __init__(self, encoder: WorkerId, relay: EmbeddingProducer, prefill: WorkerId, side: Consumer) -> None:
        self.encoder = encoder
        self.relay = relay
        self.prefill = prefill
        self.side = side

    def offer(self, number: int, num_tokens: int) -> TransferId:
        transfer_id = new_transfer_id()
        self.relay.expect(transfer_id, [self.prefill])
        self.side.relay.expect(transfer_id, self.encoder, self.relay.signal_address)
        assert self.relay.offer(transfer_id, wide_embedding(number, num_tokens))
        return transfer_id

    def rest(self) -> None:
        """Both threads have had every chance to do something."""
        for _ in range(3):
            turn(self.relay)
            turn(self.side.relay)

    def is_empty(self) -> bool:
        counts = self.relay.pool_counts()
        return counts.free == counts.total and self.side.is_empty()


def turn(front: Front[Any]) -> None:
    for _ in range(3):
        before = front._turns.num_turns
        front._turns.call(lambda: None)
        until(lambda before=before: front._turns.num_turns > before)  # type: ignore[misc]


@contextmanager
def pair_of(
    transports: tuple[str, str], made: Fence | None = None, read: Fence | None = None, pool_tokens: int = 16384
) -> Iterator[Pair]:
    """`made` is behind what the producer's device makes, `read` behind what the consumer's reads."""
    fences = [None if fence is None else lambda fence=fence: fence for fence in (made, read)]
    with (
        producer(transports[0], SETTINGS, fence=fences[0]) as (encoder, relay),
        consumer(transports[1], SETTINGS, fence=fences[1], pool_tokens=pool_tokens) as (prefill, side),
    ):
        yield Pair(encoder, relay, prefill, side)


@pytest.mark.parametrize(
    ("from_transport", "to_transport", "taken"), [*PAIRS, *(pytest.param(*pair, marks=ON_A_CARD) for pair in REAL_PAIRS)]
)
@pytest.mark.parametrize("num_tokens", [500, 3000], ids=["at_once", "in_rounds"])
def test_two_cards_leave_the_host_alone_and_a_card_and_a_host_reach_each_other(
    from_transport: str, to_transport: str, taken: str, num_tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvrelay")
    with pair_of((from_transport, to_transport)) as pair:
        pools = (pair.relay._pool, pair.side.relay._pool)
        on_host = [pool.memory_of(taken) is pool.host for pool in pools]
        transfer_id = pair.offer(1, num_tokens)
        until(lambda: pair.side.is_over(transfer_id))
        assert pair.side.holds(transfer_id, wide_embedding(1, num_tokens))
        assert pair.side.whole(transfer_id).rows.device == pools[1].memory_of(taken).rows.device
        pair.side.relay.release(transfer_id)
        until(pair.is_empty)
    fields = {record.message: record.__dict__["fields"] for record in caplog.records if "fields" in record.__dict__}
    (arrived,) = (fields[said] for said in ("embedding taken over", "an embedding came in several rounds") if said in fields)
    assert arrived["transport"] == taken
    assert ("embedding copied to the host" in fields) == (pools[0].card is not None and on_host[0])
    assert [bool(pool.host.rows.any()) for pool in pools] == on_host


@pytest.mark.parametrize("transport", ["shm", "nixl", FAKE_CARD])
def test_nothing_is_told_of_an_embedding_before_its_device_has_made_it(transport: str) -> None:
    fence = LateFence()
    with pair_of((transport, transport), made=fence) as pair:
        wanted, unwanted = pair.offer(1, 500), pair.offer(2, 500)
        until(lambda: pair.side.relay.state_of(wanted) is EmbeddingState.WAITING_FOR_INPUT)
        pair.relay.abort(unwanted)
        pair.rest()
        assert not pair.side.arrivals(wanted)
        assert pair.relay.counts().moved_bytes == pair.side.relay.counts().moved_bytes == 0
        assert pair.relay.pool_counts().held == 8, "the device may still write what is not wanted any more"
        fence.is_over = True
        until(lambda: pair.side.is_over(wanted))
        assert pair.side.holds(wanted, wide_embedding(1, 500))
        pair.side.relay.release(wanted)
        until(pair.is_empty)


@pytest.mark.parametrize("transport", ["nixl", FAKE_CARD])
def test_blocks_are_not_written_again_before_the_device_has_read_what_came(transport: str) -> None:
    fence = LateFence()
    with pair_of((transport, transport), made=PASSED, read=fence, pool_tokens=1024) as pair:
        first, second = pair.offer(1, 500), pair.offer(2, 500)
        until(lambda: pair.side.is_over(first))
        pair.side.relay.release(first)
        pair.rest()
        assert not pair.side.arrivals(second)
        assert pair.side.holds(first, wide_embedding(1, 500))
        fence.is_over = True
        until(lambda: pair.side.is_over(second))
        assert pair.side.holds(second, wide_embedding(2, 500))
        pair.side.relay.release(second)
        until(pair.is_empty)
