"""The dashboard's feed: what it says, to whom, and that it costs nothing while no page is open."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
import uvicorn
from patience import PATIENCE_S, until

from kvrelay.config import RouterOptions
from kvrelay.errors import UnavailableError
from kvrelay.frontend.app import FrontEnd
from kvrelay.frontend.fake_backend import FakeBackend
from kvrelay.frontend.feed.feed import Feed, cumulative, total
from kvrelay.launch.serve import HttpServer
from kvrelay.metrics import Metrics
from kvrelay.router.timelines import Timeline
from tests.frontend.serving import MODEL, fake_backend, make_app, running_server

KEYS = RouterOptions(api_key="mine,other")

Event = tuple[str, Any]


def read_events(lines: Iterator[str]) -> Iterator[Event]:
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


@contextlib.contextmanager
def watching(url: str, key: str = "") -> Iterator[Iterator[Event]]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with httpx.stream("GET", f"{url}/feed", headers=headers, timeout=PATIENCE_S) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        yield read_events(answer.iter_lines())


def first(events: Iterator[Event], name: str) -> Any:
    return next(value for each, value in events if each == name)


@contextlib.asynccontextmanager
async def feed_of(backend: FakeBackend, metrics: Metrics | None = None) -> AsyncIterator[Feed]:
    feed = Feed(backend, metrics or Metrics(), every_s=0.01)
    yield feed
    assert feed.num_viewers == 0
    assert not feed.is_running


def parsed(events: bytes) -> dict[str, Any]:
    return dict(read_events(iter(events.decode().splitlines())))


def add(backend: FakeBackend, name: str, owner: str = "", parent: str = "") -> Timeline:
    line = Timeline(external_id=name, owner=owner, parent=parent)
    backend.timelines.begin(line, 0.0)
    return line


def names(events: bytes) -> list[str]:
    return [each["id"] for each in parsed(events).get("requests", [])]


# Over HTTP


def test_a_page_is_greeted_and_then_told_every_second_what_happens() -> None:
    app = make_app(fake_backend())
    with running_server(app) as url, watching(url) as events:
        name, hello = next(events)
        assert name == "hello"
        assert hello["models"] == [MODEL]
        assert hello["takes_images"] is False
        ticks = [first(events, "tick"), first(events, "tick")]
        assert ticks[1]["at"] > ticks[0]["at"]
        assert ticks[0]["cluster"]["workers"] == []
        assert {"ttft", "inter_token", "queue"} == set(ticks[0]["histograms"])
        assert ticks[0]["counters"]["failovers"] == 0


def test_nothing_is_computed_when_the_last_page_has_gone() -> None:
    app: FrontEnd = make_app(fake_backend())
    with running_server(app) as url:
        assert not app.feed.is_running
        with watching(url) as one, watching(url) as two:
            next(one), next(two)
            assert app.feed.num_viewers == 2
            assert app.feed.is_running
        until(lambda: app.feed.num_viewers == 0)
        assert not app.feed.is_running


def test_without_a_key_there_is_no_feed() -> None:
    app = make_app(fake_backend(), KEYS)
    with running_server(app) as url:
        assert httpx.get(f"{url}/feed").status_code == 401
        assert httpx.get(f"{url}/feed", headers={"authorization": "Bearer wrong"}).status_code == 401
        assert app.feed.num_viewers == 0
        with watching(url, "mine") as events:
            assert next(events)[0] == "hello"


def test_a_head_request_is_answered_and_watches_nothing() -> None:
    app = make_app(fake_backend())
    with running_server(app) as url:
        assert httpx.head(f"{url}/feed", timeout=PATIENCE_S).status_code == 200
        assert app.feed.num_viewers == 0


def test_a_feed_is_not_a_slow_request() -> None:
    metrics = Metrics()
    app = make_app(fake_backend(), metrics=metrics)
    with running_server(app) as url, watching(url) as events:
        next(events)
    assert total_count(metrics) == 0.0


def total_count(metrics: Metrics) -> float:
    return cumulative(metrics.request_seconds)[-1][1]


def test_a_server_that_shuts_down_does_not_wait_for_its_pages() -> None:
    app = make_app(fake_backend())
    server = HttpServer(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", loop="uvloop"), app.feed)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    with watching(f"http://127.0.0.1:{port}") as events:
        next(events)
        server.should_exit = True
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert app.feed.num_viewers == 0


# What it says


async def test_requests_are_told_once_and_again_when_there_is_more_to_tell() -> None:
    backend = fake_backend()
    old = add(backend, "old")
    async with feed_of(backend) as feed:
        viewer = feed.open("")
        assert names(await viewer.next()) == ["old"]
        feed._look()
        feed._look()
        await viewer.next()
        feed._look()
        assert "requests" not in parsed(await viewer.next())
        add(backend, "new")
        backend.timelines.refused(old)
        feed._look()
        told = parsed(await viewer.next())["requests"]
        assert [(each["id"], each["state"]) for each in told] == [("old", "failed"), ("new", "running")]
        assert told[0]["number"] < told[1]["number"]
        feed.leave(viewer)


async def test_a_parent_is_told_again_when_it_has_a_child() -> None:
    backend = fake_backend()
    add(backend, "parent")
    async with feed_of(backend) as feed:
        viewer = feed.open("")
        feed._look()
        await viewer.next()
        add(backend, "child", parent="parent")
        feed._look()
        told = {each["id"]: each for each in parsed(await viewer.next())["requests"]}
        assert told["parent"]["children"] == ["child"]
        assert told["child"]["parent"] == "parent"
        feed.leave(viewer)


async def test_every_key_sees_its_own_requests() -> None:
    backend = fake_backend()
    async with feed_of(backend) as feed:
        mine, other = feed.open("mine"), feed.open("other")
        await mine.next(), await other.next()
        add(backend, "a", owner="mine")
        add(backend, "b", owner="other")
        feed._look()
        assert names(await mine.next()) == ["a"]
        assert names(await other.next()) == ["b"]
        feed.leave(mine)
        feed.leave(other)


async def test_a_page_that_comes_later_is_told_of_everything() -> None:
    backend = fake_backend()
    add(backend, "a")
    async with feed_of(backend) as feed:
        one = feed.open("")
        await one.next()
        feed._look()
        two = feed.open("")
        assert names(await two.next()) == ["a"]
        feed.leave(one)
        feed.leave(two)


async def test_a_page_that_does_not_read_loses_the_feed() -> None:
    async with feed_of(fake_backend()) as feed:
        viewer = feed.open("")
        for _ in range(20):
            feed._look()
        assert await viewer.next() == b""
        feed.leave(viewer)


async def test_there_is_a_limit_to_pages() -> None:
    async with feed_of(fake_backend()) as feed:
        viewers = [feed.open("") for _ in range(64)]
        with pytest.raises(UnavailableError, match="64 dashboards"):
            feed.open("")
        for viewer in viewers:
            feed.leave(viewer)


async def test_histograms_and_counters_are_summed_over_their_labels() -> None:
    metrics = Metrics()
    metrics.queue_seconds.labels("prefill").observe(0.002)
    metrics.queue_seconds.labels("decode").observe(0.2)
    metrics.failovers.labels("lost").inc()
    metrics.failovers.labels("timeout").inc(2)
    counts = dict(cumulative(metrics.queue_seconds))
    assert (counts["0.001"], counts["0.0025"], counts["+Inf"]) == (0.0, 1.0, 2.0)
    assert total(metrics.failovers) == 3.0
    assert total(metrics.failovers, reason="lost") == 1.0
    async with feed_of(fake_backend(), metrics) as feed:
        viewer = feed.open("")
        assert parsed(await viewer.next())["tick"]["counters"]["failovers"] == 3.0
        feed.leave(viewer)
