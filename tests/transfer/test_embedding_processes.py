"""Embeddings between processes over the real transports, one of which is killed, or stopped and continued."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from embedding_pair import Consumer, consumer, producer, wide_embedding
from patience import until
from prepared import Process, popen

from kvrelay.errors import EmbeddingTooLargeError
from kvrelay.ids import TransferId, WorkerId, new_transfer_id
from kvrelay.states import EmbeddingState
from kvrelay.transfer.embedding.mover import EmbeddingProducer
from kvrelay.transfer.embedding.room import EmbeddingSettings
from kvrelay.transfer.relay.link import TransferSettings
from tests.devices import ON_A_CARD
from tests.transfer_peers import FAKE_CARD, ON_CARD

HERE = pathlib.Path(__file__).resolve().parent
LEASE_S = 1.0
SETTINGS = EmbeddingSettings(buffer_tokens=1024, transfer=TransferSettings(lease_s=LEASE_S, hello_retry_s=0.1))
TRANSPORTS = ["shm", "nixl", "mooncake"]
CARDS = [FAKE_CARD, *(pytest.param(name, marks=ON_A_CARD) for name in ON_CARD)]


class Child:
    """An encode worker in a process of its own."""

    def __init__(self, transport: str) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE.parent.parent), str(HERE), str(HERE.parent), *sys.path]),
        }
        command = [sys.executable, str(HERE / "embedding_pair.py"), transport, str(LEASE_S)]
        self.process: Process = popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        told = self.hear()
        self.worker, self.address = WorkerId(str(told["worker"])), str(told["address"])

    def hear(self) -> dict[str, object]:
        assert self.process.stdout is not None
        told: dict[str, object] = json.loads(self.process.stdout.readline())
        return told

    def offer(self, transfer_id: TransferId, peer: WorkerId, num_tokens: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{transfer_id} {peer} {num_tokens}\n")
        self.process.stdin.flush()


@contextmanager
def two_processes(transport: str, num_tokens: int, pool_tokens: int = 2048) -> Iterator[tuple[Child, Consumer, TransferId]]:
    """An embedding on its way between two processes; of no tokens: one that is expected and never offered."""
    child, transfer_id = Child(transport), new_transfer_id()
    try:
        with consumer(transport, SETTINGS, block_size=96, pool_tokens=pool_tokens) as (worker, side):
            side.relay.expect(transfer_id, child.worker, child.address)
            child.offer(transfer_id, worker, num_tokens)
            yield child, side, transfer_id
    finally:
        child.process.kill()
        child.process.wait()


@pytest.mark.parametrize("transport", [*TRANSPORTS, *CARDS])
def test_an_embedding_reaches_another_process_in_several_rounds(transport: str) -> None:
    with two_processes(transport, 5000) as (child, side, transfer_id):
        until(lambda: side.is_over(transfer_id))
        assert [arrival.error for arrival in side.arrivals(transfer_id) if arrival.error] == []
        assert side.holds(transfer_id, wide_embedding(1, 5000))
        assert side.relay.counts().resumes == 2
        side.relay.release(transfer_id)
        assert child.hear() == {"error": "", "free": 128}
        until(side.is_empty)


def _asked(side: Consumer, transfer_id: TransferId) -> None:
    """Blocks are held, and the producer was told of them."""
    until(lambda: side.relay.state_of(transfer_id) is EmbeddingState.WAITING_FOR_INPUT)
    assert side.relay.pool_counts().held > 0


@pytest.mark.parametrize("transport", ["shm", *(pytest.param(name, marks=pytest.mark.long) for name in TRANSPORTS[1:]), *CARDS])
def test_a_killed_encode_worker_is_found_out_and_the_blocks_come_back(transport: str) -> None:
    with two_processes(transport, 0) as (child, side, transfer_id):
        _asked(side, transfer_id)
        child.process.kill()
        until(lambda: side.is_over(transfer_id))
        assert side.arrivals(transfer_id)[-1].error
        until(side.is_empty)


def test_a_stopped_writer_keeps_the_blocks_quarantined_until_it_goes_on() -> None:
    with two_processes("nixl", 0) as (child, side, transfer_id):
        _asked(side, transfer_id)
        child.process.send_signal(signal.SIGSTOP)
        until(lambda: side.is_over(transfer_id))
        assert "has not answered" in side.arrivals(transfer_id)[-1].error
        assert side.relay.pool_counts().quarantined > 0, "time is no proof"
        child.process.send_signal(signal.SIGCONT)
        until(side.is_empty)
        assert child.hear()["free"] == 128


@pytest.mark.long
def test_where_the_consumer_copies_a_stopped_encode_worker_holds_nothing_up() -> None:
    with two_processes("shm", 0) as (child, side, transfer_id):
        _asked(side, transfer_id)
        child.process.send_signal(signal.SIGSTOP)
        until(lambda: side.is_over(transfer_id))
        until(side.is_empty)


@contextmanager
def one_process(
    from_transport: str = "shm", to_transport: str = "shm", **shape: Any
) -> Iterator[tuple[WorkerId, EmbeddingProducer, WorkerId, Consumer]]:
    settings = EmbeddingSettings(buffer_tokens=1024)
    with (
        producer(from_transport, settings, **shape) as (encoder, relay),
        consumer(to_transport, settings, **shape) as (prefill, side),
    ):
        yield encoder, relay, prefill, side


@pytest.mark.parametrize("transport", ["shm", *CARDS])
def test_many_embeddings_at_once_share_two_small_pools(transport: str) -> None:
    with one_process(transport, transport, pool_tokens=2048) as (encoder, relay, prefill, side):
        wanted = {new_transfer_id(): wide_embedding(number, 100 + 90 * number) for number in range(20)}
        unoffered = dict(wanted)
        for transfer_id in wanted:
            relay.expect(transfer_id, [prefill])
            side.relay.expect(transfer_id, encoder, relay.signal_address)

        def step() -> bool:
            for transfer_id in list(unoffered):
                if relay.offer(transfer_id, unoffered[transfer_id]):
                    del unoffered[transfer_id]
            over = [transfer_id for transfer_id in wanted if side.is_over(transfer_id)]
            for transfer_id in over:
                assert side.holds(transfer_id, wanted.pop(transfer_id))
                side.relay.release(transfer_id)
            return not wanted

        until(step)
        until(side.is_empty)
        until(lambda: relay.pool_counts().free == relay.pool_counts().total)
        assert sorted(sent.error for sent in relay.poll()) == [""] * 20
        assert side.relay.counts().done == 20


def test_what_no_pool_can_hold_is_refused_and_a_full_pool_says_so() -> None:
    with one_process(pool_tokens=256) as (_, relay, prefill, _):
        transfer_id = new_transfer_id()
        relay.expect(transfer_id, [prefill])
        with pytest.raises(EmbeddingTooLargeError, match="257 tokens, in a pool of 256"):
            relay.offer(transfer_id, wide_embedding(1, 257))
        assert relay.offer(transfer_id, wide_embedding(1, 200))
        assert not relay.offer(new_transfer_id(), wide_embedding(2, 200))


def test_room_that_an_offer_lacked_is_news_when_an_aborted_embedding_gives_it_back() -> None:
    """Of which nothing else is told."""
    with one_process(pool_tokens=256) as (_, relay, prefill, _):
        aborted, waiting = new_transfer_id(), new_transfer_id()
        for transfer_id in (aborted, waiting):
            relay.expect(transfer_id, [prefill])
        assert relay.offer(aborted, wide_embedding(1, 200))
        assert not relay.offer(waiting, wide_embedding(2, 200))
        assert not relay.has_news
        relay.abort(aborted)
        until(lambda: relay.has_news)
        assert relay.poll() == []
        assert not relay.has_news
        assert relay.offer(waiting, wide_embedding(2, 200))


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_abort_that_crosses_the_arrival_gives_the_blocks_back(when: str) -> None:
    with one_process() as (encoder, relay, prefill, side):
        transfer_id = new_transfer_id()
        relay.expect(transfer_id, [prefill])
        side.relay.expect(transfer_id, encoder, relay.signal_address)
        assert relay.offer(transfer_id, wide_embedding(1, 500))
        if when == "after":
            until(lambda: side.is_over(transfer_id))
        else:
            until(lambda: side.relay.has_news)
        side.relay.abort(transfer_id)
        assert side.relay.poll() == []
        until(side.is_empty)


def test_of_an_embedding_that_is_refused_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the owner takes between its calls: the thread is given time for a turn after each."""
    with one_process() as (encoder, relay, prefill, side):
        first, refused = new_transfer_id(), new_transfer_id()
        for transfer_id in (first, refused):
            relay.expect(transfer_id, [prefill])
            assert relay.offer(transfer_id, wide_embedding(1, 500))
        side.relay.expect(first, encoder, relay.signal_address)
        until(lambda: side.is_over(first))  # the two know each other
        moved, turns = side.relay.counts().moved_bytes, side.relay._turns
        call = turns.call

        def slowly(command: Callable[[], object]) -> None:
            num_turns = turns.num_turns
            call(command)
            until(lambda: turns.num_turns > num_turns + 1)

        monkeypatch.setattr(turns, "call", slowly)
        side.relay.refuse(refused, encoder, relay.signal_address)
        ended = {sent.transfer_id: sent for sent in relay.poll()}
        while refused not in ended:
            ended |= {sent.transfer_id: sent for sent in relay.poll()}
        assert ended[refused].is_unwanted
        side.relay.release(first)
        until(side.is_empty)
        assert side.relay.counts().moved_bytes == moved


def test_closing_either_side_ends_what_is_open_with_a_reason() -> None:
    with one_process() as (encoder, relay, prefill, side):
        transfer_id = new_transfer_id()
        relay.expect(transfer_id, [prefill])
        side.relay.expect(transfer_id, encoder, relay.signal_address)
        until(lambda: side.relay.pool_counts().held > 0)
        relay.close()
        assert [sent.error for sent in relay.poll()] == ["the worker closes"]
        until(lambda: side.is_over(transfer_id))
        until(side.is_empty)
        another = new_transfer_id()
        side.relay.expect(another, encoder, relay.signal_address)
        side.relay.close()
        until(lambda: side.is_over(another))
        assert side.is_empty()
