"""Every metric, once: its name, labels and help. A process makes one `Metrics` and hands it to the parts that count.

Figures that a worker already counts for itself (running, waiting, blocks, tokens) are not counted again here: a collector
reads them from the latest `WorkerLoad` at a scrape (`router/collector.py`).
"""

from __future__ import annotations

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

_LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_DURATION_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """The counters, gauges and histograms of one process, in a registry of their own (so tests may make many)."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series per counter that says when it was made
        registry = CollectorRegistry()
        self.registry = registry

        # The front end counts these.
        self.requests = Counter(
            "kvrelay_requests", "HTTP requests answered", ["endpoint", "status"], registry=registry
        )  # shown as kvrelay_requests_total
        self.requests_in_flight = Gauge("kvrelay_requests_in_flight", "HTTP requests being answered", registry=registry)
        self.aborted = Counter("kvrelay_aborted", "Requests whose client left before the end", registry=registry)
        self.prompt_tokens = Counter("kvrelay_prompt_tokens", "Prompt tokens of answered requests", registry=registry)
        self.cached_tokens = Counter(
            "kvrelay_cached_tokens", "Prompt tokens whose KV was reused from a cache", registry=registry
        )
        self.continuations = Counter(
            "kvrelay_continuations",
            "Requests that continued from another, by where its KV came from",
            ["source"],
            registry=registry,
        )  # source: lease, prefix_cache, prefill, prompt
        self.inherited_tokens = Counter("kvrelay_inherited_tokens", "Prompt tokens whose KV was inherited", registry=registry)
        self.output_tokens = Counter("kvrelay_generation_tokens", "Tokens generated for clients", registry=registry)
        self.ttft_seconds = Histogram(
            "kvrelay_time_to_first_token_seconds",
            "From a request's arrival to its first token",
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self.inter_token_seconds = Histogram(
            "kvrelay_inter_token_latency_seconds",
            "Between two tokens of a sequence",
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self.request_seconds = Histogram(
            "kvrelay_e2e_request_latency_seconds",
            "From a request's arrival to its end",
            buckets=_DURATION_BUCKETS,
            registry=registry,
        )

        # Workers time these; the router that sent the request counts them (router/timelines.py).
        self.queue_seconds = Histogram(
            "kvrelay_request_queue_time_seconds",
            "Of a request on a worker: waiting for its turn, for blocks or for images",
            ["role"],
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self.encode_seconds = Histogram(
            "kvrelay_request_encode_time_seconds",
            "Of a request on a worker: its images in the vision tower",
            ["role"],
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self.prefill_seconds = Histogram(
            "kvrelay_request_prefill_time_seconds",
            "Of a request on a worker: computing its prompt",
            ["role"],
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self.reserve_seconds = Histogram(
            "kvrelay_request_reserve_time_seconds",
            "Of a request on a decode worker: until its prompt was begun elsewhere and there was room for it",
            ["role"],
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self.transfer_seconds = Histogram(
            "kvrelay_transfer_seconds",
            "From reserved blocks to all of the KV in them; from an encode worker, until embeddings were taken",
            ["role"],
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self.hand_over_seconds = Histogram(
            "kvrelay_hand_over_seconds",
            "From a computed prompt to the decode worker having all of it",
            ["role"],
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self.decode_seconds = Histogram(
            "kvrelay_request_decode_time_seconds",
            "Of a request on a worker: from its first token there to its last",
            ["role"],
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self.swapped_seconds = Histogram(
            "kvrelay_swapped_seconds",
            "Of a request on a worker: its KV on the host",
            ["role"],
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self.restore_seconds = Histogram(
            "kvrelay_restore_seconds",
            "Of a request on a worker: its KV on the way from the host",
            ["role"],
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self.embedding_resume_seconds = Histogram(
            "kvrelay_embedding_resume_seconds",
            "From the first part of an embedding that did not fit at once to its last",
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )

        # The router counts these.
        self.malformed = Counter(
            "kvrelay_malformed_messages", "Messages of peers that could not be understood", ["plane"], registry=registry
        )
        self.router_info = Gauge(
            "kvrelay_router_info", "The router that answers: always 1", ["router", "host", "pid"], registry=registry
        )
        self.role_changes = Counter(
            "kvrelay_role_changes", "Workers told to change their role (--rebalance)", ["role", "next_role"], registry=registry
        )
        self.role_pressure = Gauge(
            "kvrelay_role_pressure", "How much a role has to do for its workers, 1 is too much", ["role"], registry=registry
        )
        self.registry_up = Gauge("kvrelay_registry_up", "Whether the registry can be reached", registry=registry)
        self.worker_joins = Counter("kvrelay_worker_joins", "Workers that joined", ["role"], registry=registry)
        self.worker_losses = Counter(
            "kvrelay_worker_losses", "Workers that went away", ["role", "reason"], registry=registry
        )  # reason: left, expired, broken
        self.dispatched = Counter("kvrelay_dispatched", "Requests sent to workers", registry=registry)
        self.failovers = Counter(
            "kvrelay_failovers",
            "Requests that were sent again because a worker was lost or failed",
            ["reason"],
            registry=registry,
        )  # reason: lost, or the kind of error
        self.request_failures = Counter(
            "kvrelay_request_failures", "Requests that ended with an error after a worker had them", ["kind"], registry=registry
        )  # kind: that of the error, as clients see it
        self.hand_overs_avoided = Counter(
            "kvrelay_hand_overs_avoided",
            "Prompts left to a decode worker because a hand-over between the chosen two failed a moment ago",
            registry=registry,
        )
        self.spans = Counter(
            "kvrelay_spans", "OpenTelemetry spans, by what became of them", ["outcome"], registry=registry
        )  # outcome: sent, failed, dropped
        self.deadlines = Counter("kvrelay_deadlines", "Requests that took longer than they were given", registry=registry)
        self.local_prefills = Counter(
            "kvrelay_local_prefills", "Prompts that a decode worker was left to compute itself", registry=registry
        )
        self.routed_cached_tokens = Counter(
            "kvrelay_routed_cached_tokens",
            "Prompt tokens that the chosen worker had cached, as far as the router knew",
            ["role"],
            registry=registry,
        )
        self.prefix_index_blocks = Gauge(
            "kvrelay_prefix_index_blocks", "KV blocks that the router knows to be cached somewhere", registry=registry
        )
        self.event_gaps = Counter("kvrelay_event_gaps", "Times that KV events of a worker were missed", registry=registry)
        self.event_repairs = Counter(
            "kvrelay_event_repairs", "Times that missed KV events were made good", ["by"], registry=registry
        )  # by: replay, snapshot
        self.eviction_sync = Counter(
            "kvrelay_eviction_sync_requests",
            "Request ids on their way to the context index, by what became of them",
            ["outcome"],
            registry=registry,
        )  # outcome: sent, removed, not_found, deferred, dropped, early
        self.eviction_sync_tracked = Gauge(
            "kvrelay_eviction_sync_tracked", "Request ids that may still have cached KV", registry=registry
        )
        self.eviction_sync_waiting = Gauge(
            "kvrelay_eviction_sync_waiting", "Request ids that the context index is yet to be told", registry=registry
        )
        self.eviction_sync_up = Gauge("kvrelay_eviction_sync_up", "Whether the context index answers", registry=registry)
        self.kept_kv = Gauge("kvrelay_kept_kv", "Finished samples whose KV is known to be kept", registry=registry)
        self.kept_kv_refusals = Counter(
            "kvrelay_kept_kv_refusals", "Samples whose KV was to be kept and is not", ["reason"], registry=registry
        )  # reason: quota, worker, worker_lost, abort, no_answer
        self.rejected = Counter(
            "kvrelay_rejected", "Requests that no worker could take", ["reason"], registry=registry
        )  # reason: queue_full, unavailable

    def render(self) -> bytes:
        """The text of GET /metrics; its content type is CONTENT_TYPE."""
        return generate_latest(self.registry)
