"""The embedding relay alone, between two processes: what resuming costs, and how near it comes to its transport.

This process expects embeddings, a child offers them. Every round moves the same embedding in all the ways compared, and a ratio
is the median of the rounds' ratios. What resuming costs is seen by a worker that needs all rows in its own memory, where it
copies them from the pool in any way; the transport's rate is of the bytes until they are in the pool:

- once: room for all of it at once;
- resumed: room for a tenth at first, then for the rest;
- many: room for a tenth, again and again;
- raw: the ranges that the relay moves at once (rows, ids, positions, aux), between two other processes (`relay/transfer.py`)
  that do nothing else, as fast as its transport can be driven: by its library without our layer or by our engine alone,
  whichever was faster in the round. Shared memory has only the latter.
"""

from __future__ import annotations

import statistics
import time
from typing import Literal

import numpy as np
import torch
from rich.console import Console

from kvrelay.bench.encode.model import EncodeBench
from kvrelay.bench.harness.child import Child
from kvrelay.bench.harness.pair import open_pair
from kvrelay.bench.harness.report import Target, median_ratio
from kvrelay.bench.harness.scenario import Part, Results
from kvrelay.bench.relay.peer import How, Peer
from kvrelay.bench.relay.transfer import rewrite_and_move
from kvrelay.config import TransferOptions
from kvrelay.errors import BenchError
from kvrelay.ids import TransferId, WorkerId, new_transfer_id, new_worker_id
from kvrelay.transfer.blocks import Placement
from kvrelay.transfer.embedding.layout import EmbeddingLayout, embedding_ranges
from kvrelay.transfer.embedding.memory import host_memory
from kvrelay.transfer.embedding.mover import EmbeddingConsumer, EmbeddingParts, EmbeddingProducer
from kvrelay.transfer.embedding.pieces import Embedding, Piece, owned
from kvrelay.transfer.embedding.pool import EmbeddingPool
from kvrelay.transfer.engines.base import Ranges
from kvrelay.transfer.engines.choose import make_engine
from kvrelay.worker.embedding import embedding_layout, embedding_parts

