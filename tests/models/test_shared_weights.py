"""Models whose weights lie in a file that processes share: the same bits, one copy, and no harm if a process is killed."""

from __future__ import annotations

import pathlib
import re
import signal
import subprocess
import sys
import time

import msgspec
import pytest
import torch
from paged_run import PagedRun, prompts_of
from tiny_models import tiny_model

from kvrelay.checkpoint import weight_file
from kvrelay.checkpoint.spec import read_spec
from kvrelay.checkpoint.weight_file import SUFFIX, WeightFolder, prepare
from kvrelay.config import ModelOptions, WeightsOption, read_environment
from kvrelay.kernels.choose import choose_kernels
from kvrelay.kernels.native.kernels import NativeKernels
from kvrelay.kernels.ranks import Ranks
from kvrelay.models.registry import Model
from kvrelay.progress import Silent
from kvrelay.runner import shared
from kvrelay.runner.shared import file_name, load_for_worker

CPU = torch.device("cpu")
PROMPTS = prompts_of((21, 3))


def native() -> NativeKernels:
    kernels = choose_kernels(CPU, torch.float32, read_environment())
    if not isinstance(kernels, NativeKernels):
        pytest.skip("no C compiler")
    return kernels


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> WeightFolder:
    """The only one that weights may be in."""
    made = WeightFolder(tmp_path / "weights")
    monkeypatch.setattr(shared, "memory_folder", lambda: made)
    monkeypatch.setattr(shared, "disk_folder", lambda cache_dir: made)
    return made


def load(options: ModelOptions) -> Model:
    path = pathlib.Path(options.model)
    return load_for_worker(
        path,
        read_spec(path),
        options,
        read_environment(),
        kernels=native(),
        dtype=torch.float32,
        progress=Silent(),
        max_positions=None,
    )


def logits(model: Model) -> torch.Tensor:
    run = PagedRun(model, PROMPTS)
    return torch.cat(list(run.step({row: len(prompt) for row, prompt in enumerate(PROMPTS)}).values()))


def whole_files(folder: WeightFolder) -> list[pathlib.Path]:
    return list(folder.path.glob(f"*{SUFFIX}"))


@pytest.mark.parametrize(
    ("name", "weights"),
    [("llama", "float32"), ("qwen2", "auto"), ("blocks-32", "auto"), ("blocks-256", "auto"), ("llama", "int8")],
)
def test_the_one_that_writes_and_those_that_read_compute_what_an_own_copy_does(
    folder: WeightFolder, name: str, weights: WeightsOption
) -> None:
    options = ModelOptions(model=str(tiny_model(name)), weights=weights)
    expected = logits(load(msgspec.structs.replace(options, share_weights=False)))
    models = [load(options) for _ in range(3)]
    assert len(whole_files(folder)) == 1
    for model in models:
        assert torch.equal(logits(model), expected)
    models.clear()
    del model
    assert whole_files(folder) == [], "nobody uses it"


def test_random_weights_are_shared_too(folder: WeightFolder) -> None:
    options = ModelOptions(model=str(tiny_model("llama")), load="dummy")
    first, second = load(options), load(options)
    assert torch.equal(logits(first), logits(second))


class OneOf:
    """Implements what of `Ranks` a name depends on."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks


def test_a_name_says_all_that_the_bytes_depend_on(tmp_path: pathlib.Path) -> None:
    kernels, path = native(), tiny_model("llama")
    spec, options = read_spec(path), ModelOptions(model=str(path))

    def rank(number: int, count: int) -> Ranks:
        return OneOf(number, count)  # type: ignore[return-value]

    copied = tmp_path / "copied"
    copied.mkdir()
    for file in path.iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    names = [
        file_name(path, spec, options, kernels),
        file_name(path, spec, msgspec.structs.replace(options, weights="float32"), kernels),
        file_name(path, spec, msgspec.structs.replace(options, load="dummy"), kernels),
        file_name(path, spec, options, kernels, rank(0, 2)),
        file_name(path, spec, options, kernels, rank(1, 2)),
        file_name(copied, spec, options, kernels),
    ]
    assert len(set(names)) == len(names)
    assert names[0] == file_name(path, spec, options, native())


def test_without_room_each_has_a_copy_of_its_own(folder: WeightFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_file, "_SPARE", 1 << 60)
    options = ModelOptions(model=str(tiny_model("llama")))
    model = load(options)
    assert whole_files(folder) == []
    assert torch.equal(logits(model), logits(load(msgspec.structs.replace(options, share_weights=False))))


PROGRAM = """
import pathlib, sys, time
import torch
from kvrelay.checkpoint.spec import read_spec
from kvrelay.checkpoint.weight_file import WeightFolder
from kvrelay.config import ModelOptions, read_environment
from kvrelay.kernels.choose import choose_kernels
from kvrelay.kernels.native.room import SharedMemory
from kvrelay.progress import Silent
from kvrelay.runner import shared
folder, path, kind = sys.argv[1:]
shared.memory_folder = lambda: WeightFolder(pathlib.Path(folder))
if kind == "slow":
    SharedMemory.settle = lambda self, memory: (print("ready", flush=True), time.sleep(600))
