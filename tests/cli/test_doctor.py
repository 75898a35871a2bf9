"""`kvrelay doctor` for a host of a cluster: each check on a machine where all is well, and on one where it is not."""

from __future__ import annotations

import asyncio
import pathlib
import resource
import socket
from collections.abc import AsyncIterator, Iterator

import pytest
import torch
from commands import commands_of
from etcd_server import etcd_server
from stub_worker import StubWorker

from kvrelay.cli import main as cli
from kvrelay.cli.doctor import Cluster, Finding, Grade, examine_cluster, host, network
from kvrelay.discovery.embedded import EmbeddedMembership
from kvrelay.errors import ConfigError
from kvrelay.planes.cluster_key import ClusterKey, load_key, write_new_key
from kvrelay.planes.curve import keyed


def grade(finding: Finding) -> Grade:
    """Whoever finds fault says what to do."""
    assert bool(finding.remedy) == (finding.grade is not Grade.OK)
    return finding.grade


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_PATIENCE_S", 0.5)


@pytest.fixture
def key_file(tmp_path: pathlib.Path) -> pathlib.Path:
    file = tmp_path / "cluster.key"
    write_new_key(file)
    return file


@pytest.fixture
def key(key_file: pathlib.Path) -> ClusterKey:
    loaded = load_key(str(key_file))
    assert loaded is not None
    return loaded


