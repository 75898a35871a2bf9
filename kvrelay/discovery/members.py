"""The workers that a registry lists. What every registry checks of a record, and how it tells of changes, stands here once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Generic, TypeVar

from kvrelay.discovery.base import Loss, OnChanged, OnJoined, OnLeft
from kvrelay.errors import ProtocolError
from kvrelay.ids import as_worker_id
from kvrelay.states import WorkerState
from kvrelay.wire import check_version
from kvrelay.wire.registry import WorkerRecord

MAX_WORKERS = 1024
MAX_TTL_S = 600.0
_MAX_TEXT_CHARACTERS = 1024  # of each text in a record: routers keep and show them

K = TypeVar("K")


class Members(Generic[K]):
    """By what the registry knows them by: worker id, address or key. The callbacks are told of differences only."""

    def __init__(self, on_joined: OnJoined, on_changed: OnChanged, on_left: OnLeft) -> None:
        self._on_joined, self._on_changed, self._on_left = on_joined, on_changed, on_left
        self._records: dict[K, WorkerRecord] = {}

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, key: K) -> bool:
        return key in self._records

    def __iter__(self) -> Iterator[K]:
        """Those of this moment: members may leave meanwhile."""
        return iter(list(self._records))

    def get(self, key: K) -> WorkerRecord | None:
        return self._records.get(key)

    def put(self, key: K, record: WorkerRecord) -> None:
        """Raises ProtocolError, and then nothing has changed. A record with another id is another worker in the same place."""
        check_record(record)
        known = self._records.get(key)
        if known is None and len(self._records) >= MAX_WORKERS:
            raise ProtocolError(f"there are already {MAX_WORKERS} workers")
        if known is not None and known.id != record.id:
            self.vanished(key)
            known = None
        self._records[key] = record
        if known is None:
            self._on_joined(record)
        elif known != record:
            self._on_changed(record)

    def leave(self, key: K, loss: Loss) -> None:
        """Harmless if it is no member."""
        record = self._records.pop(key, None)
        if record is not None:
            self._on_left(record.id, loss)

    def vanished(self, key: K) -> None:
        """For registries that do not hear why: a worker that leaves in order is DRAINING before it does."""
        record = self._records.get(key)
        if record is not None:
            self.leave(key, Loss.LEFT if record.state is WorkerState.DRAINING else Loss.EXPIRED)


def check_record(record: WorkerRecord) -> None:
    """Raises ProtocolError."""
    as_worker_id(record.id)
    check_version("the worker", record.version)
    is_starting = record.state is WorkerState.STARTING
    if not is_starting and not record.serving_address.startswith("tcp://"):
        raise ProtocolError(f"serving address {record.serving_address[:80]!r} is not tcp://HOST:PORT")
    texts: tuple[str, ...] = (record.serving_address, record.signal_address, record.events_address, record.replay_address)
    texts += tuple(text for adapter in record.adapters for text in (adapter.name, adapter.digest, adapter.path))
    texts += (record.host, record.model, record.fingerprint, record.device, record.kv_dtype)
    if any(len(text) > _MAX_TEXT_CHARACTERS for text in texts):
        raise ProtocolError(f"a text of more than {_MAX_TEXT_CHARACTERS} characters")
    if record.max_batch < 1 or record.max_queue < 1 or (record.max_model_len < 1 and not is_starting):
        raise ProtocolError("max_batch, max_queue and max_model_len must be positive")


def check_ttl(ttl_s: float) -> None:
    """Raises ProtocolError."""
    if not (math.isfinite(ttl_s) and 0.0 < ttl_s <= MAX_TTL_S):
        raise ProtocolError(f"a registration for {ttl_s} s is not between 0 and {MAX_TTL_S:g}")
