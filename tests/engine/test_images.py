"""Images at the engine's door, and in its prefix cache."""

from __future__ import annotations

import time

import msgspec
import pytest

from kvrelay.config import EngineOptions
from kvrelay.engine.engine import Engine
from kvrelay.engine.requests.images import Images
from kvrelay.media.placeholders import placeholder_ids
from kvrelay.runner.fake import FakeRunner
from kvrelay.wire.serving import Image, Submit
from tests.engine.test_engine import VOCAB, WORKER, Collected, run, submit


class Everything:
    """The features of all images are there."""

    def is_ready(self, digest: str) -> bool:
        return True

    def hold(self, digest: str) -> None:
        pass

    def release(self, digest: str) -> None:
        pass


def make_engine(*, takes_images: bool = True) -> Engine:
    return Engine(
        options=EngineOptions(block_size=4, max_batch=8, token_budget=16, check_invariants=True),
        runner=FakeRunner(num_blocks=64, vocab_size=VOCAB, block_size=4),
        worker_id=WORKER,
        eos_token_ids=frozenset(),
        max_model_len=64,
        vocab_size=VOCAB,
        cache_seed="fake",
        images=Images(Everything(), timeout_s=60.0, clock=time.monotonic) if takes_images else None,
    )


def image(digest: str, start: int, num_tokens: int = 6) -> Image:
    return Image(digest=digest, start=start, num_tokens=num_tokens, grid=(1, 4, num_tokens), data=b"file")


def with_images(*digests: str) -> Submit:
    """1 2 3, the image, 4, for each."""
    prompt: list[int] = []
    images: list[Image] = []
    for digest in digests:
        prompt += [1, 2, 3]
        images.append(image(digest, len(prompt)))
        prompt += [*placeholder_ids(digest, 6), 4]
    return msgspec.structs.replace(submit(prompt), images=images)


def served(engine: Engine, request: Submit) -> Collected:
    engine.submit(request)
    seen = run(engine)
    assert not seen.failures
    return seen


def test_only_the_same_image_is_found_in_the_cache() -> None:
    engine = make_engine()
    first = with_images("a", "b")
    again, other, second_differs = with_images("a", "b"), with_images("c", "b"), with_images("a", "c")
    cached = []
    for request in (first, again, other, second_differs):
        cached.append(served(engine, request).first[request.request_id].cached_tokens)
    assert cached == [0, 16, 0, 12]  # full blocks before the first difference; block 0 has a token of the first image


@pytest.mark.parametrize(
    ("images", "says"),
    [
        ([], "token ids must be"),
        ([image("a", 3)], "token ids must be"),
        ([image("a", 3), image("b", 14)], "not its placeholders"),
        ([image("a", 3), image("a", 13)], "not its placeholders"),
        ([image("b", 13), image("a", 3)], "in order"),
        ([image("a", 3), image("a", 3), image("b", 13)], "in order"),
        ([image("a", 3), image("a", 8)], "in order"),
        ([image("a", 3), image("b", 13, 8)], "inside the prompt"),
        ([image("a", 3), image("b", 13, 0)], "inside the prompt"),
        ([image("a", -17), image("b", 13)], "inside the prompt"),
        ([image("a", 3, 5), image("b", 13)], "token ids must be"),
        ([image("a", 3, 7), image("b", 13)], "not its placeholders"),
    ],
)
def test_placeholders_stand_for_the_images_that_are_named(images: list[Image], says: str) -> None:
    engine = make_engine()
    request = msgspec.structs.replace(with_images("a", "b"), images=images)
    engine.submit(request)
    assert says in run(engine).failures[request.request_id]


def test_a_worker_without_vision_refuses_images() -> None:
    engine = make_engine(takes_images=False)
    request = with_images("a")
    engine.submit(request)
    assert "takes no images" in run(engine).failures[request.request_id]
