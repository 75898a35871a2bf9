"""The serving plane: token ids in, token ids out. A router's DEALER talks to a worker's ROUTER socket.

router                                   worker
  | Hello(version, router_id) ------------> |   opens the connection
  | <------------ Welcome(worker) | Refused |
  | Submit, Abort, Finish ----------------> |
  | Encode -------------------------------> |   an encode worker's share of a request: its images
  | <-------------------------- StepOutputs |   one per engine step, with every request's new tokens
  | Ping ---------------------------------> |   keeps an idle connection's requests alive
  | PeerLost -----------------------------> |   another worker is gone: transfers with it fail at once
  | Drain --------------------------------> |   finish what you have, then leave (or come back in another role)
  | ReleaseKept --------------------------> |   no client will continue from these any more
  | Remember, Forget ---------------------> |   a request that has ended, for the other routers
  | <---------------------------- Forgotten |   by another router
  | AskKept, then KeptTold <--------------> |   a router that did not serve the parent looks for it
  | AskTimelines, TimelinesTold <---------> |   passed on to the other routers as they are (`timelines.py`)
  | LoadAdapter, UnloadAdapter -----------> |   an operator's order about LoRA adapters
  | UseAdapter, DropAdapter --------------> |   once every worker has read what LoadAdapter named, or some could not
  | <------------------------- AdaptersTold |   its end, to the router that gave it; and to all others which there are now
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeVar

import msgspec

from kvrelay.errors import (
    HandOverError,
    InternalError,
    InvalidRequestError,
    MissingEmbeddingError,
    QueueFullError,
    RequestError,
    UnavailableError,
)
from kvrelay.ids import KeptId, RequestId, RouterId, TransferId, WorkerId
from kvrelay.sampling import SamplingParams
from kvrelay.states import FinishReason, Role, Stage
from kvrelay.wire.adapters import AboutAdapters, AdaptersTold
from kvrelay.wire.registry import WorkerLoad, WorkerRecord
from kvrelay.wire.timelines import AboutTimelines

Logprob = tuple[int, float]  # token id, natural logarithm of its probability


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Of one token: its own logprob, the most likely alternatives in falling order, and its place among all tokens."""

    logprob: float
    top: list[Logprob]
    rank: int | None = None  # 1 is the likeliest; None where it was not counted


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of all messages of this channel."""


# router -> worker


class Hello(Message, frozen=True, kw_only=True):
    version: int
    router_id: RouterId
    silence_s: float = 4.0  # a router not heard for this many seconds is considered dead: its requests are aborted


class TransferInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt to hand a request's KV from a prefill worker to a decode worker. Both are given the same one."""

    transfer_id: TransferId
    mode: Literal["write", "read"]
    producer: WorkerId
    consumer: WorkerId
    signal_address: str  # where the producer listens
    trace_id: str = ""  # of the request, for log lines


class Resumed(msgspec.Struct, frozen=True, array_like=True):
    """A sample that goes on where another worker left it: its output tokens so far, which the client has seen."""

    sample: int
    tokens: list[int]


class Keep(msgspec.Struct, frozen=True, array_like=True):
    """Asks to keep each sample's KV when the sample ends, whatever ends it. Answered by one KeptNews per sample."""

    kept_ids: list[KeptId]  # one per sample
    ttl_s: float
    owner: str = ""  # a digest of the API key whose holder may continue from it; empty where no keys are asked for


