"""Where the tokens of images are and what positions they have, in any cut of a prompt; and how images are encoded."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny_vl import IMAGE_TOKEN_ID
from vision_models import KINDS, Kind, Prompt, image_spec, make_prompt, read_drawn, reference_vl, tiny_vl

from kvrelay.checkpoint.spec import read_spec
from kvrelay.config import EngineOptions, ModelOptions
from kvrelay.engine.interfaces import Row
from kvrelay.errors import ConfigError, MediaError
from kvrelay.ids import RequestId
from kvrelay.kernels.base import ImageBatch
from kvrelay.media.placeholders import FIRST_ID
from kvrelay.models.vision import Grid
from kvrelay.progress import Silent
from kvrelay.runner.vision.build import build_encoder
from kvrelay.runner.vision.encoder import Encoder
from kvrelay.runner.vision.features import FeatureStore
from kvrelay.runner.vision.images import ImageRows
from kvrelay.sampling import SamplingParams
from kvrelay.wire.serving import Image

CPU = torch.device("cpu")
SIZES = [(300, 200), (97, 231), (64, 64)]


@dataclass
class Sequence:
    key: int
    prompt: Prompt
    num_output: int = 0
    request_id: RequestId = RequestId("r")
    sample: int = 0
    params: SamplingParams = field(default_factory=SamplingParams)
    block_table: list[int] = field(default_factory=list)

    @property
    def images(self) -> list[Image]:
        return self.prompt.images

    @property
    def tokens(self) -> list[int]:
        return self.prompt.tokens + [5] * self.num_output

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt.tokens)


def image_rows(kind: Kind, prompts: list[Prompt]) -> ImageRows:
    """Features that tell where they come from: the number of the image, and of the token in it."""
    spec = read_spec(tiny_vl(kind)).vision
    assert spec is not None
    store = FeatureStore(1 << 30, device=CPU, dtype=torch.float32)
    for number, image in enumerate(image for prompt in prompts for image in prompt.images):
        features = torch.zeros(image.num_tokens, (1 + spec.num_deepstack) * spec.out_hidden_size)
        features[:, 0], features[:, 1] = number, torch.arange(image.num_tokens)
        store.put(image.digest, features)
    return ImageRows(spec, store, CPU)


def fill(rows: ImageRows, batch: list[Row]) -> tuple[NDArray[np.int64], NDArray[np.int64], ImageBatch | None]:
    counts = [row.count for row in batch]
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    tokens = np.concatenate([row.sequence.tokens[row.start : row.start + row.count] for row in batch])
    positions = np.concatenate([np.arange(row.start, row.start + row.count) for row in batch])
    images = rows.fill(batch, starts, tokens, positions)
    axes = np.tile(positions, (3, 1)) if images is None else images.axes.numpy()
    assert np.array_equal(axes[0], positions)
    return tokens, axes, images


def reference_positions(kind: Kind, prompt: Prompt) -> tuple[NDArray[np.int64], int]:
    tokens = torch.tensor([prompt.reference_tokens])
    grids: list[Grid] = [image.grid for image in prompt.images]
    positions, delta = reference_vl(kind).model.get_rope_index(
        tokens, mm_token_type_ids=(tokens == IMAGE_TOKEN_ID).int(), image_grid_thw=torch.tensor(grids)
    )
    return positions[:, 0].numpy(), int(delta)


@pytest.mark.parametrize("kind", KINDS)
def test_positions_are_those_of_transformers_however_the_prompt_is_cut(kind: Kind) -> None:
    prompt = make_prompt(kind, SIZES, "Compare.")
    wanted, delta = reference_positions(kind, prompt)
    assert delta < 0
    sequence, length = Sequence(1, prompt, num_output=9), len(prompt.tokens)
    for chunk in (length + 9, 1, 7, 50):
        rows = image_rows(kind, [prompt])
        parts = []
        for start in range(0, length + 9, chunk):
            row = Row(sequence=sequence, start=start, count=min(chunk, length + 9 - start), samples=0)
            tokens, axes, images = fill(rows, [row])
            assert max(tokens) < FIRST_ID
            covered = [i for i in range(start, start + row.count) if i < length and prompt.tokens[i] >= FIRST_ID]
            assert (images is None) == (not covered)
            if images is not None:
                assert (images.places + start).tolist() == covered
                assert all(tokens[place] == IMAGE_TOKEN_ID for place in images.places)
                expected = [
                    (number, index - image.start)
                    for index in covered
                    for number, image in enumerate(prompt.images)
                    if image.start <= index < image.start + image.num_tokens
                ]
                assert [tuple(pair) for pair in images.features[:, :2].int().tolist()] == expected
            parts.append(axes)
        got = np.concatenate(parts, axis=1)
        assert np.array_equal(got[:, :length], wanted)
        assert np.array_equal(got[:, length:], np.tile(np.arange(length, length + 9) + delta, (3, 1)))
        assert len(rows) == 1
        rows.forget([1, 2])
        assert len(rows) == 0


def test_rows_of_a_batch_do_not_mix() -> None:
    """Text, an image in the middle of being computed, and one that decodes."""
    text, one, two = (make_prompt("qwen3_vl", SIZES[:count], "Hi", seed=count) for count in range(3))
    rows = image_rows("qwen3_vl", [one, two])
    batch = [
        Row(sequence=Sequence(1, text), start=0, count=len(text.tokens), samples=1),
        Row(sequence=Sequence(2, two), start=30, count=60, samples=0),
        Row(sequence=Sequence(3, one, num_output=4), start=len(one.tokens) + 3, count=1, samples=1),
        Row(sequence=Sequence(4, text), start=3, count=2, samples=0),
    ]
    _, axes, images = fill(rows, batch)
    alone = [fill(rows, [row])[1] for row in batch]
    assert np.array_equal(axes, np.concatenate(alone, axis=1))
    assert images is not None
    assert images.places.min() >= len(text.tokens)
    assert images.places.max() < len(text.tokens) + 60


def make_encoder(**changes: int) -> Encoder:
    whole = build_encoder(
        ModelOptions(model="", dtype="float32", threads=1), EngineOptions(), tiny_vl("qwen3_vl"), read_drawn, Silent()
    )
    return Encoder(whole._tower, image_spec("qwen3_vl"), whole.store, decode=read_drawn, device=CPU, **changes)


def test_a_image_is_encoded_once() -> None:
    images = make_prompt("qwen3_vl", SIZES, "").images
    encoder = make_encoder()
    assert encoder.encode([*images, images[0]]) == {}
    assert (encoder.num_encoded, encoder.num_hits, encoder.num_passes) == (3, 1, 1)
    assert encoder.encode(images) == {}
    assert (encoder.num_encoded, encoder.num_hits, encoder.num_passes) == (3, 4, 1)
    for image in images:
        assert encoder.store.get(image.digest).shape == (image.num_tokens, 4 * 128)


def test_passes_are_bounded_and_give_the_same_features() -> None:
    images = make_prompt("qwen3_vl", SIZES, "").images
    together, apart = make_encoder(), make_encoder(max_patches=1)
    together.encode(images)
    apart.encode(images)
    assert (together.num_passes, apart.num_passes) == (1, 3)
    for image in images:
        torch.testing.assert_close(together.store.get(image.digest), apart.store.get(image.digest), atol=1e-5, rtol=0)


def test_a_image_that_cannot_be_read_does_not_stop_the_others() -> None:
    good, bad = make_prompt("qwen3_vl", SIZES[:2], "").images
    wrong_grid = Image(digest="odd", start=0, num_tokens=1, grid=(1, 3, 2), data=good.data)
    wrong_count = Image(digest="count", start=0, num_tokens=5, grid=good.grid, data=good.data)

    def decode(data: bytes) -> object:
        if data == bad.data:
            raise MediaError("the file is broken")
        return read_drawn(data)

    encoder = make_encoder()
    encoder._decode = decode  # type: ignore[assignment]
    failures = encoder.encode([bad, wrong_grid, good, wrong_count])
    assert {digest: str(error) for digest, error in failures.items()} == {
        bad.digest: "the file is broken",
        "odd": "an image cannot have a grid of (1, 3, 2) patches",
        "count": f"a grid of {good.grid} patches makes {good.num_tokens} tokens, not 5",
    }
    assert encoder.store.is_ready(good.digest)
    assert not encoder.store.is_ready(bad.digest)


def test_a_text_model_has_nothing_to_encode() -> None:
    from tiny_models import tiny_model

    with pytest.raises(ConfigError, match="takes no images"):
        build_encoder(ModelOptions(model="", threads=1), EngineOptions(), tiny_model("qwen3"), read_drawn, Silent())
