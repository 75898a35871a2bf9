"""Images through towers, runner and engine give what transformers gives: patches bit for bit, features within rounding, and
the same greedy tokens, in any chunks and any company. Mistakes that are easy to make give others."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import numpy as np
import PIL.Image
import pytest
import torch
from leaks import check_idle
from numpy.typing import NDArray
from parity import assert_parity
from vision_models import (
    KINDS,
    Kind,
    Prompt,
    drawn,
    image_processor,
    image_spec,
    make_prompt,
    read_drawn,
    reference_output,
    reference_vl,
    tiny_vl,
)

from kvrelay.checkpoint.spec import read_spec
from kvrelay.checkpoint.vision_spec import VisionSpec
from kvrelay.config import EngineOptions, ModelOptions, read_environment
from kvrelay.engine.engine import Engine
from kvrelay.engine.requests.images import Images
from kvrelay.ids import RequestId, new_request_id, new_worker_id
from kvrelay.media.patches import patches_of
from kvrelay.media.placeholders import FIRST_ID
from kvrelay.media.resize import target_size
from kvrelay.progress import Silent
from kvrelay.runner.build import build_runner
from kvrelay.runner.loader import load_tower
from kvrelay.runner.vision import encoder as encoder_module
from kvrelay.runner.vision import images as images_module
from kvrelay.runner.vision.build import build_encoder
from kvrelay.runner.vision.encoder import Encoder
from kvrelay.runner.vision.features import FeatureStore
from kvrelay.runner.vision.images import ImageRows, Span, spans_of
from kvrelay.sampling import SamplingParams
from kvrelay.wire.serving import Failure, Submit, of_kind

CPU = torch.device("cpu")
NUM_TOKENS = 16
SIZES = [(64, 64), (300, 200), (97, 131), (31, 500), (1024, 768), (11, 2000)]
every_kind = pytest.mark.parametrize("kind", KINDS)


@functools.cache
def tower(kind: Kind, layout: Any = "hub") -> Any:
    folder = tiny_vl(kind, layout)
    return load_tower(folder, read_spec(folder), device=CPU, dtype=torch.float32, progress=Silent())


@functools.cache
def prompts(kind: Kind) -> list[Prompt]:
    """No image, one, two, and one after more text."""
    return [
        make_prompt(kind, [], "hello"),
        make_prompt(kind, [(300, 200)], "What is it?"),
        make_prompt(kind, [(220, 90), (97, 231)], "Compare."),
        make_prompt(kind, [(180, 250)], "Describe the image in one word.", seed=5),
    ]


@functools.cache
def expected(kind: Kind, index: int) -> tuple[list[int], list[bool]]:
    return reference_output(kind, prompts(kind)[index], NUM_TOKENS)


def make_engine(
    kind: Kind, *, native_kernels: bool = True, device: Literal["cpu", "cuda"] = "cpu", **options: object
) -> tuple[Engine, Encoder]:
    settings = EngineOptions(**{"max_model_len": 256, "kv_blocks": 64, "check_invariants": True, **options})  # type: ignore[arg-type]
    model = ModelOptions(model=kind, dtype="float32", threads=1, device=device)
    encoder = build_encoder(model, settings, tiny_vl(kind), read_drawn, Silent())
    environment = msgspec.structs.replace(read_environment(), native_kernels=native_kernels)
    runner = build_runner(model, settings, tiny_vl(kind), environment, Silent(), features=encoder.store)
    engine = Engine(
        options=settings,
        runner=runner,
        worker_id=new_worker_id("whole"),
        eos_token_ids=frozenset(),
        max_model_len=runner.max_model_len,
        vocab_size=runner.spec.vocab_size,
        cache_seed=runner.fingerprint,
        images=Images(encoder.store, timeout_s=60.0, clock=time.monotonic),
    )
    return engine, encoder


def generate(engine: Engine, encoder: Encoder, batch: list[Prompt], **changes: Any) -> list[list[int]]:
    assert encoder.encode([image for prompt in batch for image in prompt.images]) == {}
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": NUM_TOKENS, **changes})
    ids = [new_request_id() for _ in batch]
    tokens: dict[RequestId, list[int]] = {request_id: [] for request_id in ids}
    for request_id, prompt in zip(ids, batch, strict=True):
        submit = Submit(request_id=request_id, external_id="", prompt=prompt.tokens, params=params, images=prompt.images)
        engine.submit(submit)
    while engine.has_work:
        step = engine.step()
        assert not of_kind(Failure, step.news)
        for output in step.outputs:
            tokens[output.request_id].extend(output.tokens)
    check_idle(engine.core)
    return [tokens[request_id] for request_id in ids]


def assert_all_equal(kind: Kind, got: list[list[int]], what: str) -> None:
    for index, tokens in enumerate(got):
        assert_parity(tokens, *expected(kind, index), f"{kind} {what}, prompt {index}")


@every_kind
@pytest.mark.parametrize("size", SIZES)
def test_patches_are_those_of_the_processor_bit_for_bit(kind: Kind, size: tuple[int, int]) -> None:
    one, spec = drawn(*size, seed=3), image_spec(kind)
    height, width = target_size(
        one.height, one.width, factor=spec.factor, min_pixels=spec.min_pixels, max_pixels=spec.max_pixels
    )
    got, grid = patches_of(one, height, width, spec)
    wanted = image_processor(kind)(images=[one], return_tensors="np")
    assert [list(grid)] == wanted["image_grid_thw"].tolist()
    assert got.dtype == np.float32
    assert np.array_equal(got, wanted["pixel_values"])


def patch_width(spec: VisionSpec) -> int:
    return 3 * spec.temporal_patch_size * spec.patch_size**2


@every_kind
@pytest.mark.parametrize("layout", ["hub", pytest.param("transformers", marks=pytest.mark.long)])
def test_a_tower_alone_makes_the_features_that_the_whole_model_makes(kind: Kind, layout: Any) -> None:
    """Of images of which some fill windows and some do not, in one pass and each alone."""
    grids = [(1, 12, 18), (1, 8, 6), (1, 2, 2), (1, 8, 8), (1, 10, 14)]
    ours = tower(kind, layout)
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(rows * columns, patch_width(ours.spec), generator=generator) for _, rows, columns in grids]
    with torch.inference_mode():
        result = reference_vl(kind, layout).model.visual(torch.cat(parts), grid_thw=torch.tensor(grids))
    wanted = torch.cat([result.pooler_output, *(result.deepstack_features if kind == "qwen3_vl" else ())], dim=-1)
    together = ours.forward(torch.cat(parts), grids)
    assert together.dtype == torch.float32
    assert together.shape == (
        sum(rows * columns for _, rows, columns in grids) // 4,
        (1 + ours.spec.num_deepstack) * ours.spec.out_hidden_size,
    )
    torch.testing.assert_close(together, wanted, atol=1e-5, rtol=0)
    alone = torch.cat([ours.forward(part, [grid]) for part, grid in zip(parts, grids, strict=True)])
    torch.testing.assert_close(alone, wanted, atol=1e-5, rtol=0)


@every_kind
def test_both_layouts_of_a_checkpoint_are_the_same_model(kind: Kind) -> None:
    assert read_spec(tiny_vl(kind, "hub")) == read_spec(tiny_vl(kind, "transformers"))
    patches = torch.ones(16, patch_width(tower(kind).spec))
    assert torch.equal(
        tower(kind, "hub").forward(patches, [(1, 4, 4)]), tower(kind, "transformers").forward(patches, [(1, 4, 4)])
    )


@every_kind
def test_text_and_images_in_one_batch_twice_so_that_the_second_is_cached(kind: Kind) -> None:
    engine, encoder = make_engine(kind)
    assert_all_equal(kind, generate(engine, encoder, prompts(kind)), "fresh")
    assert (encoder.num_encoded, encoder.num_hits, encoder.num_passes) == (4, 0, 1)
    assert_all_equal(kind, generate(engine, encoder, prompts(kind)), "cached")
    assert (encoder.num_encoded, encoder.num_hits, encoder.num_passes) == (4, 4, 1)
    assert engine.load().cached_tokens > 0
    engine.close()


@pytest.mark.parametrize(
    "kind", ["qwen3_vl", pytest.param("qwen2_5_vl", marks=pytest.mark.long), pytest.param("qwen2_vl", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("chunk", [1, 16, *(pytest.param(chunk, marks=pytest.mark.long) for chunk in (7, 33, 64))])
def test_any_chunk_size(kind: Kind, chunk: int) -> None:
    engine, encoder = make_engine(kind, token_budget=chunk, prefix_cache=False, max_batch=4)
    assert_all_equal(kind, generate(engine, encoder, prompts(kind)), f"chunk {chunk}")
    engine.close()


@pytest.mark.cuda
@every_kind
def test_an_nvidia_card_does_the_same(kind: Kind) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA card")
    engine, encoder = make_engine(kind, device="cuda", token_budget=50)
    assert_all_equal(kind, generate(engine, encoder, prompts(kind)), "fresh")
    assert_all_equal(kind, generate(engine, encoder, prompts(kind)), "cached")
    engine.close()


def test_the_kernels_in_pytorch_do_the_same() -> None:
    engine, encoder = make_engine("qwen3_vl", native_kernels=False, token_budget=50)
    assert_all_equal("qwen3_vl", generate(engine, encoder, prompts("qwen3_vl")), "without native kernels")
    engine.close()


def test_samples_of_one_prompt_share_its_images() -> None:
    engine, encoder = make_engine("qwen3_vl")
    (tokens,) = generate(engine, encoder, prompts("qwen3_vl")[2:3], n=3)
    one, _ = expected("qwen3_vl", 2)
    assert tokens == [token for token in one for _ in range(3)]  # all take the same step at the same time
    engine.close()


def test_preempted_and_computed_again() -> None:
    engine, encoder = make_engine("qwen3_vl", block_size=5, kv_blocks=24, token_budget=40, max_model_len=120)
    assert_all_equal("qwen3_vl", generate(engine, encoder, prompts("qwen3_vl")), "preempted")
    assert engine.load().preemptions > 0
    engine.close()


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_5_vl"])
def test_a_image_in_a_batch_changes_no_bit_of_the_others(kind: Kind) -> None:
    """Logprobs are as good as logits here: alone, and next to images that are being computed."""

    def logprobs(batch: list[Prompt]) -> list[float]:
        engine, encoder = make_engine(kind, prefix_cache=False)
        encoder.encode([image for prompt in batch for image in prompt.images])
        params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=0)
        first = new_request_id()
        for index, prompt in enumerate(batch):
            request_id = first if index == 0 else new_request_id()
            engine.submit(
                Submit(request_id=request_id, external_id="", prompt=prompt.tokens, params=params, images=prompt.images)
            )
        found: list[float] = []
        while engine.has_work:
            outputs = [output for output in engine.step().outputs if output.request_id == first]
            found += [entry.logprob for output in outputs for entry in output.logprobs or []]
        engine.close()
        return found

    text, one, two, _ = prompts(kind)
    assert logprobs([text]) == logprobs([text, one, two])
    assert logprobs([one]) == logprobs([one, text, two])


def test_a_penalty_counts_the_image_token_and_nothing_that_is_not_in_the_vocabulary() -> None:
    engine, encoder = make_engine("qwen3_vl")
    (tokens,) = generate(engine, encoder, prompts("qwen3_vl")[1:2], repetition_penalty=1.3, frequency_penalty=0.5)
    prompt = prompts("qwen3_vl")[1]
    assert len(tokens) == NUM_TOKENS
    assert tokens != expected("qwen3_vl", 1)[0]
    assert all(token < FIRST_ID for token in tokens)
    (with_logprobs,) = generate(engine, encoder, [prompt], prompt_logprobs=2)
    assert with_logprobs == expected("qwen3_vl", 1)[0]
    engine.close()


# Mistakes


def _raster(patches: NDArray[np.float32], grid: tuple[int, int, int]) -> NDArray[np.float32]:
    _, rows, columns = grid
    return patches.reshape(rows // 2, columns // 2, 2, 2, -1).transpose(0, 2, 1, 3, 4).reshape(patches.shape)


class _Fault:
    """Replaces one step of the way of an image by a wrong one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def patch_order(self) -> None:
        def wrong(*arguments: Any) -> Any:
            patches, grid = patches_of(*arguments)
            return _raster(patches, grid), grid

        self._monkeypatch.setattr(encoder_module, "patches_of", wrong)

    def colours(self) -> None:
        self._monkeypatch.setattr(
            encoder_module, "patches_of", lambda one, *rest: patches_of(_swapped_colours(one), *rest)
        )  # fmt: skip

    def height_and_width_swapped(self) -> None:
        self._axes(lambda axes: axes[[0, 2, 1]])

    def positions_of_text(self) -> None:
        self._axes(lambda axes: axes[:1].expand(3, -1))

    def no_shift_behind_images(self) -> None:
        def wrong(images: Any, merge_size: int) -> list[Span]:
            spans = spans_of(images, merge_size)
            return [Span(s.digest, s.start, s.stop, s.position, s.num_columns, 0) for s in spans]

        self._monkeypatch.setattr(images_module, "spans_of", wrong)

    def features_shifted(self) -> None:
        self._features(lambda features: features.roll(1, 0))

    def deepstack_reversed(self) -> None:
        self._features(lambda features: features[:, _columns(features, [0, 3, 2, 1])])

    def deepstack_one_layer_late(self) -> None:
        self._features(lambda features: features[:, _columns(features, [0, 3, 1, 2])])

    def deepstack_missing(self) -> None:
        width = 128
        self._features(lambda features: torch.cat((features[:, :width], torch.zeros_like(features[:, width:])), -1))

    def _axes(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        fill = ImageRows.fill

        def wrong(rows: ImageRows, *arguments: Any) -> Any:
            batch = fill(rows, *arguments)
            if batch is not None:
                batch.axes = change(batch.axes).contiguous()
            return batch

        self._monkeypatch.setattr(ImageRows, "fill", wrong)

    def _features(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        put = FeatureStore.put
        self._monkeypatch.setattr(FeatureStore, "put", lambda store, digest, features: put(store, digest, change(features)))


def _swapped_colours(one: PIL.Image.Image) -> PIL.Image.Image:
    return PIL.Image.merge("RGB", one.split()[::-1])


def _columns(features: torch.Tensor, order: list[int]) -> torch.Tensor:
    return torch.arange(features.shape[1]).view(4, -1)[order].flatten()


FAULTS = [
    "patch_order", "colours", "height_and_width_swapped", "positions_of_text", "no_shift_behind_images", "features_shifted",
]  # fmt: skip
DEEPSTACK_FAULTS = ["deepstack_reversed", "deepstack_one_layer_late", "deepstack_missing"]


@pytest.mark.parametrize(
    ("kind", "fault"),
    [(kind, fault) for kind in ("qwen3_vl", "qwen2_5_vl") for fault in FAULTS]
    + [("qwen3_vl", fault) for fault in DEEPSTACK_FAULTS]
    + [pytest.param("qwen2_vl", fault, marks=pytest.mark.long) for fault in FAULTS],
)
def test_a_mistake_shows_in_the_tokens(kind: Kind, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prompts with images; text alone stays as it was."""
    getattr(_Fault(monkeypatch), fault)()
    engine, encoder = make_engine(kind)
    text, *others = generate(engine, encoder, prompts(kind))
    engine.close()
    assert_parity(text, *expected(kind, 0), "text")
    changed = [tokens != expected(kind, 1 + index)[0] for index, tokens in enumerate(others)]
    unmoved = 1 if kind == "qwen2_vl" else 0  # its small model gives the same few tokens for one of the prompts, whatever comes
    assert sum(changed) >= len(changed) - unmoved, f"{fault}: {changed}"
