"""How a checkpoint expects its images: read from config.json and its image processor's file, checked once.

Both files exist in two layouts. On the hub, Qwen2-VL and Qwen2.5-VL have the text model's fields at the top of config.json
and `min_pixels` and `max_pixels` in preprocessor_config.json; transformers saves the text model under `text_config`, the bounds
as `size`, and may nest the whole image processor in processor_config.json. In `size`, the two "edges" are areas in pixels.

Settings of an image processor that would change what the model sees, and that we do not implement, are refused by name.
"""

from __future__ import annotations

import math
import pathlib
from typing import Literal, TypeVar

import msgspec

from kvrelay.errors import ModelError, UnsupportedModelError

Family = Literal["qwen3_vl", "qwen2_5_vl", "qwen2_vl"]
Colour = tuple[float, float, float]

_FAMILIES: dict[str, Family] = {
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Qwen2VLForConditionalGeneration": "qwen2_vl",
}
_BICUBIC = 3
_CLIP_MEAN: Colour = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD: Colour = (0.26862954, 0.26130258, 0.27577711)

Decoded = TypeVar("Decoded")


class ImageSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that a router needs to place an image in a prompt, and a worker to cut it into patches."""

    family: Family
    patch_size: int
    temporal_patch_size: int  # frames per patch; an image is the same frame this many times
    merge_size: int  # a square of merge_size by merge_size patches becomes one token
    min_pixels: int
    max_pixels: int
    mean: Colour
    std: Colour
    image_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    num_deepstack: int  # feature sets beside the main one; 0 where the family has none
    hidden_size: int  # width of one feature set, and of the text model

    @property
    def factor(self) -> int:
        """Pixels per token, in each direction."""
        return self.patch_size * self.merge_size


class _VisionConfig(msgspec.Struct, frozen=True, kw_only=True):
    patch_size: int | None = None
    temporal_patch_size: int | None = None
    spatial_merge_size: int | None = None
    deepstack_visual_indexes: list[int] | None = None


class _TextConfig(msgspec.Struct, frozen=True, kw_only=True):
    hidden_size: int | None = None


class _Config(msgspec.Struct, frozen=True, kw_only=True):
    architectures: list[str] | None = None
    hidden_size: int | None = None
    text_config: _TextConfig | None = None
    vision_config: _VisionConfig | None = None
    image_token_id: int | None = None
    vision_start_token_id: int | None = None
    vision_end_token_id: int | None = None


class _Size(msgspec.Struct, frozen=True, kw_only=True):
    shortest_edge: int | None = None
    longest_edge: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None


class _Processor(msgspec.Struct, frozen=True, kw_only=True):
    """Absent settings have the defaults of Qwen2-VL's image processor, which all three families use."""

    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2
    size: _Size | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    image_mean: Colour = _CLIP_MEAN
    image_std: Colour = _CLIP_STD
    do_resize: bool | None = True
    do_rescale: bool | None = True
    do_normalize: bool | None = True
    do_convert_rgb: bool | None = True
    rescale_factor: float = 1 / 255
    resample: int | None = _BICUBIC


class _NestedProcessor(msgspec.Struct, frozen=True, kw_only=True):
    image_processor: _Processor | None = None


def read_image_spec(folder: pathlib.Path) -> ImageSpec | None:
    """Of the checkpoint in a folder of Hugging Face layout. None: the model takes no images."""
    path = folder / "config.json"
    if not path.is_file():
        return None
    config = _decode(path, _Config)
    family = next((_FAMILIES[name] for name in config.architectures or () if name in _FAMILIES), None)
    if family is None:
        return None
    processor, processor_path = _read_processor(folder)
    _refuse_unsupported(processor, processor_path)
    min_pixels, max_pixels = _bounds(processor, processor_path)
    vision = config.vision_config or _VisionConfig()
    text = config.text_config or _TextConfig()
    spec = ImageSpec(
        family=family,
        patch_size=processor.patch_size,
        temporal_patch_size=processor.temporal_patch_size,
        merge_size=processor.merge_size,
        min_pixels=min_pixels,
        max_pixels=max_pixels,
        mean=processor.image_mean,
        std=processor.image_std,
        image_token_id=_needed(config.image_token_id, "image_token_id", path),
        vision_start_token_id=_needed(config.vision_start_token_id, "vision_start_token_id", path),
        vision_end_token_id=_needed(config.vision_end_token_id, "vision_end_token_id", path),
        num_deepstack=_num_deepstack(family, vision),
        hidden_size=_needed(text.hidden_size or config.hidden_size, "hidden_size", path),
    )
    _check_agreement(spec, vision, path, processor_path)
    _check_numbers(spec, processor_path)
    return spec


