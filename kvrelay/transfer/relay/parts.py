"""What both halves of a relay are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvrelay.ids import WorkerId
from kvrelay.transfer.engines.base import TransferEngine, TransferError
from kvrelay.transfer.region import Region
from kvrelay.transfer.relay.kind import Kind, Layout
from kvrelay.transfer.relay.link import LocalSide, TransferSettings

L = TypeVar("L", bound=Layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayParts(Generic[L]):
    """`host` is equal on two workers that can share memory (`engines.shm.host_identity`)."""

    worker_id: WorkerId
    layout: L
    region: Region
    engines: Sequence[TransferEngine]
    fingerprint: str
    host: str
    settings: TransferSettings = TransferSettings()
    elsewhere: Mapping[str, Region] = field(default_factory=dict)  # what engines of these names move instead of `region`
    on_news: Callable[[], None] = lambda: None  # called in the transfer thread when `poll` has something: wakes the engine

    def register(self, kind: Kind[L]) -> LocalSide[L]:
        """Raises TransferError, with every engine closed."""
        try:
            for engine in self.engines:
                engine.register(self.elsewhere.get(engine.name, self.region))
        except TransferError:
            self.close_engines()
            raise
        named = {engine.name: engine for engine in self.engines}
        return LocalSide(kind, self.worker_id, self.layout, self.host, self.fingerprint, named)

    def close_engines(self) -> None:
        for engine in self.engines:
            engine.close()
