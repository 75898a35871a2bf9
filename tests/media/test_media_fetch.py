"""Which URLs are fetched, from where, and what ends a fetch. The hosts are one local server behind made-up public addresses."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from kvrelay.errors import MediaError
from kvrelay.media.data_url import read_data_url
from kvrelay.media.fetch import Connection, Fetcher, FetchRules, allowed_hosts, is_public

PUBLIC = "93.184.216.34"
OK = b"HTTP/1.1 200 OK\r\n"
Handler = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


class World:
    """A name service, and hosts that answer. `connected` has every address that was connected to."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.names: dict[str, list[list[str]]] = {}
        self.connected: list[tuple[str, int, str | None]] = []
        self.requests: list[bytes] = []

    async def resolve(self, host: str, port: int) -> list[str]:
        answers = self.names.get(host, [[PUBLIC]])
        return answers.pop(0) if len(answers) > 1 else answers[0]

    async def connect(self, address: str, port: int, tls_name: str | None) -> Connection:
        self.connected.append((address, port, tls_name))
        return await asyncio.open_connection("127.0.0.1", self.port)

    def fetcher(self, hosts: str = "a.test, b.test:8080", *, max_bytes: int = 1000, timeout_s: float = 5.0) -> Fetcher:
        rules = FetchRules(allowed_hosts=allowed_hosts(hosts), max_bytes=max_bytes, timeout_s=timeout_s)
        return Fetcher(rules, resolve=self.resolve, connect=self.connect)


