"""What a pass and a transfer take: measured by `kvrelay bench`, or given by hand.

    a pass      of prompt tokens: the curve `prefill`; of sequences that decode: the curve `decode`; of both: the sum, less the
                weights that are read once
    images      of a pass of the vision tower: the curve `encode`, of the tokens of all its images
    a transfer  its bytes at `gb_per_s`, one after the other between two workers, and `latency_ms` for every message

A curve goes through measured points, straight between them and beyond. Where all workers share one host, two tables say how
many times longer a pass takes while so many are under way. A step takes longer or shorter than its curve says by one of
`jitter`, and a hand-over one of `hand_over_ms`, as chance will have it: of those that were measured beside such passes.
"""

from __future__ import annotations

import pathlib
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from kvrelay.errors import ConfigError

T = TypeVar("T")
Point = tuple[int, float]  # how much, milliseconds
State = tuple[int, int]  # passes under way: those with prompts, those of steps alone

_PREFILL = re.compile(r"prefill_(\d+)_ms")
_DECODE = re.compile(r"decode_ms_b(\d+)|b(\d+)_in\d+_itl_ms")
_TRANSPORTS = ("shm", "nixl", "mooncake")  # in this order, the first that a file has


ALONE: State = (0, 1)  # a step


class HandOvers(msgspec.Struct, frozen=True):
    """Milliseconds from a prompt's last layer to the decode worker's next step, each as likely as the others."""

    alone: tuple[float, ...] = ()
    beside_steps: tuple[float, ...] = ()  # none: as alone


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    prefill: tuple[Point, ...]  # prompt tokens of a pass
    decode: tuple[Point, ...]  # sequences of a pass, a token each
    gb_per_s: float = 10.0
    latency_ms: float = 0.5  # of a message between workers
    router_ms: float = 1.0  # from a client to the workers
    kv_bytes_per_token: int = 131_072
    num_layers: int = 32
    encode: tuple[Point, ...] = ((0, 3.0), (1000, 23.0))  # image tokens of a pass
    embedding_bytes_per_token: int = 8192
    prefill_sharing: dict[State, float] = {}  # factors, the pass itself counted; none: workers share nothing
    decode_sharing: dict[State, float] = {}
    jitter: dict[State, tuple[float, ...]] = {}  # factors of steps, each as likely; none: a step always takes the same time
    hand_over_ms: HandOvers = HandOvers()  # none: `latency_ms`

    @property
    def weights_ms(self) -> float:
        """Of a pass, however small."""
        return min(interpolate(self.prefill, 1), interpolate(self.decode, 1))

    def pass_s(self, num_prompt_tokens: int, num_decoding: int) -> float:
        ms = interpolate(self.prefill, num_prompt_tokens) if num_prompt_tokens else 0.0
        if num_decoding:
            ms += interpolate(self.decode, num_decoding) - (self.weights_ms if ms else 0.0)
        return ms / 1000.0

    def transfer_s(self, num_tokens: int) -> float:
        return num_tokens * self.kv_bytes_per_token / (self.gb_per_s * 1e9)

    def encode_s(self, num_tokens: int) -> float:
        return interpolate(self.encode, num_tokens) / 1000.0

    def embedding_s(self, num_tokens: int) -> float:
        return num_tokens * self.embedding_bytes_per_token / (self.gb_per_s * 1e9)


# `bench gpu` on an H200 with the shape of Llama-3.1-8B in bfloat16 (bench/results/nvidia-h200/gpu.json); transfers and
# images are a guess
H200_8B = Costs(
    prefill=((512, 11.735), (2048, 43.236), (8192, 202.851)),
    decode=((1, 3.847), (8, 4.493), (64, 6.793), (256, 12.231)),
)


def interpolate(points: Sequence[Point], amount: float) -> float:
    """Never less than nothing."""
    if len(points) == 1:
        return points[0][1] * amount / points[0][0]
    index = min(max(1, bisect_left(points, amount, key=lambda point: point[0])), len(points) - 1)
    (low, at_low), (high, at_high) = points[index - 1 : index + 1]
    return max(0.0, at_low + (at_high - at_low) * (amount - low) / (high - low))


def most_like(table: Mapping[State, T], state: State) -> T:
    """What was measured in this state; or, if it was not, in the one most like it."""
    known = table.get(state)
    if known is None:
        known = table[min(table, key=lambda other: abs(other[0] - state[0]) + abs(other[1] - state[1]))]
    return known


def line(base_ms: float, ms_each: float) -> tuple[Point, ...]:
    return ((0, base_ms), (1000, base_ms + 1000 * ms_each))


def fit(paths: Iterable[pathlib.Path], otherwise: Costs = H200_8B) -> Costs:
    """From result files of `bench engine`, `bench gpu` and `bench relay`. What none of them has is that of
    `otherwise`. Raises ConfigError."""
    figures: dict[str, float] = {}
    for path in paths:
        figures |= _read(path)
    found = fitted(figures)
    if figures and not found:
        raise ConfigError("--costs: none of these files has figures of `bench engine`, `bench gpu` or `bench relay`")
    return msgspec.structs.replace(otherwise, **found)


def fitted(figures: Mapping[str, float]) -> dict[str, object]:
    """The costs that these figures tell."""
    prefill, decode = _points(_PREFILL, figures), _points(_DECODE, figures)
    if len(prefill) == 1 and decode:  # a pass of one token costs the same, whatever it is
        prefill = ((1, decode[0][1]), *prefill)
    found: dict[str, object] = {name: points for name, points in (("prefill", prefill), ("decode", decode)) if points}
    speeds = [figures[f"{name}_gb_per_s"] for name in _TRANSPORTS if f"{name}_gb_per_s" in figures]
    if speeds:
        found["gb_per_s"] = speeds[0]
    if "handover_beyond_step_ms_p50" in figures:
        beside_bytes = figures["handover_beyond_step_ms_p50"] - figures.get("last_chunk_raw_ms_p50", 0.0)
        found["latency_ms"] = max(0.01, beside_bytes / 2)  # there and back
    return found


def _points(pattern: re.Pattern[str], figures: Mapping[str, float]) -> tuple[Point, ...]:
    matches = [(pattern.fullmatch(name), figure) for name, figure in figures.items()]
    return tuple(sorted({int(match[match.lastindex or 0]): figure for match, figure in matches if match}.items()))


class _File(msgspec.Struct):
    results: dict[str, float]


def _read(path: pathlib.Path) -> dict[str, float]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_File).results
    except OSError as error:
        raise ConfigError(f"--costs: cannot read {path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--costs: {path} is no result file of kvrelay bench: {error}") from error
