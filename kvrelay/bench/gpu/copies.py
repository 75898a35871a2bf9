"""KV between two processes on one card, by the engines alone: blocks in any order, as they lie in a pool that has been used."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from rich.console import Console

from kvrelay.bench.gpu.speed import LLAMA_8B, copy_bytes_per_s
from kvrelay.bench.harness.child import Child
from kvrelay.bench.harness.scenario import Results
from kvrelay.bench.relay.transfer import kv_ranges
from kvrelay.errors import BenchError
from kvrelay.ids import WorkerId, new_worker_id
from kvrelay.transfer.engines.base import Mover, Ranges, TransferError
from kvrelay.transfer.engines.choose import make_engine
from kvrelay.transfer.kv.layout import KVLayout
from kvrelay.transfer.region import Region
from kvrelay.transfer.relay.thread import sleep_exactly

LENGTHS = (128, 2048, 8192)
NIXL_LENGTH = 2048
_ROUNDS = 15
_TOGETHER, _UNDER_WAY = 32, 8  # moves
_CHECKED_RANGES = 64
_MOVE_S = 60.0
_LOOK_EVERY_S = 0.00002
_BLOCK_SIZE = 16


def pool_layout() -> KVLayout:
    """Room for twice the longest prompt."""
    return KVLayout(
        num_layers=int(str(LLAMA_8B["num_hidden_layers"])),
        num_blocks=2 * LENGTHS[-1] // _BLOCK_SIZE,
        block_size=_BLOCK_SIZE,
        num_kv_heads=int(str(LLAMA_8B["num_key_value_heads"])),
        head_dim=128,
        dtype="bfloat16",
        item_bytes=2,
    )


class CardPeer:
    """One side, kept by a child: memory of a card, filled so that every place tells whose it is and where."""

    def __init__(self, engine: str, worker: WorkerId, size_bytes: int, salt: int, device: str = "cuda") -> None:
        self._words = torch.arange(size_bytes // 8, dtype=torch.int64, device=device).mul_(2_654_435_761).add_(salt)
        if device == "cuda":
            torch.cuda.synchronize()
        self._engine = make_engine(engine, worker)
        address = self._words.data_ptr()
        self._engine.register(Region(address=address, size_bytes=size_bytes, device=str(self._words.device)))
        self._peer = worker

    def info(self) -> bytes:
        return self._engine.local_info()

    def meet(self, peer: WorkerId, info: bytes) -> None:
        self._peer = peer
        self._engine.add_peer(peer, info)

    def move(self, ranges: Ranges, count: int = 1) -> float:
        """Seconds for so many moves, up to eight of them under way, from the first call to the completion of the last."""
        begin = self._engine.read if self._engine.mover is Mover.CONSUMER else self._engine.write
        sleep_exactly()
        start = time.perf_counter()
        begun, ended = 0, 0
        while ended < count:
            while begun < min(count, ended + _UNDER_WAY):
                begin(self._peer, ranges)
                begun += 1
            completions = self._engine.poll()
            ended += len(completions)
            if errors := [completion.error for completion in completions if completion.error]:
                raise BenchError(f"{self._engine.name}: {errors[0]}")
            if time.perf_counter() - start > _MOVE_S:
                raise BenchError(f"{self._engine.name} moved {ended} of {count} within {_MOVE_S:g} s")
            if not completions:
                time.sleep(_LOOK_EVERY_S)  # not a loop that takes Python's lock from the thread that moves
        return time.perf_counter() - start

    def holds(self, places: Ranges, salt: int) -> bool:
        """Whether these ranges (offset here, offset there, size) are what the side with that salt has there."""
        return all(self._is_theirs(here, there, size, salt) for here, there, size in places.tolist())

    def _is_theirs(self, here: int, there: int, size: int, salt: int) -> bool:
        first, count = there // 8, size // 8
        theirs = torch.arange(first, first + count, dtype=torch.int64, device=self._words.device).mul_(2_654_435_761).add_(salt)
        return torch.equal(self._words[here // 8 : here // 8 + count], theirs)


@dataclass(frozen=True)
class CardPair:
    mover: Child
    other: Child
    reads: bool

    def check(self, ranges: Ranges) -> None:
        """A rate of wrong bytes is no rate."""
        some = ranges[:_CHECKED_RANGES]
        if self.reads:
            good = self.mover.ask(CardPeer.holds, some, 2)
        else:
            good = self.other.ask(CardPeer.holds, some[:, [1, 0, 2]], 1)
        if not good:
            raise BenchError("the bytes that arrived are not those that were sent")


@contextmanager
def card_pair(engine: str, size_bytes: int, device: str = "cuda") -> Iterator[CardPair]:
    with Child() as mover, Child() as other:
        sides = {new_worker_id("decode"): mover, new_worker_id("prefill"): other}
        for salt, (worker, side) in enumerate(sides.items(), 1):
            side.keep(CardPeer, engine, worker, size_bytes, salt, device)
        for (worker, side), peer in zip(sides.items(), (other, mover), strict=True):
            peer.ask(CardPeer.meet, worker, side.ask(CardPeer.info))
        yield CardPair(mover, other, reads=make_engine(engine, new_worker_id("decode")).mover is Mover.CONSUMER)


def measure_copies(console: Console) -> Results:
    results = {"device_copy_gb_s": copy_bytes_per_s() / 2 / 1e9}  # bytes copied, not read and written
    torch.cuda.empty_cache()
    for engine, lengths in (("cuda_ipc", LENGTHS), ("nixl", (NIXL_LENGTH,))):
        name = engine.removeprefix("cuda_")
        try:
            with console.status(f"moving KV by {engine}"), card_pair(engine, pool_layout().size_bytes) as pair:
                for length in lengths:
                    rate, seconds = _rate(pair, length)
                    results |= {f"{name}_gb_s_{length}": rate / 1e9, f"{name}_ms_{length}": seconds * 1e3}
        except (TransferError, BenchError) as error:
            if engine == "cuda_ipc":
                raise
            console.print(f"[yellow]{engine} is left out:[/] {error}", highlight=False, soft_wrap=True)
    results["ipc_over_device_copy_2048"] = results["ipc_gb_s_2048"] / results["device_copy_gb_s"]
    return results


def _rate(pair: CardPair, length: int) -> tuple[float, float]:
    """Bytes per second of many moves; seconds of one alone, the median of the rounds."""
    ranges = kv_ranges(pool_layout(), length)
    pair.mover.ask(CardPeer.move, ranges)  # opens the way
    pair.check(ranges)
    alone = statistics.median(pair.mover.ask(CardPeer.move, ranges) for _ in range(_ROUNDS))
    together = statistics.median(pair.mover.ask(CardPeer.move, ranges, _TOGETHER) for _ in range(3))
    pair.check(ranges)
    return _TOGETHER * float(ranges[:, 2].sum()) / together, alone
