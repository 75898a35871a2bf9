"""Prometheus figures that the workers count: read from their latest load when somebody scrapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvrelay.router.peer import Peer
from kvrelay.wire.registry import ImageCounts

_REQUEST_STATES = ("running", "waiting", "transferring", "swapped")
_TOTALS = {
    "prompt_tokens": "Prompt tokens computed",
    "cached_tokens": "Prompt tokens found in the prefix cache",
    "inherited_tokens": "Prompt tokens whose KV was taken from a lease",
    "output_tokens": "Tokens generated",
    "preemptions": "Requests that had to give up their KV blocks",
    "steps": "Engine steps",
}


_HOST = {
    "hit_tokens": "Prompt tokens found in the host's cache and not on the device",
    "swapped_out": "Sequences whose KV went to the host",
    "swapped_in": "Sequences whose KV came back from the host",
    "timeouts": "Copies to and from the host that took too long",
}
_TRANSFERS = {
    "done": "KV hand-overs that ended well",
    "failed": "KV hand-overs that ended otherwise",
    "bytes": "KV bytes moved, counted by the side that moves them",
    "late_bytes": "KV bytes moved after the prompt was computed",
}
_IMAGES = {
    "encoded": "Images that went through a vision tower",
    "hits": "Images whose embeddings were there already",
    "relayed": "Images whose embeddings were handed over",
    "failed": "Images whose embeddings were not",
    "bytes": "Bytes of embeddings moved, counted by the side that moves them",
    "resumes": "Further rounds of embeddings that did not fit at once",
}
_MAPPING = {
    "lookups": "Look-ups of transfer ids",
    "duplicates": "Transfer messages that repeated what was said before",
    "unknown": "Messages about unknown transfers",
    "foreign": "Transfer messages from a worker that is not the peer",
    "malformed": "Frames on the signal plane that were no message",
}


class WorkerCollector(Collector):
    """`peers` gives the workers of this moment."""

    def __init__(self, peers: Callable[[], Iterable[Peer]]) -> None:
        self._peers = peers

    def collect(self) -> Iterator[Metric]:
        peers = list(self._peers())
        yield _requests(peers)
        yield _blocks(peers)
        yield _up(peers)
        yield from _counters(peers, "kvrelay_worker_", _TOTALS, lambda load: load)
        yield from _counters(peers, "kvrelay_worker_host_", _HOST, lambda load: load["host"])
        yield _host_blocks(peers)
        yield from _counters(peers, "kvrelay_worker_transfers_", _TRANSFERS, lambda load: load["transfers"])
        yield from _counters(peers, "kvrelay_worker_mapping_", _MAPPING, lambda load: load["mapping"])
        yield from _counters(peers, "kvrelay_worker_images_", _IMAGES, _images)
        yield _gauge(peers, "images_in_flight", "Embeddings on their way", lambda load: _images(load)["in_flight"])
        yield _gauge(peers, "transfers_in_flight", "KV hand-overs under way", lambda load: load["transfers"]["in_flight"])
        yield _gauge(peers, "leases", "Finished samples whose KV is kept", lambda load: load["leases"])
        yield _gauge(peers, "mapping_size", "Transfer ids known", lambda load: load["mapping"]["size"])
        yield _gauge(
            peers, "mapping_held_back", "Messages about transfers not yet known", lambda load: load["mapping"]["held_back"]
        )


def _images(load: dict[str, Any]) -> dict[str, Any]:
    """None of a worker whose model takes none."""
    return load["images"] or dict.fromkeys(ImageCounts.__struct_fields__, 0)


def _counters(
    peers: list[Peer], prefix: str, names: dict[str, str], part: Callable[[dict[str, Any]], dict[str, Any]]
) -> Iterator[Metric]:
    for name, help_text in names.items():
        family = CounterMetricFamily(prefix + name, f"{help_text}, by worker", labels=["worker", "role"])
        for peer in peers:
            family.add_metric([peer.id, peer.record.role.value], float(part(msgspec.to_builtins(peer.load))[name]))
        yield family


def _gauge(peers: list[Peer], name: str, help_text: str, value: Callable[[dict[str, Any]], float]) -> Metric:
    family = GaugeMetricFamily(f"kvrelay_worker_{name}", f"{help_text}, by worker", labels=["worker", "role"])
    for peer in peers:
        family.add_metric([peer.id, peer.record.role.value], float(value(msgspec.to_builtins(peer.load))))
    return family


def _requests(peers: list[Peer]) -> Metric:
    family = GaugeMetricFamily(
        "kvrelay_worker_requests", "Sequences on the worker, by state", labels=["worker", "role", "state"]
    )
    for peer in peers:
        load = msgspec.to_builtins(peer.load)
        for state in _REQUEST_STATES:
            family.add_metric([peer.id, peer.record.role.value, state], float(load[state]))
    return family


def _blocks(peers: list[Peer]) -> Metric:
    family = GaugeMetricFamily("kvrelay_worker_blocks", "KV blocks, by what holds them", labels=["worker", "role", "kind"])
    for peer in peers:
        for kind, count in msgspec.to_builtins(peer.load.blocks).items():
            family.add_metric([peer.id, peer.record.role.value, kind], float(count))
    return family


def _host_blocks(peers: list[Peer]) -> Metric:
    family = GaugeMetricFamily(
        "kvrelay_worker_host_blocks", "KV blocks on the host, by what holds them", labels=["worker", "role", "kind"]
    )
    for peer in peers:
        host = peer.load.host
        for kind, count in (("total", host.total), ("free", host.free), ("cached", host.cached), ("in_use", host.in_use)):
            family.add_metric([peer.id, peer.record.role.value, kind], float(count))
    return family


def _up(peers: list[Peer]) -> Metric:
    family = GaugeMetricFamily("kvrelay_worker_up", "Whether the worker takes requests", labels=["worker", "role"])
    for peer in peers:
        family.add_metric([peer.id, peer.record.role.value], float(peer.usable))
    return family
