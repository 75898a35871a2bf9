"""NVIDIA cards that the workers of this machine share: who computes where, with how much memory, and whether at the same time.

    visible_cards    what --devices and CUDA_VISIBLE_DEVICES leave
    place            each worker's cards, in turn, and its share of their memory
    sharing          NVIDIA's MPS, from before the first worker starts until the last one has ended

Without MPS, processes on one card take turns of some milliseconds: a decode step waits while another worker computes a prompt.
"""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvrelay.config import CardOptions, Environment, ModelOptions
from kvrelay.errors import ConfigError
from kvrelay.log import Log
from kvrelay.states import Role

log = Log("serve")

_CONTROL = "nvidia-cuda-mps-control"
_PRIORITIES = {"normal": "0", "low": "1"}  # of MPS
_CONTROL_S = 30.0
_MEMORY_WEIGHTS = {Role.PREFILL: 2, Role.DECODE: 3, Role.WHOLE: 3, Role.ENCODE: 1}  # decode keeps KV for longer


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker computes. `cards` is empty where it has none; an empty name is the first card that it sees."""

    gpu_memory: float
    cards: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)  # of its environment

    def prefix(self) -> list[str]:
        """Of its command."""
        return ["env", *(f"{name}={value}" for name, value in self.variables.items())] if self.variables else []


def visible_cards(options: CardOptions, environment: Environment) -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them. An empty name is the first card. Raises ConfigError."""
    visible = [name.strip() for name in environment.visible_cards.split(",") if name.strip()]
    if not options.devices:
        return [""]
    chosen = [name.strip() for name in options.devices.split(",")]
    for name in chosen:
        if not name.isdecimal() or (visible and int(name) >= len(visible)):
            told = f"; CUDA_VISIBLE_DEVICES leaves {len(visible)}, counted from 0" if visible else ""
            raise ConfigError(f"--devices {options.devices}: {name!r} is no card{told}")
    return [visible[int(name)] if visible else name for name in chosen]


def place(
    workers: Sequence[tuple[Role, ModelOptions]], cards: Sequence[str], options: CardOptions, mps: Mapping[str, str]
) -> list[Place]:
    """One place for each worker, with a card for each of its ranks where there are so many. `mps` are the variables by which a
    process finds MPS; none: it does not run."""
    chosen = _in_turn([_num_cards(role, model) for role, model in workers], cards)
    shares = _memory_shares(workers, chosen)
    return [
        Place(share, its, _variables(role, its, options, mps)) if its else Place(model.gpu_memory)
        for (role, model), its, share in zip(workers, chosen, shares, strict=True)
    ]


def _num_cards(role: Role, model: ModelOptions) -> int:
    """A vision tower is not split."""
    return 0 if model.device != "cuda" else 1 if role is Role.ENCODE else model.tp


def _in_turn(counts: Sequence[int], cards: Sequence[str]) -> list[tuple[str, ...]]:
    """So many for each worker, the one after the other."""
    ends = itertools.accumulate(min(count, len(cards)) for count in counts)
    return [
        tuple(cards[turn % len(cards)] for turn in range(end - min(count, len(cards)), end))
        for count, end in zip(counts, ends, strict=True)
    ]


def _memory_shares(workers: Sequence[tuple[Role, ModelOptions]], chosen: Sequence[tuple[str, ...]]) -> list[float]:
    """As they were asked for, where that fits; else each card's workers get parts of it by their roles."""
    asked = [model.gpu_memory for _, model in workers]
    shares = list(asked)
    for card in {card for its in chosen for card in its}:
        here = [index for index, its in enumerate(chosen) if card in its]
        if sum(asked[index] for index in here) > 1.0:
            whole = sum(_MEMORY_WEIGHTS[workers[index][0]] for index in here)
            for index in here:
                part = round(asked[index] * _MEMORY_WEIGHTS[workers[index][0]] / whole, 3)
                shares[index] = min(shares[index], part)
    return shares


def _variables(role: Role, cards: Sequence[str], options: CardOptions, mps: Mapping[str, str]) -> dict[str, str]:
    variables = {"CUDA_VISIBLE_DEVICES": ",".join(cards)} if any(cards) else {}
    if mps:
        variables |= mps
        if role is Role.PREFILL and options.prefill_sms < 100:
            variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(options.prefill_sms)
        if role is Role.PREFILL:
            variables["CUDA_MPS_CLIENT_PRIORITY"] = _PRIORITIES[options.prefill_priority]
    return variables


@contextlib.contextmanager
def sharing(
    workers: Sequence[tuple[Role, ModelOptions]], cards: Sequence[str], options: CardOptions, environment: Environment
) -> Iterator[dict[str, str]]:
    """Starts MPS where workers share a card and it does not run yet, and ends it. Gives the variables by which a process
    finds it; none where it does not run."""
    counts = Counter(card for its in place(workers, cards, options, {}) for card in its.cards)
    if not counts or max(counts.values()) < 2:
        yield {}
    elif environment.mps_folder:
        yield {"CUDA_MPS_PIPE_DIRECTORY": environment.mps_folder}
    elif options.mps == "off" or shutil.which(_CONTROL) is None:
        reason = "it is switched off (--mps)" if options.mps == "off" else f"there is no {_CONTROL}"
        log.warning("workers share a card without MPS and take turns: tokens come milliseconds later", reason=reason)
        yield {}
    else:
        with _running_mps() as variables:
            yield variables


@contextlib.contextmanager
def _running_mps() -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory(prefix="kvrelay-mps-", ignore_cleanup_errors=True) as base:
        folders = {"CUDA_MPS_PIPE_DIRECTORY": pathlib.Path(base) / "pipe", "CUDA_MPS_LOG_DIRECTORY": pathlib.Path(base) / "log"}
        for folder in folders.values():
            folder.mkdir()
        variables = {name: str(folder) for name, folder in folders.items()}
        if not _control(variables, ["-d"]):
            yield {}
            return
        try:
            yield variables
        finally:
            _control(variables, [], "quit\n")


def _control(variables: Mapping[str, str], arguments: list[str], say: str = "") -> bool:
    """The daemon serves every card: workers choose theirs."""
    assigned = [f"{name}={value}" for name, value in variables.items()]
    command = ["env", "-u", "CUDA_VISIBLE_DEVICES", *assigned, _CONTROL, *arguments]
    try:
        result = subprocess.run(command, input=say, capture_output=True, text=True, timeout=_CONTROL_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("MPS does not answer", command=" ".join([_CONTROL, *arguments]), error=error)
        return False
    if result.returncode != 0:
        said = (result.stderr or result.stdout).strip()
        log.warning("MPS refuses", command=" ".join([_CONTROL, *arguments]), status=result.returncode, said=said)
    return result.returncode == 0
