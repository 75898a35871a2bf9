"""Prometheus figures that the workers count: read from their latest load when somebody scrapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvrelay.router.peer import Peer

_REQUEST_STATES = ("running", "waiting", "transferring", "swapped")
_TOTALS = {
    "prompt_tokens": "Prompt tokens computed",
    "cached_tokens": "Prompt tokens found in the prefix cache",
    "output_tokens": "Tokens generated",
    "preemptions": "Requests that had to give up their KV blocks",
    "steps": "Engine steps",
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
        for name, help_text in _TOTALS.items():
            family = CounterMetricFamily(f"kvrelay_worker_{name}", f"{help_text}, by worker", labels=["worker", "role"])
            for peer in peers:
                family.add_metric([peer.id, peer.record.role.value], float(msgspec.to_builtins(peer.load)[name]))
            yield family


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


def _up(peers: list[Peer]) -> Metric:
    family = GaugeMetricFamily("kvrelay_worker_up", "Whether the worker takes requests", labels=["worker", "role"])
    for peer in peers:
        family.add_metric([peer.id, peer.record.role.value], float(peer.usable))
    return family
