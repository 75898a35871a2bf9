"""Connections of the embedding relay: what each side brings, what it knows of the other, and how a connection is opened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvrelay.errors import VersionMismatchError
from kvrelay.ids import TransferId, WorkerId
from kvrelay.states import EmbeddingState
from kvrelay.transfer.embedding_layout import EmbeddingLayout, embedding_layout
from kvrelay.transfer.embedding_pool import EmbeddingPool
from kvrelay.transfer.engines.base import Mover, TransferEngine, TransferError
from kvrelay.transfer.engines.choose import pick
from kvrelay.transfer.leases import Beats
from kvrelay.wire.embedding import EMBEDDING_VERSION, MapPool, PoolMapped
from kvrelay.wire.transfer import EngineInfo, Hello, Welcome


@dataclass(frozen=True, slots=True)
class LocalPool:
    """What a worker brings to every connection. `host` is equal on two workers that can share memory."""

    worker_id: WorkerId
    pool: EmbeddingPool
    host: str
    fingerprint: str
    engines: Mapping[str, TransferEngine]

    def hello(self) -> Hello:
        return Hello(version=EMBEDDING_VERSION, worker_id=self.worker_id, fingerprint=self.fingerprint)

    def welcome(self) -> Welcome:
        return Welcome(version=EMBEDDING_VERSION, worker_id=self.worker_id)

    def map_pool(self) -> MapPool:
        infos = [EngineInfo(name=name, info=engine.local_info()) for name, engine in self.engines.items()]
        return MapPool(layout=self.pool.layout, host=self.host, engines=infos)


@dataclass(slots=True)
class PoolLink:
    """What a worker knows of one peer. Open once both pools are mapped: then `layout` and `engine` are set."""

    peer: WorkerId
    heard_at: float
    layout: EmbeddingLayout | None = None
    engine: TransferEngine | None = None
    mapped: MapPool | PoolMapped | None = None  # what `layout` and `engine` were taken from

    @property
    def open(self) -> bool:
        return self.engine is not None

    def parts(self) -> tuple[EmbeddingLayout, TransferEngine]:
        """Of an open link."""
        assert self.layout is not None
        assert self.engine is not None
        return self.layout, self.engine

    @property
    def consumer_copies(self) -> bool:
        return self.engine is not None and self.engine.mover is Mover.CONSUMER


@dataclass(slots=True)
class EncoderLink(PoolLink):
    """A consumer's view of one producer: the opening, the heartbeats, and ends that the producer has not confirmed."""

    address: str = ""
    welcomed: bool = False
    ready: bool = False  # messages about transfers may be sent
    opening_since: float = 0.0
    hello_at: float = 0.0
    beat_at: float = 0.0
    used_at: float = 0.0
    beats: Beats = field(default_factory=Beats)
    unconfirmed: dict[TransferId, EmbeddingState] = field(default_factory=dict)

    def silent_since(self) -> float:
        """An opening that makes no progress is as good as silence, whatever else the producer says."""
        return self.heard_at if self.ready else self.opening_since

    def reopen(self, now: float, retry_s: float) -> None:
        """The producer does not know us any more. What is mapped stays until it is mapped anew."""
        if self.ready:
            self.opening_since = now
        self.ready = self.welcomed = False
        self.hello_at = now + retry_s


def check_hello(local: LocalPool, peer: WorkerId, hello: Hello) -> None:
    """Raises VersionMismatchError if this producer and that consumer cannot work together."""
    if hello.version != EMBEDDING_VERSION:
        raise VersionMismatchError(f"the consumer speaks embedding protocol {hello.version}, the producer {EMBEDDING_VERSION}")
    if hello.worker_id != peer:
        raise VersionMismatchError(f"the connection of {peer} says hello as {hello.worker_id}")
    if hello.fingerprint != local.fingerprint:
        raise VersionMismatchError(
            f"the consumer serves {hello.fingerprint!r}, the producer {local.fingerprint!r}: not the same model"
        )


def check_welcome(welcome: Welcome) -> None:
    if welcome.version != EMBEDDING_VERSION:
        raise VersionMismatchError(
            f"the producer speaks embedding protocol {welcome.version}, the consumer {EMBEDDING_VERSION}"
        )


def accept_pool(local: LocalPool, link: PoolLink, message: MapPool) -> PoolMapped:
    """The producer's half: checks the shape, picks the transport, maps the consumer's pool. Raises VersionMismatchError or
    TransferError. Saying the same again changes nothing."""
    if message != link.mapped:
        layout = _same_shape(local, message)
        infos = {engine.name: engine.info for engine in message.engines}
        engine = local.engines[_transport(local, message)]
        engine.add_peer(link.peer, infos[engine.name])
        link.layout, link.engine, link.mapped = layout, engine, message
    _, engine = link.parts()
    return PoolMapped(layout=local.pool.layout, engine=EngineInfo(name=engine.name, info=engine.local_info()))


def use_pool(local: LocalPool, link: PoolLink, message: PoolMapped) -> None:
    """The consumer's half. Raises as `accept_pool`."""
    if message == link.mapped:
        return
    layout = _same_shape(local, message)
    engine = local.engines.get(message.engine.name)
    if engine is None:
        raise TransferError(f"the producer picked the transport {message.engine.name!r}, which this worker does not have")
    engine.add_peer(link.peer, message.engine.info)
    link.layout, link.engine, link.mapped = layout, engine, message


def _transport(local: LocalPool, message: MapPool) -> str:
    mine, theirs = list(local.engines), [engine.name for engine in message.engines]
    if "memory" in mine and "memory" in theirs:
        return "memory"  # both live in one process
    return pick(mine, theirs, same_host=message.host == local.host)


def _same_shape(local: LocalPool, message: MapPool | PoolMapped) -> EmbeddingLayout:
    theirs = embedding_layout(message.layout)
    reason = local.pool.layout.mismatch(theirs)
    if reason:
        raise VersionMismatchError(f"the embedding pools do not fit together: {reason}")
    return theirs
