"""What a worker's record must hold before a registry passes it on."""

from __future__ import annotations

import math

from kvrelay.errors import ProtocolError, VersionMismatchError
from kvrelay.ids import as_worker_id
from kvrelay.wire import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION, speaks
from kvrelay.wire.registry import WorkerRecord

MAX_WORKERS = 1024
MAX_TTL_S = 600.0
_MAX_TEXT_CHARACTERS = 1024  # of each text in a record: routers keep and show them


def check_record(record: WorkerRecord) -> None:
    as_worker_id(record.id)
    if not speaks(record.version):
        raise VersionMismatchError(
            f"worker speaks protocol {record.version}, this registry {OLDEST_PROTOCOL_VERSION} to {PROTOCOL_VERSION}"
        )
    if not record.serving_address.startswith("tcp://"):
        raise ProtocolError(f"serving address {record.serving_address[:80]!r} is not tcp://HOST:PORT")
    texts = (record.serving_address, record.signal_address, record.events_address, record.replay_address)
    if any(len(text) > _MAX_TEXT_CHARACTERS for text in (*texts, record.host, record.model, record.fingerprint)):
        raise ProtocolError(f"a text of more than {_MAX_TEXT_CHARACTERS} characters")
    if record.max_batch < 1 or record.max_queue < 1 or record.max_model_len < 1:
        raise ProtocolError("max_batch, max_queue and max_model_len must be positive")


def check_ttl(ttl_s: float) -> None:
    if not (math.isfinite(ttl_s) and 0.0 < ttl_s <= MAX_TTL_S):
        raise ProtocolError(f"a registration for {ttl_s} s is not between 0 and {MAX_TTL_S:g}")
