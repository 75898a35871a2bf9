"""A thread per peer, so that no call of an engine waits for a library, a socket or another peer.

    add_peer ──> Link ──open()──> way to the peer ──move(), one after the other──> close()

The engine's calls only put moves into a link's queue. The link's thread opens the way (again before a later move if that
failed), moves, and ends each move in the book when its memory is no longer touched.
"""

from __future__ import annotations

import abc
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec

from kvrelay.ids import WorkerId
from kvrelay.log import Log
from kvrelay.transfer.engines.base import Completion, MoveId, Mover, Ranges, TransferError
from kvrelay.transfer.engines.moves import Move, MoveBook
from kvrelay.transfer.engines.ranges import coalesce, native_ranges
from kvrelay.transfer.region import Region

_log = Log("transfer")

T = TypeVar("T")

CANCELLED = "cancelled"
PEER_REMOVED = "the peer was removed"
CLOSED = "the engine was closed"
CLOSE_WAIT_S = 2.0  # only a library that hangs makes it wait


class Way(Protocol):
    """How bytes get to and from one peer. Its thread makes every call; each may block and may raise TransferError."""

    def open(self) -> None:
        """Called again after a move has failed."""

    def move(self, move: Move, abandon: threading.Event) -> None:
        """Returns when every byte has arrived. Raises when it failed, and as soon as it can after `move.stop` was set.

        Returns or raises only when the move touches no memory any more, here or there: what cannot be called back is waited
        for. Only when `abandon` is set it raises at once: the whole engine is about to be torn down.
        """

    def close(self) -> None:
        """Called once, opened or not."""


class Link:
    """One peer's thread and queue."""

    def __init__(self, name: str, remote_size_bytes: int, way: Way, book: MoveBook, abandon: threading.Event) -> None:
        self.remote_size_bytes = remote_size_bytes
        self.way = way
        self._book = book
        self._abandon = abandon
        self._is_open = False
        self._is_leaving = threading.Event()
        self._queue: queue.SimpleQueue[Move | None] = queue.SimpleQueue()  # None only wakes the thread
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, move: Move) -> None:
        self._queue.put(move)

    @property
    def is_leaving(self) -> bool:
        return self._is_leaving.is_set()

    def leave(self) -> None:
        """Returns at once. The thread ends what runs, closes the way, and ends itself."""
        self._is_leaving.set()
        self._queue.put(None)

    def _run(self) -> None:
        self._try_open()  # so that the first move does not pay for it
        while not self._is_leaving.is_set():
            move = self._queue.get()
            if move is not None:
                self._serve(move)
        self._error_of(self.way.close)

    def _serve(self, move: Move) -> None:
        error = self._try_open()
        if not self._book.start(move):
            return
        if not error:
            error = self._error_of(lambda: self.way.move(move, self._abandon))
            self._is_open = not error or bool(move.stop.value)  # a way that broke is opened anew for the next move
        if error and self._abandon.is_set():
            self._book.rest(move)  # `close` ends it once nothing can touch memory any more
            return
        self._book.end(move, PEER_REMOVED if error and self._is_leaving.is_set() else error)
        if not self._is_open:
            self._fail_queued(error)

    def _fail_queued(self, error: str) -> None:
        """What was asked for before the way broke fails with it, instead of waiting in turn for a peer that may be dead."""
        for _ in range(self._queue.qsize()):
            move = self._queue.get()
            if move is not None and self._book.start(move):
                self._book.end(move, error)

    def _try_open(self) -> str:
        if self._is_leaving.is_set():
            return PEER_REMOVED
        if self._is_open:
            return ""
        error = self._error_of(self.way.open)
        self._is_open = not error
        return error

    def _error_of(self, step: Callable[[], None]) -> str:
        try:
            step()
        except TransferError as failure:
            _log.debug("transfer failed", thread=self._thread.name, error=failure)
            return str(failure)
        except Exception as failure:  # noqa: BLE001 - a library may raise anything; a dead thread would leave moves open
            _log.exception("transfer failed unexpectedly", thread=self._thread.name)
            return f"{type(failure).__name__}: {failure}"
        return ""


