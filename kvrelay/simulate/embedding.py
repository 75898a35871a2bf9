"""Embeddings that cost time: the vision tower, the features that a worker has, both sides of their relay as engines see it.

    encode worker                           worker that computes the prompt
      expect                                  fetch
      offer: its pool has room
      the bytes move when all of this has happened
      sent  <---- latency ----                arrived: the features are there

An embedding comes as a whole. One that is not wanted, or whose worker is gone, ends on both sides, as the relay does it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvrelay.engine.requests.images import ImageFailure
from kvrelay.errors import EmbeddingTooLargeError, MediaError, MissingEmbeddingError
from kvrelay.ids import RequestId, TransferId, WorkerId
from kvrelay.simulate.costs import Costs
from kvrelay.simulate.loop import VirtualLoop
from kvrelay.wire.registry import ImageCounts
from kvrelay.wire.serving import EmbeddingTransfer, Image


class CostFeatures:
    """Implements `engine.interfaces.Features`: of every image, how many tokens. Those that are not held give way, oldest use
    first."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._tokens: OrderedDict[str, int] = OrderedDict()
        self._num_tokens = 0
        self._holds: Counter[str] = Counter()

    @property
    def num_held(self) -> int:
        return len(self._holds)

    def is_ready(self, digest: str) -> bool:
        return digest in self._tokens

    def hold(self, digest: str) -> None:
        self._holds[digest] += 1
        if digest in self._tokens:
            self._tokens.move_to_end(digest)

    def release(self, digest: str) -> None:
        assert self._holds[digest] > 0, f"image {digest} was not held"
        self._holds[digest] -= 1
        if not self._holds[digest]:
            del self._holds[digest]
            self._make_room()

    def put(self, digest: str, num_tokens: int) -> None:
        if digest not in self._tokens:
            self._tokens[digest] = num_tokens
            self._num_tokens += num_tokens
            self._make_room()

    def _make_room(self) -> None:
        if self._num_tokens > self._max_tokens:
            for digest in [digest for digest in self._tokens if digest not in self._holds]:
                self._num_tokens -= self._tokens.pop(digest)
                if self._num_tokens <= self._max_tokens:
                    return


class CostTower:
    """Implements `engine.interfaces.Tower`. `spend` is told the seconds of each pass."""

    def __init__(self, costs: Costs, store: CostFeatures, spend: Callable[[float], None]) -> None:
        self._costs = costs
        self._spend = spend
        self.store = store
        self.num_encoded = 0
        self.num_hits = 0

    def encode(self, images: Sequence[Image]) -> dict[str, MediaError]:
        wanted = {image.digest: image.num_tokens for image in images if not self.store.is_ready(image.digest)}
        self.num_encoded += len(wanted)
        self.num_hits += len(images) - len(wanted)
        if wanted:
            self._spend(self._costs.encode_s(sum(wanted.values())))
        for digest, num_tokens in wanted.items():
            self.store.put(digest, num_tokens)
        return {}


@dataclass(slots=True, eq=False)
class Move:
    """One embedding, from the first that is heard of it to its end."""

    transfer_id: TransferId
    sender: SimulatedSender | None = None
    intake: SimulatedIntake | None = None
    num_tokens: int = 0  # once it is offered
    is_over: bool = False


