"""What a worker tells others of its hand-overs of KV."""

from __future__ import annotations

from typing import Any

from kvrelay.transfer.relay.machine import Machine
from kvrelay.wire.registry import MappingCounts, TransferCounts


def transfer_counts(machine: Machine[Any, Any, Any]) -> TransferCounts:
    counts = machine.counts
    return TransferCounts(
        in_flight=machine.table.num_live,
        done=counts.done,
        failed=counts.failed,
        bytes=counts.moved_bytes,
        late_bytes=counts.late_bytes,
        reconnects=counts.reconnects,
        repeats=counts.repeats,
        set_aside=counts.set_aside,
        recomputed=counts.recomputed,
        by_peer=counts.by_peer.copy(),
    )


def mapping_counts(machine: Machine[Any, Any, Any]) -> MappingCounts:
    counts, table = machine.counts, machine.table
    return MappingCounts(
        size=table.num_live,
        held_back=table.num_held_back,
        lookups=counts.lookups,
        duplicates=counts.duplicates,
        unknown=counts.unknown,
        foreign=counts.foreign,
        malformed=counts.malformed,
    )
