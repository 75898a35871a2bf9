"""Embeddings that a worker makes itself, with a vision tower of its own."""

from __future__ import annotations

from collections import deque

from kvrelay.engine.interfaces import Tower, patches_in
from kvrelay.engine.requests.images import ImageFailure
from kvrelay.errors import InvalidRequestError
from kvrelay.ids import RequestId, WorkerId
from kvrelay.wire.registry import ImageCounts
from kvrelay.wire.serving import EmbeddingTransfer, Image

_PATCHES_PER_STEP = 4096  # of images encoded between two steps of the text model: about one of a million pixels


class LocalEncoder:
    """Implements `engine.requests.images.ImageSource`. Encodes between the steps of the text model, a few images at a time."""

    def __init__(self, encoder: Tower) -> None:
        self._encoder = encoder
        self._waiting: deque[tuple[RequestId, Image]] = deque()

    def can_bring(self, image: Image, transfer: EmbeddingTransfer | None) -> bool:
        return transfer is None and bool(image.data)

    def fetch(self, request_id: RequestId, image: Image, transfer: EmbeddingTransfer | None) -> None:
        assert transfer is None
        self._waiting.append((request_id, image))

    def drop(self, request_id: RequestId) -> None:
        self._waiting = deque(wanted for wanted in self._waiting if wanted[0] != request_id)

    def refuse(self, transfer: EmbeddingTransfer) -> None:
        """No producer waits."""

    def peer_lost(self, worker_id: WorkerId) -> None:
        """No other worker is needed."""

    @property
    def has_news(self) -> bool:
        return bool(self._waiting)

    def poll(self) -> list[ImageFailure]:
        batch: list[tuple[RequestId, Image]] = []
        num_patches = 0
        while self._waiting and (not batch or num_patches + patches_in(self._waiting[0][1]) <= _PATCHES_PER_STEP):
            batch.append(self._waiting.popleft())
            num_patches += patches_in(batch[-1][1])
        errors = self._encoder.encode([image for _, image in batch])
        return [
            ImageFailure(request_id, image.digest, InvalidRequestError(str(errors[image.digest]), param="messages"))
            for request_id, image in batch
            if image.digest in errors
        ]

    def resumed_s(self, request_id: RequestId) -> float:
        return 0.0

    def counts(self) -> ImageCounts:
        return ImageCounts(encoded=self._encoder.num_encoded, hits=self._encoder.num_hits)

    def close(self) -> None:
        self._waiting.clear()
