"""A rank that is not the first: a process that loads its share of the model and computes what rank 0 tells it.

    python -m kvrelay.runner.ranks.process CONNECTION MEMORY      two descriptors, inherited from rank 0

It ends when its connection does, in the middle of a pass too: rank 0 closes it, or has died. Signals that ask a worker to end
are rank 0's business.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import assert_never

import torch

from kvrelay.checkpoint.spec import read_spec
from kvrelay.checkpoint.weight_file import close_all
from kvrelay.config import read_environment
from kvrelay.errors import KVRelayError, RankDiedError
from kvrelay.kernels.choose import choose_kernels
from kvrelay.kernels.ranks import CardRanks, DistributedRanks, Ranks, SharedRanks, shared_functions
from kvrelay.log import Log, configure
from kvrelay.models.registry import Model
from kvrelay.native.driver import Driver
from kvrelay.progress import Silent
from kvrelay.runner.choices import DTYPES
from kvrelay.runner.cuda_fence import leave_default_stream
from kvrelay.runner.gpu_memory import explained
from kvrelay.runner.graphs import captured
from kvrelay.runner.kv_dtype import choose_kv_dtype
from kvrelay.runner.ranks.adapters import HeldAdapters
from kvrelay.runner.ranks.passes import PassInputs
from kvrelay.runner.ranks.shares import RankShare
from kvrelay.runner.shared import load_for_worker
from kvrelay.wire.codec import encode
from kvrelay.wire.ranks import (
    AdapterShare,
    KVMemory,
    KVShare,
    Loaded,
    Pass,
    RankFailed,
    RankSetup,
    Replay,
    ToRank,
    read_for_rank,
)

log = Log("rank")


def main(connection_fd: int, memory_fd: int) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=[connection_fd], daemon=True).start()
    connection = Connection(os.dup(connection_fd))
    setup = read_for_rank.decode(connection.recv_bytes())
    assert isinstance(setup, RankSetup)
    configure(setup.log_level, f"rank-{setup.rank}")
    with _reported(connection, setup.rank):
        rank = _Rank(setup, _open_ranks(setup, memory_fd))
    connection.send_bytes(encode(Loaded()))
    try:
        while True:
            content = connection.recv_bytes()
            if rank.repeats(content):
                continue
            message = read_for_rank.decode(content)
            if isinstance(message, KVMemory):
                with _reported(connection, setup.rank):
                    answer = rank.open_kv(message, connection_fd)
                connection.send_bytes(encode(answer))
            else:
                rank.follow(message, content)
    except (EOFError, ConnectionError):
        return 0
    except (RankDiedError, RuntimeError) as error:
        log.error("rank ends", reason=error)
        return 1


@contextlib.contextmanager
def _reported(connection: Connection, rank: int) -> Iterator[None]:
    """Around what rank 0 waits for: a failure is the answer, upon which rank 0 ends this process."""
    try:
        yield
    except (KVRelayError, OSError, RuntimeError, MemoryError) as error:
        connection.send_bytes(encode(RankFailed(reason=f"rank {rank}: {error}")))
        threading.Event().wait()


def _end_with(connection_fd: int) -> None:
    """The process, as soon as rank 0 has closed its side or died."""
    poll = select.poll()
    poll.register(connection_fd, select.POLLRDHUP)
    poll.poll()
    close_all()
    os._exit(0)


def _open_ranks(setup: RankSetup, memory_fd: int) -> Ranks:
    if setup.num_cards:
        torch.cuda.set_device(setup.card)
        leave_default_stream(torch.device("cuda", setup.card))
        return CardRanks(setup.store_port, setup.rank, setup.num_ranks, one_card=setup.one_card)
    library = shared_functions() if setup.store_port == 0 else None
    if library is None:
        return DistributedRanks(setup.store_port, setup.rank, setup.num_ranks)
    return SharedRanks(library, memory_fd, setup.rank, setup.num_ranks)


class _Rank:
    """The rank's share of the model and of KV."""

    def __init__(self, setup: RankSetup, ranks: Ranks) -> None:
        torch.set_num_threads(setup.num_threads)
        folder, environment, dtype = Path(setup.folder), read_environment(), DTYPES[setup.dtype]
        whole = read_spec(folder)
        self._device = torch.device("cuda", setup.card) if setup.num_cards else torch.device("cpu")
        kernels = choose_kernels(self._device, dtype, environment, setup.model)
        self._model: Model = load_for_worker(
            folder,
            whole,
            setup.model,
            environment,
            kernels=kernels,
            dtype=dtype,
            progress=Silent(),
            max_positions=setup.max_positions or None,
            ranks=ranks,
        )
        self._setup = setup
        self._ranks = ranks
        self._spec = RankShare(whole, setup.rank, setup.num_ranks).spec
        self._kv_dtype = choose_kv_dtype(setup.model, dtype)
        self._adapters = HeldAdapters(kernels, dtype, self._device)
        self._kv = torch.empty(0)
        self._last: tuple[bytes, PassInputs | None] = (b"", None)
        self._captured: dict[str, tuple[torch.cuda.CUDAGraph, PassInputs]] = {}
        self._memory = torch.cuda.graph_pool_handle() if setup.num_cards else None

    def open_kv(self, message: KVMemory, connection_fd: int) -> Loaded | KVShare:
        spec = self._spec
        shape = (spec.num_layers, 2, message.num_blocks, message.block_size, spec.num_kv_heads, spec.head_dim)
        if self._device.type == "cpu":
            self._kv = self._map_kv(connection_fd, shape)
            return Loaded()
        with explained("making room for KV", math.prod(shape) * self._kv_dtype.itemsize, self._device):
            self._kv = torch.zeros(shape, dtype=self._kv_dtype, device=self._device)
        torch.cuda.synchronize()
        handle, offset = Driver(self._setup.card).export(self._kv.data_ptr(), self._kv.numel() * self._kv.element_size())
        return KVShare(handle=handle, offset=offset)

    def _map_kv(self, connection_fd: int, shape: tuple[int, ...]) -> torch.Tensor:
        """This rank's share of the worker's KV memory."""
        with socket.socket(fileno=os.dup(connection_fd)) as link:
            _, (descriptor,), _, _ = socket.recv_fds(link, 1, 1)
        memory = torch.frombuffer(mmap.mmap(descriptor, 0), dtype=self._kv_dtype)
        os.close(descriptor)
        return memory.view(self._setup.num_ranks, *shape)[self._setup.rank]

    @torch.inference_mode()
    def repeats(self, content: bytes) -> bool:
        """If this is the message of the last pass, computes it with the new inputs."""
        before, inputs = self._last
        if inputs is None or content != before:
            return False
        self._model.forward(inputs.receive(self._ranks, None), self._kv)
        return True

    @torch.inference_mode()
    def follow(self, message: ToRank, content: bytes) -> None:
        """`content` is what the message was read from."""
        match message:
            case AdapterShare():
                self._adapters.hold(message)
            case Pass():
                self._adapters.drop(message.dropped)
                self._compute(message, content)
            case Replay():
                self._captured[message.name][0].replay()
            case RankSetup() | KVMemory():
                raise AssertionError("a rank is set up once, and KV memory is answered")
            case _:
                assert_never(message)

    def _compute(self, message: Pass, content: bytes) -> None:
        """A pass that is captured is computed before, as rank 0 does: that compiles kernels and chooses them."""
        self._last = (b"", None)
        inputs = PassInputs(message, self._model.dtype, self._device)
        if message.images is None and message.lora is None and not message.dropped and not message.name:
            self._last = (content, inputs)
        lora = self._adapters.batch(message.lora)
        self._model.forward(inputs.receive(self._ranks, lora), self._kv)
        if message.name:
            torch.cuda.synchronize()
            graph = captured(lambda: self._model.forward(inputs.receive(self._ranks, lora), self._kv), self._memory)
            self._captured[message.name] = graph, inputs


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
