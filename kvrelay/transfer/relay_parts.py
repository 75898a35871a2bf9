"""What both halves of the relay are made of, and what they count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from kvrelay.ids import RequestId, WorkerId, as_request_id, as_transfer_id, as_worker_id
from kvrelay.transfer.engines.base import TransferEngine, TransferError
from kvrelay.transfer.layout import KVLayout
from kvrelay.transfer.region import Region
from kvrelay.transfer.session import LocalSide, TransferSettings
from kvrelay.transfer.table import TableStats
from kvrelay.wire.registry import MappingCounts, TransferCounts
from kvrelay.wire.serving import TransferInfo


class RelayStats(msgspec.Struct, frozen=True, kw_only=True):
    """Since the start, but for sizes, which are of this moment."""

    table: TableStats
    counts: TransferCounts
    malformed: int  # frames that were no message
    unsent: int  # messages dropped because the peer was not there, or did not keep up
    strangers: int = 0  # messages of connections that did not name a worker


def mapping_counts(table: TableStats, malformed: int, num_repeated: int) -> MappingCounts:
    """`num_repeated` are the duplicates about transfers that are open."""
    return MappingCounts(
        size=table.size,
        parked=table.parked,
        lookups=table.lookups,
        lookup_s=table.lookup_s,
        duplicates=table.duplicates + num_repeated,
        unknown=table.unknown,
        foreign=table.foreign,
        malformed=malformed,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayParts:
    """What both movers are made of. `host` is equal on two workers that can share memory (`engines.shm.host_identity`)."""

    worker_id: WorkerId
    layout: KVLayout
    region: Region
    engines: Sequence[TransferEngine]
    fingerprint: str
    host: str
    settings: TransferSettings = TransferSettings()
    on_news: Callable[[], None] | None = None  # called in the transfer thread when `poll` has something: wake the engine

    def register(self) -> LocalSide:
        """Raises TransferError, with every engine closed."""
        try:
            for engine in self.engines:
                engine.register(self.region)
        except TransferError:
            self.close_engines()
            raise
        named = {engine.name: engine for engine in self.engines}
        return LocalSide(self.worker_id, self.layout, self.host, self.fingerprint, named)

    def close_engines(self) -> None:
        for engine in self.engines:
            engine.close()

    def tell(self) -> None:
        if self.on_news is not None:
            self.on_news()


def check_ids(request_id: RequestId, transfer: TransferInfo) -> None:
    """In the caller's thread, so that it is the caller who sees the error."""
    as_request_id(request_id)
    as_transfer_id(transfer.transfer_id)
    as_worker_id(transfer.producer)
    as_worker_id(transfer.consumer)
