"""One try of a request on its workers.

    Plan         which workers: the one that generates, one that computes the prompt for it, encode workers (plan.py chooses)
    Legs         the request's part on each of them, under an id of its own
    Attempt      plan and legs, from the messages that are sent until the request ends or is sent again
    OpenRequest  a request from submit to its end, through all of its attempts

The decode leg is the one that generates, whatever its worker's role. If there is no prefill leg, its worker computes the prompt
too. Each distinct image that has to be encoded is a transfer of its own, from an encode leg to the leg with the prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from kvrelay.errors import InvalidRequestError
from kvrelay.ids import KeptId, RequestId, WorkerId, new_request_id, new_transfer_id, read_trace
from kvrelay.router.backend import GenerateRequest
from kvrelay.router.peer import Leg, Peer
from kvrelay.router.policy import tokens_of
from kvrelay.router.stream import RequestStream
from kvrelay.router.timelines import Timeline
from kvrelay.states import HandleState, Role
from kvrelay.wire.serving import EmbeddingTransfer, Encode, Image, Keep, Resumed, Submit, TransferInfo

Mode = Literal["write", "read"]


@dataclass(frozen=True, slots=True)
class EncodeShare:
    """What one encode worker is asked for."""

    peer: Peer
    images: list[Image]  # each digest once, with data

    @property
    def num_tokens(self) -> int:
        return sum(image.num_tokens for image in self.images)

    def has(self, digest: str | None) -> bool:
        return any(image.digest == digest for image in self.images)


@dataclass(frozen=True, slots=True)
class Plan:
    """The worker that generates, and the one that computes the prompt for it, if that is another."""

    decode: Peer
    prefill: Peer | None = None
    prefill_tokens: int = 0  # that the prefill worker has to compute: it does not have them cached
    encode: tuple[EncodeShare, ...] = ()

    @property
    def computing(self) -> Peer:
        """Computes the prompt."""
        return self.decode if self.prefill is None else self.prefill

    @property
    def peers(self) -> tuple[Peer, ...]:
        text = (self.decode,) if self.prefill is None else (self.prefill, self.decode)
        return text if not self.encode else (*(share.peer for share in self.encode), *text)

    @property
    def prefill_name(self) -> str:
        """For the response header: `local` where a decode worker computes the prompt itself."""
        is_local = self.prefill is None and self.decode.record.role is Role.DECODE
        return "local" if is_local else self.computing.id

    @property
    def encode_name(self) -> str:
        """For the response header: the workers that encode; `local` if a whole worker does, should it have to; `cached` if no
        image has to be encoded, since the worker that computes the prompt has the KV of all of them."""
        if self.encode:
            return ",".join(share.peer.id for share in self.encode)
        return "local" if self.computing.record.role is Role.WHOLE else "cached"


@dataclass(frozen=True, slots=True)
class Legs:
    encode: tuple[Leg, ...]
    prefill: Leg | None
    decode: Leg

    @property
    def names(self) -> list[tuple[RequestId, WorkerId, Role]]:
        return [(leg.request_id, leg.peer.id, leg.peer.record.role) for leg in self]

    def __iter__(self) -> Iterator[Leg]:
        """In the order in which they are sent."""
        yield from self.encode
        if self.prefill is not None:
            yield self.prefill
        yield self.decode

    @property
    def is_one(self) -> bool:
        return self.prefill is None and not self.encode


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request that was submitted and has not ended. It keeps all that is needed to send it again."""

    request: GenerateRequest
    stream: RequestStream
    attempt: Attempt | None = None  # None while it waits for a worker
    num_attempts: int = 0  # before this one
    num_setbacks: int = 0  # attempts that failed since its last token
    num_tokens_then: int = 0  # that it had when it was last sent again
    num_internal_errors: int = 0
    avoid: set[WorkerId] = field(default_factory=set)  # workers that failed it
    deadline: asyncio.TimerHandle | None = None
    timeline: Timeline = field(default_factory=Timeline)

    @property
    def legs(self) -> Iterable[Leg]:
        """None while it waits for a worker."""
        return () if self.attempt is None else self.attempt.legs

    @property
    def is_kept(self) -> bool:
        """Whether its worker was told to keep its KV."""
        return any(parent.asked for parent in self.stream.parents)

    @property
    def has_diverged(self) -> bool:
        """Whether its samples have come to different places, so that one prompt computed elsewhere does not serve them all."""
        return self.request.params.n > 1 and any(self.stream.tokens(sample) for sample in self.stream.running)


