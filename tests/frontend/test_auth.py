"""API keys: from the command line and from a file that changes while the server runs."""

from __future__ import annotations

import logging
import os
import pathlib
from collections.abc import Iterator

import pytest

from kvrelay.config import RouterOptions
from kvrelay.errors import ConfigError
from kvrelay.frontend.http.auth import KeyRing
from tests.frontend.serving import fake_backend, http_client, make_app


class Clock:
    """Time that passes when it is told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def file(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "keys"
    write(path, "first\n")
    return path


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    lines: list[str] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(f"{record.getMessage()} {record.__dict__['fields']}")

    logger, keeper = logging.getLogger("kvrelay.frontend"), Keeper(logging.WARNING)
    logger.addHandler(keeper)
    yield lines
    logger.removeHandler(keeper)


def write(path: pathlib.Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)


def test_keys_of_a_file_stand_beside_those_of_the_command_line(file: pathlib.Path) -> None:
    write(file, "# who: everybody\n\n  second \nwith spaces inside\n#third\n")
    ring = KeyRing("first, fourth", str(file))
    assert ring.asks
    for key in (b"first", b"fourth", b"second", b"with spaces inside"):
        assert ring.holds(key)
    for key in (b"", b"#third", b"third", b"secon", b"second ", b"# who: everybody", b"first, fourth", b"\xff"):
        assert not ring.holds(key)


def test_a_changed_file_is_read_again_within_a_second(file: pathlib.Path, clock: Clock) -> None:
    ring = KeyRing("fixed", str(file), clock=clock)
    assert ring.holds(b"first")
    write(file, "other\n")  # as long as before
    assert ring.holds(b"first")
    assert not ring.holds(b"other")
    clock.now += 1.0
    assert ring.holds(b"other")
    assert not ring.holds(b"first")
    assert ring.holds(b"fixed")


def test_a_file_that_was_replaced_is_read_again(file: pathlib.Path, clock: Clock) -> None:
    ring = KeyRing("", str(file), clock=clock)
    times = file.stat()
    new = file.with_name("new")
    write(new, "other\n")
    os.utime(new, ns=(times.st_atime_ns, times.st_mtime_ns))
    new.rename(file)
    clock.now += 1.0
    assert ring.holds(b"other")
    assert not ring.holds(b"first")


@pytest.mark.parametrize("damage", ["gone", "empty", "comments", "binary"])
def test_a_file_that_went_bad_keeps_the_last_keys_and_says_so_once(
    damage: str, file: pathlib.Path, clock: Clock, warnings: list[str]
) -> None:
    ring = KeyRing("", str(file), clock=clock)
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes({"empty": b"", "comments": b"# none\n", "binary": b"\xff\xfe"}[damage])
    for _ in range(3):
        clock.now += 1.0
        assert ring.holds(b"first")
        assert not ring.holds(b"")
    (line,) = warnings
    assert str(file) in line
    write(file, "second\n")
    clock.now += 1.0
    assert ring.holds(b"second")
    assert not ring.holds(b"first")


def test_a_file_that_cannot_be_used_is_an_error_at_the_start(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "keys"
    with pytest.raises(ConfigError, match=rf"--api-key-file {file}: No such file"):
        KeyRing("", str(file))
    file.write_text("\n# none\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"--api-key-file {file} holds no key"):
        KeyRing("fixed", str(file))
    with pytest.raises(ConfigError, match="--api-key holds no key"):
        KeyRing(" , ", "")


async def test_a_server_follows_its_key_file(file: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.frontend.http.auth._LOOK_EVERY_S", 0.0)
    async with http_client(make_app(fake_backend(), RouterOptions(api_key="fixed", api_key_file=str(file)))) as client:

        async def status(key: str) -> int:
            return (await client.get("/v1/models", headers={"authorization": f"Bearer {key}"})).status_code

        assert [await status(key) for key in ("fixed", "first", "second")] == [200, 200, 401]
        write(file, "second\n")
        assert [await status(key) for key in ("fixed", "first", "second")] == [200, 401, 200]
        assert (await client.get("/health")).status_code == 200
