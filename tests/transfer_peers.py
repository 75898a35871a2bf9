"""Peers for tests of transfer engines: one in this process, or one in a process of its own that can be stopped and killed.

Run as a program, this file is the process: `-m tests.transfer_peers ENGINE WORKER_ID SIZE SEED`. It answers line by line.
"""

from __future__ import annotations

import functools
import hashlib
import pathlib
import signal
import subprocess
import sys
import time
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.ids import WorkerId
from kvrelay.transfer.engines.base import TransferEngine
from kvrelay.transfer.engines.choose import make_engine
from kvrelay.transfer.engines.cuda.ipc import CudaIpcEngine
from kvrelay.transfer.region import Region, shared_region
from tests.fake_card import FakeCard, card_bytes, card_region
from tests.patience import PATIENCE_S
from tests.prepared import popen

ROOT = pathlib.Path(__file__).resolve().parent.parent
Bytes = npt.NDArray[np.uint8]
FAKE_CARD = "cuda_ipc-fake"
ON_CARD = ("cuda_ipc", "nixl-cuda", "mooncake-cuda")
_tensors: dict[int, torch.Tensor] = {}  # memory of a card, by its address


def engine_of(name: str, worker: WorkerId) -> TransferEngine:
    """By the name of a case: `cuda_ipc-fake` is cuda_ipc without a card, `nixl-cuda` is nixl with memory of one,
    `mooncake-cuda` the same of mooncake."""
    if name == FAKE_CARD:
        return CudaIpcEngine(worker, FakeCard)
    return make_engine(name.removesuffix("-cuda").removesuffix("-tcp"), worker)


def region_of(name: str, size: int) -> Region:
    """Of the kind that the case moves."""
    if name == FAKE_CARD:
        return card_region(size)
    if name not in ON_CARD:
        return shared_region(size)
    memory = torch.zeros(size, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    _tensors[memory.data_ptr()] = memory
    return Region(address=memory.data_ptr(), size_bytes=size, device="cuda:0")


def view(region: Region) -> Any:
    """Its bytes, as an array or like one."""
    if region.address in _tensors:
        return CardBytes(_tensors[region.address])
    if region.device != "cpu":
        return card_bytes(region)
    assert region.buffer is not None
    return np.frombuffer(region.buffer, dtype=np.uint8)


def floats(region: Region) -> Any:
    """Its memory as float32 numbers: an array, or a tensor of a card."""
    if region.address in _tensors:
        return _tensors[region.address].view(torch.float32)
    return view(region).view(np.float32)


class CardBytes:
    """Memory of a card, as tests use an array. What is written is there when the call returns."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __array__(self, dtype: object = None, copy: object = None) -> Bytes:
        torch.cuda.synchronize()
        found: Bytes = self._tensor.cpu().numpy()
        return found

    def __getitem__(self, key: Any) -> Any:
        return np.asarray(self)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._tensor[key] = torch.as_tensor(value, dtype=torch.uint8, device=self._tensor.device)
        torch.cuda.synchronize()

    def __eq__(self, other: object) -> Any:
        return np.asarray(self) == other

    __hash__ = None  # type: ignore[assignment]

    def copy(self) -> Bytes:
        return np.asarray(self).copy()


@functools.cache
def random_bytes(size: int, seed: int) -> Bytes:
    made = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    made.flags.writeable = False
    return made


def digest(memory: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(memory)).hexdigest()


class LocalPeer:
    """Another engine in this process."""

    def __init__(self, engine: TransferEngine, worker: WorkerId, region: Region, seed: int) -> None:
        self.worker = worker
        self.engine = engine
        self.region = region
        view(region)[:] = random_bytes(region.size_bytes, seed)
        engine.register(self.region)
        self.info = engine.local_info()

    def know(self, worker: WorkerId, info: bytes) -> None:
        """Returns when the way to it is open."""
        self.engine.add_peer(worker, info)
        first = view(self.region)[0]
        move = self.engine.read(worker, np.array([[0, 0, 1]], dtype=np.int64))
        deadline = time.monotonic() + PATIENCE_S
        while not (completions := self.engine.poll()):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert [(completion.id, completion.error) for completion in completions] == [(move, "")]
        view(self.region)[0] = first

    def digest(self) -> str:
        return digest(view(self.region))

    def fill(self, seed: int) -> None:
        view(self.region)[:] = random_bytes(self.region.size_bytes, seed)

    def end(self) -> None:
        self.engine.close()
        self.region.close()


class ProcessPeer:
    """An engine in another process."""

    def __init__(self, engine: str, worker: WorkerId, size: int, seed: int) -> None:
        self.worker = worker
        command = [sys.executable, "-m", "tests.transfer_peers", engine, worker, str(size), str(seed)]
        self.process = popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, folder=ROOT)
        self.info = bytes.fromhex(self._answer())

    def know(self, worker: WorkerId, info: bytes) -> None:
        assert self._ask(f"know {worker} {info.hex()}") == "known"

    def digest(self) -> str:
        return self._ask("digest")

    def fill(self, seed: int) -> None:
        assert self._ask(f"fill {seed}") == "filled"

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        self.kill()
        _pipe(self.process.stdin).close()
        _pipe(self.process.stdout).close()

    def _ask(self, line: str) -> str:
        pipe = _pipe(self.process.stdin)
        pipe.write(line + "\n")
        pipe.flush()
        return self._answer()

    def _answer(self) -> str:
        line = _pipe(self.process.stdout).readline()
        assert line, "the peer process died"
        return line.strip()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def main() -> None:
    name, worker, size, seed = sys.argv[1:]
    peer = LocalPeer(engine_of(name, WorkerId(worker)), WorkerId(worker), region_of(name, int(size)), int(seed))
    print(peer.info.hex(), flush=True)
    for line in sys.stdin:
        match line.split():
            case ["know", other, info]:
                peer.know(WorkerId(other), bytes.fromhex(info))
                print("known", flush=True)
            case ["digest"]:
                print(peer.digest(), flush=True)
            case ["fill", new_seed]:
                peer.fill(int(new_seed))
                print("filled", flush=True)


if __name__ == "__main__":
    main()
