"""What the engine needs from others. It owns these protocols; `worker/` hands in the implementations.

The engine decides: it fills a `StepPlan` with which tokens of which sequence to compute into which blocks. The runner
computes: it answers with a `StepResult`. Neither knows how the other works inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from kvrelay.engine.fence import Fence
from kvrelay.errors import MediaError, UnsupportedModelError
from kvrelay.ids import RequestId
from kvrelay.sampling import SamplingParams
from kvrelay.wire.registry import Adapter
from kvrelay.wire.serving import Image, Logprob, TokenLogprobs


class Memory(Protocol):
    """Host memory. `fd` is set where other processes can map it."""

    @property
    def buffer(self) -> Any:
        """Writable."""

    @property
    def fd(self) -> int | None: ...


Allocate = Callable[[int], Memory]
"""Gives so many zeroed bytes: KV memory that transfers and the other ranks of a worker can reach. None: any memory will do."""


LayerListener = Callable[[int, Fence], None]


class SequenceView(Protocol):
    """What a runner may read of a sequence. It never writes any of it."""

    @property
    def key(self) -> int:
        """Unique within the engine; never reused."""

    @property
    def request_id(self) -> RequestId: ...

    @property
    def sample(self) -> int: ...

    @property
    def params(self) -> SamplingParams: ...

    @property
    def tokens(self) -> List[int]:
        """Prompt, then output so far."""

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def block_table(self) -> List[int]:
        """Block ids, in order of position: token p lives in block_table[p // block_size] at offset p % block_size."""

    @property
    def images(self) -> List[Image]:
        """Of the prompt, in order of their places in it."""

    @property
    def adapter(self) -> LoadedAdapter | None:
        """None: the base model's."""


class LoadedAdapter(Protocol):
    """A LoRA adapter that a runner has in memory, at least as long as anything refers to it."""

    @property
    def digest(self) -> str: ...


class Adapters(Protocol):
    """The LoRA adapters of a runner. Requests name them by the digest of their content, clients by their names."""

    def find(self, digest: str) -> LoadedAdapter | None: ...

    def records(self) -> list[Adapter]: ...

    def read(self, path: str) -> LoadedAdapter:
        """From any thread. Raises ModelError."""

    def add(self, name: str, path: str, adapter: LoadedAdapter) -> None:
        """In the place of one that has the name."""

    def unload(self, name: str) -> bool:
        """False if there is none of that name. Requests that have it keep it to their end."""


class NoAdapters:
    """Of a runner that takes none."""

    def find(self, digest: str) -> LoadedAdapter | None:
        return None

    def records(self) -> list[Adapter]:
        return []

    def read(self, path: str) -> LoadedAdapter:
        raise UnsupportedModelError("this worker takes no LoRA adapters")

    def add(self, name: str, path: str, adapter: LoadedAdapter) -> None:
        raise AssertionError("nothing was read")

    def unload(self, name: str) -> bool:
        return False


class Row(msgspec.Struct, gc=False):
    """One sequence's share of a step: compute tokens[start : start + count], whose KV goes to the sequence's blocks.

    If `samples` > 0, the logits after the last of them give that many next tokens (more than one only when a prompt with
    n > 1 ends: they are samples `sequence.sample` .. + samples - 1, which the engine forks afterwards).
    """

    sequence: SequenceView
    start: int
    count: int
    samples: int
    prompt_logprobs: bool = False  # report the logprobs of prompt tokens start + 1 .. start + count (those that exist)
    candidates: int = 0  # with samples == 0: report so many of the most likely next tokens instead, for a beam search


@dataclass(slots=True)
class StepPlan:
    """One forward pass. `copies` (source block, target block) happen before anything else, in order."""

    rows: list[Row] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    released: list[int] = field(default_factory=list)  # keys of sequences that ended: the runner forgets them

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)


@dataclass(frozen=True, slots=True)
class RowFailure:
    """Why one sequence could not go on. `param` names the client's field that is wrong; None: the computation went wrong."""

    message: str
    param: str | None = None


@dataclass(slots=True)
class RowResult:
    """Answer to one row: `tokens` has `row.samples` entries; `logprobs` as many, when asked for.

    `failure` says why this sequence alone could not go on (a grammar that cannot be compiled, say); the others are whole.
    """

    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    candidates: list[Logprob] | None = None  # in falling order; of equal ones the lower token id comes first
    failure: RowFailure | None = None


@dataclass(slots=True)
class StepResult:
    """One RowResult per row of the plan, in its order."""

    rows: list[RowResult]


class Runner(Protocol):
    """Computes. `launch` starts a plan and may return before it is done; `collect` waits for the oldest one launched."""

    @property
    def num_blocks(self) -> int:
        """KV blocks there are, numbered from 0."""

    @property
    def num_host_blocks(self) -> int:
        """KV blocks on the host, numbered from 0; 0 if there are none."""

    def begin_copies(self, saves: List[tuple[int, int]], loads: List[tuple[int, int]]) -> int:
        """Starts to copy whole blocks: `saves` are (block, host block), `loads` (host block, block). Returns a ticket at once.

        The copy sees what plans collected before have computed. It runs beside the plan under way and later ones, so nothing
        may write what it reads, or touch what it writes, before it ended."""

    def finished_copies(self, wait_s: float = 0.0) -> list[int]:
        """Tickets of copies that ended, each once, in any order. If there are none, waits up to `wait_s` for one."""

    def on_layer(self, listener: LayerListener) -> None:
        """The listener is told in the middle of a pass, from the thread that launched it, when a layer of all rows was
        launched: layer 0, 1, ..., or some of them and always the last. Its KV, and that of the layers before, is stored when
        the fence has passed. A runner with a listener does not run ahead."""

    def fence(self) -> Fence:
        """Behind everything launched so far, collected or not: a plan without samples may be collected while it runs."""

    def expect(self, sequences: List[SequenceView]) -> None:
        """Their KV is on the way into their blocks: what their first step needs may be made ready. They are released as those
        that ran."""

    @property
    def runs_ahead(self) -> bool:
        """Whether a plan may be launched before the one before it is collected, if that reports no prompt logprobs and no
        candidates. Rows may start where their sequence's tokens end: the token is the one that the plan before chooses. Such a
        row has `count` and `samples` 1, its sequence one row with `samples` 1 in the plan before, and nothing in its parameters
        that looks at the tokens so far."""

    def launch(self, plan: StepPlan) -> None: ...

    def collect(self) -> StepResult: ...

    def close(self) -> None: ...


class Features(Protocol):
    """What is there of the images of prompts, by digest. The engine plans tokens of an image only while it holds the
    image and its features are ready, and holds it until no plan can want them again."""

    def is_ready(self, digest: str) -> bool: ...

    def hold(self, digest: str) -> None:
        """From now on its features are kept when they come, or if they are there."""

    def release(self, digest: str) -> None:
        """Once for each `hold`."""

    @property
    def num_held(self) -> int:
        """Digests that are held; 0 once all were released."""


class Tower(Protocol):
    """Makes features of images, and puts them into its store."""

    @property
    def store(self) -> Features: ...

    @property
    def num_encoded(self) -> int:
        """Images that went through it."""

    @property
    def num_hits(self) -> int:
        """Images that did not need to."""

    def encode(self, images: List[Image]) -> Mapping[str, MediaError]:
        """Until this returns, the features of each image are in the store (as far as it keeps what is not held). Images
        that cannot be read are told by digest; the others are whole."""


def patches_in(image: Image) -> int:
    frames, num_rows, num_columns = image.grid
    return frames * num_rows * num_columns