class Image(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An image in a prompt. Its placeholders, prompt[start : start + num_tokens], are ids derived from its digest
    (`kvrelay/media/placeholders.py`), so that prompts with different images are different prompts to every cache."""

    digest: str  # equal for equal embeddings: of the file's bytes and the size it is brought to
    start: int
    num_tokens: int
    grid: tuple[int, int, int]  # frames, rows and columns of patches, before patches are merged
    data: bytes = b""  # the file, for a worker that makes the embeddings itself; else they are relayed to it


class EmbeddingTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt to hand the embeddings of one image from an encode worker to the worker that computes the prompt. Both are
    given the same one."""

    transfer_id: TransferId
    digest: str  # of the image
    producer: WorkerId
    consumer: WorkerId
    signal_address: str  # where the producer listens
    trace_id: str = ""  # of the request, for log lines


class Submit(Message, frozen=True, kw_only=True):
    """Asks for one request. Answered by outputs until each of its `params.n` samples has a finish reason, or by one Failure.

    With `resume` the request has been served in part by a worker that was lost. Only the samples listed go on; their tokens
    are taken as they are, and the first output of each has the position after them.
    """

    request_id: RequestId
    external_id: str  # what the client sees; for logs and continuations
    prompt: list[int]
    params: SamplingParams
    priority: int = 0  # lower runs first
    cache_salt: str = ""  # prompts share cached KV only within a salt
    adapter: str = ""  # the digest of a LoRA adapter; empty: the base model
    trace: dict[str, str] = {}  # W3C trace headers
    transfer: TransferInfo | None = None  # None: this worker computes prompt and output
    resume: list[Resumed] = []  # empty: all samples begin at the beginning
    attempt: int = 0  # how often it was sent before; a request that was accepted once is not turned away by a full queue
    keep: Keep | None = None
    inherit: KeptId | None = None  # the prompt begins with the tokens of this kept KV, which is taken if it is there
    images: list[Image] = []
    embeddings: list[EmbeddingTransfer] = []  # how those of images without data come, if this worker computes the prompt


class Encode(Message, frozen=True, kw_only=True):
    """Asks an encode worker for embeddings of a request's images. Answered by HandedOver once none is awaited, or a Failure."""

    request_id: RequestId
    external_id: str
    images: list[Image]  # each digest once, with data
    transfers: list[EmbeddingTransfer]  # one for each image, in the same order
    priority: int = 0
    attempt: int = 0


class Abort(Message, frozen=True, kw_only=True):
    request_ids: list[RequestId]


class Finish(Message, frozen=True, kw_only=True):
    """A normal end found by the router (a stop string): the sample keeps `keep_tokens` output tokens."""

    request_id: RequestId
    sample: int
    keep_tokens: int
    reason: FinishReason


class Ping(Message, frozen=True, kw_only=True):
    pass


class PeerLost(Message, frozen=True, kw_only=True):
    """The router considers this worker dead. That is no proof: memory it may still write stays in quarantine."""

    worker_id: WorkerId


class Drain(Message, frozen=True, kw_only=True):
    """Take nothing new, finish what is there, leave. With a role: then come back in it, as a new worker."""

    role: Role | None = None


class ReleaseKept(Message, frozen=True, kw_only=True):
    kept_ids: list[KeptId]


class ParentInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sample of a request that has ended, as its router knows it: all that another router needs to go on from it."""

    external_id: str
    answer_id: str
    choice: int
    owner: str
    cache_salt: str
    num_prompt_tokens: int
    tokens: bytes  # prompt and output, 4 bytes each in the order of this machine
    kept_id: KeptId | None = None
    images: list[Image] = []
    record: bytes = b""  # of a stored answer
    forget_at: float = 0.0  # of a stored answer: Unix time
    adapter: str = ""  # the digest of its LoRA adapter
    data_parallel_rank: int | None = None  # that it asked for


class Remember(Message, frozen=True, kw_only=True):
    parent: ParentInfo


class Forget(Message, frozen=True, kw_only=True):
    """Its client has deleted it."""

    handle: str
    owner: str


class AskKept(Message, frozen=True, kw_only=True):
    """`handle` is the kept KV's id, or the parent's id as its client knows it."""

    handle: str
    owner: str


# worker -> router


class Welcome(Message, frozen=True, kw_only=True):
    version: int
    worker: WorkerRecord


class Refused(Message, frozen=True, kw_only=True):
    reason: str


class SequenceOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New tokens of one sample. `position` is the index of the first of them among the sample's output tokens."""

    request_id: RequestId
    sample: int
    position: int
    tokens: list[int]
    finish: FinishReason | None = None
    cached_tokens: int = 0  # prompt tokens that were not computed anew
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # once per request, with its first token


class FirstToken(msgspec.Struct, frozen=True, array_like=True):
    """The first output token of one sample (of one that is resumed: the next), sampled by a prefill worker for a decode worker
    to go on from."""

    sample: int
    token: int
    logprobs: TokenLogprobs | None = None
    cached_tokens: int = 0  # as in SequenceOutput
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # as in SequenceOutput


# What a step tells of requests beside their tokens


class StepNews(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of `News`."""


class Failure(StepNews, frozen=True, array_like=True):
    """The one terminal answer to a request that could not be served. `kind` is the error's kind in `errors.py`."""

    request_id: RequestId
    kind: str
    message: str
    param: str | None = None  # the client's field that is wrong
    digest: str | None = None  # of a MissingEmbeddingError
    by_producer: bool = False  # of a HandOverError

    @classmethod
    def of(cls, request_id: RequestId, error: RequestError) -> Failure:
        match error:
            case MissingEmbeddingError():
                return cls(request_id, error.kind, error.message, digest=error.digest)
            case HandOverError():
                return cls(request_id, error.kind, error.message, by_producer=error.by_producer)
            case _:
                return cls(request_id, error.kind, error.message, error.param)

    def error(self) -> RequestError:
        match self.kind:
            case MissingEmbeddingError.kind:
                return MissingEmbeddingError(self.message, digest=self.digest)
            case HandOverError.kind:
                return HandOverError(self.message, by_producer=self.by_producer)
            case QueueFullError.kind:
                return QueueFullError(self.message)
            case InvalidRequestError.kind:
                return InvalidRequestError(self.message, param=self.param)
            case UnavailableError.kind:
                return UnavailableError(self.message, param=self.param)
            case _:
                return InternalError(self.message, param=self.param)


class HandedOver(StepNews, frozen=True, array_like=True):
    """A prefill or encode worker's terminal answer: the next worker has all it wanted."""

    request_id: RequestId


class KeptNews(StepNews, frozen=True, array_like=True):
    """Once for each sample whose KV was to be kept: it is, for `ttl_s` from now, or it is not, and why."""

    request_id: RequestId
    sample: int
    kept_id: KeptId
    kept: bool
    ttl_s: float = 0.0
    num_tokens: int = 0  # of the parent, prompt and output
    num_blocks: int = 0
    reason: str = ""


class Inherited(StepNews, frozen=True, array_like=True):
    """Once for each request that was to inherit kept KV, before its first token: of how many tokens it did. None, if that was
    gone: then the prefix cache was asked, and what that did not have was computed."""

    request_id: RequestId
    num_tokens: int
    num_cached: int = 0  # if it was gone: tokens that the prefix cache had


class BeamResult(StepNews, frozen=True, array_like=True):
    """Once for each sample of a beam search, in the message that brings the sample's tokens, which all come at once."""

    request_id: RequestId
    sample: int  # in falling order of score
    cumulative_logprob: float
    score: float


class LegTimes(StepNews, frozen=True, array_like=True):
    """Once for each request that a worker accepted, when it has ended there: the stages that it went through, each with the
    moment at which it began, and the end of the last. Seconds of the worker's own clock; the first is when the request came,
    and the last is when this was said."""

    request_id: RequestId
    stages: list[tuple[Stage, float]]
    ended: float
    resumed_s: float = 0.0  # from the first part of an embedding that did not fit at once to its last; the longest


News = Failure | HandedOver | KeptNews | Inherited | BeamResult | LegTimes
AnyNews = TypeVar("AnyNews", bound=StepNews)
COMES_FIRST = (Inherited, BeamResult)  # to be heard before the tokens of the same message, with which a request may end


def of_kind(kind: type[AnyNews], news: Iterable[News]) -> list[AnyNews]:
    return [one for one in news if isinstance(one, kind)]


class KeptInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The kept KV of one sample, as its worker sees it."""

    kept_id: KeptId
    external_id: str
    owner: str
    cache_salt: str
    tokens: list[int]
    num_prompt_tokens: int  # of the parent
    num_blocks: int
    on_host: bool
    ttl_s: float  # what is left
    images: list[Image] = []
    adapter: str = ""  # of the parent


class KeptTold(Message, frozen=True, kw_only=True):
    """Answers AskKept. A parent with several samples may have several; none: not here."""

    handle: str
    owner: str
    kept: list[KeptInfo] = []
    known: list[ParentInfo] = []


class Forgotten(Message, frozen=True, kw_only=True):
    """Another router was told to delete it."""

    handle: str
    owner: str


class StepOutputs(Message, frozen=True, kw_only=True):
    worker_id: WorkerId
    step: int
    load: WorkerLoad
    outputs: list[SequenceOutput] = []
    news: list[News] = []


AboutParents = Remember | Forget | AskKept | ReleaseKept
ToWorker = Hello | Submit | Encode | Abort | Finish | Ping | PeerLost | Drain | AboutParents | AboutTimelines | AboutAdapters
ToRouter = Welcome | Refused | StepOutputs | KeptTold | Forgotten | AboutTimelines | AdaptersTold
