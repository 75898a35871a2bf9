"""What the front end needs of the router that serves its requests, or of another backend in its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from kvrelay.ids import WorkerId
from kvrelay.router.continuations import Continuations
from kvrelay.router.parent import Parent
from kvrelay.router.shown import ClusterShown
from kvrelay.router.stream import RequestStream
from kvrelay.router.timelines import Timelines
from kvrelay.sampling import SamplingParams
from kvrelay.states import Role
from kvrelay.wire.registry import Adapter
from kvrelay.wire.serving import Image, Keep


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt as token ids, ready for a worker."""

    external_id: str
    prompt: Sequence[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    adapter: str = ""  # the digest of a LoRA adapter; empty: the base model
    data_parallel_rank: int | None = None  # of the worker that is to generate; None: of any
    session: str = ""  # requests of one session go to the same workers while these can take them
    trace: Mapping[str, str] = {}  # W3C headers for its workers: the parent in them is the router's own span
    parent_span_id: str = ""  # of the client's span, if it sent one
    arrived: float = 0.0  # when its client asked, by the monotonic clock; 0: when it is submitted
    timeout_s: float | None = None  # from submit to the last token
    images: Sequence[Image] = ()  # with their files
    owner: str = ""  # whose request it is: a digest of the API key; empty where no keys are asked for
    answer_id: str = ""  # another name under which it can be continued from; requests of one answer share it
    first_choice: int = 0  # the place of its first sample among the choices of that answer
    keep: Keep | None = None  # KV that is to be kept when it ends
    is_stored: bool = False  # its answer is to be remembered
    parent: Parent | None = None  # the prompt begins with all of this one's tokens

    def as_parents(self) -> list[Parent]:
        """As others may continue from it: one parent per sample."""
        return [
            Parent(
                external_id=self.external_id,
                answer_id=self.answer_id,
                choice=self.first_choice + sample,
                owner=self.owner,
                cache_salt=self.cache_salt,
                adapter=self.adapter,
                data_parallel_rank=self.data_parallel_rank,
                num_prompt_tokens=len(self.prompt),
                images=self.images,
                is_stored=self.is_stored,
                kept_id=None if self.keep is None else self.keep.kept_ids[sample],
            )
            for sample in range(self.params.n)
        ]


class DrainOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker was told, as `POST /admin/drain` and `/admin/role` answer it."""

    worker: WorkerId
    role: Role
    next_role: Role | None  # None: it leaves for good
    warning: str  # what the cluster cannot do without it; empty if others remain


class AdapterChange(msgspec.Struct, frozen=True, kw_only=True):
    """What came of an order about a LoRA adapter, as `POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter` answer it."""

    name: str
    workers: list[WorkerId]  # that carried it out


class Backend(Protocol):
    """Serves prompts. Everything runs on the event loop's thread."""

    @property
    def ready(self) -> bool:
        """Whether a request submitted now could be served."""

    @property
    def max_model_len(self) -> int:
        """Of the workers that are up; 0 while there are none."""

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The LoRA adapters that requests can ask for, by name."""

    async def load_adapter(self, name: str, path: str, *, in_place: bool) -> AdapterChange:
        """On every worker. Raises ConflictError, InvalidRequestError or UnavailableError."""

    async def unload_adapter(self, name: str) -> AdapterChange:
        """On every worker. Requests that have it keep it to their end. Raises NotFoundError or UnavailableError."""

    def submit(self, request: GenerateRequest) -> RequestStream:
        """Raises QueueFullError or UnavailableError. The caller takes the stream to its end or aborts it."""

    @property
    def continuations(self) -> Continuations:
        """Which requests can be continued from."""

    async def find_parent(self, handle: str, owner: str, *, wait_s: float) -> Parent:
        """The one that has this name, looked for everywhere, and once it has ended. Raises NotFoundError, InvalidRequestError
        (it has several choices), or ConflictError (it has not ended within `wait_s`)."""

    async def find_parents(self, handle: str, owner: str) -> list[Parent]:
        """All choices of that name, ended or not. Raises NotFoundError."""

    async def delete_parents(self, handle: str, owner: str) -> None:
        """None of them can be continued from any more, and no worker keeps their KV. Raises NotFoundError."""

    @property
    def timelines(self) -> Timelines:
        """What became of the last requests."""

    def cluster(self) -> ClusterShown:
        """The JSON of GET /cluster."""

    def drain(self, worker_id: str, role: Role | None = None) -> DrainOrder:
        """Tells a worker to finish and leave; with a role, to come back in it. Raises NotFoundError, ConflictError or
        UnavailableError."""
