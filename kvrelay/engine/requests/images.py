"""The images of prompts, the engine's side: which embeddings are here, who brings the others, and how far a prompt can be
computed without them.

expect     a request is known: its images are held, and those that are neither ready nor covered by cached KV are asked for
limit      up to the first image that is not ready a prompt can be computed; whatever KV covers needs no embeddings
poll       some came; or will not come, and the requests that need them are over here: the router sends them again
computed   the last image's KV is there: the images are let go
end        the request ended in any way

Sequences meet images again when their KV is given up and computed anew. Then images are held again, and made again if this
worker can; if no source brings one any more, the request goes back to the router.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from kvrelay.engine.interfaces import Features
from kvrelay.engine.request import Request, Sequence
from kvrelay.errors import MissingEmbeddingError, RequestError
from kvrelay.ids import RequestId, WorkerId
from kvrelay.states import RequestState
from kvrelay.wire.registry import ImageCounts
from kvrelay.wire.serving import EmbeddingTransfer, Image


@dataclass(frozen=True, slots=True)
class ImageFailure:
    """The embeddings of an image will not come to a request."""

    request_id: RequestId
    digest: str
    error: RequestError


class ImageSource(Protocol):
    """Brings embeddings into `Features`: over the relay from an encode worker, or through a vision tower of this worker. Called
    by the engine's thread; only `poll` may take long."""

    def can_bring(self, image: Image, transfer: EmbeddingTransfer | None) -> bool:
        """`transfer` says how it comes; None: from the image's data."""

    def fetch(self, request_id: RequestId, image: Image, transfer: EmbeddingTransfer | None) -> None:
        """Only what it can bring."""

    def drop(self, request_id: RequestId) -> None:
        """The request needs nothing any more of what has not come. Harmless if there is nothing."""

    def refuse(self, transfer: EmbeddingTransfer) -> None:
        """The image is not needed: its producer, if there is one, should not wait for us."""

    def peer_lost(self, worker_id: WorkerId) -> None:
        """Another worker is gone, says a router, which may be wrong."""

    @property
    def has_news(self) -> bool:
        """Whether `poll` would do or say anything."""

    def poll(self) -> list[ImageFailure]:
        """Whatever came is in `Features`; what will not come is told once."""

    def resumed_s(self, request_id: RequestId) -> float:
        """How long the embeddings of a request took that came in several rounds, after the first round; the longest. Said
        once."""

    def counts(self) -> ImageCounts: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Wants:
    request: Request
    last_token: int  # where its last image ends
    held: set[str] = field(default_factory=set)
    coming: dict[str, ImageSource] = field(default_factory=dict)
    since: float = 0.0  # when it began to wait for what is coming


class NoFeatures:
    """Of a worker whose model takes no images: requests with any are refused."""

    num_held = 0

    def is_ready(self, digest: str) -> bool:
        return False

    def hold(self, digest: str) -> None:
        raise AssertionError("a worker without images refuses them")

    def release(self, digest: str) -> None:
        raise AssertionError("a worker without images refuses them")


