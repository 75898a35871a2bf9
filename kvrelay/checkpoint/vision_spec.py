"""What a vision tower is: the `vision_config` of a checkpoint, checked once. `spec.py` reads the text model around it.

The families name things differently. Qwen2-VL's `hidden_size` is the width of what comes out, its own width is `embed_dim`, and
its MLP's a multiple of that; the later ones say `out_hidden_size`, `hidden_size` and `intermediate_size`.
"""

from __future__ import annotations

import math
from typing import Any, Literal, TypeVar

import msgspec

from kvrelay.errors import ModelError, UnsupportedModelError

VisionKind = Literal["qwen3_vl", "qwen2_5_vl", "qwen2_vl"]

_ACTIVATIONS: dict[VisionKind, str] = {"qwen3_vl": "gelu_pytorch_tanh", "qwen2_5_vl": "silu", "qwen2_vl": "quick_gelu"}
_NUM_COLOURS = 3

Needed = TypeVar("Needed")


class VisionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that a tower, and the text model that takes what it makes, need to know."""

    kind: VisionKind
    image_token_id: int  # what an image's tokens are to the tokenizer
    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int  # a square of so many by so many patches becomes one token
    out_hidden_size: int  # the text model's width
    rope_theta: float = 10000.0
    window_size: int = 0  # in pixels; 0: every patch of an image sees every other
    full_attention_blocks: tuple[int, ...] = ()  # with windows: the blocks that do not keep to them
    num_positions_per_side: int = 0  # of the learned positions, a square; 0: none
    deepstack_blocks: tuple[int, ...] = ()  # blocks whose output goes to the first text layers too

    @property
    def num_deepstack(self) -> int:
        return len(self.deepstack_blocks)


class RawVision(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of vision_config we read."""

    depth: int
    num_heads: int
    hidden_size: int
    embed_dim: int | None = None
    intermediate_size: int | None = None
    mlp_ratio: float = 4.0
    out_hidden_size: int | None = None
    patch_size: int | None = None
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    window_size: int | None = None
    fullatt_block_indexes: list[int] | None = None
    num_position_embeddings: int | None = None
    deepstack_visual_indexes: list[int] | None = None
    hidden_act: str | None = None
    in_channels: int | None = None
    in_chans: int | None = None
    rope_parameters: dict[str, Any] | None = None


def read_vision(raw: RawVision, kind: VisionKind, *, image_token_id: int, text_width: int) -> VisionSpec:
    """Errors name the field; the caller adds the file."""
    _refuse_unsupported(raw, kind)
    if kind == "qwen2_vl":
        width = _needed(raw.embed_dim, "embed_dim")
        intermediate, out_width = int(width * raw.mlp_ratio), raw.hidden_size
    else:
        width, intermediate = raw.hidden_size, _needed(raw.intermediate_size, "intermediate_size")
        out_width = _needed(raw.out_hidden_size, "out_hidden_size")
    spec = VisionSpec(
        kind=kind,
        image_token_id=image_token_id,
        depth=raw.depth,
        hidden_size=width,
        intermediate_size=intermediate,
        num_heads=raw.num_heads,
        patch_size=raw.patch_size or (16 if kind == "qwen3_vl" else 14),
        temporal_patch_size=raw.temporal_patch_size,
        merge_size=raw.spatial_merge_size,
        out_hidden_size=out_width,
        window_size=_needed(raw.window_size, "window_size") if kind == "qwen2_5_vl" else 0,
        full_attention_blocks=_blocks(raw.fullatt_block_indexes, "fullatt_block_indexes") if kind == "qwen2_5_vl" else (),
        num_positions_per_side=_side(raw.num_position_embeddings) if kind == "qwen3_vl" else 0,
        deepstack_blocks=_blocks(raw.deepstack_visual_indexes, "deepstack_visual_indexes") if kind == "qwen3_vl" else (),
    )
    _check_numbers(spec, text_width)
    return spec


def _refuse_unsupported(raw: RawVision, kind: VisionKind) -> None:
    if raw.hidden_act not in (None, _ACTIVATIONS[kind]):
        raise UnsupportedModelError(
            f"vision_config.hidden_act {raw.hidden_act!r} is not supported; supported: {_ACTIVATIONS[kind]}"
        )
    for colours in (raw.in_channels, raw.in_chans):
        if colours not in (None, _NUM_COLOURS):
            raise UnsupportedModelError(f"vision_config: {colours} colours are not supported; supported: {_NUM_COLOURS}")
    rope = raw.rope_parameters or {}
    if rope.get("rope_type", "axial") != "axial" or rope.get("rope_theta", 10000.0) != 10000.0:
        raise UnsupportedModelError(f"vision_config.rope_parameters {rope} are not supported")


def _check_numbers(spec: VisionSpec, text_width: int) -> None:
    numbers = msgspec.structs.asdict(spec)
    for name in ("depth", "hidden_size", "intermediate_size", "num_heads", "patch_size", "temporal_patch_size", "merge_size"):
        if numbers[name] < 1:
            raise ModelError(f"vision_config: {name} must be positive, is {numbers[name]}")
    if spec.hidden_size % (4 * spec.num_heads):
        raise ModelError(f"vision_config: {spec.num_heads} heads cannot split {spec.hidden_size} into quarters to rotate")
    if spec.out_hidden_size != text_width:
        raise ModelError(f"vision_config: features of width {spec.out_hidden_size} do not fit the text model's {text_width}")
    if spec.kind == "qwen2_5_vl" and spec.window_size < spec.merge_size * spec.patch_size:
        raise ModelError(f"vision_config: window_size {spec.window_size} holds no token of {spec.merge_size * spec.patch_size}")
    outside = [block for block in (*spec.deepstack_blocks, *spec.full_attention_blocks) if not 0 <= block < spec.depth]
    if outside:
        raise ModelError(f"vision_config: there is no block {outside[0]} in {spec.depth}")


def _blocks(indexes: list[int] | None, name: str) -> tuple[int, ...]:
    """Features are made in the order of the blocks, so the list has to be in it."""
    found = _needed(indexes, name)
    if sorted(set(found)) != found:
        raise ModelError(f"vision_config.{name} must be in rising order, is {found}")
    return tuple(found)


def _side(num_positions: int | None) -> int:
    count = _needed(num_positions, "num_position_embeddings")
    side = math.isqrt(max(0, count))
    if side < 1 or side * side != count:
        raise ModelError(f"vision_config.num_position_embeddings must be a square, is {count}")
    return side


def _needed(value: Needed | None, name: str) -> Needed:
    if value is None:
        raise ModelError(f"vision_config lacks {name}")
    return value