@pytest.fixture
def taken_port() -> Iterator[int]:
    """Somebody listens there who says nothing."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


# This host


def test_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (65536, 65536))
    assert grade(host.check_open_files()) is Grade.OK
    assert grade(host.check_locked_memory(tmp_path / "none")) is Grade.OK
    (tmp_path / "mlx5_0").touch()
    assert grade(host.check_locked_memory(tmp_path)) is Grade.WARN
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert grade(host.check_locked_memory(tmp_path)) is Grade.OK
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 524288))
    found = host.check_open_files()
    assert (grade(found), found.found) == (Grade.WARN, "1024 at once (may be raised to 524288)")


def test_transports_of_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    found = host.check_card_transports()
    assert (grade(found), found.found) == (Grade.OK, "none is needed: no NVIDIA card")
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    reasons = {"cuda_ipc": "", "nixl": "no UCX", "mooncake": "not installed"}
    monkeypatch.setattr(host, "_refusal", lambda name: reasons[name])
    found = host.check_card_transports()
    assert (grade(found), found.found) == (
        Grade.OK,
        "cuda_ipc: can be used on one host; nixl: no UCX; mooncake: not installed",
    )
    reasons["cuda_ipc"] = "memory of a card needs NVIDIA's driver"
    assert grade(host.check_card_transports()) is Grade.WARN


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_what_a_transport_says_of_a_card_that_is_not_here() -> None:
    assert host._refusal("cuda_ipc").startswith("memory of a card needs NVIDIA's driver")
    assert host._refusal("nixl").startswith("memory of a card needs NVIDIA's driver")
    assert "package without CUDA" in host._refusal("mooncake")


def test_shared_memory_and_kernel(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert grade(host.check_shared_memory(tmp_path)) is Grade.OK
    assert grade(host.check_shared_memory(tmp_path / "none")) is Grade.WARN
    monkeypatch.setattr(host, "_NEEDED_SHM_BYTES", 1 << 60)
    assert grade(host.check_shared_memory(tmp_path)) is Grade.WARN
    assert grade(host.check_kernel()) is Grade.OK

    def refused(*arguments: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(host.os, "memfd_create", refused)
    assert grade(host.check_kernel()) is Grade.FAIL


def test_a_transport_whose_library_is_missing(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake/__init__.py").touch()
    (tmp_path / "mooncake/engine.py").write_text("raise ImportError('libibverbs.so.1: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    finding = host.check_transport("mooncake")
    assert grade(finding) is Grade.WARN
    assert "libibverbs.so.1" in finding.found
    assert "apt install libibverbs1" in finding.remedy


def test_a_transport_that_ends_the_process(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake/__init__.py").touch()
    (tmp_path / "mooncake/engine.py").write_text("import os; os.abort()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "ends with status -6" in host.check_transport("mooncake").found


def test_a_transport_that_loads() -> None:
    assert grade(host.check_transport("nixl")) is Grade.OK


def test_ucx_may_choose_among_several_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    several = {"eth0": "10.0.0.2", "docker0": "172.17.0.1"}
    assert grade(host.check_ucx({"eth0": "10.0.0.2"})) is Grade.OK
    assert grade(host.check_ucx(several)) is Grade.WARN
    monkeypatch.setenv("UCX_NET_DEVICES", "eth0")
    finding = host.check_ucx(several)
    assert grade(finding) is Grade.OK
    assert "UCX_NET_DEVICES=eth0" in finding.found


def test_threads_against_cores_and_the_containers_quota(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda process: set(range(8)))
    quota = tmp_path / "cpu.max"
    assert grade(host.check_threads(0, quota)) is Grade.OK  # no control group
    assert grade(host.check_threads(8, quota)) is Grade.OK
    assert grade(host.check_threads(9, quota)) is Grade.WARN
    quota.write_text("max 100000\n")
    assert grade(host.check_threads(8, quota)) is Grade.OK
    quota.write_text("250000 100000\n")
    assert host.check_threads(0, quota).remedy.startswith("--threads 2,")
    assert grade(host.check_threads(2, quota)) is Grade.OK
    assert grade(host.check_threads(3, quota)) is Grade.WARN


# The network


def test_the_address_that_others_are_told() -> None:
    assert grade(network.check_address("0.0.0.0", [])) is Grade.FAIL
    assert grade(network.check_address("203.0.113.77", [])) is Grade.FAIL  # nobody's
    assert grade(network.check_address("127.0.0.1", [])) is Grade.WARN
    assert grade(network.check_address("", [])) is Grade.WARN
    outward = network.source_address("192.0.2.1")
    if outward:
        assert grade(network.check_address(outward, [])) is Grade.OK
        assert grade(network.check_address(outward, ["127.0.0.1"])) is Grade.OK


def test_a_host_name_that_means_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert grade(network.check_host_name()) is Grade.WARN
    monkeypatch.setattr(socket, "gethostname", lambda: "203.0.113.1")
    assert grade(network.check_host_name()) is Grade.OK
    monkeypatch.setattr(socket, "gethostname", lambda: "nobody.invalid")
    assert grade(network.check_host_name()) is Grade.WARN


def test_ports(taken_port: int) -> None:
    assert grade(network.check_free("127.0.0.1", taken_port)) is Grade.WARN
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert grade(network.check_free("127.0.0.1", port)) is Grade.OK
    assert grade(network.check_free("127.0.0.1", 99999)) is Grade.WARN
    assert grade(network.check_free("203.0.113.77", port)) is Grade.WARN


def test_the_key_file(key_file: pathlib.Path) -> None:
    assert grade(network.check_key("")) is Grade.WARN
    assert grade(network.check_key(str(key_file))) is Grade.OK
    key_file.chmod(0o644)
    finding = network.check_key(str(key_file))
    assert (grade(finding), finding.remedy) == (Grade.WARN, f"chmod 600 {key_file}")
    key_file.write_text("short")
    assert grade(network.check_key(str(key_file))) is Grade.FAIL
    assert grade(network.check_key(str(key_file) + "-none")) is Grade.FAIL


@pytest.mark.parametrize(
    ("text", "means"),
    [("10.0.0.1:80", ("10.0.0.1", 80)), ("name", ("name", 0)), ("[::1]:5700", ("::1", 5700)), ("::1", ("::1", 0))],
)
def test_addresses(text: str, means: tuple[str, int]) -> None:
    assert network.split_address(text) == means


def test_addresses_that_are_none() -> None:
    for text in ("host:port", "host:70000", "host:"):
        with pytest.raises(ConfigError):
            network.split_address(text)
    assert grade(network.check_peer("host:port", None)) is Grade.FAIL


@pytest.fixture
async def registry(key: ClusterKey) -> AsyncIterator[str]:
    with keyed(key):
        membership = EmbeddedMembership("tcp://127.0.0.1:*")
        membership.start(lambda record: None, lambda record: None, lambda worker_id, loss: None)
    yield membership.address
    membership.close()


async def test_a_registry_answers_those_who_have_its_key(registry: str, key: ClusterKey) -> None:
    finding = await asyncio.to_thread(network.check_registry, registry, key)
    assert (grade(finding), finding.found) == (Grade.OK, f"{registry} answers with this key")
    finding = await asyncio.to_thread(network.check_registry, registry, None)
    assert grade(finding) is Grade.FAIL
    assert "--cluster-key" in finding.remedy


def test_a_registry_that_is_not_there(taken_port: int) -> None:
    assert grade(network.check_registry("tcp://127.0.0.1:9", None)) is Grade.FAIL
    assert grade(network.check_registry(f"tcp://127.0.0.1:{taken_port}", None)) is Grade.FAIL
    assert grade(network.check_registry("127.0.0.1:5600", None)) is Grade.FAIL
    assert grade(network.check_registry("etcd://nowhere", None)) is Grade.FAIL
    assert grade(network.check_registry("etcd://127.0.0.1:9", None)) is Grade.FAIL
    assert grade(network.check_registry(f"etcd://127.0.0.1:{taken_port}", None)) is Grade.FAIL


def test_etcd() -> None:
    with etcd_server() as server:
        assert grade(network.check_registry(server.address, None)) is Grade.OK
        finding = network.check_registry(f"{server.address},127.0.0.1:9", None)
        assert grade(finding) is Grade.WARN
        assert "127.0.0.1:9" in finding.found


def test_peers(key: ClusterKey, taken_port: int) -> None:
    with keyed(key):
        worker = StubWorker("")
    place = worker.address.removeprefix("tcp://")
    try:
        assert network.check_peer(place, key) == Finding(Grade.OK, "a worker: ready")
        assert grade(network.check_peer(place, None)) is Grade.WARN
    finally:
        worker.stop()
    assert grade(network.check_peer(f"127.0.0.1:{taken_port}", key)) is Grade.WARN
    assert grade(network.check_peer("127.0.0.1:9", key)) is Grade.FAIL
    assert grade(network.check_peer("127.0.0.1", key)) is Grade.OK  # a refusal too shows that the host is reached
    assert grade(network.check_peer("nobody.invalid", key)) is Grade.FAIL


# All of it


def test_every_part_that_is_named_is_looked_at(monkeypatch: pytest.MonkeyPatch, taken_port: int) -> None:
    monkeypatch.setattr(host, "check_transport", lambda name: Finding(Grade.OK, name))
    cluster = Cluster(registry="tcp://127.0.0.1:9", peers=("127.0.0.1", f"127.0.0.1:{taken_port}"), ports=(5700, 5701))
    names = set(examine_cluster(cluster))
    assert {"registry", "peer 127.0.0.1", f"peer 127.0.0.1:{taken_port}", "port 5700", "port 5701"} <= names
    assert {"open files", "locked memory", "shared memory", "kernel", "nixl", "mooncake", "ucx", "threads"} <= names
    assert {"address", "host name", "cluster key"} <= names


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], taken_port: int) -> None:
    monkeypatch.setattr(host, "check_transport", lambda name: Finding(Grade.OK, name))
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["doctor", "--peer", "127.0.0.1:9", "--peer", f"127.0.0.1:{taken_port}"]) == 1
    shown = capsys.readouterr().out
    assert "peer 127.0.0.1:9" in shown
    assert "start it there, or open the port in the firewall" in shown
    cli.main(["doctor"])
    assert "open files" not in capsys.readouterr().out


async def test_the_commands_of_the_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], key_file: pathlib.Path, registry: str
) -> None:
    """With loopback for the hosts."""
    monkeypatch.setattr(host, "check_transport", lambda name: Finding(Grade.OK, name))
    monkeypatch.setenv("COLUMNS", "200")
    keygen, doctor = commands_of("docs/deploy.md", "tests/cli/test_doctor.py")
    (key_file.parent / "new").mkdir()
    monkeypatch.chdir(key_file.parent / "new")
    assert cli.main(keygen[1:]) == 0
    monkeypatch.chdir(key_file.parent)
    here = {"tcp://10.0.0.1:5600": registry, "10.0.0.2": "127.0.0.1", "10.0.0.3": "127.0.0.1"}
    await asyncio.to_thread(cli.main, [here.get(word, word) for word in doctor[1:]])
    shown = capsys.readouterr().out
    assert f"{registry} answers with this key" in shown
    assert all(part in shown for part in ("peer 127.0.0.1", "port 5700"))
