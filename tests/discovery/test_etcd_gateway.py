"""The JSON gateway's odd ways: addresses, answers that are no answers, and watches that end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from etcd_server import EtcdServer
from etcd_tools import Etcdctl, View
from patience import PATIENCE_S
from registry_records import make_record

from kvrelay.discovery.etcd_gateway import (
    AsyncGateway,
    Endpoints,
    NoAnswerError,
    Range,
    RangeAnswer,
    RefusedError,
    Watch,
    WatchNews,
    WatchRange,
    new_async_client,
    read_answer,
)
from kvrelay.discovery.etcd_members import PREFIX, PREFIX_END
from kvrelay.errors import ConfigError

EVENT = b'{"result":{"header":{"revision":"7"},"events":[{"kv":{"key":"aw==","mod_revision":"7"}}]}}\n'
LAST_LINE = b'{"error":{"grpc_code":14,"http_code":503,"message":"etcdserver: server stopped"}}'


@pytest.mark.parametrize(
    "address",
    [
        "etcd://",
        "etcd://host",
        "etcd://host:",
        "etcd://host:port",
        "etcd://host:99999",
        "etcd://host:0",
        "etcd://host:1,",
        "etcd://host:1,host:1",
        "etcd://host:1/prefix",
        "etcd://user@host:1",
        "etcd://a..b:1",
        "etcd://[::1:1",
        "etcd://[1:2]:1",
        "etcds://host:1",
        "tcp://host:1",
    ],
)
def test_an_address_that_cannot_work_names_the_option(address: str) -> None:
    with pytest.raises(ConfigError, match="--registry"):
        Endpoints(address)


def test_endpoints_are_used_in_turn() -> None:
    endpoints = Endpoints("etcd://a.example:2379,[::1]:80,10.0.0.1:2379")
    seen = []
    for _ in range(4):
        seen.append(endpoints.current)
        endpoints.next()
    assert seen == ["http://a.example:2379", "http://[::1]:80", "http://10.0.0.1:2379", "http://a.example:2379"]


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (200, b"<html>", NoAnswerError),
        (200, b'{"kvs":[{"key":"*"}]}', NoAnswerError),
        (200, b"[" * 100_000, NoAnswerError),
        (200, b"\xff", NoAnswerError),
        (404, b"404 page not found", NoAnswerError),
        (400, b"bad proxy", NoAnswerError),
        (503, b'{"error":"etcdserver: no leader","code":14}', NoAnswerError),
        (400, b'{"error":"etcdserver: user name is empty","code":3}', RefusedError),
        (403, b'{"code":7,"message":"permission denied","details":[]}', RefusedError),
    ],
)
def test_what_is_no_answer_is_told_from_a_refusal(status: int, body: bytes, kind: type[Exception]) -> None:
    response = httpx.Response(status, content=body, request=httpx.Request("POST", "http://etcd/v3/kv/range"))
    with pytest.raises(kind):
        read_answer(response, RangeAnswer)


async def pieces(chunks: list[bytes]) -> tuple[list[WatchNews], str]:
    """What a watch tells whose answer comes in these chunks, and why it ends."""

    async def body() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=body()))
    watch = Watch(create_request=WatchRange(key=b"a", range_end=b"b", start_revision=1))
    told: list[WatchNews] = []
    async with httpx.AsyncClient(transport=transport) as client:
        try:
            async for news in AsyncGateway(client, "http://etcd", timeout_s=1.0).watch(watch):
                told.append(news)
        except NoAnswerError as error:
            return [news for news in told if news.events], str(error)
    pytest.fail("a watch that ends says why")


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_lines_may_come_in_any_pieces_and_the_last_without_its_end(size: int) -> None:
    stream = b'{"result":{"created":true}}\n' + 3 * EVENT + LAST_LINE
    told, reason = await pieces([stream[start : start + size] for start in range(0, len(stream), size)])
    assert [event.kv.key for news in told for event in news.events] == [b"k"] * 3
    assert "server stopped" in reason


async def test_a_line_of_nonsense_ends_the_watch() -> None:
    told, reason = await pieces([EVENT, b"nonsense\n", EVENT])
    assert len(told) == 1
    assert "not etcd's" in reason


async def test_a_watch_of_what_was_compacted_says_so(server: EtcdServer) -> None:
    control = Etcdctl(server)
    for _ in range(3):
        await asyncio.to_thread(control.put_all, [make_record()])
    revision = (await asyncio.to_thread(control.post, "/v3/kv/range", {"key": PREFIX}))["header"]["revision"]
    await asyncio.to_thread(control.post, "/v3/kv/compaction", {"revision": revision, "physical": True})
    watch = Watch(create_request=WatchRange(key=PREFIX, range_end=PREFIX_END, start_revision=1))
    async with new_async_client(1.0) as client, asyncio.timeout(PATIENCE_S):
        news = AsyncGateway(client, server.url, timeout_s=1.0).watch(watch)
        while not (piece := await anext(news)).canceled:
            pass
        await news.aclose()
    assert piece.compact_revision == int(revision)


async def test_a_membership_whose_watch_was_compacted_takes_a_snapshot_again(
    server: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when much was written, and compacted, between its snapshot and its watch."""
    control, records = Etcdctl(server), [make_record() for _ in range(3)]
    for record in records:
        await asyncio.to_thread(control.put_all, [record])
    header = (await asyncio.to_thread(control.post, "/v3/kv/range", {"key": PREFIX}))["header"]
    await asyncio.to_thread(control.post, "/v3/kv/compaction", {"revision": header["revision"], "physical": True})
    asked, real = [], AsyncGateway.range

    async def old_at_first(gateway: AsyncGateway, request: Range) -> RangeAnswer:
        asked.append(request)
        return RangeAnswer() if len(asked) == 1 else await real(gateway, request)

    monkeypatch.setattr(AsyncGateway, "range", old_at_first)
    view = View(server.address, probe_every_s=60.0)
    await view.until_members(*records)
    assert view.reachable[:2] == [True, False]
    view.membership.close()
