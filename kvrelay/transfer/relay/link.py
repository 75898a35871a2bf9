"""Who talks to whom: the settings of the relay, what a worker tells of itself, and the opening of a connection, on both sides.

The opening is Hello / Welcome (same protocol, same model), then Map / Mapped (shapes of memory that fit together; the producer
picks the transport). What gets lost is said again by the consumer; what cannot work is Refused with a reason that both sides
log. Both halves are pure: messages in, messages out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from kvrelay.errors import VersionMismatchError
from kvrelay.ids import TransferId, WorkerId
from kvrelay.states import LINK_EDGES, LinkState, advance
from kvrelay.transfer.engines.base import Mover, TransferEngine, TransferError
from kvrelay.transfer.engines.choose import pick
from kvrelay.transfer.relay.kind import Kind, Layout
from kvrelay.transfer.relay.leases import Beats
from kvrelay.wire import check_version
from kvrelay.wire.relay import EngineInfo, Hello, Map, Mapped, Welcome


class TransferSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Every limit and deadline of the relay. Both sides of a pair must have the same `lease_s`."""

    lease_s: float = 30.0  # a consumer silent for this long loses what it may read; a producer silent for this long is given up
    heartbeat_s: float = 2.0  # at most this long between heartbeats while transfers are open
    hello_retry_s: float = 1.0  # an unanswered opening is repeated
    opening_s: float = 5.0  # a producer that has not let us in for this long cannot be reached
    unknown_s: float = 30.0  # a consumer waits this long for a producer that has not heard of the transfer
    pull_backoff_s: float = 0.01  # read mode: before the second pull, doubled with every further one
    pull_backoff_max_s: float = 1.0
    pull_deadline_s: float = 120.0  # read mode: from the first pull to the first byte
    max_moves_per_transfer: int = 4  # under way at once; what is computed meanwhile goes out as one larger move
    max_moves: int = 64  # under way at once, of all transfers
    max_links: int = 1024  # consumers of a producer, producers of a consumer
    idle_link_s: float = 600.0  # a connection without transfers is closed after
    max_held_back: int = 1024  # messages about transfers that are not known yet
    held_back_s: float = 30.0
    max_ended: int = 4096  # transfers remembered after their end

    @property
    def beat_s(self) -> float:
        """Between heartbeats while transfers are open: several fit into a lease."""
        return min(self.lease_s / 6, self.heartbeat_s)

    @property
    def idle_beat_s(self) -> float:
        return self.lease_s / 3


L = TypeVar("L", bound=Layout)


@dataclass(frozen=True, slots=True)
class LocalSide(Generic[L]):
    """What a worker brings to every connection. `host` is equal on two workers that can share memory."""

    kind: Kind[L]
    worker_id: WorkerId
    layout: L
    host: str
    fingerprint: str
    engines: Mapping[str, TransferEngine]

    def hello(self) -> Hello:
        return Hello(version=self.kind.version, worker_id=self.worker_id, fingerprint=self.fingerprint)

    def welcome(self) -> Welcome:
        return Welcome(version=self.kind.version, worker_id=self.worker_id)

    def map(self) -> Map[L]:
        infos = [EngineInfo(name=name, info=engine.local_info()) for name, engine in self.engines.items()]
        return Map(layout=self.layout, host=self.host, engines=infos)


@dataclass(slots=True)
class Link(Generic[L]):
    """What a worker knows of one peer. Open once both regions are mapped: then `layout` and `engine` are set."""

    peer: WorkerId
    heard_at: float
    layout: L | None = None
    engine: TransferEngine | None = None
    mapped: Map[Any] | Mapped[Any] | None = None  # what `layout` and `engine` were taken from

    @property
    def open(self) -> bool:
        return self.engine is not None

    def parts(self) -> tuple[L, TransferEngine]:
        """Of an open link."""
        assert self.layout is not None
        assert self.engine is not None
        return self.layout, self.engine

    @property
    def consumer_moves(self) -> bool:
        """Whether the consumer reads the producer's memory, rather than the producer writing the consumer's."""
        return self.engine is not None and self.engine.mover is Mover.CONSUMER