def _read_processor(folder: pathlib.Path) -> tuple[_Processor, pathlib.Path]:
    """In the order of transformers: nested in the processor's file, else in its own."""
    nested, own = folder / "processor_config.json", folder / "preprocessor_config.json"
    if nested.is_file():
        processor = _decode(nested, _NestedProcessor).image_processor
        if processor is not None:
            return processor, nested
    if own.is_file():
        return _decode(own, _Processor), own
    raise ModelError(f"{folder} has no {own.name}: a model that takes images needs one")


def _refuse_unsupported(processor: _Processor, path: pathlib.Path) -> None:
    steps = {
        "do_resize": processor.do_resize,
        "do_rescale": processor.do_rescale,
        "do_normalize": processor.do_normalize,
        "do_convert_rgb": processor.do_convert_rgb,
    }
    for name, done in steps.items():
        if not done:
            raise UnsupportedModelError(f"{path}: {name} must be true")
    if processor.resample not in (None, _BICUBIC):
        raise UnsupportedModelError(f"{path}: resample {processor.resample} is not supported; supported: {_BICUBIC} (bicubic)")
    if not math.isclose(processor.rescale_factor, 1 / 255, rel_tol=1e-6):
        raise UnsupportedModelError(f"{path}: rescale_factor {processor.rescale_factor} is not supported; supported: 1/255")


def _bounds(processor: _Processor, path: pathlib.Path) -> tuple[int, int]:
    size = processor.size or _Size()
    least = _first(processor.min_pixels, size.shortest_edge, size.min_pixels)
    most = _first(processor.max_pixels, size.longest_edge, size.max_pixels)
    if least is None or most is None:
        raise ModelError(f"{path} has no bounds for the size of images: neither size nor min_pixels and max_pixels")
    return least, most


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


def _num_deepstack(family: Family, vision: _VisionConfig) -> int:
    return len(vision.deepstack_visual_indexes or ()) if family == "qwen3_vl" else 0


def _check_agreement(spec: ImageSpec, vision: _VisionConfig, path: pathlib.Path, processor_path: pathlib.Path) -> None:
    """The tower's shapes are in config.json, those of its patches in the other file."""
    pairs = (
        ("patch_size", vision.patch_size, spec.patch_size),
        ("temporal_patch_size", vision.temporal_patch_size, spec.temporal_patch_size),
        ("merge size", vision.spatial_merge_size, spec.merge_size),
    )
    for name, tower, processor in pairs:
        if tower is not None and tower != processor:
            raise ModelError(f"{path} has {name} {tower}, but {processor_path} has {processor}")


def _check_numbers(spec: ImageSpec, path: pathlib.Path) -> None:
    for name in ("patch_size", "temporal_patch_size", "merge_size", "min_pixels"):
        value = msgspec.structs.asdict(spec)[name]
        if value < 1:
            raise ModelError(f"{path}: {name} must be positive, is {value}")
    if spec.min_pixels > spec.max_pixels:
        raise ModelError(f"{path}: min_pixels {spec.min_pixels} is above max_pixels {spec.max_pixels}")
    if min(spec.std) <= 0.0:
        raise ModelError(f"{path}: image_std must be positive")


def _needed(value: int | None, name: str, path: pathlib.Path) -> int:
    if value is None:
        raise ModelError(f"{path} lacks {name}")
    return value


def _decode(path: pathlib.Path, kind: type[Decoded]) -> Decoded:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: {error}") from error
