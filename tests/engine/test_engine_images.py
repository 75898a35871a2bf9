"""Prompts with images in the engine: computed as far as their embeddings are there, and never without them."""

from __future__ import annotations

import pytest
from leaks import check_idle

from kvrelay.config import EngineOptions
from kvrelay.engine.engine import Engine
from kvrelay.engine.interfaces import StepPlan
from kvrelay.engine.requests.images import ImageFailure, Images
from kvrelay.errors import MissingEmbeddingError
from kvrelay.ids import RequestId, TransferId, WorkerId, new_request_id
from kvrelay.media.placeholders import placeholder_ids
from kvrelay.runner.fake import FakeRunner
from kvrelay.sampling import SamplingParams
from kvrelay.wire.registry import ImageCounts
from kvrelay.wire.serving import EmbeddingTransfer, Failure, Image, StepOutputs, Submit, of_kind

WORKER = WorkerId("whole-0123456789ab")
TIMEOUT_S = 30.0


class Store:
    """Features that are there or not."""

    def __init__(self) -> None:
        self.ready: set[str] = set()
        self.holds: list[str] = []

    def is_ready(self, digest: str) -> bool:
        return digest in self.ready

    def hold(self, digest: str) -> None:
        self.holds.append(digest)

    def release(self, digest: str) -> None:
        self.holds.remove(digest)


class Source:
    """Brings what the test tells it to."""

    def __init__(self, store: Store, *, is_tower: bool) -> None:
        self._store = store
        self._is_tower = is_tower
        self.asked: dict[tuple[RequestId, str], EmbeddingTransfer | None] = {}
        self.refused: list[str] = []
        self.failures: list[ImageFailure] = []
        self.has_news = False

    def bring(self, digest: str) -> None:
        self._store.ready.add(digest)
        self.asked = {wanted: transfer for wanted, transfer in self.asked.items() if wanted[1] != digest}
        self.has_news = True

    def fail(self, request_id: RequestId, digest: str) -> None:
        self.failures.append(ImageFailure(request_id, digest, MissingEmbeddingError("lost")))
        del self.asked[request_id, digest]
        self.has_news = True

    def can_bring(self, image: Image, transfer: EmbeddingTransfer | None) -> bool:
        return bool(image.data) and transfer is None if self._is_tower else transfer is not None

    def fetch(self, request_id: RequestId, image: Image, transfer: EmbeddingTransfer | None) -> None:
        self.asked[request_id, image.digest] = transfer

    def drop(self, request_id: RequestId) -> None:
        self.asked = {wanted: transfer for wanted, transfer in self.asked.items() if wanted[0] != request_id}

    def refuse(self, transfer: EmbeddingTransfer) -> None:
        self.refused.append(transfer.digest)

    def peer_lost(self, worker_id: WorkerId) -> None:
        pass

    def poll(self) -> list[ImageFailure]:
        failures, self.failures, self.has_news = self.failures, [], False
        return failures

    def resumed_s(self, request_id: RequestId) -> float:
        return 0.0

    def counts(self) -> ImageCounts:
        return ImageCounts()

    def close(self) -> None:
        pass


class Runner(FakeRunner):
    """Fails on a token of an image whose features are not held and ready."""

    def __init__(self, store: Store, num_blocks: int) -> None:
        super().__init__(num_blocks=num_blocks, vocab_size=97, block_size=4)
        self._features = store

    def launch(self, plan: StepPlan) -> None:
        for row in plan.rows:
            for image in row.sequence.images:
                if row.start < image.start + image.num_tokens and row.start + row.count > image.start:
                    assert image.digest in self._features.ready, "computed without its embeddings"
                    assert image.digest in self._features.holds, "computed without holding them"
        super().launch(plan)


class World:
    def __init__(self, *, num_blocks: int = 64, has_tower: bool = False, **options: object) -> None:
        self.now = 0.0
        self.store = Store()
        self.source = Source(self.store, is_tower=has_tower)
        settings = EngineOptions(**{"block_size": 4, "max_batch": 8, "token_budget": 16, "check_invariants": True, **options})  # type: ignore[arg-type]
        self.engine = Engine(
            options=settings,
            runner=Runner(self.store, num_blocks),
            worker_id=WORKER,
            eos_token_ids=frozenset(),
            max_model_len=64,
            vocab_size=97,
            cache_seed="fake",
            images=Images(self.store, [self.source], timeout_s=TIMEOUT_S, clock=lambda: self.now),
        )
        self.failures: list[Failure] = []
        self.tokens: dict[RequestId, list[int]] = {}

    def submit(self, *images: Image, num_text: int = 3, relay: bool = True, max_tokens: int = 4) -> Submit:
        """`num_text` tokens of text before each image, and three after the last."""
        prompt: list[int] = []
        placed = []
        for image in images:
            prompt += range(1, 1 + num_text)
            placed.append(
                Image(digest=image.digest, start=len(prompt), num_tokens=image.num_tokens, grid=image.grid, data=image.data)
            )
            prompt += placeholder_ids(image.digest, image.num_tokens)
        prompt += (7, 8, 9)
        digests = dict.fromkeys(image.digest for image in images)
        submit = Submit(
            request_id=new_request_id(),
            external_id="x",
            prompt=prompt,
            params=SamplingParams(temperature=0.0, max_tokens=max_tokens),
            images=placed,
            embeddings=[transfer(digest) for digest in digests] if relay else [],
        )
        self.engine.submit(submit)
        return submit

    def run(self) -> None:
        """As a worker does: while there is work."""
        for _ in range(200):
            if not self.engine.has_work:
                return
            self.take(self.engine.step())
        raise AssertionError("it goes on for ever")

    def take(self, outputs: StepOutputs) -> None:
        self.failures += of_kind(Failure, outputs.news)
        for output in outputs.outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.tokens)

    def end(self) -> None:
        self.run()
        check_idle(self.engine.core)
        assert self.store.holds == []
        assert self.source.asked == {}


