"""The data plane alone: two processes, one that has KV and one that wants it, against what the machine or the library can do.

Rounds alternate between the two things compared, and a ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import contextlib
import pathlib
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from kvrelay.bench.harness.child import Child
from kvrelay.bench.harness.scenario import Results
from kvrelay.bench.relay.peer import Digest, Done, How, Measure, Meet, Ready, Rewrite, Setup
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
    """The shortest prompt whose KV has at least this size, in whole blocks."""
    return -(-payload_bytes // (spec.kv_bytes_per_token(ITEM_BYTES) * BLOCK_SIZE)) * BLOCK_SIZE


def last_cache_bytes() -> int:
    sizes = []
    for path in pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text(encoding="ascii").strip()
        sizes.append(int(text.rstrip("KM")) << {"K": 10, "M": 20}.get(text[-1], 0))
    return max([*sizes, _SMALLEST_CACHE_BYTES])


@dataclass
class Pair:
    """The process that moves and the other one."""

    mover: Child
    other: Child
    tokens: int

    def measure(self, how: How, tokens: int = 0, *, scattered: bool = True) -> Done:
        return self.mover.ask(Measure(how=how, tokens=tokens or self.tokens, scattered=scattered), Done, _ANSWER_S)

    def rewrite(self, how: How) -> None:
        """The side that such a move reads."""
        (self.other if how == "read" else self.mover).ask(Rewrite(), Done, _ANSWER_S)

    def check(self) -> None:
        """A rate of wrong bytes is no rate."""
        digests = {child.ask(Digest(tokens=self.tokens), Done, _ANSWER_S).digest for child in (self.mover, self.other)}
        if len(digests) != 1:
            raise BenchError("the bytes that arrived are not those that were sent")


class EngineMissing(BenchError):
    """A library that is not installed here, or cannot run."""


@contextlib.contextmanager
def open_pair(engine: str, layout: KVLayout, tokens: int, cores: tuple[int, int] | None) -> Iterator[Pair]:
    """Two processes that know each other, on a core each or wherever the kernel puts them, with a pool of this layout each, of
    which they move `tokens`. Raises EngineMissing."""
    placed: tuple[int | None, int | None] = cores or (None, None)
    with contextlib.ExitStack() as stack:
        mover, other = (stack.enter_context(Child(["kvrelay.bench.relay.peer"], core)) for core in placed)
        here = Setup(engine=engine, worker=new_worker_id(Role.DECODE), layout=layout, side="local")
        there = Setup(engine=engine, worker=new_worker_id(Role.PREFILL), layout=layout, side="remote")
        ready, other_ready = (child.ask(setup, Ready, _ANSWER_S) for child, setup in ((mover, here), (other, there)))
        if problem := ready.problem or other_ready.problem:
            raise EngineMissing(problem)
        for child, peer, told in ((mover, there, other_ready), (other, here, ready)):
            child.ask(Meet(worker=peer.worker, info=told.info, raw_info=told.raw_info), Done, _ANSWER_S)
        yield Pair(mover=mover, other=other, tokens=tokens)


def measure_shm(spec: ModelSpec, cores: tuple[int, int], chunk_tokens: int) -> tuple[Results, float]:
    """The better of the two memcpys around a move counts: one that was disturbed would flatter us. Also the seconds
    that it takes to move the KV of `chunk_tokens` alone."""
    tokens = tokens_for(spec, 4 * last_cache_bytes())
    with open_pair("shm", layout_of(spec, tokens), tokens, cores) as pair:
        pair.measure("read")  # maps pages
        pair.check()
        pair.measure("memcpy")
        in_order, rates, limits = [], [], []
        before = pair.measure("memcpy")
        for _ in range(ROUNDS):
            moved, after = pair.measure("read"), pair.measure("memcpy")
            rates.append(moved.bytes_per_s)
            limits.append(max(before.bytes_per_s, after.bytes_per_s))
            in_order.append(pair.measure("read", scattered=False).bytes_per_s)
            before = after
        chunk_s = statistics.median(pair.measure("read", chunk_tokens).seconds for _ in range(3 * ROUNDS))
    figures = {
        "shm_over_memcpy": _ratio(rates, limits),
        "shm_in_order_over_memcpy": _ratio(in_order, limits),
        "shm_gb_per_s": statistics.median(rates) / 1e9,
        "memcpy_gb_per_s": statistics.median(limits) / 1e9,
    }
    return figures, chunk_s


def measure_library(engine: str, spec: ModelSpec) -> Results:
    """Its threads run where the kernel puts them, as in a worker."""
    tokens = tokens_for(spec, LIBRARY_PAYLOAD_BYTES)
    with open_pair(engine, layout_of(spec, tokens), tokens, None) as pair:
        pair.measure("raw")  # connects
        pair.check()
        pair.measure("write")
        pair.check()
        rates, limits = [], []
        before = pair.measure("raw")
        for _ in range(ROUNDS):
            moved, after = pair.measure("write"), pair.measure("raw")
            rates.append(moved.bytes_per_s)
            limits.append(statistics.mean((before.bytes_per_s, after.bytes_per_s)))
            before = after
    return {
        f"{engine}_over_raw": _ratio(rates, limits),
        f"{engine}_gb_per_s": statistics.median(rates) / 1e9,
        f"{engine}_raw_gb_per_s": statistics.median(limits) / 1e9,
    }


def _ratio(ours: list[float], limits: list[float]) -> float:
    return statistics.median(one / limit for one, limit in zip(ours, limits, strict=True))
