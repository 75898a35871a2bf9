"""The serving plane: token ids in, token ids out. A router's DEALER talks to a worker's ROUTER socket.

router                                   worker
  | Hello(version, router_id) ------------> |   opens the connection
  | <------------ Welcome(worker) | Refused |
  | Submit, Abort, Finish ----------------> |
  | <-------------------------- StepOutputs |   one per engine step, with every request's new tokens
  | Ping ---------------------------------> |   keeps an idle connection's requests alive
  | PeerLost -----------------------------> |   another worker is gone: transfers with it fail at once
  | Drain --------------------------------> |   finish what you have, then leave (or come back in another role)
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kvrelay.ids import RequestId, RouterId, TransferId, WorkerId
from kvrelay.sampling import SamplingParams
from kvrelay.states import FinishReason, Role
from kvrelay.wire.registry import WorkerLoad, WorkerRecord

Logprob = tuple[int, float]  # token id, natural logarithm of its probability


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Of one token: its own logprob, and the most likely alternatives in falling order."""

    logprob: float
    top: list[Logprob]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of all messages of this channel."""


# router -> worker


class Hello(Message, frozen=True, kw_only=True):
    version: int
    router_id: RouterId
    lease_s: float = 4.0  # a router silent for so long is taken for dead, and its requests are aborted


class TransferInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt to hand a request's KV from a prefill worker to a decode worker. Both are given the same one."""

    transfer_id: TransferId
    mode: Literal["write", "read"]
    producer: WorkerId
    consumer: WorkerId
    signal_address: str  # where the producer listens


class Resumed(msgspec.Struct, frozen=True, array_like=True):
    """A sample that goes on where another worker left it: its output tokens so far, which the client has seen."""

    sample: int
    tokens: list[int]


class Submit(Message, frozen=True, kw_only=True):
    """Asks for one request. Answered by outputs until each of its `params.n` samples has a finish reason, or by one Failure.

    With `resume` the request has been served in part by a worker that was lost. Only the samples listed go on; their tokens
    are taken as they are, and the first output of each has the position after them.
    """

    request_id: RequestId
    external_id: str  # what the client sees; for logs and later for continuation
    prompt: list[int]
    params: SamplingParams
    priority: int = 0  # lower runs first
    cache_salt: str = ""  # prompts share cached KV only within a salt
    trace: dict[str, str] = {}  # W3C trace headers
    transfer: TransferInfo | None = None  # None: this worker computes prompt and output
    resume: list[Resumed] = []  # empty: all samples begin at the beginning
    attempt: int = 0  # how often it was sent before; a request that was accepted once is not turned away by a full queue


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
    """The router takes this worker for gone. That is no proof of death: memory it may still write stays in quarantine."""

    worker_id: WorkerId


class Drain(Message, frozen=True, kw_only=True):
    """Take nothing new, finish what is there, leave. With a role: then come back in it, as a new worker."""

    role: Role | None = None


# worker -> router


class Welcome(Message, frozen=True, kw_only=True):
    version: int
    worker: WorkerRecord


class Refused(Message, frozen=True, kw_only=True):
    reason: str


class SequenceOutput(msgspec.Struct, frozen=True, array_like=True):
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


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """The one terminal answer to a request that could not be served. `kind` is the error's kind in `errors.py`."""

    request_id: RequestId
    kind: str
    message: str
    param: str | None = None


class StepOutputs(Message, frozen=True, kw_only=True):
    worker_id: WorkerId
    step: int
    load: WorkerLoad
    outputs: list[SequenceOutput] = []
    failures: list[Failure] = []
    handed_over: list[RequestId] = []  # a prefill worker's terminal word: the decode worker has all it wanted


ToWorker = Hello | Submit | Abort | Finish | Ping | PeerLost | Drain
ToRouter = Welcome | Refused | StepOutputs


def since(message: ToWorker) -> int:
    """The protocol version from which on a worker understands this message. What older ones may ignore does not count."""
    match message:
        case PeerLost() | Drain():
            return 2
        case Submit():
            return 2 if message.resume else 1
        case _:
            return 1
