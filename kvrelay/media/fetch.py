"""Fetches an image over HTTP, only from hosts that the operator has named.

A client chooses the URL, and the server may be inside networks that clients must not reach. So:

- the scheme is http or https, the host one of the allowed ones, the port the scheme's own or one that is named with the host;
- the host's name is resolved once; every address must be public; the connection goes to an address that was checked, even if
  the name resolves to another one a moment later;
- a redirect is a new URL, to which all of this applies again, and their number is limited;
- size and time are limited for the whole fetch, not per read; the declared type is ignored, compressed content refused.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import socket
import ssl
import urllib.parse
from collections.abc import Awaitable, Callable

import httptools
import msgspec

from kvrelay.errors import MediaError
from kvrelay.version import version

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Host and port to addresses."""
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[str, int, str | None], Awaitable[Connection]]
"""Address, port, and the name that a TLS certificate must have (None: no TLS)."""

_MAX_REDIRECTS = 3
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MAX_HEADER_BYTES = 32 * 1024
_READ_BYTES = 64 * 1024
_PORTS = {"http": 80, "https": 443}
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class FetchRules(msgspec.Struct, frozen=True, kw_only=True):
    allowed_hosts: frozenset[str]  # "name" allows the schemes' own ports, "name:port" that one
    max_bytes: int
    timeout_s: float


class _Target(msgspec.Struct, frozen=True, kw_only=True):
    """A URL that may be fetched."""

    url: str
    secure: bool
    host: str
    port: int
    path: str


def allowed_hosts(option: str) -> frozenset[str]:
    """From the text of --allowed-media-hosts."""
    return frozenset(host.strip().lower() for host in option.split(",") if host.strip())


class Fetcher:
    """Stateless; may fetch any number of images at once."""

    def __init__(self, rules: FetchRules, *, resolve: Resolve | None = None, connect: Connect | None = None) -> None:
        self._rules = rules
        self._resolve = resolve or _resolve
        self._connect = connect or _connect

    async def fetch(self, url: str) -> bytes:
        """Raises MediaError."""
        try:
            async with asyncio.timeout(self._rules.timeout_s):
                return await self._follow(url)
        except TimeoutError:
            raise MediaError(f"fetching the image took longer than {self._rules.timeout_s:g} s") from None
        except (OSError, ssl.CertificateError, httptools.HttpParserError) as error:
            raise MediaError(f"the image cannot be fetched: {error}") from error

    async def _follow(self, url: str) -> bytes:
        for _ in range(1 + _MAX_REDIRECTS):
            answer = await self._ask(self._target(url))
            if answer.location is None:
                return answer.body()
            url = urllib.parse.urljoin(url, answer.location)
        raise MediaError(f"the URL leads through more than {_MAX_REDIRECTS} redirects")

    def _target(self, url: str) -> _Target:
        if not (url.isascii() and url.isprintable()) or " " in url:
            raise MediaError("the URL has characters that must be percent-encoded")
        try:
            parts = urllib.parse.urlsplit(url)
            host, port = (parts.hostname or "").rstrip("."), parts.port
        except ValueError as error:
            raise MediaError(f"the URL cannot be read: {error}") from error
        own_port = _PORTS.get(parts.scheme)
        if own_port is None:
            raise MediaError(f"{parts.scheme[:20] or 'no scheme'}: images come from http:, https: and data: URLs")
        if parts.username is not None or parts.password is not None:
            raise MediaError("the URL holds a user name or password")
        name = host if port in (None, own_port) else f"{host}:{port}"
        if name not in self._rules.allowed_hosts:
            raise MediaError(f"this server fetches no images from {name[:100]!r} (--allowed-media-hosts)")
        path = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        return _Target(url=url, secure=parts.scheme == "https", host=host, port=port or own_port, path=path)

    async def _ask(self, target: _Target) -> _Answer:
        addresses = await self._resolve(target.host, target.port)
        if not addresses or not all(map(is_public, addresses)):
            raise MediaError(f"{target.host} has an address that is not public")
        reader, writer = await self._connect(addresses[0], target.port, target.host if target.secure else None)
        try:
            writer.write(_request(target))
            return await self._read(reader)
        finally:
            writer.transport.abort()  # a peer that does not close must not keep it open

    async def _read(self, reader: asyncio.StreamReader) -> _Answer:
        answer = _Answer(self._rules.max_bytes)
        parser = httptools.HttpResponseParser(answer)
        while not answer.complete and (data := await reader.read(_READ_BYTES)):
            answer.count(len(data))
            try:
                parser.feed_data(data)
            except httptools.HttpParserCallbackError as error:
                raise error.__context__ if isinstance(error.__context__, MediaError) else error from None
            if answer.headers_done:
                answer.status = parser.get_status_code()
                if answer.location is not None:
                    break
        answer.check_end()
        return answer


class _Answer:
    """A host's answer; httptools calls its methods."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._chunks: list[bytes] = []
        self._num_bytes = 0
        self._num_read = 0
        self._headers: dict[bytes, bytes] = {}
        self.status = 0
        self.headers_done = False
        self.complete = False

    def count(self, num_bytes: int) -> None:
        self._num_read += num_bytes
        if not self.headers_done and self._num_read > _MAX_HEADER_BYTES + _READ_BYTES:
            raise MediaError("the headers of the host's answer are too long")

    # Called by httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self.headers_done = True
        length = self._headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_bytes:
            raise self._too_large()
        if self._headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise MediaError("the host sends the file compressed, although the request forbids it")

    def on_body(self, body: bytes) -> None:
        self._num_bytes += len(body)
        if self._num_bytes > self._max_bytes:
            raise self._too_large()
        self._chunks.append(body)

    def on_message_complete(self) -> None:
        self.complete = True

    # Afterwards

    @property
    def location(self) -> str | None:
        """Where it redirects to."""
        if self.status not in _REDIRECTS:
            return None
        return self._headers.get(b"location", b"").decode("latin-1")

    def check_end(self) -> None:
        has_length = b"content-length" in self._headers or b"transfer-encoding" in self._headers
        if not self.headers_done or (has_length and not self.complete and self.location is None):
            raise MediaError("the host's answer is incomplete")

    def body(self) -> bytes:
        if self.status != 200:
            raise MediaError(f"the host answered {self.status}")
        return b"".join(self._chunks)

    def _too_large(self) -> MediaError:
        return MediaError(f"the file is larger than {self._max_bytes} bytes, the limit of this server")


def is_public(address: str) -> bool:
    """Not private, loopback, link-local, reserved, multicast or of any other special kind, also not wrapped in an IPv6
    address."""
    found = ipaddress.ip_address(address)
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour
        if inner is None and found in _NAT64:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return found.is_global and not found.is_multicast


def _request(target: _Target) -> bytes:
    host = f"[{target.host}]" if ":" in target.host else target.host
    if target.port != _PORTS["https" if target.secure else "http"]:
        host = f"{host}:{target.port}"
    lines = (
        f"GET {target.path} HTTP/1.1",
        f"Host: {host}",
        f"User-Agent: kvrelay/{version()}",
        "Accept: image/*",
        "Accept-Encoding: identity",
        "Connection: close",
    )
    return "\r\n".join([*lines, "", ""]).encode("ascii")


async def _resolve(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


async def _connect(address: str, port: int, tls_name: str | None) -> Connection:
    if tls_name is None:
        return await asyncio.open_connection(address, port)
    return await asyncio.open_connection(address, port, ssl=_tls(), server_hostname=tls_name)


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()
