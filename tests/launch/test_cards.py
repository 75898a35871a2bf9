"""Which card each worker has, how much of its memory, and MPS around them."""

from __future__ import annotations

import pathlib

import pytest

from kvrelay.config import CardOptions, ClusterOptions, EngineOptions, ModelOptions, TransferOptions, read_environment
from kvrelay.errors import ConfigError
from kvrelay.launch.cards import place, sharing, visible_cards
from kvrelay.launch.cluster import WorkerSettings, worker_roles
from kvrelay.states import Role

GPU = ModelOptions(device="cuda")
PAIR = [(Role.PREFILL, GPU), (Role.DECODE, GPU)]


@pytest.mark.parametrize(
    ("devices", "visible", "cards"),
    [
        ("", "", [""]),
        ("", "2,3", [""]),  # the workers see 2 first by themselves
        ("0,1,2", "", ["0", "1", "2"]),
        ("1, 0", "4,GPU-5ab", ["GPU-5ab", "4"]),
    ],
)
def test_devices_count_within_what_is_visible(
    monkeypatch: pytest.MonkeyPatch, devices: str, visible: str, cards: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_cards(CardOptions(devices=devices), read_environment()) == cards


@pytest.mark.parametrize(("devices", "visible"), [("a", ""), ("0,", ""), ("-1", ""), ("2", "0,1"), ("GPU-5ab", "GPU-5ab")])
def test_a_card_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, devices: str, visible: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ConfigError, match=r"--devices .* is no card"):
        visible_cards(CardOptions(devices=devices), read_environment())


def test_workers_take_cards_in_turn_and_share_the_memory_of_one() -> None:
    workers = [(Role.PREFILL, GPU), (Role.PREFILL, GPU), (Role.DECODE, GPU)]
    places = place(workers, ["0", "1"], CardOptions(), {})
    assert [its.variables for its in places] == [{"CUDA_VISIBLE_DEVICES": card} for card in ("0", "1", "0")]
    assert [its.gpu_memory for its in places] == [0.36, 0.9, 0.54]


def test_each_rank_has_a_card_where_there_are_enough() -> None:
    workers = [(Role.PREFILL, ModelOptions(device="cuda", tp=2)), (Role.ENCODE, ModelOptions()), (Role.DECODE, GPU)]
    places = place(workers, ["0", "1", "2"], CardOptions(), {})
    assert [its.cards for its in places] == [("0", "1"), (), ("2",)]
    assert places[0].variables == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert [its.gpu_memory for its in places] == [0.9, 0.9, 0.9]
    assert [its.cards for its in place(workers, ["0", "1"], CardOptions(), {})] == [("0", "1"), (), ("0",)]
    assert [its.gpu_memory for its in place(workers, ["0", "1"], CardOptions(), {})] == [0.36, 0.9, 0.54]
    assert place(workers[:1], ["3"], CardOptions(), {})[0].cards == ("3",)
    encoder = (Role.ENCODE, ModelOptions(device="cuda", tp=2))  # whose tower is not split
    assert [its.cards for its in place([encoder, workers[0]], ["0", "1", "2"], CardOptions(), {})] == [("0",), ("1", "2")]


def test_memory_that_was_asked_for_and_fits_is_given() -> None:
    workers = [
        (Role.PREFILL, ModelOptions(device="cuda", gpu_memory=0.3)),
        (Role.DECODE, ModelOptions(device="cuda", gpu_memory=0.6)),
    ]
    assert [its.gpu_memory for its in place(workers, [""], CardOptions(), {})] == [0.3, 0.6]


def test_workers_on_a_cpu_have_no_card() -> None:
    options = CardOptions(prefill_sms=100, prefill_priority="normal")
    places = place([(Role.ENCODE, ModelOptions()), *PAIR], ["3"], options, {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/mps"})
    assert places[0].prefix() == []
    assert [its.gpu_memory for its in places] == [0.9, 0.36, 0.54]
    assert places[1].prefix() == [
        "env",
        "CUDA_VISIBLE_DEVICES=3",
        "CUDA_MPS_PIPE_DIRECTORY=/tmp/mps",
        "CUDA_MPS_CLIENT_PRIORITY=0",
    ]


def test_prefills_share_and_priority_are_told_under_mps_only() -> None:
    options = CardOptions(prefill_sms=70)
    assert [its.variables for its in place(PAIR, [""], options, {})] == [{}, {}]
    prefill, decode = place(PAIR, [""], options, {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/mps"})
    assert prefill.variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "70"
    assert prefill.variables["CUDA_MPS_CLIENT_PRIORITY"] == "1"
    assert decode.variables == {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/mps"}


def test_commands_say_where_and_how_much() -> None:
    settings = WorkerSettings(
        model=ModelOptions(model="/model", device="cuda"),
        engine=EngineOptions(),
        transfer=TransferOptions(),
        registration_s=4.0,
        cards=["1"],
        mps={"CUDA_MPS_PIPE_DIRECTORY": "/tmp/mps"},
    )
    prefill, decode = settings.commands(worker_roles(ClusterOptions(prefill=1, decode=1)), "tcp://127.0.0.1:1")
    assert prefill[:3] == decode[:3] == ["env", "CUDA_VISIBLE_DEVICES=1", "CUDA_MPS_PIPE_DIRECTORY=/tmp/mps"]
    assert prefill[3] == "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50"
    assert any("0.36" in word for word in prefill)
    assert any("0.54" in word for word in decode)


@pytest.fixture
def control(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A program in the place of NVIDIA's, that notes how it is called; its notes."""
    notes = tmp_path / "notes"
    program = tmp_path / "nvidia-cuda-mps-control"
    program.write_text(
        f'#!/bin/sh\necho "args=$* visible=$CUDA_VISIBLE_DEVICES pipe=$CUDA_MPS_PIPE_DIRECTORY said=$(cat)" >> {notes}\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    return notes


def test_mps_runs_while_workers_share_a_card(control: pathlib.Path) -> None:
    with sharing(PAIR, [""], CardOptions(), read_environment()) as variables:
        folder = variables["CUDA_MPS_PIPE_DIRECTORY"]
        assert pathlib.Path(folder).is_dir()
        assert control.read_text() == f"args=-d visible= pipe={folder} said=\n"
    assert control.read_text().splitlines()[1:] == [f"args= visible= pipe={folder} said=quit"]
    assert not pathlib.Path(folder).exists()


def test_mps_ends_when_the_server_fails(control: pathlib.Path) -> None:
    with pytest.raises(ConfigError), sharing(PAIR, [""], CardOptions(), read_environment()):
        raise ConfigError("something else")
    assert "said=quit" in control.read_text()


def test_mps_is_not_started_where_it_is_of_no_use(control: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = (PAIR, ["0", "1"], CardOptions()), (PAIR, [""], CardOptions(mps="off")), ([(Role.WHOLE, GPU)], [""], CardOptions())
    for workers, cards, options in cases:
        with sharing(workers, cards, options, read_environment()) as variables:
            assert variables == {}
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/run/mps")  # it runs already
    with sharing(PAIR, [""], CardOptions(), read_environment()) as variables:
        assert variables == {"CUDA_MPS_PIPE_DIRECTORY": "/run/mps"}
    assert not control.exists()


def test_mps_that_cannot_start_is_done_without(control: pathlib.Path) -> None:
    (control.parent / "nvidia-cuda-mps-control").write_text("#!/bin/sh\necho no card >&2\nexit 1\n")
    with sharing(PAIR, [""], CardOptions(), read_environment()) as variables:
        assert variables == {}
