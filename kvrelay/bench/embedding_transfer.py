"""The embedding relay alone, between two processes: what resuming costs, and how near it comes to its transport.

    python -m kvrelay.bench.embedding_transfer shm nixl mooncake

prints a JSON object of numbers. This process expects embeddings, a child (the same module, as `... --child TRANSPORT`) offers
them. Every round moves the same embedding in all the ways compared, and a ratio is the median of the rounds' ratios:

- once: room for all of it at once;
- resumed: room for a tenth at first, then for the rest;
- many: room for a tenth, again and again;
- raw: the same bytes by the transfer engine, with nothing of the relay around it.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Literal, assert_never

import msgspec
import numpy as np

from kvrelay.bench.processes import Child, LineReader, say
from kvrelay.config import TransferOptions
from kvrelay.errors import BenchError
from kvrelay.ids import TransferId, WorkerId, new_transfer_id, new_worker_id
from kvrelay.transfer.embedding.layout import EmbeddingLayout, TokenPlacement, embedding_ranges
from kvrelay.transfer.embedding.mover import EmbeddingConsumer, EmbeddingParts, EmbeddingProducer
from kvrelay.transfer.embedding.pool import Embedding
from kvrelay.transfer.engines.base import Mover, Ranges, TransferEngine
from kvrelay.transfer.engines.choose import make_engine
from kvrelay.transfer.region import Region, shared_region
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


class Offer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    transfer_id: TransferId
    consumer: WorkerId


class Rewrite(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Write the embedding into the pool, as an offer does: memory that another process has just written is slower to read."""


