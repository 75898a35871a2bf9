"""The data plane alone: two processes, one that has KV and one that wants it, against what the machine or the library can do.

Rounds alternate between the two things compared, and a ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import contextlib
import pathlib
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvrelay.bench.harness.child import Child
from kvrelay.bench.harness.report import median_ratio
from kvrelay.bench.harness.scenario import Results
from kvrelay.bench.relay.peer import How, Peer
from kvrelay.checkpoint.spec import ModelSpec
from kvrelay.errors import BenchError
from kvrelay.ids import new_worker_id
from kvrelay.states import Role
from kvrelay.transfer.blocks import Placement
from kvrelay.transfer.engines.base import Ranges, TransferError
from kvrelay.transfer.kv.layout import KVLayout, move_ranges

BLOCK_SIZE = 16
ITEM_BYTES = 4  # float32
ROUNDS = 9
LIBRARY_PAYLOAD_BYTES = 64 << 20
_RAW: tuple[How, ...] = ("raw", "raw_one_by_one")
_SMALLEST_CACHE_BYTES = 32 << 20  # where the kernel does not tell, or forgets a level


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


def kv_ranges(layout: KVLayout, tokens: int, *, scattered: bool = True) -> Ranges:
    """The KV of a prompt. In a fresh pool its blocks lie in order, so that all of a layer's plane is one range; later they
    scatter, until ranges are as small as they get, one block of one layer and plane each."""
    count = -(-tokens // layout.block_size)
    if scattered:
        places = [np.random.default_rng(seed).permutation(layout.num_blocks).tolist() for seed in (1, 2)]
    else:
        places = [list(range(layout.num_blocks))] * 2
    here, there = (Placement(layout, place[:count]) for place in places)
    return move_ranges(here, there, (0, tokens), (0, layout.num_layers), writes=True)


@dataclass
class Pair:
    """The process that moves and the other one."""

    mover: Child
    other: Child

    def move(self, how: How, ranges: Ranges) -> float:
        """Bytes per second."""
        return self.mover.ask(Peer.move, how, ranges)

    def rewrite_and_move(self, how: How, ranges: Ranges) -> float:
        """The side that such a move reads is written anew before."""
        (self.other if how == "read" else self.mover).ask(Peer.rewrite)
        return self.move(how, ranges)

    def check(self, ranges: Ranges) -> None:
        """A rate of wrong bytes is no rate."""
        if self.mover.ask(Peer.digest, ranges[:, [0, 2]]) != self.other.ask(Peer.digest, ranges[:, [1, 2]]):
            raise BenchError("the bytes that arrived are not those that were sent")


class EngineMissing(BenchError):
    """A library that is not installed here, or cannot run."""


@contextlib.contextmanager
def open_pair(engine: str, size_bytes: int, cores: tuple[int | None, int | None] = (None, None)) -> Iterator[Pair]:
    """Two processes that know each other, on a core each or wherever the kernel puts them, with as much memory each. Raises
    EngineMissing."""
    with Child(cores[0]) as mover, Child(cores[1]) as other:
        sides = {new_worker_id(Role.DECODE): mover, new_worker_id(Role.PREFILL): other}
        try:
            for worker, side in sides.items():
                side.keep(Peer, engine, worker, size_bytes)
        except TransferError as error:
            raise EngineMissing(str(error)) from error
        for (worker, side), peer in zip(sides.items(), (other, mover), strict=True):
            peer.ask(Peer.meet, worker, *side.ask(Peer.info))
        yield Pair(mover, other)


def measure_shm(spec: ModelSpec, cores: tuple[int, int], chunk_tokens: int) -> Results:
    """The better of the two memcpys around a move counts: one that was disturbed would flatter us."""
    tokens = tokens_for(spec, 4 * last_cache_bytes())
    layout = layout_of(spec, tokens)
    ranges, neighbours = (kv_ranges(layout, tokens, scattered=scattered) for scattered in (True, False))
    chunk = kv_ranges(layout, chunk_tokens)
    with open_pair("shm", layout.size_bytes, cores) as pair:
        pair.rewrite_and_move("read", ranges)  # maps pages
        pair.check(ranges)
        pair.move("memcpy", ranges)
        in_order, rates, limits = [], [], []
        before = pair.move("memcpy", ranges)
        for _ in range(ROUNDS):
            rates.append(pair.move("read", ranges))
            after = pair.move("memcpy", ranges)
            limits.append(max(before, after))
            in_order.append(pair.move("read", neighbours))
            before = after
        chunk_s = int(chunk[:, 2].sum()) / statistics.median(pair.move("read", chunk) for _ in range(3 * ROUNDS))
    return {
        "shm_samples": float(ROUNDS),
        "last_chunk_raw_ms_p50": chunk_s * 1e3,
        "shm_over_memcpy": median_ratio(rates, limits),
        "shm_in_order_over_memcpy": median_ratio(in_order, limits),
        "shm_gb_per_s": statistics.median(rates) / 1e9,
        "memcpy_gb_per_s": statistics.median(limits) / 1e9,
    }


def measure_library(engine: str, spec: ModelSpec) -> Results:
    """Its threads run where the kernel puts them, as in a worker. Bytes are written anew before each check, so that those
    of the run before do not pass for this one's."""
    tokens = tokens_for(spec, LIBRARY_PAYLOAD_BYTES)
    layout = layout_of(spec, tokens)
    ranges = kv_ranges(layout, tokens)
    with open_pair(engine, layout.size_bytes) as pair:
        for how in (*_RAW, "write"):
            pair.rewrite_and_move(how, ranges)  # the first one connects
            pair.check(ranges)
        rates, limits = [], []
        before = max(pair.move(how, ranges) for how in _RAW)
        for _ in range(ROUNDS):
            rates.append(pair.move("write", ranges))
            after = max(pair.move(how, ranges) for how in _RAW)
            limits.append(statistics.mean((before, after)))
            before = after
    return {
        f"{engine}_samples": float(ROUNDS),
        f"{engine}_over_raw": median_ratio(rates, limits),
        f"{engine}_gb_per_s": statistics.median(rates) / 1e9,
        f"{engine}_raw_gb_per_s": statistics.median(limits) / 1e9,
    }
