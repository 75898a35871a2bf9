"""Every metric, once: its name, help and labels. A process makes one `Metrics` and hands it to the parts that count.

Figures that a worker already counts for itself (running, waiting, blocks, tokens) are not counted again here: a collector
reads them from the latest `WorkerLoad` at a scrape (`router/collector.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

CONTENT_TYPE = CONTENT_TYPE_LATEST

_LOSSES = ("left", "expired", "broken")
_LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_DURATION_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


def _counter(name: str, help: str, *labels: str) -> Counter:
    """A row of the table below. Prometheus shows it as NAME_total."""
    return field(default_factory=lambda: Counter(name, help, labels, registry=None), init=False)


def _gauge(name: str, help: str, *labels: str) -> Gauge:
    return field(default_factory=lambda: Gauge(name, help, labels, registry=None), init=False)


def _histogram(name: str, help: str, *labels: str, buckets: tuple[float, ...] = _LATENCY_BUCKETS) -> Histogram:
    return field(default_factory=lambda: Histogram(name, help, labels, buckets=buckets, registry=None), init=False)


@dataclass(eq=False)
class Metrics:
    """The counters, gauges and histograms of one process, in a registry of their own (so tests may make many)."""

    # The front end counts these.
    # endpoint: a path, or none (see turned_away)
    requests: Counter = _counter("kvrelay_requests", "HTTP requests answered or turned away", "endpoint", "status")
    requests_in_flight: Gauge = _gauge("kvrelay_requests_in_flight", "HTTP requests being answered")
    aborted: Counter = _counter("kvrelay_aborted", "Requests whose client left before the end")
    prompt_tokens: Counter = _counter("kvrelay_prompt_tokens", "Prompt tokens of answered requests")
    cached_tokens: Counter = _counter("kvrelay_prompt_tokens_cached", "Prompt tokens whose KV was reused from a cache")
    # source: lease, prefix_cache, prefill, prompt
    continuations: Counter = _counter(
        "kvrelay_continuations", "Requests that continued from another, by where its KV came from", "source"
    )
    inherited_tokens: Counter = _counter("kvrelay_inherited_tokens", "Prompt tokens whose KV was inherited")
    output_tokens: Counter = _counter("kvrelay_generation_tokens", "Tokens generated for clients")
    ttft_seconds: Histogram = _histogram("kvrelay_time_to_first_token_seconds", "From a request's arrival to its first token")
    inter_token_seconds: Histogram = _histogram("kvrelay_inter_token_latency_seconds", "Between two tokens of a sequence")
    request_seconds: Histogram = _histogram(
        "kvrelay_e2e_request_latency_seconds", "From a request's arrival to its end", buckets=_DURATION_BUCKETS
    )

    # Workers time these; the router that sent the request counts them (router/timelines.py).
    queue_seconds: Histogram = _histogram(
        "kvrelay_request_queue_time_seconds", "Of a request on a worker: waiting for its turn, for blocks or for images", "role"
    )
    encode_seconds: Histogram = _histogram(
        "kvrelay_request_encode_time_seconds", "Of a request on a worker: its images in the vision tower", "role"
    )
    prefill_seconds: Histogram = _histogram(
        "kvrelay_request_prefill_time_seconds", "Of a request on a worker: computing its prompt", "role"
    )
    reserve_seconds: Histogram = _histogram(
        "kvrelay_request_reserve_time_seconds",
        "Of a request on a decode worker: until its prompt was begun elsewhere and there was room for it",
        "role",
    )
    transfer_seconds: Histogram = _histogram(
        "kvrelay_transfer_seconds",
        "From reserved blocks to all of the KV in them; from an encode worker, until embeddings were taken",
        "role",
    )
    hand_over_seconds: Histogram = _histogram(
        "kvrelay_hand_over_seconds", "From a computed prompt to the decode worker having all of it", "role"
    )
    decode_seconds: Histogram = _histogram(
        "kvrelay_request_decode_time_seconds", "Of a request on a worker: from its first token there to its last", "role"
    )
    swapped_seconds: Histogram = _histogram("kvrelay_swapped_seconds", "Of a request on a worker: its KV on the host", "role")
    restore_seconds: Histogram = _histogram(
        "kvrelay_restore_seconds", "Of a request on a worker: its KV on the way from the host", "role"
    )
    embedding_resume_seconds: Histogram = _histogram(
        "kvrelay_embedding_resume_seconds", "From the first part of an embedding that did not fit at once to its last"
    )

    # The router counts these.
    malformed: Counter = _counter("kvrelay_malformed_messages", "Messages of peers that could not be understood", "plane")
    router_info: Gauge = _gauge("kvrelay_router_info", "The router that answers: always 1", "router", "host", "pid")
    role_changes: Counter = _counter(
        "kvrelay_role_changes", "Workers told to change their role (--rebalance)", "role", "next_role"
    )
    role_pressure: Gauge = _gauge("kvrelay_role_pressure", "How much a role has to do for its workers, 1 is too much", "role")
    registry_up: Gauge = _gauge("kvrelay_registry_up", "Whether the registry can be reached")
    registry_retries: Counter = _counter(
        "kvrelay_registry_retries", "Attempts to reach the registry that failed and were made again"
    )
    refused_peers: Counter = _counter("kvrelay_refused_peers", "Connections of peers that do not hold the cluster key")
    worker_joins: Counter = _counter("kvrelay_worker_joins", "Workers that joined", "role")
    # reason: of _LOSSES
    worker_losses: Counter = _counter("kvrelay_worker_losses", "Workers that went away", "role", "reason")
    # outcome: restarted, given_up
    worker_crashes: Counter = _counter(
        "kvrelay_worker_crashes", "Workers of kvrelay serve that crashed, by what became of them", "outcome"
    )
    dispatched: Counter = _counter("kvrelay_dispatched", "Requests sent to workers")
    # reason: lost, or the kind of error
    failovers: Counter = _counter(
        "kvrelay_failovers", "Requests that were sent again because a worker was lost or failed", "reason"
    )
    # kind: that of the error, as clients see it
    request_failures: Counter = _counter(
        "kvrelay_request_failures", "Requests that ended with an error after a worker had them", "kind"
    )
    hand_overs_avoided: Counter = _counter(
        "kvrelay_hand_overs_avoided",
        "Prompts left to a decode worker because a hand-over between the chosen two failed a moment ago",
    )
    # outcome: sent, failed, dropped
    spans: Counter = _counter("kvrelay_spans", "OpenTelemetry spans, by what became of them", "outcome")
    deadlines: Counter = _counter("kvrelay_deadlines", "Requests that took longer than they were given")
    local_prefills: Counter = _counter("kvrelay_local_prefills", "Prompts that a decode worker was left to compute itself")
    routed_cached_tokens: Counter = _counter(
        "kvrelay_routed_cached_tokens", "Prompt tokens that the chosen worker had cached, as far as the router knew", "role"
    )
    prefix_index_blocks: Gauge = _gauge("kvrelay_prefix_index_blocks", "KV blocks that the router knows to be cached somewhere")
    prefix_index_bytes: Gauge = _gauge("kvrelay_prefix_index_bytes", "Memory of what the router knows of cached blocks")
    event_gaps: Counter = _counter("kvrelay_event_gaps", "Times that KV events of a worker were missed")
    # by: replay, snapshot
    event_repairs: Counter = _counter("kvrelay_event_repairs", "Times that missed KV events were made good", "by")
    # outcome: sent, removed, not_found, deferred, dropped, early
    eviction_sync: Counter = _counter(
        "kvrelay_eviction_sync_requests", "Request ids on their way to the context index, by what became of them", "outcome"
    )
    eviction_sync_tracked: Gauge = _gauge("kvrelay_eviction_sync_tracked", "Request ids that may still have cached KV")
    eviction_sync_waiting: Gauge = _gauge(
        "kvrelay_eviction_sync_waiting", "Request ids that the context index is yet to be told"
    )
    eviction_sync_up: Gauge = _gauge("kvrelay_eviction_sync_up", "Whether the context index answers")
    kept_kv: Gauge = _gauge("kvrelay_kept_kv", "Finished samples whose KV is known to be kept")
    # reason: quota, worker, worker_lost, abort, no_answer
    kept_kv_refusals: Counter = _counter("kvrelay_kept_kv_refusals", "Samples whose KV was to be kept and is not", "reason")
    # reason: queue_full, unavailable
    rejected: Counter = _counter("kvrelay_rejected", "Requests that no worker could take", "reason")

    def __post_init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series per counter that says when it was made
        self.registry = CollectorRegistry()
        for row in fields(self):
            self.registry.register(vars(self)[row.name])

    def worker_joined(self, role: str) -> None:
        """Its losses are counted from 0 on: a counter that begins with 1 has not increased."""
        self.worker_joins.labels(role).inc()
        for reason in _LOSSES:
            self.worker_losses.labels(role, reason)

    def turned_away(self, status: int) -> None:
        """A request that no endpoint has seen."""
        self.requests.labels("none", str(status)).inc()

    def render(self) -> bytes:
        """The text of GET /metrics; its content type is CONTENT_TYPE."""
        return generate_latest(self.registry)
