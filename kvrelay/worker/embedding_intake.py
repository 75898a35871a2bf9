"""Embeddings that come over the relay: from the relay's pool into the runner's `FeatureStore`.

fetch     the relay is told to expect the image's transfer; if it comes for another request already, both wait for that one
poll      further tokens came; with the last, the embedding is checked and put into the store
drop      no request waits for it any more: aborted, and the encode worker stops
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from kvrelay.engine.requests.images import ImageFailure
from kvrelay.errors import MissingEmbeddingError
from kvrelay.ids import RequestId, TransferId, WorkerId
from kvrelay.runner.vision.feature_rows import from_rows
from kvrelay.runner.vision.features import FeatureStore
from kvrelay.transfer.embedding.arrival import EmbeddingArrival
from kvrelay.transfer.embedding.mover import EmbeddingConsumer
from kvrelay.transfer.embedding.pieces import Piece, owned
from kvrelay.wire.registry import ImageCounts
from kvrelay.wire.serving import EmbeddingTransfer, Image
from kvrelay.worker.embedding import describe


@dataclass(slots=True)
class _Coming:
    """One image on its way, and the requests that wait for it."""

    image: Image
    transfer_id: TransferId
    owner: RequestId  # whose transfer it is: when it ends, so does the transfer
    waiters: set[RequestId]
    pieces: list[Piece] = field(default_factory=list)
    resumed_at: float | None = None  # when its first round was here, if that was not all


class EmbeddingIntake:
    """Implements `engine.requests.images.ImageSource`. Requests that want an image at the same time share one transfer of
    it."""

    def __init__(self, consumer: EmbeddingConsumer, store: FeatureStore, dtype: torch.dtype, merge_size: int) -> None:
        self._consumer = consumer
        self._store = store
        self._dtype = dtype
        self._merge_size = merge_size
        self._by_digest: dict[str, _Coming] = {}
        self._by_transfer: dict[TransferId, _Coming] = {}
        self._resumed_s: dict[RequestId, float] = {}
        self._num_shared = 0
        self._num_failed = 0  # not those that were refused

    def can_bring(self, image: Image, transfer: EmbeddingTransfer | None) -> bool:
        return transfer is not None

    def fetch(self, request_id: RequestId, image: Image, transfer: EmbeddingTransfer | None) -> None:
        assert transfer is not None
        coming = self._by_digest.get(image.digest)
        if coming is not None:
            coming.waiters.add(request_id)
            self._num_shared += 1
            self.refuse(transfer)
            return
        coming = _Coming(image, transfer.transfer_id, request_id, {request_id})
        self._by_digest[image.digest] = self._by_transfer[transfer.transfer_id] = coming
        self._consumer.expect(
            transfer.transfer_id,
            transfer.producer,
            transfer.signal_address,
            request_id=request_id,
            trace_id=transfer.trace_id,
        )

    def drop(self, request_id: RequestId) -> None:
        for coming in list(self._by_digest.values()):
            coming.waiters.discard(request_id)
            if not coming.waiters:
                self._forget(coming)
                self._consumer.abort(coming.transfer_id)

    def refuse(self, transfer: EmbeddingTransfer) -> None:
        """The producer learns of it by an abort."""
        self._consumer.refuse(transfer.transfer_id, transfer.producer, transfer.signal_address)

    def peer_lost(self, worker_id: WorkerId) -> None:
        self._consumer.peer_lost(worker_id)

    @property
    def has_news(self) -> bool:
        return self._consumer.has_news

    def poll(self) -> list[ImageFailure]:
        failures: list[ImageFailure] = []
        for arrival in self._consumer.poll():
            coming = self._by_transfer.get(arrival.transfer_id)
            if coming is None:
                self._consumer.release(arrival.transfer_id)
                continue
            error = arrival.error or self._take(coming, arrival)
            if error:
                failures += self._fail(coming, error)
        return failures

    def resumed_s(self, request_id: RequestId) -> float:
        return self._resumed_s.pop(request_id, 0.0)

    def counts(self) -> ImageCounts:
        counts = self._consumer.counts()
        return ImageCounts(
            in_flight=self._consumer.num_live,
            hits=self._num_shared,
            relayed=counts.done,
            failed=self._num_failed,
            bytes=counts.moved_bytes,
            resumes=counts.resumes,
            reconnects=counts.reconnects,
            repeats=counts.repeats,
            malformed=counts.malformed,
            by_peer=counts.by_peer.copy(),
        )

    def close(self) -> None:
        self._consumer.close()

    def _take(self, coming: _Coming, arrival: EmbeddingArrival) -> str:
        """Pieces that lie in the pool are copied out of it with the last one. Returns why the embedding cannot be used."""
        coming.pieces += arrival.pieces
        if not arrival.is_complete:
            coming.resumed_at = coming.resumed_at or time.monotonic()
            return ""
        if coming.resumed_at is not None:
            for request_id in coming.waiters:
                took_s = time.monotonic() - coming.resumed_at
                self._resumed_s[request_id] = max(took_s, self._resumed_s.get(request_id, 0.0))
        self._forget(coming)
        image = coming.image
        whole = owned(coming.pieces)
        self._consumer.release(arrival.transfer_id)
        error = describe(image, self._merge_size).mismatch(whole.fill_ids, whole.positions, arrival.aux)
        if not error:
            self._store.put(image.digest, from_rows(whole.rows, self._dtype))
        return error

    def _fail(self, coming: _Coming, reason: str) -> list[ImageFailure]:
        """Where only those are left that shared another request's transfer, that request has ended: no image is to blame."""
        self._forget(coming)
        self._num_failed += 1
        digest = coming.image.digest
        blamed = digest if coming.owner in coming.waiters else None
        error = MissingEmbeddingError(f"the embeddings of image {digest} did not arrive: {reason}", digest=blamed)
        return [ImageFailure(request_id, digest, error) for request_id in coming.waiters]

    def _forget(self, coming: _Coming) -> None:
        self._by_digest.pop(coming.image.digest, None)
        self._by_transfer.pop(coming.transfer_id, None)
