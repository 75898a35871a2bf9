"""Only workers that hand nothing over run on a GPU."""

from __future__ import annotations

import pytest

from kvrelay.cli.main import main
from kvrelay.config import ModelOptions, check_device
from kvrelay.errors import ConfigError
from kvrelay.states import Role

GPU = ModelOptions(device="cuda")


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE, Role.ENCODE])
def test_a_role_that_hands_over_is_refused_on_a_gpu_and_the_error_says_what_works(role: Role) -> None:
    with pytest.raises(ConfigError, match=f"--device cuda: {role.value} workers .* --whole 1"):
        check_device(GPU, [Role.WHOLE, role, role])
    check_device(ModelOptions(), [role])


def test_whole_workers_run_on_a_gpu() -> None:
    check_device(GPU, [Role.WHOLE, Role.WHOLE])
    check_device(GPU, [])


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["serve", "/no/model", "--port", "0"], "prefill and decode"),
        (["serve", "/no/model", "--port", "0", "--decode", "1"], "decode"),
        (["serve", "/no/model", "--port", "0", "--whole", "1", "--encode", "1"], "encode"),
        (["worker", "/no/model", "--role", "prefill"], "prefill"),
        (["worker", "/no/model", "--role", "decode"], "decode"),
        (["worker", "/no/model", "--role", "encode"], "encode"),
    ],
)
def test_it_is_refused_before_anything_is_loaded(argv: list[str], names: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*argv, "--device", "cuda"]) == 2
    assert f"error: --device cuda: {names} workers run on the CPU only" in capsys.readouterr().err
