"""Timelines reach an OpenTelemetry collector as spans under the client's trace."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import msgspec
import pytest
from cluster import Shape, ask, collect, relay
from collector import Collector
from patience import PATIENCE_S

from kvrelay.errors import ConfigError
from kvrelay.metrics import Metrics
from kvrelay.router.spans import SpanExport
from kvrelay.router.timelines import Timeline

TRACE_ID, CLIENT_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PROMPT = list(range(10, 60))


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


async def test_a_request_is_a_span_under_its_clients_and_its_stages_are_below_it(collector: Collector) -> None:
    metrics = Metrics()
    export = SpanExport(collector.url, metrics)
    async with relay(Shape()) as cluster:
        timelines = cluster.router.timelines
        timelines.on_settled = export.offer
        trace = {"traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01"}
        request = msgspec.structs.replace(ask(PROMPT), external_id="mine", trace=trace, parent_span_id=CLIENT_SPAN)
        unwanted = msgspec.structs.replace(ask(PROMPT), trace={"traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-00"})
        for each in (request, unwanted):
            assert (await collect(cluster.submit(each))).error is None
        await cluster.idle()
        await cluster.until(lambda: len(timelines.about("", "mine", 0)[0].clocks) == 2)
        timelines.tick(0.0)
    export.close()
    by_name = {span.name: span for span in collector.spans}
    assert len(by_name) == len(collector.spans) == 8, "the trace that its client does not record is not sent"
    root = by_name.pop("request")
    assert set(by_name) == {"route", "queue", "prefill", "hand_over", "reserve", "transfer", "decode"}
    assert (root.trace_id.hex(), root.parent_span_id.hex(), root.span_id.hex()) == (TRACE_ID, CLIENT_SPAN, "00f067aa0ba902b7")
    for span in by_name.values():
        assert (span.trace_id, span.parent_span_id) == (root.trace_id, root.span_id)
        assert span.end_time_unix_nano >= span.start_time_unix_nano
    assert len({span.span_id for span in collector.spans}) == 8
    assert metrics.registry.get_sample_value("kvrelay_spans_total", {"outcome": "sent"}) == 8.0


def test_a_collector_that_is_gone_costs_spans_and_nothing_else(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.router.spans._TIMEOUT_S", 0.2)
    metrics = Metrics()
    collector.close()
    export = SpanExport(collector.url, metrics)
    export.offer(Timeline(external_id="a", trace_id=TRACE_ID, span_id=CLIENT_SPAN, is_sampled=True))
    export.offer(Timeline(external_id="b", trace_id=TRACE_ID, span_id=CLIENT_SPAN, is_sampled=False))
    export._waiting.put(None)
    export._thread.join(PATIENCE_S)
    assert not export._thread.is_alive()
    assert metrics.registry.get_sample_value("kvrelay_spans_total", {"outcome": "failed"}) == 1.0
    collector._server.shutdown = lambda: None  # type: ignore[method-assign]


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"kvrelay\[otel\]"):
        SpanExport("http://127.0.0.1:1/v1/traces", Metrics())
