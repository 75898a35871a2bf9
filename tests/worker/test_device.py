"""Which workers run on a GPU."""

from __future__ import annotations

import pytest
import torch

from kvrelay.config import EngineOptions, ModelOptions
from kvrelay.errors import ConfigError
from kvrelay.ids import new_worker_id
from kvrelay.options import RoleOptions, check_roles
from kvrelay.states import Role
from kvrelay.transfer.engines import choose
from kvrelay.worker.transports import check_ranks, open_embedding_engines, open_engines


def test_a_card_and_a_host_do_not_hand_over_to_each_other() -> None:
    cpu = RoleOptions(model=ModelOptions(dtype="float32"), engine=EngineOptions())
    gpu = RoleOptions(model=ModelOptions(device="cuda", dtype="float32"), engine=EngineOptions())
    with pytest.raises(ConfigError, match="--device: cuda for prefill, cpu for decode: one command starts both on cards"):
        check_roles({Role.PREFILL: gpu, Role.DECODE: cpu})


def test_workers_that_hand_over_hold_kv_in_one_precision() -> None:
    plain, narrow = (RoleOptions(model=ModelOptions(kv_dtype=kv), engine=EngineOptions()) for kv in ("auto", "fp8"))
    with pytest.raises(ConfigError, match="--kv-dtype: fp8 for prefill, auto for decode: workers that hand over"):
        check_roles({Role.PREFILL: narrow, Role.DECODE: plain})
    check_roles({Role.PREFILL: narrow, Role.DECODE: narrow})


def test_embeddings_come_from_a_card_or_a_host_to_either() -> None:
    cpu, gpu = (
        RoleOptions(model=ModelOptions(device=device, dtype="float32"), engine=EngineOptions()) for device in ("cpu", "cuda")
    )
    for encode in (cpu, gpu):
        for others in (cpu, gpu):
            check_roles({Role.ENCODE: encode, Role.PREFILL: others, Role.DECODE: others})


@pytest.mark.parametrize(("name", "said"), [("shm", "moves host memory"), ("mooncake", ".*without CUDA knows no memory")])
def test_a_transport_that_does_not_move_memory_of_a_card_is_refused_by_name(name: str, said: str) -> None:
    if name == "mooncake" and torch.cuda.is_available():
        pytest.skip("its build may be one that does")
    with pytest.raises(ConfigError, match=f"--transfer {name}: {name}:? {said}"):
        open_engines(name, new_worker_id("prefill"), "127.0.0.1", "cuda:0")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_driver_the_error_says_so() -> None:
    with pytest.raises(ConfigError, match="--transfer auto: no transport can move memory on cuda:0"):
        open_engines("auto", new_worker_id("prefill"), "127.0.0.1", "cuda:0")
    for name in ("cuda_ipc", "nixl"):
        with pytest.raises(ConfigError, match=f"--transfer {name}: memory of a card needs NVIDIA's driver"):
            open_engines(name, new_worker_id("prefill"), "127.0.0.1", "cuda:0")


def test_host_memory_is_not_moved_by_cuda_ipc() -> None:
    with pytest.raises(ConfigError, match=r"--transfer cuda_ipc: .* not memory on cpu"):
        open_engines("cuda_ipc", new_worker_id("prefill"), "127.0.0.1", "cpu")


@pytest.mark.parametrize(
    ("transfer", "device", "on_card", "on_host"),
    [
        ("auto", "cuda:0", ["cuda_ipc"], ["shm"]),
        ("cuda_ipc", "cuda:0", ["cuda_ipc"], ["shm"]),
        ("nixl", "cuda:0", ["nixl"], []),
        ("shm", "cuda:0", [], ["shm"]),
        ("auto", "cpu", [], ["shm"]),
        ("cuda_ipc", "cpu", [], ["shm"]),
    ],
)
def test_embeddings_are_moved_on_a_card_by_transports_that_can_and_on_its_host_by_the_others(
    monkeypatch: pytest.MonkeyPatch, transfer: str, device: str, on_card: list[str], on_host: list[str]
) -> None:
    monkeypatch.setattr(choose, "check_driver", lambda: None)
    monkeypatch.setattr(choose.nixl, "try_card", lambda device: None)
    opened = open_embedding_engines(transfer, new_worker_id("encode"), "127.0.0.1", device)
    assert [[engine.name for engine in engines] for engines in opened] == [on_card, on_host]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_embeddings_of_a_card_that_no_transport_reaches_are_moved_on_its_host() -> None:
    on_card, on_host = open_embedding_engines("auto", new_worker_id("encode"), "127.0.0.1", "cuda:0")
    assert (on_card, [engine.name for engine in on_host]) == ([], ["shm"])


def test_ranks_on_cards_are_refused_other_transports_before_anything_is_loaded() -> None:
    ranks = ModelOptions(device="cuda", tp=2)
    check_ranks("auto", ranks)
    check_ranks("nixl", ModelOptions(tp=2))
    with pytest.raises(ConfigError, match=r"--transfer nixl: KV of ranks on cards \(--tp 2\) is moved by cuda_ipc alone"):
        check_ranks("nixl", ranks)