TOKENS = 10_000
DEFAULT_TOKENS = 1024
ROUNDS = 7
_BLOCK_SIZE = 128
_HIDDEN, _DEEPSTACK, _ITEM_BYTES = 4096, 3, 2  # of Qwen3-VL-8B in bfloat16: 32 KiB a token
_ROOM_TOKENS = -(-TOKENS // _BLOCK_SIZE) * _BLOCK_SIZE
_PATIENCE_S = 60.0
_POLL_S = 0.0001

Way = Literal["once", "resumed", "many"]
WAYS: dict[Way, tuple[int, int]] = {  # the default, and the pool
    "once": (TOKENS, _ROOM_TOKENS),
    "resumed": (DEFAULT_TOKENS, _ROOM_TOKENS),
    "many": (DEFAULT_TOKENS, DEFAULT_TOKENS),
}


def _layout(pool_tokens: int) -> EmbeddingLayout:
    options = TransferOptions(embedding_pool_tokens=pool_tokens, embedding_block_size=_BLOCK_SIZE)
    return embedding_layout(options, hidden=_HIDDEN, deepstack=_DEEPSTACK, dtype="bfloat16", item_bytes=_ITEM_BYTES)


def _ranges() -> Ranges:
    """All that the relay moves, where there is room for it at once."""
    layout = _layout(_ROOM_TOKENS)
    placement = Placement(layout, range(layout.num_blocks))
    return embedding_ranges(placement, placement, (0, TOKENS))


def _parts(role: str, transport: str, pool_tokens: int, default_tokens: int = DEFAULT_TOKENS) -> EmbeddingParts:
    worker = new_worker_id(role)
    options = TransferOptions(embedding_buffer_tokens=default_tokens)
    memory = host_memory(_layout(pool_tokens))
    assert memory.region.buffer is not None
    np.frombuffer(memory.region.buffer, dtype=np.uint8)[::4096] = 1  # every page is there before anything is timed
    return embedding_parts(worker, EmbeddingPool(memory), [make_engine(transport, worker)], "bench", options)


def _embedding() -> Embedding:
    rows = np.random.default_rng(1).integers(0, 256, (TOKENS, _layout(_BLOCK_SIZE).row_bytes), dtype=np.uint8)
    tokens = np.arange(TOKENS, dtype=np.int32)
    return Embedding(rows=torch.from_numpy(rows), fill_ids=tokens, positions=np.stack([tokens] * 3, axis=1))


class Producer:
    """Kept by the child."""

    def __init__(self, transport: str) -> None:
        parts = _parts("encode", transport, _ROOM_TOKENS)
        self._relay, self._embedding = EmbeddingProducer(parts), _embedding()
        self._worker = parts.worker_id

    def address(self) -> tuple[WorkerId, str]:
        return self._worker, self._relay.signal_address

    def offer(self, transfer_id: TransferId, consumer: WorkerId) -> None:
        self._relay.expect(transfer_id, [consumer])
        while not self._relay.offer(transfer_id, self._embedding):
            time.sleep(_POLL_S)  # the one before is about to be let go

    def close(self) -> None:
        self._relay.close()


class _Consumers:
    """One for each way."""

    def __init__(self, transport: str, child: Child) -> None:
        self._child = child
        child.keep(Producer, transport)
        self._producer = child.ask(Producer.address)
        self._parts = {way: _parts("prefill", transport, pool, default) for way, (default, pool) in WAYS.items()}
        self.relays = {way: EmbeddingConsumer(parts) for way, parts in self._parts.items()}

    def relay(self, way: Way) -> tuple[float, float]:
        """Seconds until all of it is in the pool, or was; and until it is in memory of its own."""
        pieces: list[Piece] = []
        relay, transfer_id = self.relays[way], new_transfer_id()
        self._child.ask(Producer.offer, transfer_id, self._parts[way].worker_id)
        begun = time.perf_counter()
        relay.expect(transfer_id, *self._producer)
        while time.perf_counter() < begun + _PATIENCE_S:
            for arrival in relay.poll():
                if arrival.error:
                    raise BenchError(f"{way}: {arrival.error}")
                pieces += arrival.pieces
                if arrival.is_complete:
                    arrived_s = time.perf_counter() - begun
                    owned(pieces)
                    owned_s = time.perf_counter() - begun
                    relay.release(transfer_id)
                    return arrived_s, owned_s
            time.sleep(_POLL_S)
        raise BenchError(f"{way}: nothing arrived within {_PATIENCE_S:g} s")

    def close(self) -> None:
        for relay in self.relays.values():
            relay.close()
        self._child.ask(Producer.close)


def measure(options: EncodeBench, console: Console) -> Results:
    results: Results = {}
    for transport in options.transports.split(","):
        with console.status(f"{transport}: {TOKENS} tokens"):
            results |= _measure(transport)
    return results


def _measure(transport: str) -> Results:
    """Names of the numbers begin with the transport's. Raises BenchError."""
    seconds: dict[Way, list[tuple[float, float]]] = {way: [] for way in WAYS}
    raw_rates: list[float] = []
    drives: tuple[How, ...] = ("read",) if transport == "shm" else ("raw", "raw_one_by_one", "write")
    ranges = _ranges()
    with Child(answer_s=_PATIENCE_S) as child, open_pair(Peer, transport, _layout(_ROOM_TOKENS).size_bytes) as pair:
        consumers = _Consumers(transport, child)
        try:
            for _ in range(ROUNDS + 1):
                for way in WAYS:
                    seconds[way].append(consumers.relay(way))
                raw_rates.append(max(rewrite_and_move(pair, how, ranges) for how in drives))
            resumes = {way: relay.counts().resumes / (ROUNDS + 1) for way, relay in consumers.relays.items()}
        finally:
            consumers.close()
    once, resumed, many = ([owned_s for _, owned_s in seconds[way][1:]] for way in WAYS)  # the first ones opened connections
    rates = [int(ranges[:, 2].sum()) / arrived_s for arrived_s, _ in seconds["once"][1:]]
    return {
        f"{transport}_samples": float(ROUNDS),
        f"{transport}_once_gbytes_per_s": statistics.median(rates) / 1e9,
        f"{transport}_raw_gbytes_per_s": statistics.median(raw_rates[1:]) / 1e9,
        f"{transport}_rate_of_raw": median_ratio(rates, raw_rates[1:]),
        f"{transport}_resumed_over_once": median_ratio(resumed, once),
        f"{transport}_resumes": resumes["resumed"],
        f"{transport}_many_over_once": median_ratio(many, once),
        f"{transport}_many_resumes": resumes["many"],
    }


TARGETS = {
    f"{transport}_{name}": target
    for transport in ("shm", "nixl", "mooncake")
    for name, target in (
        ("resumed_over_once", Target("<=", 1.15)),
        ("many_over_once", Target("<=", 1.3)),
        ("rate_of_raw", Target(">=", 0.9)),
    )
}
PART = Part("the embedding relay alone", measure, TARGETS)
