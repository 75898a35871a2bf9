"""`kvrelay events`: prints live what the workers of a running cluster do with their KV (docs/events.md).

    which workers there are: GET /cluster every second (--url), or etcd's watch (--registry), or those named (--worker)
    -> one subscription each -> one line per event

It only listens: no worker waits for it, and what it misses is asked for again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

from kvrelay.cli.client import add_api_key, add_url, ask, connect
from kvrelay.config import read_environment
from kvrelay.discovery.base import Loss, Membership
from kvrelay.discovery.static import StaticMembership
from kvrelay.errors import ConfigError, ProtocolError
from kvrelay.events.subscriber import EventSubscriber
from kvrelay.ids import WorkerId, new_router_id
from kvrelay.options import Parser
from kvrelay.planes.cluster_key import key_file, load_key
from kvrelay.planes.curve import keyed
from kvrelay.wire.events import CacheEvent
from kvrelay.wire.registry import WorkerRecord

_EPILOG = """\
examples:
  kvrelay events                                   of the server on http://127.0.0.1:8000
  kvrelay events --json | jq 'select(.type == "Freed")'
  kvrelay events --worker tcp://10.0.0.2:5700      of one worker, by its serving address
  kvrelay events --registry etcd://10.0.0.9:2379   of every worker that etcd knows
