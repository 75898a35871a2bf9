"""A rank that is not the first: a process that loads its share of the model and computes what rank 0 tells it.

    python -m kvrelay.runner.ranks.process CONNECTION MEMORY      two descriptors, inherited from rank 0

It ends when its connection does, in the middle of a pass too: rank 0 closes it, or has died. Signals that ask a worker to end
are rank 0's business.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
import socket
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from kvrelay.checkpoint.spec import ModelSpec, read_spec
from kvrelay.checkpoint.weight_file import close_all
from kvrelay.config import read_environment
from kvrelay.errors import KVRelayError, RankDiedError
from kvrelay.kernels.choose import choose_kernels
from kvrelay.kernels.ranks import DistributedRanks, Ranks, SharedRanks, shared_functions
from kvrelay.log import Log, configure
from kvrelay.models.registry import Model
from kvrelay.progress import Silent
from kvrelay.runner.kv_dtype import choose_kv_dtype
from kvrelay.runner.ranks.adapters import HeldAdapters
from kvrelay.runner.ranks.passes import to_batch
from kvrelay.runner.ranks.shares import RankShare
from kvrelay.runner.shared import load_for_worker
from kvrelay.wire.codec import encode
from kvrelay.wire.ranks import AdapterShare, KVMemory, Loaded, Pass, RankFailed, RankSetup, read_for_rank

log = Log("rank")


def main(connection_fd: int, memory_fd: int) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=[connection_fd], daemon=True).start()
    connection = Connection(os.dup(connection_fd))
    setup = read_for_rank.decode(connection.recv_bytes())
    assert isinstance(setup, RankSetup)
    configure(setup.log_level, f"rank-{setup.rank}")
    try:
        ranks = _open_ranks(setup, memory_fd)
        model, spec, adapters = _load(setup, ranks)
    except (KVRelayError, OSError, RuntimeError, MemoryError) as error:
        connection.send_bytes(encode(RankFailed(reason=f"rank {setup.rank}: {error}")))
        return 1
    connection.send_bytes(encode(Loaded()))
    kv = _map_kv(connection, connection_fd, setup, spec)
    connection.send_bytes(encode(Loaded()))
    _compute(connection, model, kv, adapters)
    return 0


def _end_with(connection_fd: int) -> None:
    """The process, as soon as rank 0 has closed its side or died."""
    poll = select.poll()
    poll.register(connection_fd, select.POLLRDHUP)
    poll.poll()
    close_all()
    os._exit(0)


def _open_ranks(setup: RankSetup, memory_fd: int) -> Ranks:
    library = shared_functions() if setup.store_port == 0 else None
    if library is None:
        return DistributedRanks(setup.store_port, setup.rank, setup.num_ranks)
    return SharedRanks(library, memory_fd, setup.rank, setup.num_ranks)


def _load(setup: RankSetup, ranks: Ranks) -> tuple[Model, ModelSpec, HeldAdapters]:
    torch.set_num_threads(setup.num_threads)
    folder, environment, dtype = Path(setup.folder), read_environment(), _dtype(setup)
    whole = read_spec(folder)
    kernels = choose_kernels(torch.device("cpu"), dtype, environment, setup.model)
    model = load_for_worker(
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
    return model, RankShare(whole, setup.rank, setup.num_ranks).spec, HeldAdapters(kernels, dtype)


def _dtype(setup: RankSetup) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[setup.dtype]


def _map_kv(connection: Connection, connection_fd: int, setup: RankSetup, spec: ModelSpec) -> torch.Tensor:
    """This rank's share of the worker's KV memory."""
    message = read_for_rank.decode(connection.recv_bytes())
    assert isinstance(message, KVMemory)
    with socket.socket(fileno=os.dup(connection_fd)) as link:
        _, (descriptor,), _, _ = socket.recv_fds(link, 1, 1)
    dtype = choose_kv_dtype(setup.model, _dtype(setup))
    shape = (spec.num_layers, 2, message.num_blocks, message.block_size, spec.num_kv_heads, spec.head_dim)
    memory = torch.frombuffer(mmap.mmap(descriptor, 0), dtype=dtype)
    os.close(descriptor)
    return memory.view(setup.num_ranks, *shape)[setup.rank]


@torch.inference_mode()
def _compute(connection: Connection, model: Model, kv: torch.Tensor, adapters: HeldAdapters) -> None:
    while True:
        try:
            message = read_for_rank.decode(connection.recv_bytes())
        except (EOFError, ConnectionError):
            return
        if isinstance(message, AdapterShare):
            adapters.hold(message)
            continue
        assert isinstance(message, Pass)
        adapters.drop(message.dropped)
        try:
            model.forward(to_batch(message, model.dtype, adapters.batch(message.lora)), kv)
        except RankDiedError as error:
            log.error("rank ends", reason=error)
            return


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
