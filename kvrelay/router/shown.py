"""What GET /cluster shows."""

from __future__ import annotations

from typing import NotRequired, TypedDict

import msgspec

from kvrelay.states import BreakerState, WorkerState
from kvrelay.wire.registry import BlockCounts, ImageCounts, TransferCounts, WorkerLoad, WorkerRecord


class HostBlocks(TypedDict):
    """KV blocks on the host."""

    total: int
    free: int
    cached: int
    in_use: int


class WorkerShown(TypedDict):
    """A worker as one router sees it. `in_flight` are that router's own requests; tokens, steps and preemptions are counted
    from the worker's start."""

    id: str
    role: str
    state: str
    host: str
    pid: int
    device: str
    kv_dtype: str
    max_batch: int
    data_parallel_rank: int
    running: int
    waiting: int
    transferring: int
    swapped: int
    steps: int
    preemptions: int
    connections: int
    prompt_tokens: int
    cached_tokens: int
    inherited_tokens: int
    output_tokens: int
    blocks: BlockCounts
    host_blocks: HostBlocks
    transfers: TransferCounts
    images: ImageCounts
    address: str
    events_address: str
    replay_address: str
    in_flight: int
    kept_kv: int
    breaker: str
    adapters: list[str]
    problem: NotRequired[str]
    adapter_failures: NotRequired[dict[str, str]]


class RouterShown(TypedDict):
    id: str
    host: str
    pid: int


class ClusterShown(TypedDict):
    """`stranded` requests wait for a worker that can take them."""

    router: str
    routers: list[RouterShown]
    model: str
    ready: bool
    in_flight: int
    stranded: int
    workers: list[WorkerShown]


def describe(record: WorkerRecord, load: WorkerLoad, state: WorkerState) -> WorkerShown:
    """Of any worker, also of one that cannot be reached yet."""
    host = load.host
    return {
        "id": record.id,
        "role": record.role.value,
        "state": state.value,
        "host": record.host,
        "pid": record.pid,
        "device": record.device,
        "kv_dtype": record.kv_dtype,
        "max_batch": record.max_batch,
        "data_parallel_rank": record.data_parallel_rank,
        "running": load.running,
        "waiting": load.waiting,
        "transferring": load.transferring,
        "swapped": load.swapped,
        "steps": load.steps,
        "preemptions": load.preemptions,
        "connections": load.connections,
        "prompt_tokens": load.prompt_tokens,
        "cached_tokens": load.cached_tokens,
        "inherited_tokens": load.inherited_tokens,
        "output_tokens": load.output_tokens,
        "blocks": msgspec.to_builtins(load.blocks),
        "host_blocks": {"total": host.total, "free": host.free, "cached": host.cached, "in_use": host.in_use},
        "transfers": msgspec.to_builtins(load.transfers),
        "images": msgspec.to_builtins(load.images or ImageCounts()),
        "address": record.serving_address,
        "events_address": record.events_address,
        "replay_address": record.replay_address,
        "in_flight": 0,
        "kept_kv": load.kept,
        "breaker": BreakerState.CLOSED.value,
        "adapters": [adapter.name for adapter in record.adapters],
    }
