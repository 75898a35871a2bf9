"""How positions turn into angles: the rotary settings of a checkpoint, in both layouts that transformers has written.

Old: `rope_theta` and `rope_scaling: {"rope_type" | "type", ...}`. New: `rope_parameters` with all of it.
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import msgspec

from kvrelay.errors import ModelError, UnsupportedModelError

RopeKind = Literal["default", "linear", "llama3", "yarn"]
_DEFAULT_THETA = 10000.0

RawRope = dict[str, Any]


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`models/layers.py` makes the table from this. A kind reads only its own fields; the others keep their defaults."""

    kind: RopeKind = "default"
    theta: float = _DEFAULT_THETA
    factor: float = 1.0  # linear, llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_position_embeddings: int = 0  # llama3, yarn
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn: scales cos and sin
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    mrope_section: tuple[int, int, int] | None = None  # pairs turned by time, height and width; None: one position per token
    mrope_interleaved: bool = False  # the three take turns along the pairs; else each has its own stretch of them


def read_rope(raw: RawRope | None, theta: float | None, max_position_embeddings: int) -> RopeSpec:
    """`raw` is rope_parameters or rope_scaling; `theta` the old layout's rope_theta; errors name the field."""
    raw = raw or {}
    base = _number(raw, "rope_theta", theta if theta is not None else _DEFAULT_THETA)
    kind = raw.get("rope_type", raw.get("type", "default"))
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError(f"partial_rotary_factor {raw['partial_rotary_factor']} is not supported")
    match kind:
        case "default":
            return RopeSpec(theta=base)
        case "linear":
            return RopeSpec(kind="linear", theta=base, factor=_number(raw, "factor"))
        case "llama3":
            return _read_llama3(raw, base, max_position_embeddings)
        case "yarn":
            return _read_yarn(raw, base, max_position_embeddings)
        case _:
            supported = ", ".join(get_args(RopeKind))
            raise UnsupportedModelError(f"rope type {kind!r} is not supported; supported: {supported}")


def read_mrope(raw: RawRope | None, theta: float | None, max_position_embeddings: int, *, interleaved: bool) -> RopeSpec:
    """Of a model whose images have positions of three axes. "mrope" is an old name for the plain kind with sections."""
    raw = raw or {}
    section = raw.get("mrope_section")
    if not isinstance(section, list) or len(section) != 3 or not all(type(size) is int and size >= 0 for size in section):
        raise ModelError(f"rope setting mrope_section must be three counts, is {section!r}")
    if "mrope_interleaved" in raw and bool(raw["mrope_interleaved"]) is not interleaved:
        raise UnsupportedModelError(f"mrope_interleaved {raw['mrope_interleaved']!r} is not supported for this architecture")
    renamed = {name: "default" if name in ("type", "rope_type") and value == "mrope" else value for name, value in raw.items()}
    plain = read_rope(renamed, theta, max_position_embeddings)
    time, height, width = section
    return msgspec.structs.replace(plain, mrope_section=(time, height, width), mrope_interleaved=interleaved)


def _read_llama3(raw: RawRope, theta: float, max_position_embeddings: int) -> RopeSpec:
    return RopeSpec(
        kind="llama3",
        theta=theta,
        factor=_number(raw, "factor"),
        low_freq_factor=_number(raw, "low_freq_factor"),
        high_freq_factor=_number(raw, "high_freq_factor"),
        original_max_position_embeddings=int(_number(raw, "original_max_position_embeddings", max_position_embeddings)),
    )


def _read_yarn(raw: RawRope, theta: float, max_position_embeddings: int) -> RopeSpec:
    original = int(_number(raw, "original_max_position_embeddings", max_position_embeddings))
    factor = _number(raw, "factor", max_position_embeddings / original)
    return RopeSpec(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=_number(raw, "beta_fast", 32.0),
        beta_slow=_number(raw, "beta_slow", 1.0),
        attention_factor=_number(raw, "attention_factor", _yarn_attention_factor(raw, factor)),
        truncate=bool(raw.get("truncate", True)),
    )


def _yarn_attention_factor(raw: RawRope, factor: float) -> float:
    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if raw.get("mscale") and raw.get("mscale_all_dim"):
        return scale(_number(raw, "mscale")) / scale(_number(raw, "mscale_all_dim"))
    return scale(1.0)


def _number(raw: RawRope, name: str, default: float | None = None) -> float:
    """A positive number, or the default where the field is absent or null."""
    value = raw.get(name)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"rope settings lack {name}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError(f"rope setting {name} must be a positive number, is {value!r}")
    return float(value)
