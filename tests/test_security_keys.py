"""The cluster key's file, and warnings of addresses that others can reach."""

from __future__ import annotations

import logging
import pathlib
import sys
from collections.abc import Iterator

import pytest

from kvrelay.cli.main import main
from kvrelay.config import ClusterOptions, RouterOptions, WorkerOptions, read_environment
from kvrelay.discovery.choose import open_embedded
from kvrelay.errors import ConfigError
from kvrelay.launch.cluster import FREE_LOCAL_PORT
from kvrelay.launch.entrance import prepare
from kvrelay.launch.serve import DEFAULT_LISTEN
from kvrelay.planes import curve as plane
from kvrelay.planes.cluster_key import derive, key_file, load_key, write_new_key

KEY = derive(b"k" * 32)


@pytest.fixture(autouse=True)
def _key_of_this_process() -> Iterator[None]:
    plane.use_key(KEY)
    yield
    plane.use_key(None)


@pytest.fixture
def _same_process_afterwards() -> Iterator[None]:
    """Commands set up the threads of their process, and here that is the process of all tests."""
    interval_s = sys.getswitchinterval()
    yield
    sys.setswitchinterval(interval_s)


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """Warnings, with their fields."""
    lines: list[str] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(f"{record.getMessage()} {record.__dict__['fields']}")

    logger, keeper = logging.getLogger("kvrelay"), Keeper(logging.WARNING)
    logger.addHandler(keeper)
    yield lines
    logger.removeHandler(keeper)


def test_a_new_key_is_private_and_never_overwritten(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cluster.key"
    assert main(["keygen", str(file)]) == 0
    assert file.stat().st_mode & 0o777 == 0o600
    first = file.read_text(encoding="ascii")
    assert str(file) in capsys.readouterr().out
    assert main(["keygen", str(file)]) == 2
    assert "never overwritten" in capsys.readouterr().err
    assert file.read_text(encoding="ascii") == first
    assert main(["keygen", str(tmp_path / "another")]) == 0
    assert load_key(str(file)) == load_key(str(file)) != load_key(str(tmp_path / "another"))


def test_the_pairs_of_a_key_are_distinct_and_hidden() -> None:
    parts = {KEY.server_secret, KEY.server_public, KEY.client_secret, KEY.client_public}
    assert len(parts) == 4
    assert not any(part.decode() in repr(KEY) for part in parts)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "No such file"),
        ("", "must hold one line"),
        ("# only a comment\n", "must hold one line"),
        ("ab" * 16, "holds 16 bytes where a key has 32"),
        ("ab" * 33, "holds 33 bytes"),
        ("zz" * 32, "must hold one line"),
        ("ab" * 32 + "\n" + "cd" * 32, "must hold one line"),
        ("\xff" * 64, "is not text"),
        ("a" * 10_000, "larger than"),
    ],
)
def test_a_file_that_is_no_key_is_refused_naming_the_option(tmp_path: pathlib.Path, text: str | None, complaint: str) -> None:
    file = tmp_path / "key"
    if text is not None:
        file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=rf"--cluster-key {file}.*{complaint}"):
        load_key(str(file))


@pytest.mark.usefixtures("_same_process_afterwards")
@pytest.mark.parametrize("command", ["serve", "router", "worker"])
def test_every_command_checks_the_key_file(command: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, str(tmp_path), "--cluster-key", str(tmp_path / "none")]) == 2
    assert f"error: --cluster-key {tmp_path / 'none'}: No such file" in capsys.readouterr().err


def test_a_key_file_that_others_can_read_is_warned_of(tmp_path: pathlib.Path, logged: list[str]) -> None:
    file = tmp_path / "key"
    write_new_key(file)
    assert load_key(str(file)) is not None
    assert logged == []
    file.chmod(0o644)
    assert load_key(str(file)) is not None
    (line,) = logged
    assert "chmod 600" in line
    assert "--cluster-key" in line


def test_the_option_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVRELAY_CLUSTER_KEY", raising=False)
    assert key_file("", read_environment()) == ""
    monkeypatch.setenv("KVRELAY_CLUSTER_KEY", "from-environment")
    assert key_file("", read_environment()) == "from-environment"
    assert key_file("from-option", read_environment()) == "from-option"


# Addresses


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost"])
def test_loopback_needs_no_key(host: str, logged: list[str]) -> None:
    plane.use_key(None)
    plane.warn_if_open("--worker-host", host)
    assert logged == []


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.2", "*", "::", "eth0", "worker-1.example"])
def test_an_address_others_can_reach_without_a_key_is_warned_of(host: str, logged: list[str]) -> None:
    plane.warn_if_open("--worker-host", host)
    assert logged == []
    plane.use_key(None)
    plane.warn_if_open("--worker-host", host)
    (line,) = logged
    assert "--worker-host" in line
    assert "--cluster-key" in line


async def test_a_registry_that_others_can_reach_is_warned_of(logged: list[str]) -> None:
    plane.use_key(None)
    for listen, warnings in (("tcp://127.0.0.1:*", 0), ("tcp://0.0.0.0:*", 1)):
        open_embedded(ClusterOptions(registry_listen=listen), "").close()
        assert sum("--registry-listen" in line and "--cluster-key" in line for line in logged) == warnings


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        (RouterOptions(), False),
        (RouterOptions(host="0.0.0.0"), True),
        (RouterOptions(host="::"), True),
        (RouterOptions(host="0.0.0.0", api_key="secret"), False),
        (RouterOptions(host="0.0.0.0", api_key_file="keys"), False),
    ],
)
def test_http_that_others_can_reach_without_a_key_is_warned_of(options: RouterOptions, warned: bool, logged: list[str]) -> None:
    prepare(options, ClusterOptions(), read_environment())
    assert any("--host" in line and "--api-key-file" in line for line in logged) is warned


def test_everything_listens_on_loopback_by_default() -> None:
    assert plane.is_loopback(RouterOptions().host)
    assert plane.is_loopback(WorkerOptions().worker_host)
    for address in (DEFAULT_LISTEN, FREE_LOCAL_PORT):
        assert plane.is_loopback(address.removeprefix("tcp://").rpartition(":")[0])
