"""Prometheus figures that the workers count: read from their latest load at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvrelay.router.peer import HOST_KINDS, Peer
from kvrelay.wire.registry import BlockCounts, ImageCounts, PlaneCounts, WorkerLoad

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
    "reconnects": "Connections to prefill workers that were opened again",
    "repeats": "Messages about KV hand-overs that were said again, since no answer had come",
    "set_aside": "Computed prompts that were set aside, since their decode worker had no room",
    "recomputed": "Prompts that were set aside and computed again",
}
_IMAGES = {
    "encoded": "Images that went through a vision tower",
    "hits": "Images whose embeddings were there already",
    "relayed": "Images whose embeddings were handed over",
    "failed": "Images whose embeddings were not",
    "bytes": "Bytes of embeddings moved, counted by the side that moves them",
    "resumes": "Further rounds of embeddings that did not fit at once",
    "reconnects": "Connections to encode workers that were opened again",
    "repeats": "Messages about embeddings that were said again, since no answer had come",
    "malformed": "Frames on the signal plane of embeddings that were no message",
}
_MAPPING = {
    "lookups": "Look-ups of transfer ids",
    "duplicates": "Transfer messages that repeated what was said before",
    "unknown": "Messages about unknown transfers",
    "foreign": "Transfer messages from a worker that is not the peer",
    "malformed": "Frames on the signal plane that were no message",
}
_PLANES = {
    "refused_peers": "Connections of peers that do not hold the cluster key",
    "registry_retries": "Attempts to reach the registry that failed and were made again",
}
_MALFORMED: dict[str, Callable[[PlaneCounts], int]] = {
    "serving": lambda planes: planes.serving_malformed,
    "events": lambda planes: planes.events_malformed,
}
_NAMES = {  # as vLLM calls them
    "preemptions": "num_preemptions", "output_tokens": "generation_tokens", "cached_tokens": "prompt_tokens_cached",
}  # fmt: skip
_STATES = ("running", "waiting", "transferring", "swapped")
_NO_IMAGES = ImageCounts()  # of a worker whose model takes none
_GAUGES: dict[str, tuple[str, Callable[[Peer], float]]] = {
    "up": ("Whether the worker takes requests", lambda peer: peer.usable),
    "images_in_flight": ("Embeddings on their way, by worker", lambda peer: _images(peer.load).in_flight),
    "transfers_in_flight": ("KV hand-overs under way, by worker", lambda peer: peer.load.transfers.in_flight),
    "kept_kv": ("Finished samples whose KV is kept, by worker", lambda peer: peer.load.kept),
    "mapping_size": ("Transfer ids known, by worker", lambda peer: peer.load.mapping.size),
    "mapping_held_back": ("Messages about transfers not yet known, by worker", lambda peer: peer.load.mapping.held_back),
}


class WorkerCollector(Collector):
    """`peers` gives the workers of this moment."""

    def __init__(self, peers: Callable[[], Iterable[Peer]]) -> None:
        self._peers = peers

    def collect(self) -> Iterator[Metric]:
        peers = list(self._peers())
        yield _gauge_by(peers, "requests", "Sequences on the worker, by state", "state", _STATES, lambda load: load)
        kinds = BlockCounts.__struct_fields__
        yield _gauge_by(peers, "blocks", "KV blocks, by what holds them", "kind", kinds, lambda load: load.blocks)
        help_text = "KV blocks on the host, by what holds them"
        yield _gauge_by(peers, "host_blocks", help_text, "kind", HOST_KINDS, lambda load: load.host)
        yield from _counters(peers, "", _TOTALS, lambda load: load)
        yield from _counters(peers, "host_", _HOST, lambda load: load.host)
        yield from _counters(peers, "transfers_", _TRANSFERS, lambda load: load.transfers)
        yield from _counters(peers, "mapping_", _MAPPING, lambda load: load.mapping)
        yield from _counters(peers, "images_", _IMAGES, _images)
        yield from _counters(peers, "", _PLANES, lambda load: load.planes)
        yield _malformed(peers)
        for name, (help_text, value) in _GAUGES.items():
            family = GaugeMetricFamily(f"kvrelay_worker_{name}", help_text, labels=["worker", "role"])
            for peer in peers:
                family.add_metric([peer.id, peer.record.role.value], float(value(peer)))
            yield family


def _images(load: WorkerLoad) -> ImageCounts:
    return load.images or _NO_IMAGES


def _counters(
    peers: list[Peer], prefix: str, names: dict[str, str], part: Callable[[WorkerLoad], msgspec.Struct]
) -> Iterator[Metric]:
    for name, help_text in names.items():
        shown = f"kvrelay_worker_{prefix}{_NAMES.get(name, name)}"
        family = CounterMetricFamily(shown, f"{help_text}, by worker", labels=["worker", "role"])
        for peer in peers:
            family.add_metric([peer.id, peer.record.role.value], float(getattr(part(peer.load), name)))
        yield family


def _malformed(peers: list[Peer]) -> Metric:
    help_text = "Messages of routers and subscribers that were refused, by worker"
    labels = ["worker", "role", "plane"]  # as the routers' own
    family = CounterMetricFamily("kvrelay_worker_malformed_messages", help_text, labels=labels)
    for peer in peers:
        for plane, count in _MALFORMED.items():
            family.add_metric([peer.id, peer.record.role.value, plane], float(count(peer.load.planes)))
    return family


def _gauge_by(
    peers: list[Peer],
    name: str,
    help_text: str,
    label: str,
    kinds: Iterable[str],
    part: Callable[[WorkerLoad], msgspec.Struct],
) -> Metric:
    family = GaugeMetricFamily(f"kvrelay_worker_{name}", help_text, labels=["worker", "role", label])
    for peer in peers:
        for kind in kinds:
            family.add_metric([peer.id, peer.record.role.value, kind], float(getattr(part(peer.load), kind)))
    return family
