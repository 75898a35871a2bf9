"""What a pass and a transfer take: measured by `kvrelay bench` (`fit`), or given by hand.

    a pass      of prompt tokens: the curve `prefill`, and attention for every pair of a new token and one before it;
                of sequences that decode: the curve `decode`, and reading the KV of all tokens that they hold;
                of both: the sum, less the weights that are read once
    images      of a pass of the vision tower: the curve `encode`, of the tokens of all its images
    a transfer  its bytes at `gb_per_s`, one after the other between two workers, and `latency_ms` for every message

A curve goes through measured points, straight between them and beyond. Where all workers share one host, two tables say how
many times longer a pass takes while so many are under way. A step takes longer or shorter than its curve says by one of
`jitter`, and a hand-over one of `hand_over_ms`, as chance will have it: of those that were measured beside such passes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

T = TypeVar("T")
Point = tuple[int, float]  # how much, milliseconds
State = tuple[int, int]  # passes under way: those with prompts, those of steps alone

ALONE: State = (0, 1)  # a step


class HandOvers(msgspec.Struct, frozen=True):
    """Milliseconds from a prompt's last layer to the decode worker's next step, each as likely as the others."""

    alone: tuple[float, ...] = ()
    beside_steps: tuple[float, ...] = ()  # none: as alone


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    prefill: tuple[Point, ...]  # prompt tokens of a pass, without attention
    decode: tuple[Point, ...]  # sequences of a pass, a token each, without reading KV
    attention_ms_per_million_pairs: float = 0.0  # of a prompt token and one before it, or itself by half
    kv_read_ms_per_1000_tokens: float = 0.0  # that the sequences of a step hold
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

    def pass_s(self, num_prompt_tokens: int, num_decoding: int, *, num_pairs: float = 0.0, num_held: int = 0) -> float:
        """`num_pairs`: of all prompts (`attended`); `num_held`: tokens that the sequences which decode hold."""
        ms = interpolate(self.prefill, num_prompt_tokens) if num_prompt_tokens else 0.0
        if num_decoding:
            ms += interpolate(self.decode, num_decoding) - (self.weights_ms if ms else 0.0)
        return ms / 1000.0 + num_pairs * self.pair_s + num_held * self.held_s

    @property
    def pair_s(self) -> float:
        return self.attention_ms_per_million_pairs / 1e9

    @property
    def held_s(self) -> float:
        """What each token that a sequence holds adds to a step."""
        return self.kv_read_ms_per_1000_tokens / 1e6

    def transfer_s(self, num_tokens: int) -> float:
        return num_tokens * self.kv_bytes_per_token / (self.gb_per_s * 1e9)

    def encode_s(self, num_tokens: int) -> float:
        return interpolate(self.encode, num_tokens) / 1000.0

    def embedding_s(self, num_tokens: int) -> float:
        return num_tokens * self.embedding_bytes_per_token / (self.gb_per_s * 1e9)


def attended(num_before: int, num_new: int) -> float:
    """Pairs of a new token of a prompt and one before it, to which its attention looks."""
    return num_new * (num_before + num_new / 2)


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
