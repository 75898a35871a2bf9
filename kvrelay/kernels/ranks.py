"""How the ranks of a tensor-parallel model meet: sums of what each has computed, and what rank 0 has for all.

`OneRank`           a model that is not split.
`SharedRanks`       on one host: memory that all ranks have mapped, and a C function that waits in it. A sum of one token's
                    activations takes a few microseconds.
`DistributedRanks`  torch.distributed's gloo, where there is neither a compiler nor a library of the wheel.
`CardRanks`         torch.distributed's NCCL, on NVIDIA cards: queued on the card's stream like any kernel, also in CUDA graphs.

In shared memory each rank has a counter and two places for its numbers, used in turn. In turn n a rank writes into its place
n mod 2, sets its counter to n, and waits until every counter has reached n; then it reads all places. It comes back to a place
in turn n + 2, when every counter has passed n + 1 and so every rank has read what stood there. Sums are made in the order of
the ranks, so every rank has the same bits.
"""

from __future__ import annotations

import ctypes
import datetime
import functools
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from kvrelay.errors import RankDiedError
from kvrelay.native.compile import load_native

_HEADER_BYTES = 4096  # HEADER and FLOATS of ranks.c
_PLACE_FLOATS = 1 << 18
_FOR_EVER = datetime.timedelta(days=365)


@dataclass(frozen=True, slots=True)
class SumInC:
    """`add_up` for native code: function(ranks, x, count) is 0, or a rank has ended. Both are addresses."""

    function: int
    ranks: int


class Ranks(Protocol):
    """One rank's view of all. Every rank makes the same calls in the same order. Raises RankDiedError."""

    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    @property
    def sum_in_c(self) -> SumInC | None:
        """None: sums are made in Python alone."""

    @property
    def spent_s(self) -> tuple[float, float]:
        """Since the start: in sums and spreads; and, where it can be told apart, until the last rank had its share of a sum."""

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's `x`, which may be overwritten."""

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's `x`; the others' is overwritten."""

    def meet(self) -> None:
        """Returns when every rank has called it: what each wrote before is written."""

    def end(self) -> None:
        """From any thread: a rank has died, so no other need wait any longer."""


class OneRank:
    """Implements `Ranks` for a model that is not split: there is nothing to add and no one to wait for."""

    rank, num_ranks = 0, 1
    sum_in_c: SumInC | None = None
    spent_s = (0.0, 0.0)

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def meet(self) -> None: ...

    def end(self) -> None: ...


ALONE = OneRank()


class _State(ctypes.Structure):
    _fields_ = [
        ("memory", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rank", "count", "turn", "spent_ns", "waited_ns")),
    ]


def shared_bytes(num_ranks: int) -> int:
    """The size of the memory in which so many ranks meet."""
    return _HEADER_BYTES + num_ranks * 2 * _PLACE_FLOATS * 4


@functools.cache
def shared_functions() -> ctypes.CDLL | None:
    """None where there is no native code."""
    library = load_native(__file__)
    if library is not None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        library.kvrelay_add_up.argtypes = library.kvrelay_spread.argtypes = (pointer, pointer, number)
        library.kvrelay_meet.argtypes = library.kvrelay_end.argtypes = (pointer,)
        library.kvrelay_end.restype = None
    return library


class SharedRanks:
    """Implements `Ranks` in host memory behind a file descriptor, which is zero when the first rank comes."""

    def __init__(self, library: ctypes.CDLL, descriptor: int, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self._library = library
        self._memory = mmap.mmap(descriptor, shared_bytes(num_ranks))
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._state = _State(address, rank, num_ranks)
        self._address = ctypes.addressof(self._state)
        function = ctypes.cast(library.kvrelay_add_up, ctypes.c_void_p).value
        assert function is not None
        self.sum_in_c = SumInC(function, self._address)

    @property
    def spent_s(self) -> tuple[float, float]:
        return self._state.spent_ns / 1e9, self._state.waited_ns / 1e9

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        summed = x.float().contiguous()
        check_met(self._library.kvrelay_add_up(self._address, summed.data_ptr(), summed.numel()))
        return summed.to(x.dtype)

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        check_met(self._library.kvrelay_spread(self._address, x.data_ptr(), x.numel() * x.element_size()))
        return x

    def meet(self) -> None:
        check_met(self._library.kvrelay_meet(self._address))

    def end(self) -> None:
        self._library.kvrelay_end(self._address)


class DistributedRanks:
    """Implements `Ranks` with torch.distributed."""

    sum_in_c = None

    def __init__(self, store_port: int, rank: int, num_ranks: int, store: TCPStore | None = None) -> None:
        """`store` is rank 0's."""
        self.rank, self.num_ranks = rank, num_ranks
        self.spent_s = 0.0, 0.0
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = store or TCPStore("127.0.0.1", store_port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=_FOR_EVER)

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        summed = x.contiguous()
        self._ask(lambda: dist.all_reduce(summed))
        return summed

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        whole = x.contiguous()
        self._ask(lambda: dist.broadcast(whole, 0))
        return whole

    def meet(self) -> None:
        self._ask(dist.barrier)

    def end(self) -> None:
        """Gloo sees a closed connection by itself."""

    def _ask(self, collective: Callable[[], object]) -> None:
        begun = time.perf_counter()
        try:
            collective()
        except RuntimeError as error:
            raise RankDiedError(f"a rank of this worker has ended: {error}") from error
        self.spent_s = self.spent_s[0] + time.perf_counter() - begun, 0.0