class Images:
    """Of one engine. Its sources bring what encode workers made, or make embeddings here."""

    def __init__(
        self,
        features: Features,
        sources: List[ImageSource] = (),
        *,
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._features = features
        self._sources = sources
        self._timeout_s = timeout_s
        self._clock = clock
        self._wants: dict[RequestId, _Wants] = {}
        self._undeliverable: dict[RequestId, str] = {}  # no source brings them an image that they need
        self._next_timeout = float("inf")
        self._num_hits = 0

    @property
    def num_held(self) -> int:
        """Holds of live requests."""
        return sum(len(wants.held) for wants in self._wants.values())

    def expect(
        self, request: Request, transfers: List[EmbeddingTransfer], *, num_cached_tokens: int, computes_prompt: bool
    ) -> None:
        """The first `num_cached_tokens` tokens have KV, so their images are not needed. Where another worker computes the
        prompt, none is."""
        wants = _Wants(request, max(image.start + image.num_tokens for image in request.images), since=self._clock())
        self._wants[request.request_id] = wants
        by_digest = {transfer.digest: transfer for transfer in transfers}
        needed = {image.digest for image in request.images if image.start + image.num_tokens > num_cached_tokens}
        for image in request.images if computes_prompt else ():
            transfer = by_digest.pop(image.digest, None)
            if image.digest in needed and image.digest not in wants.held:
                self._hold(wants, image.digest)
                if not self._features.is_ready(image.digest):
                    self._fetch(wants, image, transfer)
                    continue
                self._num_hits += 1
            if transfer is not None:
                for source in self._sources:
                    source.refuse(transfer)

    def limit(self, sequence: Sequence) -> int:
        """How many of the sequence's tokens can be computed with what is here."""
        wants = self._wants[sequence.request_id]
        for image in sequence.images:
            if image.start + image.num_tokens > sequence.num_computed and not self._is_here(wants, image):
                return image.start
        return len(sequence.tokens)

    def computed(self, sequence: Sequence) -> None:
        wants = self._wants[sequence.request_id]
        if wants.held and all(
            each.state is RequestState.FINISHED or each.num_computed >= wants.last_token for each in wants.request.sequences
        ):
            self._let_go(wants)

    def end(self, request_id: RequestId) -> float:
        """Returns how long its embeddings took that came in several rounds."""
        wants = self._wants.pop(request_id)
        self._undeliverable.pop(request_id, None)
        self._let_go(wants)
        return max((source.resumed_s(request_id) for source in self._sources), default=0.0)

    @property
    def has_news(self) -> bool:
        if self._undeliverable or (self._next_timeout != float("inf") and self._clock() >= self._next_timeout):
            return True
        return any(source.has_news for source in self._sources)

    def poll(self) -> list[tuple[Request, RequestError]]:
        """The requests that cannot go on here, each with its reason."""
        failed: dict[RequestId, RequestError] = {}
        for source in self._sources:
            for failure in source.poll() if source.has_news else ():
                wants = self._wants.get(failure.request_id)
                if wants is not None and wants.coming.pop(failure.digest, None) is not None:
                    failed.setdefault(failure.request_id, failure.error)
        for request_id, digest in self._undeliverable.items():
            failed.setdefault(request_id, MissingEmbeddingError(f"the embeddings of image {digest} are gone from this worker"))
        self._undeliverable.clear()
        self._check_waits(failed)
        return [(self._wants[request_id].request, error) for request_id, error in failed.items()]

    def peer_lost(self, worker_id: WorkerId) -> None:
        for source in self._sources:
            source.peer_lost(worker_id)

    def counts(self) -> ImageCounts:
        each = [msgspec.structs.asdict(source.counts()) for source in self._sources]
        by_peer: dict[WorkerId, int] = {}  # one of them has peers
        for counts in each:
            by_peer |= counts.pop("by_peer")
        total = {name: sum(counts[name] for counts in each) for name in ImageCounts.__struct_fields__ if name != "by_peer"}
        return ImageCounts(**total | {"held": self.num_held, "hits": total["hits"] + self._num_hits}, by_peer=by_peer)

    def close(self) -> None:
        for source in self._sources:
            source.close()

    def _check_waits(self, failed: dict[RequestId, RequestError]) -> None:
        """Drops what came, gives up what has not for too long, and notes when to look again."""
        now, self._next_timeout = self._clock(), float("inf")
        for request_id, wants in self._wants.items():
            for digest in [digest for digest in wants.coming if self._features.is_ready(digest)]:
                del wants.coming[digest]
            if not wants.coming:
                continue
            if now >= wants.since + self._timeout_s:
                digest = next(iter(wants.coming))
                reason = f"the embeddings of image {digest} did not come within {self._timeout_s:g} s"
                failed.setdefault(request_id, MissingEmbeddingError(reason, digest=digest))
            else:
                self._next_timeout = min(self._next_timeout, wants.since + self._timeout_s)

    def _is_here(self, wants: _Wants, image: Image) -> bool:
        if image.digest not in wants.held:
            self._hold(wants, image.digest)
        if self._features.is_ready(image.digest):
            return True
        if image.digest not in wants.coming:
            wants.since = self._clock()
            self._fetch(wants, image, None)
            if image.digest not in wants.coming:
                self._undeliverable[wants.request.request_id] = image.digest
        return False

    def _hold(self, wants: _Wants, digest: str) -> None:
        self._features.hold(digest)
        wants.held.add(digest)

    def _fetch(self, wants: _Wants, image: Image, transfer: EmbeddingTransfer | None) -> None:
        """If no source can, perhaps its KV is found; if not, `limit` finds it undeliverable."""
        for source in self._sources:
            if source.can_bring(image, transfer):
                wants.coming[image.digest] = source
                self._next_timeout = min(self._next_timeout, wants.since + self._timeout_s)
                source.fetch(wants.request.request_id, image, transfer)
                return

    def _let_go(self, wants: _Wants) -> None:
        for digest in wants.held:
            self._features.release(digest)
        wants.held.clear()
        if wants.coming:
            for source in self._sources:
                source.drop(wants.request.request_id)
            wants.coming.clear()