"""
_LOOK_EVERY_S = 1.0
_REGISTRATION_S = 4.0
_SHOWN_HASHES = 4


class EventWorker(msgspec.Struct, frozen=True):
    """An entry of GET /cluster, as far as it matters here."""

    id: str
    events_address: str = ""
    replay_address: str = ""


class _Cluster(msgspec.Struct, frozen=True):
    workers: list[EventWorker]


def build_parser() -> Parser:
    parser = Parser(prog="kvrelay events", description="Shows live what the workers' KV caches do.", epilog=_EPILOG)
    source = parser.add_mutually_exclusive_group()
    add_url(source)
    source.add_argument("--registry", default="", metavar="ADDRESS", help="etcd://HOST:PORT, where the workers register")
    source.add_argument(
        "--worker", action="append", default=[], metavar="ADDRESS", help="tcp://HOST:PORT of a worker; again for more"
    )
    add_api_key(parser)
    parser.add_argument("--cluster-key", default="", metavar="FILE", help="the cluster's key file, if it has one")
    parser.add_argument("--json", action="store_true", help="one JSON object a line, with every hash")
    return parser


def run(argv: list[str]) -> int:
    """Until Ctrl-C."""
    arguments = build_parser().parse_strictly(argv)
    with keyed(load_key(key_file(arguments.cluster_key, read_environment()))):
        asyncio.run(_follow(arguments))
    return 0


async def _follow(arguments: argparse.Namespace) -> None:
    listener = Listener(JsonLines() if arguments.json else TextLines())
    try:
        if arguments.worker or arguments.registry:
            membership = _membership(arguments.registry, arguments.worker)
            membership.start(listener.joined, lambda record: None, lambda worker_id, loss: listener.left(worker_id, loss.value))
            try:
                await asyncio.Event().wait()
            finally:
                membership.close()
        else:
            await _follow_server(arguments.url, arguments.api_key, listener)
    finally:
        listener.close()


def _membership(registry: str, workers: list[str]) -> Membership:
    if workers:
        return StaticMembership(workers, router_id=new_router_id(), registration_s=_REGISTRATION_S)
    if not registry.startswith("etcd://"):
        raise ConfigError(
            f"--registry {registry!r}: only etcd://HOST:PORT can be asked; where the router keeps the registry, use --url"
        )
    from kvrelay.discovery.etcd import EtcdMembership

    return EtcdMembership(registry, registration_s=_REGISTRATION_S)


async def _follow_server(url: str, api_key: str, listener: Listener) -> None:
    with connect(url, api_key) as client:
        listener.update((await asyncio.to_thread(ask, client, "GET", "/cluster", _Cluster)).workers)
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            with contextlib.suppress(ConfigError):  # the router may come back; its workers go on
                listener.update((await asyncio.to_thread(ask, client, "GET", "/cluster", _Cluster)).workers)


class Lines(Protocol):
    """Shows one thing that happened `at` a time, in a line."""

    def show(self, at: float, worker_id: str, kind: str, **fields: Any) -> None: ...


class JsonLines:
    def show(self, at: float, worker_id: str, kind: str, **fields: Any) -> None:
        shown = {name: [digest.hex() for digest in value] if name == "hashes" else value for name, value in fields.items()}
        print(msgspec.json.encode({"time": at, "worker": worker_id, "type": kind, **shown}).decode(), flush=True)


class TextLines:
    def show(self, at: float, worker_id: str, kind: str, **fields: Any) -> None:
        words = [_hashes(value) if name == "hashes" else f"{name}={value}" for name, value in fields.items()]
        print(" ".join([time.strftime("%H:%M:%S", time.localtime(at)), worker_id, f"{kind:11}", *words]).rstrip(), flush=True)


def _hashes(hashes: list[bytes]) -> str:
    shown = " ".join(digest.hex()[:8] for digest in hashes[:_SHOWN_HASHES])
    return f"blocks={len(hashes)} {shown}{' ...' if len(hashes) > _SHOWN_HASHES else ''}"


class Listener:
    """The subscriptions, and what they say (EventOwner)."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._subscribers: dict[WorkerId, EventSubscriber] = {}

    def _show(self, worker_id: WorkerId, kind: str, **fields: Any) -> None:
        """With the time at which it happened: events that were missed come later."""
        subscriber = self._subscribers.get(worker_id)
        happened = None if subscriber is None else subscriber.batch_time
        self._lines.show(time.time() if happened is None else happened, worker_id, kind, **fields)

    def update(self, workers: Iterable[EventWorker]) -> None:
        """These are the workers that there are."""
        listed = {WorkerId(worker.id): worker for worker in workers}
        for worker_id in [known for known in self._subscribers if known not in listed]:
            self.left(worker_id, Loss.LEFT.value)
        for worker_id, worker in listed.items():
            self._subscribe(worker_id, worker.events_address, worker.replay_address)

    def joined(self, record: WorkerRecord) -> None:
        self._subscribe(record.id, record.events_address, record.replay_address)

    def left(self, worker_id: WorkerId, reason: str) -> None:
        subscriber = self._subscribers.pop(worker_id, None)
        if subscriber is not None:
            subscriber.close()
            self._show(worker_id, "Left", reason=reason)

    def close(self) -> None:
        for subscriber in self._subscribers.values():
            subscriber.close()
        self._subscribers.clear()

    def _subscribe(self, worker_id: WorkerId, events_address: str, replay_address: str) -> None:
        if worker_id in self._subscribers or not events_address or not replay_address:
            return
        try:
            self._subscribers[worker_id] = EventSubscriber(worker_id, events_address, replay_address, self)
        except ProtocolError as error:
            print(f"{worker_id}: {error}", file=sys.stderr)
            return
        self._show(worker_id, "Joined", address=events_address)

    def happened(self, worker_id: WorkerId, event: CacheEvent) -> None:
        fields = msgspec.structs.asdict(event)
        fields.pop("parent", None)  # its own event told of it
        self._show(worker_id, type(event).__name__, **fields)

    def replaced(self, worker_id: WorkerId, hashes: Iterable[bytes]) -> None:
        self._show(worker_id, "Snapshot", hashes=list(hashes))

    def gap(self, worker_id: WorkerId) -> None:
        self._show(worker_id, "Gap")

    def repaired(self, worker_id: WorkerId, *, by_snapshot: bool) -> None:
        self._show(worker_id, "Repaired", by="snapshot" if by_snapshot else "replay")

    def malformed(self, worker_id: WorkerId, reason: str) -> None:
        print(f"{worker_id}: {reason}", file=sys.stderr)