class LinkedEngine(abc.ABC):
    """What is the same for all transfer engines that move bytes on threads: the region, peers, moves and their ends."""

    name: str
    mover: Mover
    takes_shares = False  # regions that go on in memory of other ranks

    def __init__(self, worker: WorkerId) -> None:
        self._worker = worker
        self._region: Region | None = None
        self._abandon = threading.Event()
        self._book = MoveBook()
        self._links: dict[WorkerId, Link] = {}

    # What a transport does

    @abc.abstractmethod
    def _open(self, region: Region) -> None:
        """Lets peers reach it. Raises TransferError."""

    @abc.abstractmethod
    def _info(self, region: Region) -> msgspec.Struct: ...

    @abc.abstractmethod
    def _way_to(self, peer: WorkerId, info: bytes, region: Region) -> tuple[Way, int]:
        """And the size of the peer's region. Raises TransferError if the info makes no sense."""

    @abc.abstractmethod
    def _tear_down(self, region: Region) -> None:
        """Afterwards no memory is touched any more."""

    # The contract

    def register(self, region: Region) -> None:
        if self._region is not None:
            raise TransferError(f"{self.name}: a region is already registered")
        if region.shares and not self.takes_shares:
            raise TransferError(f"{self.name} moves one piece of memory, not {1 + len(region.shares)} of ranks on cards")
        native_ranges()  # so that the first move does not wait for it
        self._open(region)
        self._region = region

    def local_info(self) -> bytes:
        return msgspec.msgpack.encode(self._info(self._registered()))

    def add_peer(self, peer: WorkerId, info: bytes) -> None:
        way, size_bytes = self._way_to(peer, info, self._registered())
        self.remove_peer(peer)
        self._links[peer] = Link(f"{self.name}-{peer}", size_bytes, way, self._book, self._abandon)

    def remove_peer(self, peer: WorkerId) -> None:
        link = self._links.pop(peer, None)
        if link is not None:
            link.leave()
            self._book.stop_all(PEER_REMOVED, peer)

    def write(self, peer: WorkerId, ranges: Ranges) -> MoveId:
        return self._submit(peer, ranges, writes=True)

    def read(self, peer: WorkerId, ranges: Ranges) -> MoveId:
        return self._submit(peer, ranges, writes=False)

    def poll(self) -> list[Completion]:
        return self._book.take()

    def cancel(self, move: MoveId) -> None:
        self._book.stop(move, CANCELLED)

    def close(self) -> None:
        """Brings every move to rest, tears the transport down, and only then ends the moves. A thread that still tries to reach
        a peer is left to itself: no move runs there."""
        self._abandon.set()
        for peer in list(self._links):
            self.remove_peer(peer)
        deadline = time.monotonic() + CLOSE_WAIT_S
        while self._book.is_any_running() and time.monotonic() < deadline:
            time.sleep(0.001)
        region, self._region = self._region, None
        if region is not None:
            self._tear_down(region)
        self._book.end_all(CLOSED)

    def _submit(self, peer: WorkerId, ranges: Ranges, *, writes: bool) -> MoveId:
        region, link = self._registered(), self._link_to(peer)
        move = self._book.open(peer, coalesce(ranges, region.size_bytes, link.remote_size_bytes), writes=writes)
        if len(move.ranges):
            link.submit(move)
        else:
            self._book.end(move)
        return move.id

    def _link_to(self, peer: WorkerId) -> Link:
        link = self._links.get(peer)
        if link is None:
            raise TransferError(f"{self.name}: unknown peer {peer}")
        return link

    def _registered(self) -> Region:
        if self._region is None:
            raise TransferError(f"{self.name}: no region is registered, or the engine was closed")
        return self._region


def read_info(name: str, peer: WorkerId, info: bytes, kind: type[T]) -> T:
    """What a peer told of its region, for the transport of that name. Raises TransferError."""
    try:
        return msgspec.msgpack.decode(info, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TransferError(f"{name}: the info of {peer} makes no sense: {error}") from error