environment, path = read_environment(), pathlib.Path(path)
model = shared.load_for_worker(
    path, read_spec(path), ModelOptions(model=str(path), weights="float32"), environment,
    kernels=choose_kernels(torch.device("cpu"), torch.float32, environment), dtype=torch.float32, progress=Silent(),
    max_positions=None,
)
assert not {"torch._dynamo", "triton"} & set(sys.modules), "loading them costs seconds"
print("ready", flush=True)
sys.stdin.readline()
"""


def start(folder: WeightFolder, model: pathlib.Path, kind: str = "usual") -> subprocess.Popen[str]:
    """A process that loads the model and waits; a slow one is about to end writing."""
    command = [sys.executable, "-c", PROGRAM, str(folder.path), str(model), kind]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def await_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert any(line == "ready\n" for line in iter(process.stdout.readline, "")), "it has loaded the model"


def end(process: subprocess.Popen[str], number: int = signal.SIGKILL) -> None:
    process.send_signal(number)
    process.communicate()


def mapped_kib(pid: int, field: str) -> int:
    """Of the weights in a process's memory."""
    text = pathlib.Path(f"/proc/{pid}/smaps").read_text()
    parts = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", text, flags=re.MULTILINE)
    shared_parts = [part for part in parts if SUFFIX in part.partition("\n")[0]]
    return sum(int(found) for part in shared_parts for found in re.findall(rf"^{field}:\s+(\d+)", part, re.MULTILINE))


def test_four_processes_hold_the_weights_once(folder: WeightFolder) -> None:
    native()
    model = tiny_model("llama")
    processes = [start(folder, model) for _ in range(4)]
    try:
        for process in processes:
            await_ready(process)
        (file,) = whole_files(folder)
        size = file.stat().st_size / 1024
        held = [mapped_kib(process.pid, "Pss") for process in processes]
        assert sum(held) <= 1.2 * size + 64
    finally:
        for process in processes:
            end(process)


def test_a_writer_that_is_killed_harms_nobody(folder: WeightFolder) -> None:
    native()
    prepare(folder)
    model = tiny_model("llama")
    writer = start(folder, model, "slow")
    await_ready(writer)
    assert whole_files(folder) == [], "it is not whole"
    end(writer)
    options = ModelOptions(model=str(model), weights="float32")
    next_one = load(options)
    assert torch.equal(logits(next_one), logits(load(msgspec.structs.replace(options, share_weights=False))))
    assert [path.suffix for path in folder.path.iterdir() if path.suffix != ".lock"] == [SUFFIX]


def test_a_writer_that_stands_still_holds_up_no_other(folder: WeightFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    native()
    prepare(folder)
    monkeypatch.setattr(shared, "_PATIENCE_S", 0.5)
    options = ModelOptions(model=str(tiny_model("llama")), weights="float32")
    writer = start(folder, tiny_model("llama"), "slow")
    try:
        await_ready(writer)
        writer.send_signal(signal.SIGSTOP)
        own = load(options)
        assert whole_files(folder) == [], "it is not whole"
        assert torch.equal(logits(own), logits(load(msgspec.structs.replace(options, share_weights=False))))
    finally:
        end(writer)


def test_those_that_wait_go_on_when_the_writer_is_killed(folder: WeightFolder) -> None:
    native()
    prepare(folder)
    model = tiny_model("llama")
    writer = start(folder, model, "slow")
    await_ready(writer)
    waiting = start(folder, model)
    time.sleep(0.5)  # it may or may not have begun to wait: either must do
    end(writer)
    try:
        await_ready(waiting)
        assert len(whole_files(folder)) == 1
    finally:
        end(waiting)
