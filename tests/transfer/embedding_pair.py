"""The embedding relay with its threads and sockets, over any transport; a worker on a card has its host's memory, too. Run as a
program, this file is an encode worker in a process of its own: `embedding_pair.py TRANSPORT LEASE_S`. It tells its id and
address as a line of JSON, reads a transfer id, a consumer and a number of tokens, offers such an embedding, and tells how that
ended."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from embedding_world import embedding, joined

from kvrelay.engine.fence import PASSED, Fence
from kvrelay.ids import TransferId, WorkerId, new_worker_id
from kvrelay.runner.cuda_fence import CudaFence
from kvrelay.transfer.embedding.arrival import EmbeddingArrival
from kvrelay.transfer.embedding.layout import EmbeddingLayout
from kvrelay.transfer.embedding.memory import PoolMemory, card_memory, host_memory
from kvrelay.transfer.embedding.mover import EmbeddingConsumer, EmbeddingParts, EmbeddingProducer
from kvrelay.transfer.embedding.pieces import Embedding, Piece
from kvrelay.transfer.embedding.pool import EmbeddingPool
from kvrelay.transfer.embedding.room import EmbeddingSettings
from kvrelay.transfer.engines.choose import make_engine
from kvrelay.transfer.engines.shm import host_identity
from kvrelay.transfer.relay.link import TransferSettings
from tests.fake_card import card_bytes, card_region
from tests.transfer_peers import FAKE_CARD, ON_CARD, engine_of

HIDDEN = 64


def fake_memory(shape: EmbeddingLayout) -> PoolMemory:
    """Of a card that is none."""
    region = card_region(shape.size_bytes)
    return PoolMemory(shape, region, torch.from_numpy(card_bytes(region)))


def pool_of(transport: str, shape: EmbeddingLayout) -> EmbeddingPool:
    """By the name of a case in the contract of transfer engines."""
    host = host_memory(shape)
    if transport == FAKE_CARD:
        return EmbeddingPool(host, fake_memory(shape), ["cuda_ipc"])
    if transport in ON_CARD:
        return EmbeddingPool(host, card_memory(shape, torch.device("cuda")), [transport.removesuffix("-cuda")])
    return EmbeddingPool(host)


def parts(
    role: str,
    transport: str,
    settings: EmbeddingSettings,
    *,
    block_size: int = 128,
    pool_tokens: int = 16384,
    fence: Callable[[], Fence] | None = None,
) -> EmbeddingParts:
    shape = EmbeddingLayout(
        num_blocks=pool_tokens // block_size, block_size=block_size, hidden=HIDDEN, deepstack=1, dtype="float32", item_bytes=4,
        aux_items=16,
    )  # fmt: skip
    worker, pool = new_worker_id(role), pool_of(transport, shape)
    engines = [engine_of(transport, worker)]
    if transport in ("cuda_ipc", FAKE_CARD):
        engines.append(make_engine("shm", worker))
    if fence is None:
        fence = (lambda: CudaFence(torch.device("cuda"))) if transport in ON_CARD else (lambda: PASSED)
    return EmbeddingParts(
        worker_id=worker,
        pool=pool,
        engines=engines,
        fingerprint="tiny",
        host=host_identity(),
        settings=settings,
        fence=fence,
    )


def wide_embedding(number: int, num_tokens: int) -> Embedding:
    return embedding(number, num_tokens, row_bytes=HIDDEN * 2 * 4)


class Consumer:
    """Collects what arrives."""

    def __init__(self, relay: EmbeddingConsumer) -> None:
        self.relay = relay
        self._arrivals: dict[TransferId, list[EmbeddingArrival]] = {}

    def arrivals(self, transfer_id: TransferId) -> list[EmbeddingArrival]:
        for arrival in self.relay.poll():
            self._arrivals.setdefault(arrival.transfer_id, []).append(arrival)
        return self._arrivals.get(transfer_id, [])

    def is_over(self, transfer_id: TransferId) -> bool:
        return any(arrival.is_complete or arrival.error for arrival in self.arrivals(transfer_id))

    def whole(self, transfer_id: TransferId) -> Piece:
        return joined([piece for arrival in self.arrivals(transfer_id) for piece in arrival.pieces])

    def holds(self, transfer_id: TransferId, wanted: Embedding) -> bool:
        whole = self.whole(transfer_id)
        same = torch.equal(whole.rows.cpu(), wanted.rows) and np.array_equal(whole.fill_ids, wanted.fill_ids)
        return same and np.array_equal(whole.positions, wanted.positions)

    def is_empty(self) -> bool:
        counts = self.relay.pool_counts()
        return counts.free == counts.total and self.relay.num_live == 0


@contextmanager
def consumer(transport: str, settings: EmbeddingSettings, **shape: Any):  # type: ignore[no-untyped-def]
    relay = EmbeddingConsumer(mine := parts("prefill", transport, settings, **shape))
    try:
        yield mine.worker_id, Consumer(relay)
    finally:
        relay.close()


@contextmanager
def producer(transport: str, settings: EmbeddingSettings, **shape: Any):  # type: ignore[no-untyped-def]
    relay = EmbeddingProducer(mine := parts("encode", transport, settings, **shape))
    try:
        yield mine.worker_id, relay
    finally:
        relay.close()


def main(transport: str, lease_s: str) -> None:
    settings = EmbeddingSettings(transfer=TransferSettings(lease_s=float(lease_s), hello_retry_s=0.1))
    with producer(transport, settings) as (worker, relay):
        print(json.dumps({"worker": worker, "address": relay.signal_address}), flush=True)
        for line in sys.stdin:
            transfer_id, peer, num_tokens = line.split()
            relay.expect(TransferId(transfer_id), [WorkerId(peer)])
            if int(num_tokens):
                assert relay.offer(TransferId(transfer_id), wide_embedding(1, int(num_tokens)))
            while not (ended := relay.poll()):
                time.sleep(0.01)
            print(json.dumps({"error": ended[0].error, "free": relay.pool_counts().free}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
