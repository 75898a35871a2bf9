"""What a checkpoint's files say about images, in every layout they come in."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from kvrelay.errors import ModelError, UnsupportedModelError
from kvrelay.media.image_spec import ImageSpec, read_image_spec

IDS = {"image_token_id": 9, "vision_start_token_id": 7, "vision_end_token_id": 8}
NESTED = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "text_config": {"hidden_size": 128},
    "vision_config": {
        "hidden_size": 64,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "deepstack_visual_indexes": [0, 1, 2],
    },
    **IDS,
}
FLAT = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "hidden_size": 3584,
    "vision_config": {"hidden_size": 1280, "spatial_merge_size": 2},
    **IDS,
}
PROCESSOR_3 = {
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
PROCESSOR_2 = {"patch_size": 14, "min_pixels": 3136, "max_pixels": 12845056}
SPEC_3 = ImageSpec(
    family="qwen3_vl",
    patch_size=16,
    temporal_patch_size=2,
    merge_size=2,
    min_pixels=65536,
    max_pixels=16777216,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
    num_deepstack=3,
    hidden_size=128,
    **IDS,
)


def folder_with(folder: pathlib.Path, **files: Any) -> pathlib.Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_qwen3_as_on_the_hub(tmp_path: pathlib.Path) -> None:
    spec = read_image_spec(folder_with(tmp_path, config=NESTED, preprocessor_config=PROCESSOR_3))
    assert spec == SPEC_3
    assert spec.factor == 32


def test_qwen2_5_as_on_the_hub(tmp_path: pathlib.Path) -> None:
    spec = read_image_spec(folder_with(tmp_path, config=FLAT, preprocessor_config=PROCESSOR_2))
    assert spec is not None
    assert (spec.family, spec.hidden_size, spec.num_deepstack, spec.factor) == ("qwen2_5_vl", 3584, 0, 28)
    assert (spec.min_pixels, spec.max_pixels, spec.mean[0], spec.std[0]) == (3136, 12845056, 0.48145466, 0.26862954)


def test_a_nested_processor_counts_before_a_file_of_its_own(tmp_path: pathlib.Path) -> None:
    """As transformers reads them."""
    nested = {"image_processor": {**PROCESSOR_3, "size": {"shortest_edge": 4096, "longest_edge": 65536}}}
    folder_with(tmp_path, config=NESTED, preprocessor_config=PROCESSOR_3, processor_config=nested)
    spec = read_image_spec(tmp_path)
    assert spec is not None
    assert (spec.min_pixels, spec.max_pixels) == (4096, 65536)
    folder_with(tmp_path, processor_config={"processor_class": "Qwen3VLProcessor"})
    assert read_image_spec(tmp_path) == SPEC_3


def test_a_text_model_takes_no_images(tmp_path: pathlib.Path) -> None:
    assert read_image_spec(tmp_path) is None
    assert read_image_spec(folder_with(tmp_path, config={"architectures": ["Qwen3ForCausalLM"]})) is None


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"do_resize": False}, "do_resize must be true"),
        ({"resample": 2}, "resample 2 is not supported"),
        ({"rescale_factor": 1.0}, "rescale_factor 1.0 is not supported"),
    ],
)
def test_a_processor_that_does_something_else_is_refused(
    tmp_path: pathlib.Path, changes: dict[str, Any], complaint: str
) -> None:
    folder_with(tmp_path, config=NESTED, preprocessor_config={**PROCESSOR_3, **changes})
    with pytest.raises(UnsupportedModelError, match=complaint):
        read_image_spec(tmp_path)


@pytest.mark.parametrize(
    ("config", "processor", "complaint"),
    [
        (NESTED, {**PROCESSOR_3, "patch_size": 14}, "has patch_size 16, but .* has 14"),
        (NESTED, {**PROCESSOR_3, "size": {"shortest_edge": 9, "longest_edge": 8}}, "is above max_pixels"),
        (NESTED, {**PROCESSOR_3, "size": {"height": 9}}, "has no bounds for the size"),
        (NESTED, {**PROCESSOR_3, "image_std": [0.5, 0.0, 0.5]}, "image_std must be positive"),
        (NESTED, {**PROCESSOR_3, "merge_size": "2"}, "merge_size"),
        ({**NESTED, "image_token_id": None}, PROCESSOR_3, "lacks image_token_id"),
        ({**NESTED, "text_config": {}}, PROCESSOR_3, "lacks hidden_size"),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path: pathlib.Path, config: Any, processor: Any, complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        read_image_spec(folder_with(tmp_path, config=config, preprocessor_config=processor))


def test_a_missing_processor_is_an_error(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ModelError, match="has no preprocessor_config"):
        read_image_spec(folder_with(tmp_path, config=NESTED))
