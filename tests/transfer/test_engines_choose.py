"""Which engine two workers use, and what a missing one says."""

from __future__ import annotations

import sys

import pytest
import torch

from kvrelay.ids import new_worker_id
from kvrelay.transfer.engines.base import Mover, TransferError
from kvrelay.transfer.engines.choose import available, make_engine, pick, probe


def test_all_engines_for_host_memory_work_here() -> None:
    """Fails where NIXL or Mooncake is not installed: they are part of what is tested."""
    assert available("cpu") == ["shm", "nixl", "mooncake"]


def test_what_moves_memory_of_a_card_needs_one() -> None:
    found = available("cuda:0")
    assert found[:1] == (["cuda_ipc"] if torch.cuda.is_available() else [])
    assert set(found[1:]) <= {"nixl", "mooncake"}


def test_where_only_this_host_can_reach_a_worker_what_works_within_it_is_all() -> None:
    assert available("cpu", one_host=True) == ["shm"]


@pytest.mark.parametrize(
    ("name", "device", "reason"),
    [
        ("cuda_ipc", "cpu", "cuda_ipc moves memory of NVIDIA cards, not memory on cpu"),
        ("shm", "cuda:0", "shm moves host memory on Linux, not memory on cuda:0"),
        ("mooncake", "cuda:0", "mooncake: its package without CUDA knows no memory on cuda:0"),
        ("tcp", "cpu", "no transfer engine is called 'tcp'"),
    ],
)
def test_an_engine_that_cannot_move_that_memory_says_so(name: str, device: str, reason: str) -> None:
    with pytest.raises(TransferError, match=reason):
        probe(name, device)


def test_a_card_and_a_host_have_no_engine_in_common_and_the_error_says_why() -> None:
    with pytest.raises(TransferError, match="one has its memory on a card and the other on its host"):
        pick(["cuda_ipc"], ["shm", "nixl"], same_host=True)


@pytest.mark.parametrize(
    ("mine", "theirs", "same_host", "picked"),
    [
        (["shm", "nixl", "mooncake"], ["shm", "nixl", "mooncake"], True, "shm"),
        (["shm", "nixl", "mooncake"], ["shm", "nixl", "mooncake"], False, "nixl"),
        (["mooncake", "nixl", "shm"], ["mooncake", "nixl"], True, "nixl"),
        (["shm", "mooncake"], ["shm", "nixl", "mooncake"], False, "mooncake"),
        (["nixl"], ["nixl"], True, "nixl"),
        (["cuda_ipc", "nixl"], ["cuda_ipc", "nixl"], True, "cuda_ipc"),
        (["cuda_ipc", "nixl"], ["cuda_ipc", "nixl"], False, "nixl"),
    ],
)
def test_the_best_that_both_have_is_picked(mine: list[str], theirs: list[str], same_host: bool, picked: str) -> None:
    assert pick(mine, theirs, same_host=same_host) == pick(theirs, mine, same_host=same_host) == picked


@pytest.mark.parametrize(("mine", "theirs"), [(["shm"], ["shm"]), (["shm", "nixl"], ["mooncake"]), ([], ["nixl"])])
def test_no_common_engine_is_an_error_that_names_both_lists(mine: list[str], theirs: list[str]) -> None:
    with pytest.raises(TransferError) as raised:
        pick(mine, theirs, same_host=False)
    assert all(name in str(raised.value) for name in [*mine, *theirs])


@pytest.mark.parametrize(
    ("name", "mover"),
    [("cuda_ipc", Mover.CONSUMER), ("shm", Mover.CONSUMER), ("nixl", Mover.PRODUCER), ("mooncake", Mover.PRODUCER)],
)
def test_engines_are_made_by_name(name: str, mover: Mover) -> None:
    engine = make_engine(name, new_worker_id("prefill"))
    assert (engine.name, engine.mover) == (name, mover)


@pytest.mark.parametrize("name", ["memory", "auto", ""])
def test_an_unknown_name_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(TransferError, match="cuda_ipc, shm, nixl, mooncake"):
        make_engine(name, new_worker_id("prefill"))


@pytest.mark.parametrize(
    ("name", "modules", "command"),
    [
        ("nixl", ["nixl_cu12._bindings", "nixl_cu13._bindings"], "pip install nixl-cu12"),
        ("mooncake", ["mooncake.engine"], "libibverbs1 librdmacm1 libnuma1 liburing2"),
    ],
)
def test_a_missing_library_says_what_to_type(
    monkeypatch: pytest.MonkeyPatch, name: str, modules: list[str], command: str
) -> None:
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    with pytest.raises(TransferError, match=command):
        make_engine(name, new_worker_id("prefill"))
    assert name not in available("cpu")