def transfer(digest: str) -> EmbeddingTransfer:
    return EmbeddingTransfer(
        transfer_id=TransferId(f"xfer-{digest}"), digest=digest, producer=WORKER, consumer=WORKER, signal_address=""
    )


def drawn(digest: str, num_tokens: int = 9, data: bytes = b"") -> Image:
    return Image(digest=digest, start=0, num_tokens=num_tokens, grid=(1, 6, 6), data=data)


def test_a_prompt_goes_as_far_as_its_images_are_there() -> None:
    world = World()
    submit = world.submit(drawn("a"), drawn("b"), num_text=5)
    world.run()
    (sequence,) = world.engine.requests[submit.request_id].sequences
    assert sequence.num_computed == 5
    world.source.bring("b")  # the later one does not help
    world.run()
    assert sequence.num_computed == 5
    world.source.bring("a")
    world.run()
    assert len(world.tokens[submit.request_id]) == 4
    world.end()


def test_one_that_can_do_nothing_lets_others_pass_and_keeps_its_place() -> None:
    world = World(max_batch=1)
    blocked = world.submit(drawn("a"), num_text=0)
    text = world.submit(relay=False)
    world.run()
    assert list(world.tokens) == [text.request_id]
    assert world.engine.load().waiting == 1
    world.source.bring("a")
    world.run()
    assert len(world.tokens[blocked.request_id]) == 4
    world.end()


def test_a_prompt_that_ends_with_a_image_is_refused() -> None:
    world = World()
    submit = Submit(
        request_id=new_request_id(),
        external_id="x",
        prompt=[1, *placeholder_ids("a", 4)],
        params=SamplingParams(max_tokens=4),
        images=[Image(digest="a", start=1, num_tokens=4, grid=(1, 4, 4))],
    )
    world.engine.submit(submit)
    world.end()
    assert "after its last image" in world.failures[0].message


def test_what_the_prefix_cache_has_needs_no_embeddings() -> None:
    world = World()
    world.source.bring("a")
    first = world.submit(drawn("a", 8), num_text=4)
    world.run()
    assert world.source.refused == ["a"]
    world.store.ready.clear()
    second = world.submit(drawn("a", 8), num_text=4)
    world.run()
    assert world.source.refused == ["a", "a"]
    assert world.tokens[first.request_id] == world.tokens[second.request_id]
    world.end()


def test_embeddings_that_do_not_come_send_the_request_back() -> None:
    world = World()
    failed = world.submit(drawn("a"))
    late = world.submit(drawn("b"))
    world.run()
    world.source.fail(failed.request_id, "a")
    world.run()
    assert [(failure.request_id, failure.kind) for failure in world.failures] == [
        (failed.request_id, MissingEmbeddingError.kind)
    ]
    world.now = TIMEOUT_S - 1.0
    world.run()
    assert len(world.failures) == 1
    world.now = TIMEOUT_S + 1.0
    world.run()
    assert world.failures[1].request_id == late.request_id
    assert "did not come within 30 s" in world.failures[1].message
    world.end()


def test_a_image_that_nobody_brings_is_noticed_when_it_is_needed() -> None:
    world = World()
    submit = world.submit(drawn("a"), relay=False)
    world.run()
    assert [(failure.request_id, failure.kind) for failure in world.failures] == [
        (submit.request_id, MissingEmbeddingError.kind)
    ]
    world.end()


@pytest.mark.parametrize("has_tower", [False, True])
def test_images_are_needed_again_when_kv_was_given_up(has_tower: bool) -> None:
    """Two requests that outgrow the pool: the second makes room, and finds neither its KV nor its embeddings again."""
    world = World(num_blocks=16, has_tower=has_tower, prefix_cache=False)
    for digest in ("a", "b"):
        world.store.ready.add(digest)
    first, second = (world.submit(drawn(digest, 8, b"file"), relay=False, max_tokens=40, num_text=2) for digest in ("a", "b"))
    while len(world.tokens) < 2:
        world.take(world.engine.step())
    assert world.store.holds == []
    world.store.ready.clear()
    world.run()
    if has_tower:
        assert world.source.asked == {(second.request_id, "b"): None}
        world.source.bring("b")
        world.run()
        assert len(world.tokens[second.request_id]) == 40
    else:
        assert [failure.request_id for failure in world.failures] == [second.request_id]
    assert len(world.tokens[first.request_id]) == 40
    world.end()


def test_an_abort_lets_go_of_everything() -> None:
    world = World()
    for num_text in (0, 6):
        submit = world.submit(drawn("a"), drawn("b"), num_text=num_text)
        world.run()
        world.engine.abort([submit.request_id])
        world.end()
