"""The pages for people: the dashboard at `/`, the API page at `/docs`, and the files of both under `/assets/`.

They hold nothing about the server and need no API key; what they show they ask for, with the key that they were given. They
load nothing from other hosts, and browsers are told to refuse it (Content-Security-Policy). A file that has not changed is not
sent again (ETag).
"""

from __future__ import annotations

import functools
import hashlib
import html
import pathlib

import msgspec

from kvrelay.frontend.http.accept import prefers_html
from kvrelay.frontend.http.call import Call, Header
from kvrelay.frontend.http.errors import unknown_path
from kvrelay.frontend.pages.info import index
from kvrelay.frontend.service import Service

_FOLDER = pathlib.Path(__file__).parent / "site"
_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    b"base-uri 'self'; form-action 'none'; frame-ancestors 'none'"
)
_HEAD = b"<head>\n"


class SiteFile(msgspec.Struct, frozen=True, kw_only=True):
    body: bytes
    content_type: bytes
    etag: bytes


async def dashboard(service: Service, call: Call) -> None:
    """For browsers; programs get JSON."""
    if prefers_html(call.header(b"accept")):
        await _answer(call, page("index.html", service.options.root_path))
    else:
        await index(service, call)


async def docs(service: Service, call: Call) -> None:
    await _answer(call, page("docs.html", service.options.root_path))


async def asset(service: Service, call: Call) -> None:
    found = files().get(call.scope["path_params"]["name"])
    if found is None:
        raise unknown_path(call.scope["path"])
    await _answer(call, found)


@functools.cache
def files() -> dict[str, SiteFile]:
    """By name, without the pages."""
    paths = [path for path in sorted(_FOLDER.iterdir()) if path.suffix in _TYPES and path.suffix != ".html"]
    return {path.name: _file(path.read_bytes(), path.suffix) for path in paths}


@functools.cache
def page(name: str, root_path: str) -> SiteFile:
    """Its links are relative. Under a path of a proxy, they are so to that path."""
    body = (_FOLDER / name).read_bytes()
    if root_path:
        base = f'<base href="{html.escape(root_path)}/">\n'
        body = body.replace(_HEAD, _HEAD + base.encode(), 1)
    return _file(body, ".html")


def _file(body: bytes, suffix: str) -> SiteFile:
    digest = hashlib.blake2b(body, digest_size=12).hexdigest()
    return SiteFile(body=body, content_type=_TYPES[suffix], etag=f'"{digest}"'.encode())


async def _answer(call: Call, file: SiteFile) -> None:
    headers: list[Header] = [
        (b"content-type", file.content_type),
        (b"cache-control", b"no-cache"),  # it may be kept, and is asked for again each time
        (b"etag", file.etag),
        (b"vary", b"accept"),
        (b"content-security-policy", _POLICY),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
    ]
    known = [tag.strip().removeprefix(b"W/") for tag in (call.header(b"if-none-match") or b"").split(b",")]
    if file.etag in known or known == [b"*"]:
        await call.answer(304, b"", headers)
    else:
        await call.answer(200, file.body, headers)