class RawWrite(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Write all of it into that worker's memory, by the engine alone."""

    worker: WorkerId
    info: bytes


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    worker: WorkerId
    address: str
    raw_worker: WorkerId
    raw_info: bytes


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    seconds: float = 0.0


class RawSide:
    """A pool-shaped region and an engine of its own."""

    def __init__(self, transport: str, region: Region) -> None:
        self.worker = new_worker_id("encode")
        self.engine: TransferEngine = make_engine(transport, self.worker)
        self.engine.register(region)
        self._known: set[WorkerId] = set()

    def move(self, peer: WorkerId, info: bytes) -> float:
        if peer not in self._known:
            self.engine.add_peer(peer, info)
            self._known.add(peer)
        begun = time.perf_counter()
        by_consumer = self.engine.mover is Mover.CONSUMER
        (self.engine.read if by_consumer else self.engine.write)(peer, _all_ranges())
        while not (ended := self.engine.poll()):
            time.sleep(_POLL_S)
        if ended[0].error:
            raise BenchError(f"{self.engine.name}: {ended[0].error}")
        return time.perf_counter() - begun


def _layout(pool_tokens: int) -> EmbeddingLayout:
    options = TransferOptions(embedding_pool_tokens=pool_tokens, embedding_block_size=_BLOCK_SIZE)
    return embedding_layout(options, hidden=_HIDDEN, deepstack=_DEEPSTACK, dtype="bfloat16", item_bytes=_ITEM_BYTES)


def _parts(role: str, transport: str, pool_tokens: int, default_tokens: int = DEFAULT_TOKENS) -> EmbeddingParts:
    worker = new_worker_id(role)
    options = TransferOptions(embedding_buffer_tokens=default_tokens)
    parts = embedding_parts(worker, _layout(pool_tokens), [make_engine(transport, worker)], "bench", options)
    _touch(parts.region)
    return parts


def _touch(region: Region) -> None:
    """Every page is there before anything is timed."""
    assert region.buffer is not None
    np.frombuffer(region.buffer, dtype=np.uint8)[::4096] = 1


def _all_ranges() -> Ranges:
    layout = _layout(_ROOM_TOKENS)
    placement = TokenPlacement(layout, range(layout.num_blocks))
    return embedding_ranges(placement, placement, (0, TOKENS))


def _embedding() -> Embedding:
    rows = np.random.default_rng(1).integers(0, 256, (TOKENS, _layout(_BLOCK_SIZE).row_bytes), dtype=np.uint8)
    tokens = np.arange(TOKENS, dtype=np.int32)
    return Embedding(rows=rows, fill_ids=tokens, positions=np.stack([tokens] * 3, axis=1))


def child_main(transport: str) -> None:
    parts = _parts("encode", transport, _ROOM_TOKENS)
    relay, raw, embedding = EmbeddingProducer(parts), RawSide(transport, parts.region), _embedding()
    raw_info = raw.engine.local_info()
    say(Ready(worker=parts.worker_id, address=relay.signal_address, raw_worker=raw.worker, raw_info=raw_info))
    commands = LineReader(sys.stdin.fileno())
    while True:
        line = commands.next_line()
        if line is None:
            if not commands.fill():
                break
            continue
        message = msgspec.json.decode(line, type=Offer | Rewrite | RawWrite)
        match message:
            case Offer():
                relay.expect(message.transfer_id, [message.consumer])
                while not relay.offer(message.transfer_id, embedding):
                    time.sleep(_POLL_S)  # the one before is about to be let go
                say(Answer())
            case Rewrite():
                while relay.num_live:
                    time.sleep(_POLL_S)
                parts.pool.store(range(parts.pool.layout.num_blocks), embedding)
                say(Answer())
            case RawWrite():
                say(Answer(seconds=raw.move(message.worker, message.info)))
            case _:
                assert_never(message)
    relay.close()
    raw.engine.close()


class _Consumers:
    """One for each way, and one without a relay."""

    def __init__(self, transport: str, child: Child) -> None:
        self._child = child
        self._told = child.receive(Ready, _PATIENCE_S)
        self._parts = {way: _parts("prefill", transport, pool, default) for way, (default, pool) in WAYS.items()}
        self.relays = {way: EmbeddingConsumer(parts) for way, parts in self._parts.items()}
        region = shared_region(_layout(_ROOM_TOKENS).size_bytes)
        _touch(region)
        self._raw = RawSide(transport, region)

    def relay(self, way: Way) -> float:
        relay, transfer_id = self.relays[way], new_transfer_id()
        self._child.send(Offer(transfer_id=transfer_id, consumer=self._parts[way].worker_id))
        self._child.receive(Answer, _PATIENCE_S)
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

    def raw(self) -> float:
        self._child.send(Rewrite())
        self._child.receive(Answer, _PATIENCE_S)
        if self._raw.engine.mover is Mover.CONSUMER:
            return self._raw.move(self._told.raw_worker, self._told.raw_info)
        self._child.send(RawWrite(worker=self._raw.worker, info=self._raw.engine.local_info()))
        return self._child.receive(Answer, _PATIENCE_S).seconds

    def close(self) -> None:
        for relay in self.relays.values():
            relay.close()
        self._raw.engine.close()


def measure(transport: str, rounds: int = ROUNDS) -> dict[str, float]:
    """Names of the numbers begin with the transport's. Raises BenchError."""
    size_bytes = int(_all_ranges()[:, 2].sum())
    with Child(["kvrelay.bench.embedding_transfer", "--child", transport], core=None) as child:
        consumers = _Consumers(transport, child)
        try:
            seconds: dict[str, list[float]] = {name: [] for name in (*WAYS, "raw")}
            for number in range(rounds + 1):  # the first one opens connections
                for way in WAYS:
                    seconds[way].append(consumers.relay(way))
                seconds["raw"].append(consumers.raw())
                if number == 0:
                    seconds = {name: [] for name in seconds}
            moved = {way: relay.counts() for way, relay in consumers.relays.items()}
        finally:
            consumers.close()
    resumes = {way: counts.resumes / (rounds + 1) for way, counts in moved.items()}
    return {
        f"{transport}_once_gbytes_per_s": size_bytes / statistics.median(seconds["once"]) / 1e9,
        f"{transport}_raw_gbytes_per_s": size_bytes / statistics.median(seconds["raw"]) / 1e9,
        f"{transport}_rate_of_raw": _ratio(seconds["raw"], seconds["once"]),
        f"{transport}_resumed_over_once": _ratio(seconds["resumed"], seconds["once"]),
        f"{transport}_resumes": resumes["resumed"],
        f"{transport}_many_over_once": _ratio(seconds["many"], seconds["once"]),
        f"{transport}_many_resumes": resumes["many"],
    }


def _ratio(one: list[float], other: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--child"]:
        child_main(arguments[1])
        return
    results: dict[str, float] = {}
    for transport in arguments or ["shm"]:
        results |= measure(transport)
    print(json.dumps({name: round(value, 3) for name, value in results.items()}, indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
