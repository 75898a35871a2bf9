"""KV between two processes on one card, by the engines alone: blocks in any order, as they lie in a pool that has been used."""

from __future__ import annotations

import hashlib
import statistics
import time
import zlib
from collections.abc import Sequence

import torch
from rich.console import Console

from kvrelay.bench.gpu.speed import LLAMA_8B, copy_bytes_per_s
from kvrelay.bench.harness.pair import Pair, open_pair
from kvrelay.bench.harness.scenario import Results
from kvrelay.bench.relay.transfer import kv_ranges
from kvrelay.errors import BenchError
from kvrelay.ids import WorkerId
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
    """Implements `Side`: memory of a card, filled so that every place tells whose it is and where."""

    def __init__(self, engine: str, worker: WorkerId, size_bytes: int, device: str = "cuda") -> None:
        self._words = (
            torch.arange(size_bytes // 8, dtype=torch.int64, device=device)
            .mul_(2_654_435_761)
            .add_(zlib.crc32(worker.encode()))
        )
        if device == "cuda":
            torch.cuda.synchronize()
        self._engine = make_engine(engine, worker)
        address = self._words.data_ptr()
        self._engine.register(Region(address=address, size_bytes=size_bytes, device=str(self._words.device)))
        self._peer = worker

    def info(self) -> Sequence[bytes]:
        return [self._engine.local_info()]

    def meet(self, peer: WorkerId, info: Sequence[bytes]) -> None:
        self._peer = peer
        self._engine.add_peer(peer, info[0])

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

    def digest(self, places: Ranges) -> str:
        digest, held = hashlib.blake2b(), self._words.view(torch.uint8)
        for start, size in places.tolist():
            digest.update(held[start : start + size].cpu().numpy().data)
        return digest.hexdigest()


def measure_copies(console: Console) -> Results:
    results = {"device_copy_gb_s": copy_bytes_per_s() / 2 / 1e9}  # bytes copied, not read and written
    torch.cuda.empty_cache()
    for engine, lengths in (("cuda_ipc", LENGTHS), ("nixl", (NIXL_LENGTH,))):
        name = engine.removeprefix("cuda_")
        try:
            with console.status(f"moving KV by {engine}"), open_pair(CardPeer, engine, pool_layout().size_bytes) as pair:
                for length in lengths:
                    rate, seconds = _rate(pair, length)
                    results |= {f"{name}_gb_s_{length}": rate / 1e9, f"{name}_ms_{length}": seconds * 1e3}
        except (TransferError, BenchError) as error:
            if engine == "cuda_ipc":
                raise
            console.print(f"[yellow]{engine} is left out:[/] {error}", highlight=False, soft_wrap=True)
    results["ipc_over_device_copy_2048"] = results["ipc_gb_s_2048"] / results["device_copy_gb_s"]
    return results


def _rate(pair: Pair, length: int) -> tuple[float, float]:
    """Bytes per second of many moves; seconds of one alone, the median of the rounds."""
    ranges = kv_ranges(pool_layout(), length)
    pair.mover.ask(CardPeer.move, ranges)  # opens the way
    pair.check(ranges[:_CHECKED_RANGES])
    alone = statistics.median(pair.mover.ask(CardPeer.move, ranges) for _ in range(_ROUNDS))
    together = statistics.median(pair.mover.ask(CardPeer.move, ranges, _TOGETHER) for _ in range(3))
    pair.check(ranges[:_CHECKED_RANGES])
    return _TOGETHER * float(ranges[:, 2].sum()) / together, alone
