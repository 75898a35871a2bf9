"""One side of a measured transfer: a process with a transfer engine, and beside it the same library used without our layer.

    parent -> peer    Setup first, then Meet(the other peer), Measure, Digest, Rewrite
    peer -> parent    Ready, then one Done each
It ends when the parent closes the pipe (`harness/child.py`).

What moves is the KV of a prompt. Its blocks lie at random places on both sides, so that ranges are as small as they get, one
block of one layer and plane each; or in order, so that all of a layer's plane is one range.
"""

from __future__ import annotations

import ctypes
import hashlib
import time
from typing import Literal, assert_never

import msgspec
import numpy as np

from kvrelay.bench.harness.child import commands, say
from kvrelay.bench.relay.raw import RawMover, open_raw
from kvrelay.errors import BenchError
from kvrelay.ids import WorkerId
from kvrelay.transfer.engines.base import MoveId, Ranges, TransferError
from kvrelay.transfer.engines.choose import make_engine
from kvrelay.transfer.kv.layout import KVLayout, Placement, kv_layout, move_ranges
from kvrelay.transfer.region import shared_region
from kvrelay.wire.kv import Layout

How = Literal["read", "write", "raw", "memcpy"]
_POLL_S = 0.00005
_MOVE_S = 60.0


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    engine: str
    worker: WorkerId
    layout: Layout
    side: Literal["local", "remote"]  # of a move


class Meet(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    worker: WorkerId
    info: bytes
    raw_info: bytes


class Measure(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Moves the KV of this many tokens: by our engine, by the library alone, or within this process by one memcpy."""

    how: How
    tokens: int
    scattered: bool = True


class Digest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Of the bytes that a move of this many tokens moves, on this side."""

    tokens: int


class Rewrite(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Write all memory, as a worker does before a hand-over: what another process has just written is slower to read."""


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    info: bytes = b""
    raw_info: bytes = b""
    problem: str = ""  # why the engine cannot work here


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """What was done, as far as the command asks for it."""

    seconds: float = 0.0
    payload_bytes: int = 0
    digest: str = ""

    @property
    def bytes_per_s(self) -> float:
        return self.payload_bytes / self.seconds


Command = Meet | Measure | Digest | Rewrite


def kv_ranges(layout: KVLayout, tokens: int, *, scattered: bool) -> Ranges:
    """Local offset, remote offset, size. The same for both peers. In a fresh pool blocks lie in order; later they scatter."""
    count = -(-tokens // layout.block_size)
    if scattered:
        places = [np.random.default_rng(seed).permutation(layout.num_blocks).tolist() for seed in (1, 2)]
    else:
        places = [list(range(layout.num_blocks))] * 2
    here, there = (Placement(layout, place[:count]) for place in places)
    return move_ranges(here, there, (0, tokens), (0, layout.num_layers))


class Peer:
    """Memory, engine and raw library of this process."""

    def __init__(self, setup: Setup) -> None:
        """Raises TransferError where the engine cannot work."""
        self._side = setup.side
        self._layout = kv_layout(setup.layout)
        self._engine = make_engine(setup.engine, setup.worker)
        region = shared_region(self._layout.size_bytes)
        assert region.buffer is not None
        self._memory = np.frombuffer(region.buffer, dtype=np.uint8)
        self._rewrite()
        self._engine.register(region)
        self._raw: RawMover | None = open_raw(setup.engine, setup.worker, region)
        self._peer = setup.worker
        self._copies: tuple[np.ndarray[tuple[int], np.dtype[np.uint8]], ...] = ()

    def ready(self) -> Ready:
        return Ready(info=self._engine.local_info(), raw_info=b"" if self._raw is None else self._raw.info())

    def obey(self, command: Command) -> Done:
        match command:
            case Meet():
                self._peer = command.worker
                self._engine.add_peer(command.worker, command.info)
                if self._raw is not None:
                    self._raw.meet(command.raw_info)
                return Done()
            case Measure():
                return self._measure(command)
            case Digest():
                return Done(digest=self._digest(command.tokens))
            case Rewrite():
                self._rewrite()
                return Done()
            case _:
                assert_never(command)

    def close(self) -> None:
        self._engine.close()

    def _rewrite(self) -> None:
        """No two peers hold the same."""
        generator = np.random.default_rng(1 if self._side == "local" else 2)
        self._memory.view(np.int64)[:] = generator.integers(0, 1 << 63, self._memory.size // 8)

    def _measure(self, command: Measure) -> Done:
        ranges = kv_ranges(self._layout, command.tokens, scattered=command.scattered)
        size = int(ranges[:, 2].sum())
        if command.how == "memcpy" and (not self._copies or self._copies[0].size < size):
            self._copies = (np.full(size, 2, dtype=np.uint8), np.full(size, 1, dtype=np.uint8))  # with every page there
        start = time.perf_counter()
        self._carry_out(command.how, ranges, size)
        return Done(seconds=time.perf_counter() - start, payload_bytes=size)

    def _carry_out(self, how: How, ranges: Ranges, size: int) -> None:
        match how:
            case "read":
                self._wait_for(self._engine.read(self._peer, ranges))
            case "write":
                self._wait_for(self._engine.write(self._peer, ranges))
            case "raw":
                assert self._raw is not None
                self._raw.write(ranges)
            case "memcpy":
                ctypes.memmove(self._copies[0].ctypes.data, self._copies[1].ctypes.data, size)
            case _:
                assert_never(how)

    def _wait_for(self, move: MoveId) -> None:
        deadline = time.monotonic() + _MOVE_S
        while not (ended := self._engine.poll()):
            if time.monotonic() > deadline:
                raise BenchError(f"{self._engine.name} did not move anything within {_MOVE_S:g} s")
            time.sleep(_POLL_S)
        for completion in ended:
            if completion.id != move or completion.error:
                raise BenchError(f"{self._engine.name}: {completion.error or 'another move ended'}")

    def _digest(self, tokens: int) -> str:
        digest = hashlib.blake2b()
        for here, there, size in kv_ranges(self._layout, tokens, scattered=True).tolist():
            start = here if self._side == "local" else there
            digest.update(self._memory[start : start + size].data)
        return digest.hexdigest()


def main() -> None:
    messages = commands(Setup | Command)
    try:
        peer = Peer(next(messages))
    except StopIteration:
        return
    except TransferError as error:
        say(Ready(problem=str(error)))
        return
    say(peer.ready())
    for message in messages:
        say(peer.obey(message))
    peer.close()


if __name__ == "__main__":
    main()
