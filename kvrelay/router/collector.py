"""Prometheus figures that the workers count: read from their latest load at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvrelay.router.peer import Peer
from kvrelay.wire.registry import ImageCounts, WorkerLoad

_TOTALS = {
    "prompt_tokens": "Prompt tokens computed",
    "cached_tokens": "Prompt tokens found in the prefix cache",
    "inherited_tokens": "Prompt tokens whose KV was inherited",
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


_NO_IMAGES = ImageCounts()  # of a worker whose model takes none


class WorkerCollector(Collector):
    """`peers` gives the workers of this moment."""

    def __init__(self, peers: Callable[[], Iterable[Peer]]) -> None:
        self._peers = peers

    def collect(self) -> Iterator[Metric]:
        peers = list(self._peers())
        yield _gauge_by(peers, "requests", "Sequences on the worker, by state", "state", _requests)
        yield _gauge_by(
            peers, "blocks", "KV blocks, by what holds them", "kind", lambda load: msgspec.structs.asdict(load.blocks)
        )
        yield _gauge_by(peers, "host_blocks", "KV blocks on the host, by what holds them", "kind", _host_blocks)
        yield from _counters(peers, "", _TOTALS, lambda load: load)
        yield from _counters(peers, "host_", _HOST, lambda load: load.host)
        yield from _counters(peers, "transfers_", _TRANSFERS, lambda load: load.transfers)
        yield from _counters(peers, "mapping_", _MAPPING, lambda load: load.mapping)
        yield from _counters(peers, "images_", _IMAGES, _images)
        yield _gauge(peers, "up", "Whether the worker takes requests", lambda peer: peer.usable)
        yield _gauge(peers, "images_in_flight", "Embeddings on their way, by worker", lambda peer: _images(peer.load).in_flight)
        yield _gauge(
            peers, "transfers_in_flight", "KV hand-overs under way, by worker", lambda peer: peer.load.transfers.in_flight
        )
        yield _gauge(peers, "kept_kv", "Finished samples whose KV is kept, by worker", lambda peer: peer.load.kept)
        yield _gauge(peers, "mapping_size", "Transfer ids known, by worker", lambda peer: peer.load.mapping.size)
        yield _gauge(
            peers,
            "mapping_held_back",
            "Messages about transfers not yet known, by worker",
            lambda peer: peer.load.mapping.held_back,
        )


def _images(load: WorkerLoad) -> ImageCounts:
    return load.images or _NO_IMAGES


def _requests(load: WorkerLoad) -> dict[str, int]:
    return {
        "running": load.running,
        "waiting": load.waiting,
        "transferring": load.transferring,
        "swapped": load.swapped,
    }


def _host_blocks(load: WorkerLoad) -> dict[str, int]:
    host = load.host
    return {"total": host.total, "free": host.free, "cached": host.cached, "in_use": host.in_use}


def _counters(
    peers: list[Peer], prefix: str, names: dict[str, str], part: Callable[[WorkerLoad], msgspec.Struct]
) -> Iterator[Metric]:
    for name, help_text in names.items():
        family = CounterMetricFamily(f"kvrelay_worker_{prefix}{name}", f"{help_text}, by worker", labels=["worker", "role"])
        for peer in peers:
            family.add_metric([peer.id, peer.record.role.value], float(getattr(part(peer.load), name)))
        yield family


def _gauge(peers: list[Peer], name: str, help_text: str, value: Callable[[Peer], float]) -> Metric:
    family = GaugeMetricFamily(f"kvrelay_worker_{name}", help_text, labels=["worker", "role"])
    for peer in peers:
        family.add_metric([peer.id, peer.record.role.value], float(value(peer)))
    return family


def _gauge_by(
    peers: list[Peer], name: str, help_text: str, label: str, values: Callable[[WorkerLoad], dict[str, int]]
) -> Metric:
    family = GaugeMetricFamily(f"kvrelay_worker_{name}", help_text, labels=["worker", "role", label])
    for peer in peers:
        for kind, count in values(peer.load).items():
            family.add_metric([peer.id, peer.record.role.value, kind], float(count))
    return family
