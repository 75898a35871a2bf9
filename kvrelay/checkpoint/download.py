"""HTTP for `wheel.py`: find a file in a package index, download it, resume it."""

from __future__ import annotations

import html.parser
import pathlib
import ssl
import urllib.parse
from dataclasses import dataclass
from typing import IO

import httpx
import msgspec

from kvrelay.errors import DownloadError
from kvrelay.progress import Progress

_ATTEMPTS = 4
_TIMEOUT_S = 20.0
_CHUNK_BYTES = 1 << 18
_ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"


class IndexAccess(msgspec.Struct, frozen=True, kw_only=True):
    """What pip's configuration says about reaching an index, besides its address."""

    certificates: str | None = None
    proxy: str | None = None

    def client(self) -> httpx.Client:
        try:
            verify = ssl.create_default_context(cafile=self.certificates) if self.certificates else True
            return httpx.Client(follow_redirects=True, timeout=_TIMEOUT_S, verify=verify, proxy=self.proxy)
        except (OSError, ValueError) as error:
            raise DownloadError(f"pip's certificate or proxy setting cannot be used: {error}") from error


class _File(msgspec.Struct, frozen=True):
    filename: str
    url: str


class _Project(msgspec.Struct, frozen=True):
    """A project's page in the index's JSON form."""

    files: list[_File]


def find_in_index(index: str, project: str, filename: str, access: IndexAccess) -> str:
    """The file's address."""
    page = f"{index.rstrip('/')}/{project}/"
    try:
        with access.client() as client:
            response = client.get(page, headers={"Accept": _ACCEPT})
            response.raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise DownloadError(_reason(error)) from error
    if "json" in response.headers.get("content-type", ""):
        links = _json_links(response.content)
    else:
        links = _html_links(response.text)
    if filename not in links:
        raise DownloadError(f"it does not have {filename}")
    return urllib.parse.urljoin(str(response.url), links[filename])


def download(url: str, part: pathlib.Path, *, size_bytes: int, title: str, access: IndexAccess, progress: Progress) -> None:
    """Fills `part`, going on where it ends; a connection that breaks is taken up again a few times."""
    progress.start(title, size_bytes, unit="bytes")
    try:
        with access.client() as client, part.open("ab") as file:
            transfer = _Transfer(client, url, file, size_bytes, progress)
            for attempts_left in reversed(range(_ATTEMPTS)):
                try:
                    return transfer.resume()
                except (httpx.HTTPError, httpx.InvalidURL) as error:
                    if _is_final(error) or not attempts_left:
                        raise DownloadError(_reason(error)) from error
    finally:
        progress.done()


@dataclass(slots=True)
class _Transfer:
    """One file on its way. `resume` may be called again after it failed."""

    _client: httpx.Client
    _url: str
    _file: IO[bytes]
    _size_bytes: int
    _progress: Progress
    _reported: int = 0

    def __post_init__(self) -> None:
        if self._file.tell() > self._size_bytes:
            self._begin_again()
        self._report()

    def resume(self) -> None:
        have = self._file.tell()
        if have == self._size_bytes:
            return
        headers = {"Accept-Encoding": "identity"}
        if 0 < have < self._size_bytes:
            headers["Range"] = f"bytes={have}-"
        with self._client.stream("GET", self._url, headers=headers) as response:
            if response.status_code in (httpx.codes.OK, httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE):
                self._begin_again()  # all of it comes, not the rest; or there is no such rest
            response.raise_for_status()
            for chunk in response.iter_raw(_CHUNK_BYTES):
                self._file.write(chunk)
                self._report()
        if self._file.tell() < self._size_bytes:
            raise httpx.RemoteProtocolError(f"it ended after {self._file.tell()} of {self._size_bytes} bytes")

    def _begin_again(self) -> None:
        self._file.truncate(0)
        self._file.seek(0)

    def _report(self) -> None:
        have = self._file.tell()
        if have > self._size_bytes:
            raise DownloadError(f"the file is longer than the pinned {self._size_bytes} bytes")
        self._progress.advance(max(0, have - self._reported))
        self._reported = max(have, self._reported)


def _json_links(content: bytes) -> dict[str, str]:
    try:
        project = msgspec.json.decode(content, type=_Project)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DownloadError(f"its answer makes no sense: {error}") from error
    return {file.filename: file.url for file in project.files}


class _Links(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        address = dict(attrs).get("href")
        if tag == "a" and address:
            plain = urllib.parse.urldefrag(address).url
            self.found[urllib.parse.unquote(plain.rpartition("/")[2])] = plain


def _html_links(text: str) -> dict[str, str]:
    parser = _Links()
    parser.feed(text)
    return parser.found


def _is_final(error: Exception) -> bool:
    """The server has said no, and would say so again."""
    if not isinstance(error, httpx.HTTPStatusError):
        return False
    status = error.response.status_code
    return status < 500 and status != httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE


def _reason(error: Exception) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        return f"HTTP status {error.response.status_code}"
    return str(error) or type(error).__name__
