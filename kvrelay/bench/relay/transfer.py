"""The data plane alone: two processes, one that has KV and one that wants it, against what the machine or the library can do.

Rounds alternate between the two things compared, and a ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import pathlib
import statistics

import numpy as np

from kvrelay.bench.harness.pair import Pair, open_pair
from kvrelay.bench.harness.report import median_ratio
from kvrelay.bench.harness.scenario import Results
from kvrelay.bench.relay.peer import How, Peer
from kvrelay.checkpoint.spec import ModelSpec
from kvrelay.transfer.blocks import Placement
from kvrelay.transfer.engines.base import Ranges
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


def move(pair: Pair, how: How, ranges: Ranges) -> float:
    """Bytes per second."""
    return pair.mover.ask(Peer.move, how, ranges)


def rewrite_and_move(pair: Pair, how: How, ranges: Ranges) -> float:
    """The side that such a move reads is written anew before."""
    (pair.other if how == "read" else pair.mover).ask(Peer.rewrite)
    return move(pair, how, ranges)


def measure_shm(spec: ModelSpec, cores: tuple[int, int], chunk_tokens: int) -> Results:
    """The better of the two memcpys around a move counts: one that was disturbed would flatter us."""
    tokens = tokens_for(spec, 4 * last_cache_bytes())
    layout = layout_of(spec, tokens)
    ranges, neighbours = (kv_ranges(layout, tokens, scattered=scattered) for scattered in (True, False))
    chunk = kv_ranges(layout, chunk_tokens)
    with open_pair(Peer, "shm", layout.size_bytes, cores) as pair:
        rewrite_and_move(pair, "read", ranges)  # maps pages
        pair.check(ranges)
        move(pair, "memcpy", ranges)
        in_order, rates, limits = [], [], []
        before = move(pair, "memcpy", ranges)
        for _ in range(ROUNDS):
            rates.append(move(pair, "read", ranges))
            after = move(pair, "memcpy", ranges)
            limits.append(max(before, after))
            in_order.append(move(pair, "read", neighbours))
            before = after
        chunk_s = int(chunk[:, 2].sum()) / statistics.median(move(pair, "read", chunk) for _ in range(3 * ROUNDS))
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
    with open_pair(Peer, engine, layout.size_bytes) as pair:
        for how in (*_RAW, "write"):
            rewrite_and_move(pair, how, ranges)  # the first one connects
            pair.check(ranges)
        rates, limits = [], []
        before = max(move(pair, how, ranges) for how in _RAW)
        for _ in range(ROUNDS):
            rates.append(move(pair, "write", ranges))
            after = max(move(pair, how, ranges) for how in _RAW)
            limits.append(statistics.mean((before, after)))
            before = after
    return {
        f"{engine}_samples": float(ROUNDS),
        f"{engine}_over_raw": median_ratio(rates, limits),
        f"{engine}_gb_per_s": statistics.median(rates) / 1e9,
        f"{engine}_raw_gb_per_s": statistics.median(limits) / 1e9,
    }
