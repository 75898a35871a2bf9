"""Timelines as OpenTelemetry spans, sent to a collector over OTLP (`--otlp-endpoint`). Needs the extra `otel`.

    request                       child of the client's span, if it sent a `traceparent`
      +-- route                   on the router
      +-- queue, prefill, ...     one for each stage on each worker, with the worker's own duration

A thread of its own makes and sends them; what it cannot keep up with is dropped and counted. A trace that its client does not
record (the sampled flag of its `traceparent` is 0) is not sent.
"""

from __future__ import annotations

import queue
import secrets
import threading
from collections.abc import Iterable
from typing import Any

from kvrelay.errors import ConfigError
from kvrelay.log import take_over
from kvrelay.metrics import Metrics
from kvrelay.router.timelines import Timeline
from kvrelay.version import version

_QUEUED = 4096  # timelines
_BATCH = 128
_TIMEOUT_S = 5.0


class SpanExport:
    """`offer` costs the event loop nothing; the rest is the thread's."""

    def __init__(self, endpoint: str, metrics: Metrics) -> None:
        """Raises ConfigError where OpenTelemetry is not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
        except ImportError as error:
            raise ConfigError(f"--otlp-endpoint needs the extra otel: pip install 'kvrelay[otel]' ({error})") from error
        take_over("opentelemetry")
        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_TIMEOUT_S)
        self._resource = Resource({"service.name": "kvrelay", "service.version": version()})
        self._counted = metrics.spans
        self._waiting: queue.Queue[Timeline | None] = queue.Queue(_QUEUED)
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def offer(self, line: Timeline) -> None:
        if not line.is_sampled:
            return
        try:
            self._waiting.put_nowait(line)
        except queue.Full:
            self._counted.labels("dropped").inc(_num_spans(line))

    def close(self) -> None:
        """Sends what waits, for as long as one call may take."""
        try:
            self._waiting.put(None, timeout=_TIMEOUT_S)
        except queue.Full:
            return
        self._thread.join(2 * _TIMEOUT_S)

    def _run(self) -> None:
        over = False
        while not over:
            lines = [self._waiting.get()]
            while len(lines) < _BATCH and not self._waiting.empty():
                lines.append(self._waiting.get())
            over = None in lines
            self._send([span for line in lines if line is not None for span in self._spans(line)])
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _send(self, spans: list[Any]) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        if spans:
            sent = self._exporter.export(spans) is SpanExportResult.SUCCESS  # it raises nothing, and logs why not
            self._counted.labels("sent" if sent else "failed").inc(len(spans))

    def _spans(self, line: Timeline) -> Iterable[Any]:
        failed = line.state == "failed"
        about = {
            "kvrelay.request_id": line.external_id,
            "kvrelay.transfer_id": line.transfer_id,
            "kvrelay.state": line.state,
            "gen_ai.usage.input_tokens": line.prompt_tokens,
            "gen_ai.usage.output_tokens": line.output_tokens,
        }
        yield self._span(line, "request", line.began_at, line.ended_at - line.began_at, line.span_id, about, failed=failed)
        for stage in line.stages():
            place = {"kvrelay.worker": stage.worker, "kvrelay.role": stage.role, "kvrelay.attempt": stage.attempt}
            yield self._span(line, stage.stage, stage.at, stage.seconds, "", place)

    def _span(
        self,
        line: Timeline,
        name: str,
        at: float,
        seconds: float,
        span_id: str,
        about: dict[str, Any],
        *,
        failed: bool = False,
    ) -> Any:
        """Without a `span_id` of its own it is a child of the request's."""
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        def context(identity: str, *, is_remote: bool = False) -> SpanContext:
            return SpanContext(int(line.trace_id, 16), int(identity, 16), is_remote, TraceFlags(TraceFlags.SAMPLED))

        client = context(line.parent_span_id, is_remote=True) if line.parent_span_id else None
        start_ns = int((line.began_unix + at - line.began_at) * 1e9)
        return ReadableSpan(
            name,
            context(span_id or secrets.token_hex(8)),
            client if span_id else context(line.span_id),
            self._resource,
            about,
            kind=SpanKind.SERVER if span_id else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR if failed else StatusCode.UNSET),
            start_time=start_ns,
            end_time=start_ns + int(seconds * 1e9),
        )


def _num_spans(line: Timeline) -> int:
    return 1 + sum(1 for _ in line.stages())
