"""Sequences that no engine knows, and plans made of them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from kvrelay.engine.interfaces import LoadedAdapter, Row, StepPlan
from kvrelay.ids import RequestId, new_request_id
from kvrelay.sampling import SamplingParams
from kvrelay.wire.serving import Image

_keys = itertools.count(1)


@dataclass(slots=True)
class FreeSequence:
    """Implements `SequenceView`."""

    tokens: list[int]
    block_table: list[int] = field(default_factory=list)
    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    num_prompt_tokens: int = -1
    sample: int = 0
    key: int = field(default_factory=lambda: next(_keys))
    request_id: RequestId = field(default_factory=new_request_id)
    images: tuple[Image, ...] = ()
    adapter: LoadedAdapter | None = None

    def __post_init__(self) -> None:
        if self.num_prompt_tokens < 0:
            self.num_prompt_tokens = len(self.tokens)


def whole(sequence: FreeSequence, *, samples: int = 1, prompt_logprobs: bool = False) -> Row:
    """All tokens at once."""
    return Row(sequence=sequence, start=0, count=len(sequence.tokens), samples=samples, prompt_logprobs=prompt_logprobs)


def last(sequence: FreeSequence) -> Row:
    """The newest token alone."""
    return Row(sequence=sequence, start=len(sequence.tokens) - 1, count=1, samples=1)


def plan(*rows: Row, copies: list[tuple[int, int]] | None = None, released: list[int] | None = None) -> StepPlan:
    return StepPlan(rows=list(rows), copies=copies or [], released=released or [])