@dataclass(slots=True)
class ProducerLink(Link[L]):
    """A consumer's view of one producer: the opening, the heartbeats, and ends that the producer has not confirmed."""

    address: str = ""
    state: LinkState = LinkState.HELLO
    opening_since: float = 0.0
    hello_at: float = 0.0
    beat_at: float = 0.0
    used_at: float = 0.0
    beats: Beats = field(default_factory=Beats)
    unconfirmed: dict[TransferId, Any] = field(default_factory=dict)  # the state in which each ended

    @property
    def ready(self) -> bool:
        """Messages about transfers may be sent."""
        return self.state is LinkState.READY

    def advance(self, following: LinkState) -> None:
        self.state = advance(LINK_EDGES, self.state, following)

    def silent_since(self) -> float:
        """An opening that makes no progress is as good as silence, whatever else the producer says."""
        return self.heard_at if self.ready else self.opening_since

    def reopen(self, now: float, retry_s: float) -> None:
        """The producer does not know us any more. What is mapped stays until it is mapped anew."""
        if self.ready:
            self.opening_since = now
        self.advance(LinkState.HELLO)
        self.hello_at = now + retry_s


def check_hello(local: LocalSide[L], peer: WorkerId, hello: Hello) -> None:
    """Raises VersionMismatchError if this producer and that consumer cannot work together."""
    check_version("the consumer", hello.version, local.kind.version, f"{local.kind.name} relay")
    if hello.worker_id != peer:
        raise VersionMismatchError(f"the connection of {peer} says hello as {hello.worker_id}")
    if hello.fingerprint != local.fingerprint:
        raise VersionMismatchError(
            f"the consumer serves {hello.fingerprint!r}, the producer {local.fingerprint!r}: not the same model"
        )


def check_welcome(local: LocalSide[L], welcome: Welcome) -> None:
    check_version("the producer", welcome.version, local.kind.version, f"{local.kind.name} relay")


def accept_map(local: LocalSide[L], link: Link[L], message: Map[Any]) -> Mapped[L]:
    """The producer's half: checks the shape, picks the transport, maps the consumer's memory. Raises VersionMismatchError or
    TransferError. Saying the same again changes nothing."""
    if message != link.mapped:
        layout = _same_shape(local, message)
        infos = {engine.name: engine.info for engine in message.engines}
        engine = local.engines[_transport(local, message)]
        engine.add_peer(link.peer, infos[engine.name])
        link.layout, link.engine, link.mapped = layout, engine, message
    _, engine = link.parts()
    return Mapped(layout=local.layout, engine=EngineInfo(name=engine.name, info=engine.local_info()))


def use_mapped(local: LocalSide[L], link: Link[L], message: Mapped[Any]) -> None:
    """The consumer's half. Raises as `accept_map`."""
    if message == link.mapped:
        return
    layout = _same_shape(local, message)
    engine = local.engines.get(message.engine.name)
    if engine is None:
        raise TransferError(f"the producer picked the transport {message.engine.name!r}, which this worker does not have")
    engine.add_peer(link.peer, message.engine.info)
    link.layout, link.engine, link.mapped = layout, engine, message


def _transport(local: LocalSide[L], message: Map[Any]) -> str:
    mine, theirs = list(local.engines), [engine.name for engine in message.engines]
    if "memory" in mine and "memory" in theirs:
        return "memory"  # both live in one process
    return pick(mine, theirs, same_host=message.host == local.host)


def _same_shape(local: LocalSide[L], message: Map[Any] | Mapped[Any]) -> L:
    theirs = local.kind.read_layout(message.layout)
    reason = local.layout.mismatch(theirs)
    if reason:
        raise VersionMismatchError(f"the {local.kind.name} memories do not fit together: {reason}")
    return theirs
