"""The embedding relay alone, between two processes: what resuming costs, and how near it comes to its transport.

This process expects embeddings, a child (this module as a program) offers them. Every round moves the same embedding in all the
ways compared, and a ratio is the median of the rounds' ratios:

- once: room for all of it at once;
- resumed: room for a tenth at first, then for the rest;
- many: room for a tenth, again and again;
- raw: as many bytes by the transfer engine alone, between two other processes (`relay/transfer.py`).
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Literal

import msgspec
import numpy as np

from kvrelay.bench.harness.child import Child, commands, say
from kvrelay.bench.harness.scenario import Results
from kvrelay.bench.relay.transfer import open_pair
from kvrelay.config import TransferOptions
from kvrelay.errors import BenchError
from kvrelay.ids import TransferId, WorkerId, new_transfer_id, new_worker_id
from kvrelay.transfer.embedding.layout import EmbeddingLayout
from kvrelay.transfer.embedding.mover import EmbeddingConsumer, EmbeddingParts, EmbeddingProducer
from kvrelay.transfer.embedding.pool import Embedding
from kvrelay.transfer.engines.choose import make_engine
from kvrelay.transfer.kv.layout import KVLayout
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


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    worker: WorkerId
    address: str


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    transfer_id: TransferId
    consumer: WorkerId


class Offered(msgspec.Struct, frozen=True):
    pass


def _layout(pool_tokens: int) -> EmbeddingLayout:
    options = TransferOptions(embedding_pool_tokens=pool_tokens, embedding_block_size=_BLOCK_SIZE)
    return embedding_layout(options, hidden=_HIDDEN, deepstack=_DEEPSTACK, dtype="bfloat16", item_bytes=_ITEM_BYTES)


def _raw_layout() -> KVLayout:
    """KV of the same size; its blocks in order are one range, as those of an embedding are."""
    width = (1 + _DEEPSTACK) * _HIDDEN // 2  # keys and values
    return KVLayout(
        num_layers=1,
        num_blocks=_ROOM_TOKENS // _BLOCK_SIZE,
        block_size=_BLOCK_SIZE,
        num_kv_heads=1,
        head_dim=width,
        dtype="bfloat16",
        item_bytes=_ITEM_BYTES,
    )


def _parts(role: str, transport: str, pool_tokens: int, default_tokens: int = DEFAULT_TOKENS) -> EmbeddingParts:
    worker = new_worker_id(role)
    options = TransferOptions(embedding_buffer_tokens=default_tokens)
    parts = embedding_parts(worker, _layout(pool_tokens), [make_engine(transport, worker)], "bench", options)
    assert parts.region.buffer is not None
    np.frombuffer(parts.region.buffer, dtype=np.uint8)[::4096] = 1  # every page is there before anything is timed
    return parts


def _embedding() -> Embedding:
    rows = np.random.default_rng(1).integers(0, 256, (TOKENS, _layout(_BLOCK_SIZE).row_bytes), dtype=np.uint8)
    tokens = np.arange(TOKENS, dtype=np.int32)
    return Embedding(rows=rows, fill_ids=tokens, positions=np.stack([tokens] * 3, axis=1))


def main(transport: str) -> None:
    """The child."""
    parts = _parts("encode", transport, _ROOM_TOKENS)
    relay, embedding = EmbeddingProducer(parts), _embedding()
    say(Ready(worker=parts.worker_id, address=relay.signal_address))
    for offer in commands(Offer):
        relay.expect(offer.transfer_id, [offer.consumer])
        while not relay.offer(offer.transfer_id, embedding):
            time.sleep(_POLL_S)  # the one before is about to be let go
        say(Offered())
    relay.close()


class _Consumers:
    """One for each way."""

    def __init__(self, transport: str, child: Child) -> None:
        self._child = child
        self._told = child.receive(Ready, _PATIENCE_S)
        self._parts = {way: _parts("prefill", transport, pool, default) for way, (default, pool) in WAYS.items()}
        self.relays = {way: EmbeddingConsumer(parts) for way, parts in self._parts.items()}

    def relay(self, way: Way) -> float:
        relay, transfer_id = self.relays[way], new_transfer_id()
        self._child.ask(Offer(transfer_id=transfer_id, consumer=self._parts[way].worker_id), Offered, _PATIENCE_S)
        begun = time.perf_counter()
        relay.expect(transfer_id, self._told.worker, self._told.address)
        while time.perf_counter() < begun + _PATIENCE_S:
            for arrival in relay.poll():
                if arrival.error:
                    raise BenchError(f"{way}: {arrival.error}")
                if arrival.is_complete:
                    seconds = time.perf_counter() - begun
                    relay.release(transfer_id)
                    return seconds
            time.sleep(_POLL_S)
        raise BenchError(f"{way}: nothing arrived within {_PATIENCE_S:g} s")

    def close(self) -> None:
        for relay in self.relays.values():
            relay.close()


def measure(transport: str) -> Results:
    """Names of the numbers begin with the transport's. Raises BenchError."""
    size_bytes = TOKENS * _layout(_BLOCK_SIZE).row_bytes
    seconds: dict[Way, list[float]] = {way: [] for way in WAYS}
    raw_rates: list[float] = []
    how: Literal["read", "write"] = "read" if transport == "shm" else "write"
    with (
        Child(["kvrelay.bench.encode.transfer", transport], core=None) as child,
        open_pair(transport, _raw_layout(), TOKENS, None) as pair,
    ):
        consumers = _Consumers(transport, child)
        try:
            for _ in range(ROUNDS + 1):
                for way in WAYS:
                    seconds[way].append(consumers.relay(way))
                pair.rewrite(how)
                raw_rates.append(pair.measure(how, scattered=False).bytes_per_s)
            resumes = {way: relay.counts().resumes / (ROUNDS + 1) for way, relay in consumers.relays.items()}
        finally:
            consumers.close()
    once, resumed, many = (seconds[way][1:] for way in WAYS)  # the first ones opened connections
    rates = [size_bytes / one for one in once]
    return {
        f"{transport}_once_gbytes_per_s": statistics.median(rates) / 1e9,
        f"{transport}_raw_gbytes_per_s": statistics.median(raw_rates[1:]) / 1e9,
        f"{transport}_rate_of_raw": _ratio(rates, raw_rates[1:]),
        f"{transport}_resumed_over_once": _ratio(resumed, once),
        f"{transport}_resumes": resumes["resumed"],
        f"{transport}_many_over_once": _ratio(many, once),
        f"{transport}_many_resumes": resumes["many"],
    }


def _ratio(one: list[float], other: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


if __name__ == "__main__":
    main(sys.argv[1])
