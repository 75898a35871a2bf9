"""Who makes the embeddings of a request's images.

    the worker that computes the prompt has an image's KV cached     nobody
    encode workers up                                                 one of them for each image: who made it before, unless
                                                                      it is overloaded; else the least loaded
    none up                                                           a whole worker does it itself; others cannot

Every distinct image is one transfer of its own, so a worker that has some of them fetches the others only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec

from kvrelay.errors import UnavailableError
from kvrelay.ids import WorkerId, new_transfer_id
from kvrelay.router.peer import EncodeShare, Leg, Peer
from kvrelay.router.policy import overloaded
from kvrelay.states import Role
from kvrelay.wire.serving import EmbeddingTransfer, Encode, Image, Submit

_REMEMBERED_IMAGES = 16_384


class Encoders:
    """Shares images out, and remembers who made which. The one unused for longest is forgotten first."""

    def __init__(self) -> None:
        self._made_by: OrderedDict[str, WorkerId] = OrderedDict()

    def share_out(
        self, images: Sequence[Image], num_cached_tokens: int, computing: Peer, encoders: list[Peer], avoid: frozenset[str]
    ) -> tuple[EncodeShare, ...]:
        """`computing` computes the prompt, of which it has `num_cached_tokens` tokens cached. Raises UnavailableError."""
        needed = {image.digest: image for image in images if image.start + image.num_tokens > num_cached_tokens}
        wanted = [image for image in needed.values() if image.data]
        if not wanted:
            return ()
        able = [peer for peer in encoders if peer.has_room and peer.id not in avoid and peer.breaker.passes]
        if not able and computing.record.role is Role.WHOLE:
            return ()
        able = able or [peer for peer in encoders if peer.has_room]
        if not able:
            reason = "the queues of all encode workers are full" if encoders else "no encode worker is up"
            raise UnavailableError(f"{reason}, and the request has images", code="no_encode_worker")
        given: dict[WorkerId, EncodeShare] = {}
        for image in wanted:
            peer = self._choose(image, able, given)
            given.setdefault(peer.id, EncodeShare(peer, [])).images.append(image)
            self._remember(image.digest, peer.id)
        return tuple(given.values())

    def _choose(self, image: Image, able: list[Peer], given: dict[WorkerId, EncodeShare]) -> Peer:
        made_by = self._made_by.get(image.digest)
        known = next((peer for peer in able if peer.id == made_by), None)
        if known is not None and not overloaded(known, able):
            return known
        return min(able, key=lambda peer: peer.load_tokens + (given[peer.id].num_tokens if peer.id in given else 0))

    def _remember(self, digest: str, worker_id: WorkerId) -> None:
        self._made_by[digest] = worker_id
        self._made_by.move_to_end(digest)
        if len(self._made_by) > _REMEMBERED_IMAGES:
            self._made_by.popitem(last=False)


class ImageMessages:
    """What each worker of one attempt is told about a request's images: files go only to who encodes them."""

    def __init__(self, shares: Sequence[EncodeShare], computing: Peer) -> None:
        self._images = {share.peer.id: share.images for share in shares}
        self._transfers = {share.peer.id: _transfers(share, computing) for share in shares}
        self._computing = computing

    def message_for(self, peer: Peer, submit: Submit) -> Submit | Encode:
        """`submit` is what a worker would get that does everything itself."""
        if peer.id in self._transfers:
            return Encode(
                request_id=submit.request_id,
                external_id=submit.external_id,
                images=self._images[peer.id],
                transfers=self._transfers[peer.id],
                priority=submit.priority,
                attempt=submit.attempt,
            )
        if peer is self._computing and not self._transfers and peer.record.role is Role.WHOLE:
            return submit  # it makes the embeddings itself
        bare = [msgspec.structs.replace(image, data=b"") for image in submit.images]
        embeddings = [each for share in self._transfers.values() for each in share] if peer is self._computing else []
        return msgspec.structs.replace(submit, images=bare, embeddings=embeddings)


def encode_name(shares: Sequence[EncodeShare], computing: Peer) -> str:
    """For the response header: the workers that encode; `local` if a whole worker does, should it have to; `cached` if nobody
    does, since the worker that computes the prompt has the KV of all images."""
    if shares:
        return ",".join(share.peer.id for share in shares)
    return "local" if computing.record.role is Role.WHOLE else "cached"


def open_encode_legs(legs: Iterable[Leg]) -> list[Leg]:
    """Those whose worker has not said its last word."""
    return [leg for leg in legs if leg.peer.record.role is Role.ENCODE and leg.request_id in leg.peer.open]


def _transfers(share: EncodeShare, computing: Peer) -> list[EmbeddingTransfer]:
    return [
        EmbeddingTransfer(
            transfer_id=new_transfer_id(),
            digest=image.digest,
            producer=share.peer.id,
            consumer=computing.id,
            signal_address=share.peer.record.signal_address,
        )
        for image in share.images
    ]
