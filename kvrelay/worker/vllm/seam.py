"""What the engine needs of a core that schedules and computes, and what such a core asks and tells about blocks.

    add -> step, step, ... -> outputs until one has a finish reason; or abort
    a sequence that a peer computes (`taken`)    add -> hooks.wanted, hooks.allocated -> received -> step ...
    a sequence that a peer takes over (`given`)  add -> hooks.passes, hooks.passed -> its output -> hooks.holds -> sent

One thread drives it. The hooks are called inside `step` and `abort`, by that thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from kvrelay.engine.fence import Fence
from kvrelay.sampling import SamplingParams
from kvrelay.states import FinishReason
from kvrelay.wire.serving import TokenLogprobs


class CoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence. `forced` is the output that another worker made of its sample: it goes on behind that."""

    id: str
    prompt: list[int]
    forced: list[int] = []
    params: SamplingParams
    max_tokens: int  # of its output, `forced` included; at most that of the parameters
    seed: int
    priority: int = 0
    cache_salt: str = ""
    prompt_logprobs: int | None = None


class CoreOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What a step has given one sequence."""

    id: str
    tokens: list[int]
    finish: FinishReason | None = None
    cached_tokens: int = 0  # of the prompt; told with the first tokens
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] = []  # of the prompt's tokens from the second on, as far as they were computed


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """A prompt's share in a forward pass that ends it: when the pass is over, all its KV is there."""

    id: str
    blocks: Sequence[int]
    num_computed: int  # tokens before


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreCounts:
    """Of this moment. `total` blocks are free, cached (and free), or held by sequences."""

    running: int
    waiting: int
    total: int
    free: int
    cached: int
    preemptions: int


class Hooks:
    """What a core asks and tells about the blocks of hand-overs. As they stand, of a core that shares none; each side of a
    hand-over overrides what concerns it."""

    def wanted(self, sequence_id: str, num_cached: int) -> int:
        """How many tokens behind the cached ones a peer will bring. Then the core gives it blocks, and waits."""
        return 0

    def allocated(self, sequence_id: str, blocks: Sequence[int], num_cached: int, fence: Fence) -> None:
        """The blocks of the whole prompt of a sequence for which `wanted` gave some. A pass may write them until the fence
        has passed."""
        raise AssertionError("nothing was wanted")

    def passes(self, ending: Sequence[Pass], fence: Fence) -> None:
        """A forward pass begins that ends these prompts. What was computed of them before is there once the fence has
        passed."""

    def layer_done(self, layer: int, fence: Fence) -> None:
        """In the middle of a pass: cheap."""

    def passed(self, fence: Fence) -> None:
        """The pass was launched to its end."""

    def holds(self, sequence_id: str) -> bool:
        """Whether a sequence that ends keeps its blocks until `Core.sent`."""
        return False


class Core(Protocol):
    @property
    def block_size(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    def add(self, request: CoreRequest) -> None:
        """Raises InvalidRequestError for what it cannot serve."""

    def abort(self, sequence_ids: Sequence[str]) -> None:
        """Harmless if unknown or over. Blocks stay where `hooks.holds` says so, and those of a sequence that waits for a peer
        stay until `received`."""

    def sent(self, sequence_id: str) -> None:
        """A sequence that has ended, and was held: its blocks are not read any more."""

    def received(self, sequence_id: str, token: int | None = None) -> None:
        """A sequence that waits for a peer has its KV, and goes on behind this token. Or it was aborted: no token, and no peer
        writes its blocks any more."""

    def step(self) -> tuple[list[CoreOutput], bool]:
        """And whether anything was computed."""

    def counts(self) -> CoreCounts: ...

    def close(self) -> None: ...
