"""Which workers run on a GPU."""

from __future__ import annotations

import pytest
import torch

from kvrelay.cli.main import main
from kvrelay.config import EngineOptions, ModelOptions
from kvrelay.errors import ConfigError
from kvrelay.ids import new_worker_id
from kvrelay.options import RoleOptions, check_device, check_roles
from kvrelay.states import Role
from kvrelay.worker.transports import open_engines

GPU = ModelOptions(device="cuda")


def test_an_encode_worker_is_refused_on_a_gpu_and_the_error_says_what_works() -> None:
    with pytest.raises(ConfigError, match=r"--device cuda: encode workers .* --whole 1"):
        check_device(GPU, [Role.WHOLE, Role.ENCODE])
    check_device(ModelOptions(), [Role.ENCODE])


def test_all_others_run_on_a_gpu() -> None:
    check_device(GPU, [Role.WHOLE, Role.PREFILL, Role.DECODE])
    check_device(GPU, [])


def test_a_card_and_a_host_do_not_hand_over_to_each_other() -> None:
    cpu, gpu = (RoleOptions(model=model, engine=EngineOptions()) for model in (ModelOptions(dtype="float32"), GPU))
    gpu = RoleOptions(model=ModelOptions(device="cuda", dtype="float32"), engine=EngineOptions())
    with pytest.raises(ConfigError, match="--device: cuda for prefill, cpu for decode: KV is not handed over"):
        check_roles({Role.PREFILL: gpu, Role.DECODE: cpu})
    check_roles({Role.ENCODE: cpu, Role.PREFILL: gpu, Role.DECODE: gpu})


@pytest.mark.parametrize(
    "argv",
    [
        ["serve", "/no/model", "--port", "0", "--whole", "1", "--encode", "1"],
        ["worker", "/no/model", "--role", "encode"],
    ],
)
def test_it_is_refused_before_anything_is_loaded(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*argv, "--device", "cuda"]) == 2
    assert "error: --device cuda: encode workers run on the CPU only" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["shm", "nixl", "mooncake"])
def test_a_transport_that_does_not_move_memory_of_a_card_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--transfer {name}: {name} moves host memory"):
        open_engines(name, new_worker_id("prefill"), "127.0.0.1", "cuda:0")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_driver_the_error_says_so() -> None:
    with pytest.raises(ConfigError, match="--transfer auto: no transport can move memory on cuda:0"):
        open_engines("auto", new_worker_id("prefill"), "127.0.0.1", "cuda:0")
    with pytest.raises(ConfigError, match="--transfer cuda_ipc: cuda_ipc needs NVIDIA's driver"):
        open_engines("cuda_ipc", new_worker_id("prefill"), "127.0.0.1", "cuda:0")


def test_host_memory_is_not_moved_by_cuda_ipc() -> None:
    with pytest.raises(ConfigError, match=r"--transfer cuda_ipc: .* not memory on cpu"):
        open_engines("cuda_ipc", new_worker_id("prefill"), "127.0.0.1", "cpu")