class CardRanks:
    """Implements `Ranks` with NCCL. No call waits on the host; what a rank that has ended leaves undone is found by `end`,
    after which results are worth nothing."""

    sum_in_c = None
    spent_s = 0.0, 0.0  # the host does not know

    def __init__(self, store_port: int, rank: int, num_ranks: int, store: TCPStore | None = None, *, one_card: bool) -> None:
        """On the current card. `one_card`: that of another rank, too, which NCCL allows to ranks of different hosts alone, so
        each is told that it is on one of its own. `store` is rank 0's."""
        self.rank, self.num_ranks = rank, num_ranks
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # else it ends the process, which is the group's to decide
        os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"
        if one_card:
            os.environ["NCCL_HOSTID"] = f"rank-{rank}"
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        nccl: Any = dist.__dict__["ProcessGroupNCCL"]  # of builds for cards alone
        self._group = nccl(store or TCPStore("127.0.0.1", store_port, is_master=False), rank, num_ranks)
        self._sum, self._from_first = dist.AllreduceOptions(), dist.BroadcastOptions()
        if "asyncOp" in dir(self._sum):
            self._sum.asyncOp = self._from_first.asyncOp = False  # on the current stream; before, on one that this waits for
        self._from_first.rootRank = 0
        self._nothing = torch.zeros(1, device="cuda")
        self._has_ended = False

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        summed = x.contiguous()
        self._ask(self._group.allreduce, summed, self._sum)
        return summed

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        whole = x.contiguous()
        self._ask(self._group.broadcast, whole, self._from_first)
        return whole

    def meet(self) -> None:
        """On the card, not on the host."""
        self.add_up(self._nothing)

    def end(self) -> None:
        self._has_ended = True
        self._group.abort()

    def _ask(self, collective: Callable[..., Any], x: torch.Tensor, options: object) -> None:
        if self._has_ended:
            raise RankDiedError("a rank of this worker has ended")
        try:
            work = collective([x], options)
        except RuntimeError as error:
            raise RankDiedError(f"a rank of this worker has ended: {error}") from error
        if work is not None:
            work.wait()


def open_store() -> TCPStore:
    """Where ranks on this host find each other; `port` tells the others."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def check_met(status: int) -> None:
    """Of native code that meets other ranks: 0, or one of them has ended. Raises RankDiedError."""
    if status != 0:
        raise RankDiedError("a rank of this worker has ended")
