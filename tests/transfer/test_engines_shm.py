"""What only shared memory has: a socket that hands out the region, and memory that outlives its owner."""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import os
import pathlib
import socket
import time

import msgspec
import numpy as np
import pytest
from patience import PATIENCE_S
from transfer_peers import LocalPeer, ProcessPeer, random_bytes, view

from kvrelay.ids import new_worker_id
from kvrelay.transfer.engines.base import Completion, Ranges, TransferEngine, TransferError
from kvrelay.transfer.engines.shm import ShmEngine, ShmInfo, host_identity
from kvrelay.transfer.region import Region, shared_region

SIZE = 1 << 20
WHOLE: Ranges = np.array([[0, 0, SIZE]], dtype=np.int64)


def consumer() -> tuple[ShmEngine, Region]:
    engine, region = ShmEngine(new_worker_id("decode")), shared_region(SIZE)
    engine.register(region)
    return engine, region


def completion_of(engine: TransferEngine) -> Completion:
    deadline = time.monotonic() + PATIENCE_S
    while not (completions := engine.poll()):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    (completion,) = completions
    return completion


@pytest.fixture
def producer() -> LocalPeer:
    worker = new_worker_id("prefill")
    return LocalPeer(ShmEngine(worker), worker, shared_region(SIZE), seed=1)


def told(info: bytes) -> ShmInfo:
    return msgspec.msgpack.decode(info, type=ShmInfo)


def test_a_wrong_token_gets_no_memory(producer: LocalPeer) -> None:
    engine, region = consumer()
    engine.add_peer(producer.worker, msgspec.msgpack.encode(msgspec.structs.replace(told(producer.info), token="0" * 32)))
    engine.read(producer.worker, WHOLE)
    assert "refused" in completion_of(engine).error
    assert not view(region).any()
    engine.add_peer(producer.worker, producer.info)  # the door still opens for the right one
    engine.read(producer.worker, WHOLE)
    assert completion_of(engine).error == ""


def test_visitors_who_say_nothing_or_too_little_do_not_close_the_door(producer: LocalPeer) -> None:
    name = "\0" + told(producer.info).socket_name
    silent, short = (socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(2))
    with silent, short:
        silent.connect(name)
        short.connect(name)
        short.sendall(b"abc")
        short.shutdown(socket.SHUT_WR)
        engine, _ = consumer()
        engine.add_peer(producer.worker, producer.info)
        engine.read(producer.worker, WHOLE)
        assert completion_of(engine).error == ""


def test_another_host_is_refused_at_once(producer: LocalPeer) -> None:
    engine, _ = consumer()
    boot, namespace = host_identity().split("/")
    for host in (f"{boot}/1", f"00000000-0000-0000-0000-000000000000/{namespace}"):
        with pytest.raises(TransferError, match="another host"):
            engine.add_peer(producer.worker, msgspec.msgpack.encode(msgspec.structs.replace(told(producer.info), host=host)))


def test_more_bytes_than_the_producer_shares_are_not_mapped(producer: LocalPeer) -> None:
    engine, _ = consumer()
    info = msgspec.structs.replace(told(producer.info), size_bytes=2 * SIZE)
    engine.add_peer(producer.worker, msgspec.msgpack.encode(info))
    engine.read(producer.worker, WHOLE)
    assert "fixed size" in completion_of(engine).error


def test_memory_that_could_shrink_under_a_reader_is_not_mapped() -> None:
    fd = os.memfd_create("loose")
    os.ftruncate(fd, SIZE)
    buffer = mmap.mmap(fd, SIZE)
    loose = Region(address=np.frombuffer(buffer, dtype=np.uint8).ctypes.data, size_bytes=SIZE, fd=fd, buffer=buffer)
    producer_id, producer = new_worker_id("prefill"), ShmEngine(new_worker_id("prefill"))
    producer.register(loose)
    engine, _ = consumer()
    engine.add_peer(producer_id, producer.local_info())
    engine.read(producer_id, WHOLE)
    assert "fixed size" in completion_of(engine).error


def test_a_region_keeps_its_size() -> None:
    region = shared_region(SIZE)
    assert region.fd is not None
    for size in (SIZE // 2, 2 * SIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(region.fd, size)


def test_memory_of_a_dead_producer_stays_readable() -> None:
    engine, region = consumer()
    peer = ProcessPeer("shm", new_worker_id("prefill"), SIZE, seed=4)
    engine.add_peer(peer.worker, peer.info)
    engine.read(peer.worker, np.array([[0, 0, 1]], dtype=np.int64))
    assert completion_of(engine).error == ""
    peer.end()
    engine.read(peer.worker, WHOLE)
    assert completion_of(engine).error == ""
    assert np.array_equal(view(region), random_bytes(SIZE, 4))


def test_memory_without_a_file_and_memory_of_a_card_are_refused() -> None:
    engine = ShmEngine(new_worker_id("decode"))
    for region in (Region(address=4096, size_bytes=4096), Region(address=4096, size_bytes=4096, device="cuda:0", fd=0)):
        with pytest.raises(TransferError, match="host memory"):
            engine.register(region)


def test_closing_leaves_no_file_open() -> None:
    """In a process of its own, where nothing else opens files; without the garbage collector, so without circles either."""
    child = multiprocessing.get_context("spawn").Process(target=_open_and_close)
    child.start()
    child.join()
    assert child.exitcode == 0


def _open_and_close() -> None:
    gc.disable()
    before = num_open_files()
    for _ in range(3):
        _read_and_close()
    until_open(before)


def _read_and_close() -> None:
    worker = new_worker_id("prefill")
    producer = LocalPeer(ShmEngine(worker), worker, shared_region(SIZE), seed=1)
    engine, region = consumer()
    engine.add_peer(worker, producer.info)
    engine.read(worker, WHOLE)
    assert completion_of(engine).error == ""
    engine.add_peer(worker, msgspec.msgpack.encode(msgspec.structs.replace(told(producer.info), token="0" * 32)))
    engine.read(worker, WHOLE)
    assert "refused" in completion_of(engine).error
    engine.close()
    region.close()
    producer.end()


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def until_open(count: int) -> None:
    """A link's thread unmaps what it has mapped a moment after its engine was closed."""
    deadline = time.monotonic() + PATIENCE_S
    while num_open_files() > count:
        names = [os.readlink(path) for path in pathlib.Path("/proc/self/fd").iterdir() if path.is_symlink()]
        assert time.monotonic() < deadline, names
        time.sleep(0.01)


def test_a_kernel_without_a_boot_id_is_told_apart_by_its_name_and_start(monkeypatch: pytest.MonkeyPatch) -> None:
    read = pathlib.Path.read_text

    def refuse(path: pathlib.Path, encoding: str) -> str:
        if path.name == "boot_id":
            raise FileNotFoundError(path)
        return read(path, encoding=encoding)

    monkeypatch.setattr(pathlib.Path, "read_text", refuse)
    assert host_identity() == host_identity()
    assert host_identity().startswith(os.uname().nodename)