@contextlib.asynccontextmanager
async def world(answers: dict[str, bytes | Handler]) -> AsyncIterator[World]:
    """`answers` by path."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            request = await reader.readuntil(b"\r\n\r\n")
            there.requests.append(request)
            answer = answers[request.split(b" ")[1].decode()]
            if isinstance(answer, bytes):
                writer.write(answer)
            else:
                await answer(request, writer)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    there = World(server.sockets[0].getsockname()[1])
    try:
        yield there
    finally:
        server.close()


def redirect(to: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n".encode()


async def test_three_ways_to_end_a_body() -> None:
    answers: dict[str, bytes | Handler] = {
        "/length": OK + b"Content-Length: 5\r\n\r\nhello",
        "/chunks": OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n",
        "/close": OK + b"\r\nhello",
    }
    async with world(answers) as there:
        for path in answers:
            assert await there.fetcher().fetch(f"http://a.test{path}") == b"hello"
        assert there.connected == [(PUBLIC, 80, None)] * 3
        assert b"\r\nHost: a.test\r\n" in there.requests[0]


async def test_https_asks_for_the_host_s_certificate() -> None:
    async with world({"/p?q=1": OK + b"\r\nhello"}) as there:
        assert await there.fetcher().fetch("https://A.test/p?q=1#f") == b"hello"
        assert there.connected == [(PUBLIC, 443, "a.test")]


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("file:///etc/passwd", "file: images come from"),
        ("ftp://a.test/x", "ftp: images come from"),
        ("gopher://a.test/x", "gopher: images come from"),
        ("//a.test/x", "no scheme: images come from"),
        ("http://c.test/x", "no images from 'c.test'"),
        ("http://sub.a.test/x", "no images from 'sub.a.test'"),
        ("http://a.test.evil.test/x", "no images from"),
        ("http://a.test:22/x", "no images from 'a.test:22'"),
        ("http://b.test/x", "no images from 'b.test'"),
        ("http://127.0.0.1/x", "no images from '127.0.0.1'"),
        ("http://[::1]/x", "no images from '::1'"),
        ("http://2130706433/x", "no images from '2130706433'"),
        ("http://a.test@evil.test/x", "user name"),
        ("http://evil.test\\@a.test/x", "user name"),
        ("http://a.test/x\r\nHost: evil", "percent-encoded"),
        ("http://a.test/a b", "percent-encoded"),
        ("http://a.test/\u00e9", "percent-encoded"),
        ("http://a.test:99999/x", "cannot be read"),
        ("http://[a.test/x", "cannot be read"),
        ("http:///x", "no images from ''"),
    ],
)  # fmt: skip
async def test_other_urls_are_refused(url: str, complaint: str) -> None:
    async with world({}) as there:
        with pytest.raises(MediaError, match=complaint):
            await there.fetcher().fetch(url)
        assert there.connected == []


async def test_without_allowed_hosts_nothing_is_fetched() -> None:
    async with world({}) as there:
        with pytest.raises(MediaError, match="--allowed-media-hosts"):
            await there.fetcher("").fetch("http://a.test/x")


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
        "255.255.255.255", "240.0.0.1", "192.0.2.1", "198.18.0.1", "::1", "::", "fe80::1", "fc00::1", "fd12::1", "ff02::1",
        "::ffff:127.0.0.1", "::ffff:10.0.0.1", "2002:7f00:1::", "2002:a00:1::", "64:ff9b::a00:1", "64:ff9b::7f00:1",
        "2001::1", "2001:db8::1",
    ],
)  # fmt: skip
async def test_addresses_that_are_not_public_are_refused(address: str) -> None:
    assert not is_public(address)
    async with world({"/x": OK + b"\r\nhello"}) as there:
        there.names["a.test"] = [[PUBLIC, address]]
        with pytest.raises(MediaError, match="not public"):
            await there.fetcher().fetch("http://a.test/x")
        assert there.connected == []


@pytest.mark.parametrize("address", [PUBLIC, "8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_public_addresses(address: str) -> None:
    assert is_public(address)


async def test_a_name_that_changes_its_mind_is_resolved_once() -> None:
    async with world({"/x": OK + b"\r\nhello"}) as there:
        there.names["a.test"] = [[PUBLIC], ["127.0.0.1"]]
        assert await there.fetcher().fetch("http://a.test/x") == b"hello"
        assert there.connected == [(PUBLIC, 80, None)]


async def test_redirects_are_followed_within_the_rules() -> None:
    answers: dict[str, bytes | Handler] = {
        "/x": redirect("/y"),
        "/y": redirect("https://b.test:8080/z"),
        "/z": OK + b"\r\nhello",
    }
    async with world(answers) as there:
        assert await there.fetcher().fetch("http://a.test/x") == b"hello"
        assert there.connected == [(PUBLIC, 80, None), (PUBLIC, 80, None), (PUBLIC, 8080, "b.test")]


@pytest.mark.parametrize(
    ("location", "complaint"),
    [
        ("http://evil.test/", "no images from 'evil.test'"),
        ("http://127.0.0.1/", "no images from '127.0.0.1'"),
        ("file:///etc/passwd", "file: images come from"),
        ("http://inner.test/", "not public"),
        ("/x", "more than 3 redirects"),
        ("data:,hello", "data: images come from"),
    ],
)
async def test_redirects_elsewhere_are_refused(location: str, complaint: str) -> None:
    async with world({"/x": redirect(location)}) as there:
        there.names["inner.test"] = [["10.0.0.7"]]
        with pytest.raises(MediaError, match=complaint):
            await there.fetcher("a.test,inner.test").fetch("http://a.test/x")
        assert {address for address, _, _ in there.connected} == {PUBLIC}
        assert len(there.connected) <= 4


async def drip(request: bytes, writer: asyncio.StreamWriter) -> None:
    """Never pauses for long, and never ends."""
    writer.write(OK + b"\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.01)


async def endless(request: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(OK + b"Transfer-Encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"400\r\n" + bytes(0x400) + b"\r\n")
        await writer.drain()


async def endless_header(request: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(OK)
    while True:
        writer.write(b"X-Header: " + b"x" * 1000 + b"\r\n")
        await writer.drain()


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (drip, "took longer than 0.2 s"),
        (endless, "larger than 1000 bytes"),
        (endless_header, "are too long|cannot be fetched"),
        (OK + b"Content-Length: 1001\r\n\r\n", "larger than 1000 bytes"),
        (OK + b"Content-Length: 10\r\n\r\nhello", "is incomplete"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhel", "is incomplete"),
        (OK + b"Content-Encoding: gzip\r\n\r\nhello", "compressed"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "answered 404"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "cannot be fetched"),
        (b"", "is incomplete"),
    ],
)
async def test_answers_that_are_no_image(answer: bytes | Handler, complaint: str) -> None:
    async with world({"/x": answer}) as there:
        with pytest.raises(MediaError, match=complaint):
            await there.fetcher(timeout_s=0.2 if answer is drip else 5.0).fetch("http://a.test/x")


async def test_a_host_that_is_not_there() -> None:
    async def refuse(address: str, port: int, tls_name: str | None) -> Connection:
        raise ConnectionRefusedError(111, "Connection refused")

    rules = FetchRules(allowed_hosts=frozenset({"a.test"}), max_bytes=10, timeout_s=5.0)
    there = World(0)
    with pytest.raises(MediaError, match="cannot be fetched"):
        await Fetcher(rules, resolve=there.resolve, connect=refuse).fetch("http://a.test/")


# Files inside URLs


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64,aGVsbG8=",
        "data:;base64,aGVsbG8",
        "data:text/html;charset=x;base64,aGVs%62G8%3D",
        "data:image/png;BASE64,aGVs\nbG8=\r\n",
        "data:image/png,hello",
        "data:,%68ello",
    ],
)
def test_data_urls(url: str) -> None:
    assert read_data_url(url, 5) == b"hello"
    with pytest.raises(MediaError, match="larger than 4 bytes"):
        read_data_url(url, 4)


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("data:image/png;base64", "comma"),
        ("data:image/png;base64,aGVsb!8=", "not valid base64"),
        ("data:image/png;base64,a", "not valid base64"),
        ("data:image/png;base64,aGVsbG8=aGVs", "not valid base64"),
        ("data:image/png;base64,aGVs_G8-", "not valid base64"),
        ("data:image/png;base64,\u00e9\u00e9\u00e9\u00e9", "not valid base64"),
        ("data:image/png;base64," + "A" * 100_000, "larger than 100 bytes"),
    ],
)
def test_broken_data_urls_are_refused(url: str, complaint: str) -> None:
    with pytest.raises(MediaError, match=complaint):
        read_data_url(url, 100)