class Attempt:
    """Made for a plan. `send` gives every worker its message, or none of them."""

    __slots__ = ("_trace_id", "legs", "plan", "transfer")

    def __init__(self, entry: OpenRequest, plan: Plan, mode: Mode) -> None:
        stream = entry.stream
        first_id = new_request_id() if entry.num_attempts else stream.request_id
        encode = tuple(Leg(share.peer, new_request_id(), stream, share.num_tokens) for share in plan.encode)
        prefill = None if plan.prefill is None else Leg(plan.prefill, new_request_id(), stream, plan.prefill_tokens)
        self.plan = plan
        self.legs = Legs(encode, prefill, Leg(plan.decode, first_id, stream, tokens_of(entry.request)))
        self._trace_id = entry.timeline.trace_id
        self.transfer = _transfer(plan, mode, self._trace_id)
        entry.timeline.transfer_id = "" if self.transfer is None else self.transfer.transfer_id

    @property
    def is_generating(self) -> bool:
        """The decode leg has given an output, so it needs no other leg any more."""
        return self.legs.decode.has_output

    def send(self, entry: OpenRequest, keep: Keep | None) -> Peer | None:
        """Returns the first worker that cannot be reached; then none of them has the request."""
        for leg, message in self.messages(entry, keep):
            if not leg.peer.send(message):
                for each in self.legs:
                    each.abort()
                return leg.peer
        for leg in self.legs:
            leg.peer.add(leg)
        return None

    def messages(self, entry: OpenRequest, keep: Keep | None) -> Iterator[tuple[Leg, Submit | Encode]]:
        """What each worker is told. Files of images go only to the workers that encode them."""
        request, plan, legs = entry.request, self.plan, self.legs
        images, embeddings = list(request.images), []
        if images and (plan.encode or plan.computing.record.role is not Role.WHOLE):
            images = [msgspec.structs.replace(image, data=b"") for image in images]
        for leg, share in zip(legs.encode, plan.encode, strict=True):
            transfers = _embedding_transfers(share, plan.computing, self._trace_id)
            embeddings += transfers
            yield (
                leg,
                Encode(
                    request_id=leg.request_id,
                    external_id=request.external_id,
                    images=share.images,
                    transfers=transfers,
                    priority=request.priority,
                    attempt=entry.num_attempts,
                ),
            )
        submit = Submit(
            request_id=legs.decode.request_id,
            external_id=request.external_id,
            prompt=request.prompt if isinstance(request.prompt, list) else list(request.prompt),
            params=request.params,
            priority=request.priority,
            cache_salt=request.cache_salt,
            adapter=request.adapter,
            trace=dict(request.trace),
            transfer=self.transfer,
            resume=_resumed(entry),
            attempt=entry.num_attempts,
            keep=keep,  # the worker that generates keeps it
            inherit=self._inherited(entry),
            images=images,
            embeddings=embeddings if legs.prefill is None else [],
        )
        if legs.prefill is not None:
            prefill_id = legs.prefill.request_id
            yield legs.prefill, msgspec.structs.replace(submit, request_id=prefill_id, keep=None, embeddings=embeddings)
        yield legs.decode, submit

    def _inherited(self, entry: OpenRequest) -> KeptId | None:
        """The kept KV that the request takes over. When it is sent again it does without: all it needs are the tokens."""
        parent = entry.request.parent
        if parent is None or parent.state is not HandleState.HELD or entry.num_attempts or self.legs.prefill is not None:
            return None
        return parent.kept_id if self.plan.decode.id == parent.worker_id else None


def timeline_of(request: GenerateRequest, stream: RequestStream) -> Timeline:
    trace_id, span_id, is_sampled = read_trace(request.trace)
    return Timeline(
        span_id=span_id,
        parent_span_id=request.parent_span_id,
        is_sampled=is_sampled,
        external_id=request.external_id,
        answer_id=request.answer_id,
        owner=request.owner,
        trace_id=trace_id,
        parent="" if request.parent is None else request.parent.external_id,
        prompt_tokens=len(request.prompt),
        stream=stream,
    )


def holder_of(request: GenerateRequest, peers: Iterable[Peer], avoid: frozenset[str]) -> Peer | None:
    """The worker that keeps the KV of the request's parent, if it can take the request."""
    parent = request.parent
    if parent is None or parent.state is not HandleState.HELD or parent.worker_id in avoid:
        return None
    peer = next((peer for peer in peers if peer.id == parent.worker_id), None)
    if peer is None or request.data_parallel_rank not in (None, peer.record.data_parallel_rank):
        return None
    if request.adapter and not peer.record.has(request.adapter):
        return None
    return peer if peer.has_room and peer.breaker.passes else None


def check_model(request: GenerateRequest, plan: Plan) -> None:
    """Raises InvalidRequestError for a parent of another model."""
    parent = request.parent
    if parent is not None and parent.fingerprint and parent.fingerprint != plan.decode.record.fingerprint:
        reason = f"continuation_of: {parent.name[:200]!r} was generated by another model than is served now"
        raise InvalidRequestError(reason, param="model")


def _resumed(entry: OpenRequest) -> list[Resumed]:
    """What the client has seen, for a request that is sent again. Empty if that is nothing."""
    if not entry.num_attempts:
        return []
    resume = entry.stream.resume()
    return resume if len(resume) < entry.request.params.n or any(sample.tokens for sample in resume) else []


def _transfer(plan: Plan, mode: Mode, trace_id: str) -> TransferInfo | None:
    if plan.prefill is None:
        return None
    return TransferInfo(
        transfer_id=new_transfer_id(),
        mode=mode,
        producer=plan.prefill.id,
        consumer=plan.decode.id,
        signal_address=plan.prefill.record.signal_address,
        trace_id=trace_id,
    )


def _embedding_transfers(share: EncodeShare, computing: Peer, trace_id: str) -> list[EmbeddingTransfer]:
    return [
        EmbeddingTransfer(
            transfer_id=new_transfer_id(),
            digest=image.digest,
            producer=share.peer.id,
            consumer=computing.id,
            signal_address=share.peer.record.signal_address,
            trace_id=trace_id,
        )
        for image in share.images
    ]
