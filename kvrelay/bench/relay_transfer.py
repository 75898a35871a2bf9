"""The data plane alone: two processes, one that has KV and one that wants it, against what the machine or the library can do.

Rounds alternate between the two things compared, and a ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import contextlib
import pathlib
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from kvrelay.bench.processes import Child
from kvrelay.bench.transfer_peer import Digest, Digested, How, Measure, Measured, Meet, Met, Ready, Setup, Side
from kvrelay.checkpoint.spec import ModelSpec
from kvrelay.errors import BenchError
from kvrelay.ids import new_worker_id
from kvrelay.states import Role
from kvrelay.transfer.kv.layout import KVLayout

BLOCK_SIZE = 16
ITEM_BYTES = 4  # float32
ROUNDS = 9
LIBRARY_PAYLOAD_BYTES = 64 << 20
_SMALLEST_CACHE_BYTES = 32 << 20  # where the kernel does not tell, or forgets a level
_ANSWER_S = 90.0


def layout_of(spec: ModelSpec, tokens: int) -> KVLayout:
    return KVLayout(
        num_layers=spec.num_layers,
        num_blocks=-(-tokens // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype="float32",
        item_bytes=ITEM_BYTES,
    )


def tokens_for(spec: ModelSpec, payload_bytes: int) -> int:
    """The shortest prompt whose KV is at least so large, in whole blocks."""
    return -(-payload_bytes // (spec.kv_bytes_per_token(ITEM_BYTES) * BLOCK_SIZE)) * BLOCK_SIZE


def last_cache_bytes() -> int:
    sizes = []
    for path in pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text(encoding="ascii").strip()
        sizes.append(int(text.rstrip("KM")) << {"K": 10, "M": 20}.get(text[-1], 0))
    return max([*sizes, _SMALLEST_CACHE_BYTES])


@dataclass
class Pair:
    """The mover and the other one."""

    mover: Child
    other: Child
    tokens: int

    def measure(self, how: How, tokens: int = 0, *, scattered: bool = True) -> Measured:
        self.mover.send(Measure(how=how, tokens=tokens or self.tokens, scattered=scattered))
        return self.mover.receive(Measured, _ANSWER_S)

    def check(self, tokens: int = 0) -> None:
        """A rate of wrong bytes is no rate."""
        digests = set()
        for child in (self.mover, self.other):
            child.send(Digest(tokens=tokens or self.tokens))
            digests.add(child.receive(Digested, _ANSWER_S).digest)
        if len(digests) != 1:
            raise BenchError("the bytes that arrived are not those that were sent")


class EngineMissing(BenchError):
    """A library that is not installed here, or cannot run."""


@contextlib.contextmanager
def open_pair(engine: str, spec: ModelSpec, tokens: int, cores: tuple[int, int] | None) -> Iterator[Pair]:
    """Two processes that know each other, on a core each or wherever the kernel puts them. Raises EngineMissing."""
    layout = layout_of(spec, tokens)
    placed: tuple[int | None, int | None] = cores or (None, None)
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(Child(["kvrelay.bench.transfer_peer"], core)) for core in placed]
        ids = [new_worker_id(Role.DECODE), new_worker_id(Role.PREFILL)]
        sides: tuple[Side, Side] = ("local", "remote")
        setups = [
            Setup(engine=engine, worker=worker, layout=layout, side=side) for worker, side in zip(ids, sides, strict=True)
        ]
        answers = [_set_up(child, setup) for child, setup in zip(children, setups, strict=True)]
        for child, worker, answer in zip(children, reversed(ids), reversed(answers), strict=True):
            child.send(Meet(worker=worker, info=answer.info, raw_info=answer.raw_info))
        for child in children:
            child.receive(Met, _ANSWER_S)
        yield Pair(mover=children[0], other=children[1], tokens=tokens)


def _set_up(child: Child, setup: Setup) -> Ready:
    child.send(setup)
    ready = child.receive(Ready, _ANSWER_S)
    if ready.problem:
        raise EngineMissing(ready.problem)
    return ready


class ShmFigures(msgspec.Struct, frozen=True, kw_only=True):
    over_memcpy: float
    in_order_over_memcpy: float
    gb_per_s: float
    memcpy_gb_per_s: float
    chunk_s: float  # to move `chunk_tokens` alone, median


def measure_shm(spec: ModelSpec, cores: tuple[int, int], chunk_tokens: int) -> ShmFigures:
    """The better of the two memcpys around a move counts: one that a neighbour disturbed would flatter us."""
    with open_pair("shm", spec, tokens_for(spec, 4 * last_cache_bytes()), cores) as pair:
        pair.measure("read")  # maps pages
        pair.check()
        pair.measure("memcpy")
        ratios, in_order, rates, limits = [], [], [], []
        before = pair.measure("memcpy")
        for _ in range(ROUNDS):
            moved, after = pair.measure("read"), pair.measure("memcpy")
            limit = max(before.bytes_per_s, after.bytes_per_s)
            in_order.append(pair.measure("read", scattered=False).bytes_per_s / limit)
            ratios.append(moved.bytes_per_s / limit)
            rates.append(moved.bytes_per_s)
            limits.append(limit)
            before = after
        chunk_s = statistics.median(pair.measure("read", chunk_tokens).seconds for _ in range(3 * ROUNDS))
    return ShmFigures(
        over_memcpy=statistics.median(ratios),
        in_order_over_memcpy=statistics.median(in_order),
        gb_per_s=statistics.median(rates) / 1e9,
        memcpy_gb_per_s=statistics.median(limits) / 1e9,
        chunk_s=chunk_s,
    )


class LibraryFigures(msgspec.Struct, frozen=True, kw_only=True):
    over_raw: float
    gb_per_s: float
    raw_gb_per_s: float


def measure_library(engine: str, spec: ModelSpec) -> LibraryFigures:
    """Its threads run where the kernel puts them, as in a worker."""
    with open_pair(engine, spec, tokens_for(spec, LIBRARY_PAYLOAD_BYTES), None) as pair:
        pair.measure("raw")  # connects
        pair.check()
        pair.measure("write")
        pair.check()
        ratios, rates, limits = [], [], []
        before = pair.measure("raw")
        for _ in range(ROUNDS):
            moved, after = pair.measure("write"), pair.measure("raw")
            limit = statistics.mean((before.bytes_per_s, after.bytes_per_s))
            ratios.append(moved.bytes_per_s / limit)
            rates.append(moved.bytes_per_s)
            limits.append(limit)
            before = after
    return LibraryFigures(
        over_raw=statistics.median(ratios),
        gb_per_s=statistics.median(rates) / 1e9,
        raw_gb_per_s=statistics.median(limits) / 1e9,
    )