class Moves:
    """All embeddings of a cluster on their way."""

    def __init__(self, loop: VirtualLoop, costs: Costs) -> None:
        self._loop = loop
        self._costs = costs
        self._latency_s = costs.latency_ms / 1000.0
        self._moves: dict[TransferId, Move] = {}

    def of_sender(self, transfer_id: TransferId, sender: SimulatedSender) -> Move:
        move = self._moves.setdefault(transfer_id, Move(transfer_id))
        move.sender = sender
        return self._known(move)

    def of_intake(self, transfer_id: TransferId, intake: SimulatedIntake) -> Move:
        move = self._moves.setdefault(transfer_id, Move(transfer_id))
        move.intake = intake
        return self._known(move)

    def _known(self, move: Move) -> Move:
        if move.is_over:  # it was remembered for this side
            del self._moves[move.transfer_id]
        return move

    def later(self, function: Callable[..., object], *arguments: object) -> None:
        self._loop.at(self._loop.now + self._latency_s, function, *arguments)

    def go(self, move: Move) -> None:
        """If both sides are ready."""
        sender, intake = move.sender, move.intake
        if sender is None or intake is None or not move.num_tokens or move.is_over:
            return
        begins_at = max(self._loop.now + self._latency_s, sender.link_free_at, intake.link_free_at)
        sender.link_free_at = intake.link_free_at = ends_at = begins_at + self._costs.embedding_s(move.num_tokens)
        self._loop.at(ends_at + self._latency_s, self._arrived, move)

    def _arrived(self, move: Move) -> None:
        if not move.is_over:
            assert move.sender is not None
            assert move.intake is not None
            num_bytes = move.num_tokens * self._costs.embedding_bytes_per_token
            move.intake.arrived(move.transfer_id, "", num_bytes)
            self.later(move.sender.ended, move.transfer_id, "", False, num_bytes)
            self._end(move)

    def fail(self, move: Move, reason: str, *, by_sender: bool = False, by_intake: bool = False) -> None:
        """A side that ended it is not told."""
        if move.is_over:
            return
        self._end(move)
        if move.sender is not None and not by_sender:
            self.later(move.sender.ended, move.transfer_id, reason, by_intake)
        if move.intake is not None and not by_intake:
            self.later(move.intake.arrived, move.transfer_id, reason)

    def _end(self, move: Move) -> None:
        """One that only one side knows is remembered for the other."""
        move.is_over = True
        if move.sender is not None and move.intake is not None:
            del self._moves[move.transfer_id]


@dataclass(frozen=True, slots=True)
class Sent:
    """Implements `engine.encode.Sent`."""

    transfer_id: TransferId
    error: str
    is_unwanted: bool
    size_bytes: int = 0  # its lines are written nowhere


@dataclass(slots=True)
class SentCounts:
    """Implements `engine.encode.SentCounts`."""

    done: int = 0
    failed: int = 0
    moved_bytes: int = 0
    resumes: int = 0
    repeats: int = 0
    malformed: int = 0
    by_peer: dict[WorkerId, int] = field(default_factory=dict)


class SimulatedSender:
    """Implements `engine.encode.EmbeddingSender`. `at_end` calls when the step under way has ended, `wake` says that there is
    news."""

    def __init__(self, moves: Moves, pool_tokens: int, at_end: Callable[..., None], wake: Callable[[], None]) -> None:
        self._moves = moves
        self._pool_tokens = pool_tokens
        self._at_end = at_end
        self._wake = wake
        self._live: dict[TransferId, tuple[Move, WorkerId]] = {}
        self._pooled: dict[TransferId, int] = {}  # tokens of embeddings that were offered
        self._news: list[Sent] = []
        self._counts = SentCounts()
        self.link_free_at = 0.0

    @property
    def has_news(self) -> bool:
        return bool(self._news)

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def num_pooled_tokens(self) -> int:
        return sum(self._pooled.values())

    def expect(self, transfer_id: TransferId, consumers: Sequence[WorkerId]) -> None:
        move = self._moves.of_sender(transfer_id, self)
        self._live[transfer_id] = move, consumers[0]
        if move.is_over:
            self._moves.later(self.ended, transfer_id, "not wanted", True)

    def offer(self, transfer_id: TransferId, image: Image) -> bool:
        if image.num_tokens > self._pool_tokens:
            raise EmbeddingTooLargeError(f"an embedding of {image.num_tokens} tokens, in a pool of {self._pool_tokens}")
        if self.num_pooled_tokens + image.num_tokens > self._pool_tokens:
            return False
        if transfer_id in self._live:
            self._pooled[transfer_id] = image.num_tokens
            self._at_end(self._offered, transfer_id, image.num_tokens)
        return True

    def _offered(self, transfer_id: TransferId, num_tokens: int) -> None:
        if (live := self._live.get(transfer_id)) is not None:
            live[0].num_tokens = num_tokens
            self._moves.go(live[0])

    def ended(self, transfer_id: TransferId, error: str, is_unwanted: bool, num_bytes: int = 0) -> None:
        if self._live.pop(transfer_id, None) is not None:
            self._pooled.pop(transfer_id, None)
            self._counts.done += not error
            self._counts.failed += bool(error)
            self._counts.moved_bytes += num_bytes
            self._news.append(Sent(transfer_id, error, is_unwanted))
            self._wake()

    def abort(self, transfer_id: TransferId) -> None:
        live = self._live.pop(transfer_id, None)
        if live is not None:
            self._pooled.pop(transfer_id, None)
            self._moves.fail(live[0], "the encode worker ended it", by_sender=True)

    def peer_lost(self, worker_id: WorkerId) -> None:
        for move, consumer in self._live.values():
            if consumer == worker_id:
                self._moves.fail(move, f"worker {worker_id} is gone")

    def poll(self) -> list[Sent]:
        news, self._news = self._news, []
        return news

    def counts(self) -> SentCounts:
        return self._counts

    def close(self) -> None:
        pass


