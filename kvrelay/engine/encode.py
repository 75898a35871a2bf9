"""A worker that turns images into embeddings for those that compute prompts. It has the vision tower and no text model.

    encode    the router's word: images, and a transfer for each; the relay is told which workers will ask for them
    step      waiting images go through the tower together, up to a number of patches; what was made before is taken from the
              cache; the embeddings are put into the relay's pool, as far as there is room, and the others when there is
    poll      an embedding was taken, or is not wanted: with the last one of a request the router is told that it is over

Every request ends in exactly one way: handed over, or with one Failure. Whether the consumers got what they wanted, they say
themselves.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvrelay.engine.interfaces import Tower, patches_in
from kvrelay.engine.requests.stages import Stages
from kvrelay.errors import (
    EmbeddingTooLargeError,
    InternalError,
    InvalidRequestError,
    QueueFullError,
    RequestError,
    UnavailableError,
)
from kvrelay.ids import KeptId, RequestId, TransferId, WorkerId
from kvrelay.log import Log
from kvrelay.states import Stage
from kvrelay.wire.registry import ImageCounts, TransferCounts, WorkerLoad
from kvrelay.wire.serving import (
    EmbeddingTransfer,
    Encode,
    Failure,
    Finish,
    HandedOver,
    Image,
    KeptInfo,
    News,
    StepOutputs,
    Submit,
)

log = Log("engine")

_PATCHES_PER_STEP = 16_384  # about four images of a million pixels


Offer = Callable[[TransferId, Image], bool]
"""Gives the features of an image, which are there, to the relay. False: there is no room; try again after a later `poll`.
Raises EmbeddingTooLargeError."""


class Sent(Protocol):
    """How an expected transfer ended. `error` is empty when its consumer has everything."""

    @property
    def transfer_id(self) -> TransferId: ...

    @property
    def error(self) -> str: ...

    @property
    def is_unwanted(self) -> bool:
        """It was the consumer that ended it."""

    @property
    def size_bytes(self) -> int:
        """That the consumer has."""


class SentCounts(Protocol):
    """Since the start."""

    done: int
    failed: int
    moved_bytes: int
    resumes: int
    repeats: int
    malformed: int
    by_peer: dict[WorkerId, int]


class EmbeddingSender(Protocol):
    """The relay, as an encode worker sees it. No call blocks."""

    def expect(self, transfer_id: TransferId, consumers: Sequence[WorkerId]) -> None:
        """An embedding will be offered; these will ask for it."""

    def abort(self, transfer_id: TransferId) -> None:
        """Nothing more is told of it."""

    def peer_lost(self, worker_id: WorkerId) -> None: ...

    @property
    def has_news(self) -> bool:
        """Whether `poll` would say anything, or there is room that an offer lacked."""

    @property
    def num_live(self) -> int:
        """Transfers that have not ended."""

    def poll(self) -> Sequence[Sent]:
        """Of each expected transfer once, unless it was aborted."""

    def counts(self) -> SentCounts: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Job:
    """One image of one request."""

    request_id: RequestId
    image: Image
    transfer: EmbeddingTransfer


class EncodeEngine:
    """Implements `worker.serving_engine.ServingEngine`. One thread calls it."""

    def __init__(
        self,
        *,
        worker_id: WorkerId,
        encoder: Tower,
        producer: EmbeddingSender,
        offer: Offer,
        max_queue: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker_id = worker_id
        self._encoder = encoder
        self._store = encoder.store
        self._producer = producer
        self._offer = offer
        self._max_queue = max_queue
        self._clock = clock
        self._open: dict[RequestId, set[TransferId]] = {}  # what was neither taken nor refused yet
        self._stages: dict[RequestId, Stages] = {}  # of the same requests
        self._jobs: dict[TransferId, _Job] = {}  # of the same
        self._waiting: deque[_Job] = deque()  # for the tower
        self._made: deque[_Job] = deque()  # for room in the relay's pool
        self._news: list[News] = []
        self._pool_full = False
        self._num_steps = 0
        self._num_failed = 0  # images that a consumer waited for
        self._draining = False

    # What the worker calls between steps

    def encode(self, encode: Encode) -> None:
        try:
            self._check(encode)
        except RequestError as error:
            self._news.append(Failure.of(encode.request_id, error))
            return
        self._open[encode.request_id] = {transfer.transfer_id for transfer in encode.transfers}
        self._stages[encode.request_id] = Stages(clock=self._clock)
        for image, transfer in zip(encode.images, encode.transfers, strict=True):
            job = self._jobs[transfer.transfer_id] = _Job(encode.request_id, image, transfer)
            self._producer.expect(transfer.transfer_id, [transfer.consumer])
            self._store.hold(image.digest)
            self._waiting.append(job)

    def submit(self, submit: Submit) -> None:
        """A mistake of the router."""
        error = UnavailableError(f"worker {self._worker_id} encodes images and computes no prompts")
        self._news.append(Failure.of(submit.request_id, error))

    def abort(self, request_ids: Iterable[RequestId]) -> None:
        for request_id in request_ids:
            self._drop(request_id)

    def finish(self, finish: Finish) -> None:
        """Nothing here has samples."""

    def release_kept(self, kept_ids: Iterable[KeptId]) -> None:
        """Nothing here has KV."""

    def find_kept(self, handle: str, owner: str) -> list[KeptInfo]:
        return []

    def drain(self) -> None:
        self._draining = True

    def peer_lost(self, worker_id: WorkerId) -> None:
        self._producer.peer_lost(worker_id)

    @property
    def drained(self) -> bool:
        return self._draining and not self._open and not self.has_work and self._producer.num_live == 0

    @property
    def has_work(self) -> bool:
        if self._news or self._waiting or self._producer.has_news:
            return True
        return bool(self._made) and not self._pool_full

    def load(self) -> WorkerLoad:
        counts, num_live = self._producer.counts(), self._producer.num_live
        return WorkerLoad(
            waiting=len(self._waiting),
            transferring=len(self._jobs) - len(self._waiting),
            transfers=TransferCounts(
                in_flight=num_live,
                done=counts.done,
                failed=counts.failed,
                bytes=counts.moved_bytes,
                by_peer=counts.by_peer.copy(),
            ),
            steps=self._num_steps,
            images=ImageCounts(
                in_flight=num_live,
                held=self._store.num_held,
                encoded=self._encoder.num_encoded,
                hits=self._encoder.num_hits,
                relayed=counts.done,
                failed=self._num_failed,
                bytes=counts.moved_bytes,
                resumes=counts.resumes,
                repeats=counts.repeats,
                malformed=counts.malformed,
            ),
        )

    def close(self) -> None:
        self._producer.close()

    # The loop

    def step(self) -> StepOutputs:
        self._take_news()
        self._encode(self._next_batch())
        self._offer_made()
        self._num_steps += 1
        news, self._news = self._news, []
        return StepOutputs(worker_id=self._worker_id, step=self._num_steps, load=self.load(), news=news)

    def _take_news(self) -> None:
        """A consumer that stops waiting for an image before it was encoded saves the tower the work."""
        if self._producer.has_news:
            self._pool_full = False
        for sent in self._producer.poll():
            job = self._jobs.pop(sent.transfer_id, None)
            if job is None:
                continue
            self._forget_images({sent.transfer_id})
            self._num_failed += bool(sent.error) and not sent.is_unwanted
            if not sent.error:
                self._log_sent(job, sent.size_bytes)
            request_id, left = job.request_id, self._open[job.request_id]
            left.discard(sent.transfer_id)
            if not left:
                del self._open[request_id]
                self._news += [self._stages.pop(request_id).times(request_id), HandedOver(request_id)]

    def _log_sent(self, job: _Job, size_bytes: int) -> None:
        transfer, seconds = job.transfer, self._stages[job.request_id].seconds_in(Stage.TRANSFER)
        log.info(
            "embedding handed over", request=job.request_id, transfer=transfer.transfer_id, consumer=transfer.consumer,
            tokens=job.image.num_tokens, bytes=size_bytes, ms=round(1000 * seconds, 1), trace=transfer.trace_id,
        )  # fmt: skip

    def _next_batch(self) -> list[_Job]:
        batch: list[_Job] = []
        num_patches = 0
        while self._waiting:
            job = self._waiting[0]
            cost = 0 if self._store.is_ready(job.image.digest) else patches_in(job.image)
            if batch and num_patches + cost > _PATCHES_PER_STEP:
                break
            batch.append(self._waiting.popleft())
            num_patches += cost
        return batch

    def _encode(self, batch: list[_Job]) -> None:
        if not batch:
            return
        self._made.extend(batch)  # from here on they are let go as such, also if they fail
        for job in batch:
            self._stages[job.request_id].enter(Stage.ENCODE)
        errors = self._encoder.encode([job.image for job in batch])
        for job in batch:
            error = errors.get(job.image.digest)
            if error is not None:
                self._fail(job.request_id, InvalidRequestError(str(error), param="messages"))

    def _offer_made(self) -> None:
        while self._made and not self._pool_full:
            job = self._made[0]
            try:
                self._pool_full = not self._offer(job.transfer.transfer_id, job.image)
            except EmbeddingTooLargeError as error:
                self._fail(job.request_id, InvalidRequestError(str(error), param="messages"))
                continue
            if not self._pool_full:
                self._stages[job.request_id].enter(Stage.TRANSFER)
                self._made.popleft()
                self._store.release(job.image.digest)

    # Endings

    def _check(self, encode: Encode) -> None:
        if self._draining:
            raise UnavailableError("the worker is draining and takes no new requests")
        if len(self._waiting) >= self._max_queue and encode.attempt == 0:
            raise QueueFullError(f"the worker's queue is full ({len(self._waiting)} images wait)")
        if encode.request_id in self._open:
            raise InternalError(f"request {encode.request_id} is here already")
        if [image.digest for image in encode.images] != [transfer.digest for transfer in encode.transfers] or not encode.images:
            raise InvalidRequestError("every image needs its transfer", param="images")
        if any(transfer.producer != self._worker_id for transfer in encode.transfers):
            raise UnavailableError(f"not every transfer is for worker {self._worker_id}")

    def _fail(self, request_id: RequestId, error: RequestError) -> None:
        if self._drop(request_id):
            self._num_failed += 1
            self._news.append(Failure.of(request_id, error))

    def _drop(self, request_id: RequestId) -> bool:
        """Whether it was there. Its consumers learn of it from the relay."""
        transfers = self._open.pop(request_id, None)
        if transfers is None:
            return False
        self._news.append(self._stages.pop(request_id).times(request_id))
        self._pool_full = False
        for transfer_id in transfers:
            del self._jobs[transfer_id]
            self._producer.abort(transfer_id)
        self._forget_images(transfers)
        return True

    def _forget_images(self, over: set[TransferId]) -> None:
        for queue in (self._waiting, self._made):
            for job in [job for job in queue if job.transfer.transfer_id in over]:
                queue.remove(job)
                self._store.release(job.image.digest)
