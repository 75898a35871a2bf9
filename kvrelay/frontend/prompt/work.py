"""A request made ready: all that its workers and its answer need to know."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kvrelay.frontend.prompt.types import SamplingFields
from kvrelay.router.parent import Parent
from kvrelay.sampling import SamplingParams
from kvrelay.wire.serving import Image


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """The request that another one continues from."""

    handle: str  # as the client named it
    parent: Parent
    prompt: list[int]  # all tokens of the parent, and the suffix


@dataclasses.dataclass(frozen=True, slots=True)
class LostOrigin:
    """A request whose tokens are gone: the prompt that came beside its name is computed instead."""

    handle: str


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """What is to be generated."""

    request: SamplingFields
    prompts: list[list[int]]
    params: Sequence[SamplingParams]  # one per prompt: max_tokens may differ
    keep_s: float  # how long its KV is kept for continuations; 0: not at all
    origin: Origin | LostOrigin | None  # what its one prompt continues from, or was to continue from
    images: Sequence[Image]  # of a conversation, which is one prompt
    is_stored: bool = False  # its answer is to be remembered