@dataclass(slots=True, eq=False)
class _Coming:
    """One image, and the requests that wait for it."""

    image: Image
    move: Move
    producer: WorkerId
    owner: RequestId  # whose transfer it is
    waiters: dict[RequestId, None]


class SimulatedIntake:
    """Implements `engine.requests.images.ImageSource`. Requests that want an image at the same time share one transfer of it,
    as in `worker.embedding_intake`."""

    def __init__(self, moves: Moves, features: CostFeatures, wake: Callable[[], None]) -> None:
        self._moves = moves
        self._features = features
        self._wake = wake
        self._by_digest: dict[str, _Coming] = {}
        self._by_transfer: dict[TransferId, _Coming] = {}
        self._news: list[tuple[TransferId, str]] = []
        self._num_shared = self._num_done = self._num_failed = self._num_bytes = 0
        self.link_free_at = 0.0

    @property
    def has_news(self) -> bool:
        return bool(self._news)

    def can_bring(self, image: Image, transfer: EmbeddingTransfer | None) -> bool:
        return transfer is not None

    def fetch(self, request_id: RequestId, image: Image, transfer: EmbeddingTransfer | None) -> None:
        assert transfer is not None
        coming = self._by_digest.get(image.digest)
        if coming is not None:
            coming.waiters[request_id] = None
            self._num_shared += 1
            self.refuse(transfer)
            return
        move = self._moves.of_intake(transfer.transfer_id, self)
        coming = _Coming(image, move, transfer.producer, request_id, {request_id: None})
        self._by_digest[image.digest] = self._by_transfer[transfer.transfer_id] = coming
        if move.is_over:
            self._moves.later(self.arrived, transfer.transfer_id, "the encode worker ended it")
        self._moves.go(move)

    def drop(self, request_id: RequestId) -> None:
        for coming in list(self._by_digest.values()):
            coming.waiters.pop(request_id, None)
            if not coming.waiters:
                self._forget(coming)
                self._moves.fail(coming.move, "not wanted any more", by_intake=True)

    def refuse(self, transfer: EmbeddingTransfer) -> None:
        self._moves.fail(self._moves.of_intake(transfer.transfer_id, self), "not wanted", by_intake=True)

    def peer_lost(self, worker_id: WorkerId) -> None:
        for coming in self._by_digest.values():
            if coming.producer == worker_id:
                self._moves.fail(coming.move, f"worker {worker_id} is gone")

    def arrived(self, transfer_id: TransferId, error: str, num_bytes: int = 0) -> None:
        self._num_bytes += num_bytes
        self._news.append((transfer_id, error))
        self._wake()

    def poll(self) -> list[ImageFailure]:
        failures: list[ImageFailure] = []
        news, self._news = self._news, []
        for transfer_id, error in news:
            coming = self._by_transfer.get(transfer_id)
            if coming is None:
                continue
            self._forget(coming)
            if error:
                failures += self._failed(coming, error)
            else:
                self._num_done += 1
                self._features.put(coming.image.digest, coming.image.num_tokens)
        return failures

    def _failed(self, coming: _Coming, reason: str) -> list[ImageFailure]:
        self._num_failed += 1
        digest = coming.image.digest
        blamed = digest if coming.owner in coming.waiters else None
        error = MissingEmbeddingError(f"the embeddings of image {digest} did not arrive: {reason}", digest=blamed)
        return [ImageFailure(request_id, digest, error) for request_id in coming.waiters]

    def _forget(self, coming: _Coming) -> None:
        self._by_digest.pop(coming.image.digest, None)
        self._by_transfer.pop(coming.move.transfer_id, None)

    def resumed_s(self, request_id: RequestId) -> float:
        return 0.0

    def counts(self) -> ImageCounts:
        return ImageCounts(
            in_flight=len(self._by_transfer),
            hits=self._num_shared,
            relayed=self._num_done,
            failed=self._num_failed,
            bytes=self._num_bytes,
        )

    def close(self) -> None:
        pass
