"""Rank 0's side: starts the other ranks, tells them every pass, and sees their death.

    RankGroup(...)  ->  load own share  ->  group.until_loaded()  ->  group.share(KV memory)  ->  passes  ->  close

All ranks of a worker are processes of one host. On a CPU they have their KV in one piece of memory, each its share; on cards
each has its share on its card, and rank 0 has mapped them all. So rank 0 alone copies blocks, swaps them and hands them over
for all; the others compute and nothing else. A rank that dies is the worker's death: `on_death` is told at once, by a thread
that watches the connections, and the threads that wait for the rank are woken.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import assert_never

import msgspec
from torch._C._distributed_c10d import TCPStore

from kvrelay.errors import ConfigError, RankDiedError
from kvrelay.kernels.ranks import CardRanks, DistributedRanks, Ranks, SharedRanks, open_store, shared_bytes, shared_functions
from kvrelay.log import Log
from kvrelay.wire.codec import encode
from kvrelay.wire.ranks import KVMemory, KVShare, Loaded, RankFailed, RankMessage, RankSetup, Replay, read_from_rank

log = Log("ranks")

_END_S = 5.0

OnDeath = Callable[[str], None]


class _Rank:
    """One other rank, from its start to its end."""

    def __init__(self, setup: RankSetup, memory_fd: int) -> None:
        self.number = setup.rank
        self.link, theirs = socket.socketpair()
        with theirs:
            descriptors = [theirs.fileno(), memory_fd]
            command = [sys.executable, "-m", "kvrelay.runner.ranks.process", *map(str, descriptors)]
            self.process = subprocess.Popen(command, pass_fds=descriptors, stdin=subprocess.DEVNULL)
        self._connection = Connection(os.dup(self.link.fileno()))
        self.tell(encode(setup))

    def tell(self, message: bytes) -> None:
        try:
            self._connection.send_bytes(message)
        except OSError as error:
            raise RankDiedError(f"rank {self.number} has ended: {error}") from error

    def give(self, descriptor: int) -> None:
        socket.send_fds(self.link, [b"\0"], [descriptor])

    def answer(self) -> KVShare | None:
        """To what it was told last. Raises ConfigError with the rank's own reason."""
        try:
            message = read_from_rank.decode(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise ConfigError(f"rank {self.number} ended while it started") from None
        match message:
            case Loaded():
                return None
            case KVShare():
                return message
            case RankFailed():
                raise ConfigError(message.reason)
            case _:
                assert_never(message)

    def close(self) -> None:
        self._connection.close()
        self.link.close()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class RankGroup:
    """The other ranks of a worker. Used by the thread that runs the model, except for `tell_each`; `on_death` is called from
    another one."""

    def __init__(self, setup: RankSetup, on_death: OnDeath | None = None) -> None:
        """`setup` is that of rank 0, from which those of the others follow."""
        self._on_death = on_death
        self._closing = False
        self.death = ""  # why the worker ends
        self._on_cards = setup.num_cards > 0
        self._telling = threading.Lock()
        self._others: list[_Rank] = []
        self._wakes, self._wake = socket.socketpair()
        memory_fd = os.memfd_create("kvrelay-ranks", os.MFD_CLOEXEC)
        try:
            os.ftruncate(memory_fd, shared_bytes(setup.num_ranks))
            library = None if setup.num_cards else shared_functions()
            store = open_store() if library is None else None
            setup = msgspec.structs.replace(setup, store_port=0 if store is None else store.port)
            for rank in range(1, setup.num_ranks):
                self._others.append(_Rank(msgspec.structs.replace(setup, rank=rank), memory_fd))
            self.ranks = _meet(setup, store, library, memory_fd)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(memory_fd)
        self._watch: threading.Thread | None = None

    def until_loaded(self) -> None:
        """Every rank has its share of the model. Raises ConfigError."""
        for other in self._others:
            other.answer()
        self._watch = threading.Thread(target=self._see_death, name="ranks", daemon=True)
        self._watch.start()

    def share(self, num_blocks: int, block_size: int, descriptor: int | None = None) -> list[KVShare]:
        """The worker's KV memory, with every rank: behind the descriptor on a CPU; on cards each makes its own, and the others'
        are returned. All are ready then. Raises ConfigError."""
        assert (descriptor is None) == self._on_cards, "ranks on a CPU need memory that they can map"
        for other in self._others:
            other.tell(encode(KVMemory(num_blocks=num_blocks, block_size=block_size)))
            if descriptor is not None:
                other.give(descriptor)
        answers = [other.answer() for other in self._others]
        return [share for share in answers if share is not None]

    def check(self) -> None:
        """Raises RankDiedError if one has died: then what was computed since is worth nothing."""
        if self.death:
            raise RankDiedError(self.death)

    def replay(self, name: str) -> None:
        """The others replay the captured pass of that name."""
        self.tell(Replay(name=name))

    def tell(self, message: RankMessage) -> None:
        encoded = encode(message)
        with self._telling:
            for other in self._others:
                other.tell(encoded)

    def tell_each(self, messages: Sequence[RankMessage]) -> None:
        """One to each of the others, in their order. From any thread."""
        encoded = [encode(message) for message in messages]
        with self._telling:
            for other, message in zip(self._others, encoded, strict=True):
                other.tell(message)

    @property
    def pids(self) -> list[int]:
        return [other.process.pid for other in self._others]

    def _see_death(self) -> None:
        poll = select.poll()
        numbers = {other.link.fileno(): other.number for other in self._others}
        for descriptor in (*numbers, self._wakes.fileno()):
            poll.register(descriptor, select.POLLRDHUP)
        (descriptor, _), *_ = poll.poll()
        if self._closing or descriptor not in numbers:
            return
        self.death = f"rank {numbers[descriptor]} has ended"
        log.error("a rank has ended, and the worker with it", rank=numbers[descriptor])
        if self._on_death is not None:
            self._on_death(self.death)
        self.ranks.end()

    def close(self) -> None:
        """No rank is left afterwards. May be called twice."""
        self._closing = True
        self._wake.close()
        for other in self._others:
            other.close()
        self._others.clear()


def _meet(setup: RankSetup, store: TCPStore | None, library: ctypes.CDLL | None, memory_fd: int) -> Ranks:
    if setup.num_cards:
        return CardRanks(setup.store_port, 0, setup.num_ranks, store, one_card=setup.one_card)
    if library is None:
        return DistributedRanks(setup.store_port, 0, setup.num_ranks, store)
    return SharedRanks(library, memory_fd, 0, setup.num_ranks)
