"""What a model is: the shapes and constants that `config.json` and `generation_config.json` tell, checked once.

Everything that would change the output and that we do not implement is refused here, by name, before a single weight is
read. A `ModelSpec` that exists can be served.
"""

from __future__ import annotations

import hashlib
import pathlib
from typing import Any, TypeVar

import msgspec

from kvrelay.checkpoint.rope import RawRope, RopeSpec, read_mrope, read_rope
from kvrelay.checkpoint.vision_spec import RawVision, VisionKind, VisionSpec, read_vision
from kvrelay.errors import ModelError, UnsupportedModelError

CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"

Decoded = TypeVar("Decoded")


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that models, runner and engine need to know of a checkpoint. Rows of weights are outputs, as in safetensors."""

    architecture: str  # the class name in config.json, such as LlamaForCausalLM
    model_type: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeSpec
    tie_word_embeddings: bool
    attention_bias: bool  # on q, k and v
    output_bias: bool  # on attention's output projection
    mlp_bias: bool
    qk_norm: bool  # a norm per head on q and k, before the rotation
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    vision: VisionSpec | None = None  # None: a text model
    fp8: bool = False  # the weights of its linear layers are stored in fp8

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_bytes


class _Family(msgspec.Struct, frozen=True, kw_only=True):
    """What an architecture implies and its config.json may leave out."""

    model_type: str
    qkv_bias: bool | None = None  # None: the config's attention_bias says
    output_bias: bool | None = None
    mlp_bias: bool | None = None
    qk_norm: bool = False
    head_dim: int | None = None  # None: hidden_size / heads
    num_kv_heads: int | None = None  # None: as many as heads
    sliding_window: int | None = None  # what a config that does not mention it means
    window_switch: bool = False  # use_sliding_window must be true for a window to count
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    vision: VisionKind | None = None
    mrope_interleaved: bool = False


_FAMILIES = {
    "LlamaForCausalLM": _Family(model_type="llama"),
    "MistralForCausalLM": _Family(
        model_type="mistral", qkv_bias=False, output_bias=False, mlp_bias=False, num_kv_heads=8, sliding_window=4096
    ),
    "Qwen2ForCausalLM": _Family(model_type="qwen2", qkv_bias=True, output_bias=False, mlp_bias=False, window_switch=True),
    "Qwen3ForCausalLM": _Family(model_type="qwen3", mlp_bias=False, qk_norm=True, head_dim=128, window_switch=True),
    "Qwen3VLForConditionalGeneration": _Family(
        model_type="qwen3_vl", mlp_bias=False, qk_norm=True, head_dim=128, rope_theta=500000.0, vision="qwen3_vl",
        mrope_interleaved=True,
    ),
    "Qwen2_5_VLForConditionalGeneration": _Family(
        model_type="qwen2_5_vl", qkv_bias=True, output_bias=False, mlp_bias=False, num_kv_heads=8, window_switch=True,
        rms_norm_eps=1e-5, rope_theta=1000000.0, vision="qwen2_5_vl",
    ),
    "Qwen2VLForConditionalGeneration": _Family(
        model_type="qwen2_vl", qkv_bias=True, output_bias=False, mlp_bias=False, num_kv_heads=8, window_switch=True,
        rms_norm_eps=1e-5, rope_theta=1000000.0, vision="qwen2_vl",
    ),
}  # fmt: skip
SUPPORTED_ARCHITECTURES = tuple(_FAMILIES)


class _RawConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of config.json we read, typed; msgspec names the one that is wrong."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float | None = None
    rope_theta: float | None = None
    rope_scaling: RawRope | None = None
    rope_parameters: RawRope | None = None
    partial_rotary_factor: float | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | msgspec.UnsetType | None = msgspec.UNSET
    use_sliding_window: bool = False
    max_window_layers: int = 28  # transformers' default
    layer_types: list[str] | None = None
    quantization_config: dict[str, Any] | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None


class _RawOuter(msgspec.Struct, frozen=True, kw_only=True):
    """Around the text model of one that takes images. Some files have no text_config, but its fields here."""

    vision_config: RawVision
    image_token_id: int
    text_config: msgspec.Raw = msgspec.Raw(b"null")
    tie_word_embeddings: bool = False
    quantization_config: dict[str, Any] | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None


class _Architectures(msgspec.Struct, frozen=True):
    architectures: list[str] | None = None
    model_type: str | None = None


class _RawGeneration(msgspec.Struct, frozen=True, kw_only=True):
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None


def read_spec(folder: pathlib.Path) -> ModelSpec:
    """The spec of the checkpoint in a folder of Hugging Face layout."""
    path = folder / CONFIG_NAME
    raw_bytes = _read(path)
    architecture, family = _family(_decode(raw_bytes, _Architectures, path), path)
    outer = None if family.vision is None else _decode(raw_bytes, _RawOuter, path)
    raw = _decode(raw_bytes, _RawConfig, path) if outer is None else _text_config(raw_bytes, outer, path)
    _refuse_unsupported(raw, family, path)
    generation = _read_generation(folder / GENERATION_CONFIG_NAME)
    spec = ModelSpec(
        architecture=architecture,
        model_type=family.model_type,
        hidden_size=raw.hidden_size,
        num_layers=raw.num_hidden_layers,
        num_heads=raw.num_attention_heads,
        num_kv_heads=raw.num_key_value_heads or family.num_kv_heads or raw.num_attention_heads,
        head_dim=raw.head_dim or family.head_dim or raw.hidden_size // max(1, raw.num_attention_heads),
        intermediate_size=raw.intermediate_size,
        vocab_size=raw.vocab_size,
        rms_norm_eps=family.rms_norm_eps if raw.rms_norm_eps is None else raw.rms_norm_eps,
        rope=_read_rope(raw, family, path),
        tie_word_embeddings=raw.tie_word_embeddings,
        attention_bias=_either(family.qkv_bias, raw.attention_bias),
        output_bias=_either(family.output_bias, raw.attention_bias),
        mlp_bias=_either(family.mlp_bias, raw.mlp_bias),
        qk_norm=family.qk_norm,
        max_position_embeddings=raw.max_position_embeddings,
        bos_token_id=raw.bos_token_id if raw.bos_token_id is not None else generation.bos_token_id,
        eos_token_ids=_eos_ids(generation.eos_token_id, raw.eos_token_id),
        vision=None if outer is None else _read_vision(outer, raw, family, path),
        fp8=raw.quantization_config is not None,
    )
    _check_numbers(spec, path)
    return spec


def fingerprint(spec: ModelSpec, dtype: str) -> str:
    """Differs wherever KV could not be exchanged for a reason the config shows: shape, rotation or precision."""
    digest = hashlib.sha256(msgspec.json.encode(spec) + b"\n" + dtype.encode()).hexdigest()
    return f"{spec.model_type}-{dtype}-{digest[:16]}"


def _read(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise ModelError(f"{path.parent}: no such folder") from None
        raise ModelError(f"{path.parent} has no {path.name}: not a checkpoint in Hugging Face layout") from None
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error


def _decode(data: bytes, kind: type[Decoded], path: pathlib.Path) -> Decoded:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: {error}") from error


def _text_config(raw_bytes: bytes, outer: _RawOuter, path: pathlib.Path) -> _RawConfig:
    """The text model's fields, in either layout. What the outer config alone says counts for it too."""
    nested = bytes(outer.text_config)
    text = _decode(raw_bytes if nested == b"null" else nested, _RawConfig, path)
    return msgspec.structs.replace(
        text,
        tie_word_embeddings=text.tie_word_embeddings or outer.tie_word_embeddings,
        quantization_config=text.quantization_config or outer.quantization_config,
        bos_token_id=outer.bos_token_id if text.bos_token_id is None else text.bos_token_id,
        eos_token_id=outer.eos_token_id if text.eos_token_id is None else text.eos_token_id,
    )


def _read_generation(path: pathlib.Path) -> _RawGeneration:
    """Checkpoints may come without one."""
    return _decode(_read(path), _RawGeneration, path) if path.exists() else _RawGeneration()


def _family(raw: _Architectures, path: pathlib.Path) -> tuple[str, _Family]:
    supported = ", ".join(SUPPORTED_ARCHITECTURES)
    if not raw.architectures:
        raise UnsupportedModelError(f"{path} names no architecture (model_type {raw.model_type!r}); supported: {supported}")
    for name in raw.architectures:
        if name in _FAMILIES:
            return name, _FAMILIES[name]
    raise UnsupportedModelError(f"architecture {', '.join(raw.architectures)} is not supported; supported: {supported}")


def _refuse_unsupported(raw: _RawConfig, family: _Family, path: pathlib.Path) -> None:
    if raw.hidden_act != "silu":
        raise UnsupportedModelError(f"{path}: hidden_act {raw.hidden_act!r} is not supported; supported: silu")
    if raw.quantization_config is not None:
        _refuse_but_fp8(raw.quantization_config, family, path)
    window = _window_that_matters(raw, family)
    if window is not None:
        raise UnsupportedModelError(
            f"{path}: sliding window attention is not supported: sliding_window {window} is shorter than "
            f"max_position_embeddings {raw.max_position_embeddings}; a copy of the config with max_position_embeddings "
            f"{window} would be served exactly"
        )
    odd = sorted(set(raw.layer_types or ()) - {"full_attention", "sliding_attention"})
    if odd:
        raise UnsupportedModelError(f"{path}: layer_types {', '.join(odd)} not supported")


def _refuse_but_fp8(config: dict[str, Any], family: _Family, path: pathlib.Path) -> None:
    """Weights in fp8 are read if a scale holds for a tensor or for an output; scales of activations are made anew."""
    method = config.get("quant_method", "unnamed")
    kinds: set[tuple[Any, Any, Any]] = set()
    if method == "fp8":
        kinds = {("float", 8, "block" if config.get("weight_block_size") else "tensor")}
    elif method == "compressed-tensors":
        groups = [group.get("weights") or {} for group in config.get("config_groups", {}).values()]
        kinds = {(group.get("type"), group.get("num_bits"), group.get("strategy")) for group in groups}
    if family.vision is not None or not kinds or not kinds <= {("float", 8, "tensor"), ("float", 8, "channel")}:
        said = ", ".join(f"{kind} {bits} by {strategy}" for kind, bits, strategy in sorted(kinds, key=str)) or "unknown"
        raise UnsupportedModelError(
            f"{path}: quantization_config (method {method!r}) with weights {said} is not supported: use unquantised weights,"
            " or those of a text model in fp8 with a scale per tensor or channel"
        )


def _window_that_matters(raw: _RawConfig, family: _Family) -> int | None:
    """The sliding window, unless no layer uses it or no context can be longer than it."""
    window = family.sliding_window if raw.sliding_window is msgspec.UNSET else raw.sliding_window
    if not isinstance(window, int) or window >= raw.max_position_embeddings:
        return None
    if family.window_switch and not raw.use_sliding_window:
        return None
    if raw.layer_types is not None:
        return window if "sliding_attention" in raw.layer_types else None
    if family.window_switch and raw.max_window_layers >= raw.num_hidden_layers:
        return None
    if family.window_switch or family.sliding_window is not None:
        return window
    return None  # a family that ignores the field


def _read_rope(raw: _RawConfig, family: _Family, path: pathlib.Path) -> RopeSpec:
    if raw.partial_rotary_factor not in (None, 1.0):
        raise UnsupportedModelError(f"{path}: partial_rotary_factor {raw.partial_rotary_factor} is not supported")
    settings, limit = raw.rope_parameters or raw.rope_scaling, raw.max_position_embeddings
    theta = family.rope_theta if raw.rope_theta is None else raw.rope_theta
    try:
        if family.vision is not None:
            return read_mrope(settings, theta, limit, interleaved=family.mrope_interleaved)
        return read_rope(settings, theta, limit)
    except ModelError as error:
        raise type(error)(f"{path}: {error}") from error


def _read_vision(outer: _RawOuter, text: _RawConfig, family: _Family, path: pathlib.Path) -> VisionSpec:
    assert family.vision is not None
    try:
        return read_vision(outer.vision_config, family.vision, image_token_id=outer.image_token_id, text_width=text.hidden_size)
    except ModelError as error:
        raise type(error)(f"{path}: {error}") from error


def _either(implied: bool | None, configured: bool) -> bool:
    return configured if implied is None else implied


def _eos_ids(*sources: int | list[int] | None) -> tuple[int, ...]:
    """The first source that says anything, in its order and without repeats, then what the later ones add."""
    found: dict[int, None] = {}
    for source in sources:
        ids = [source] if isinstance(source, int) else source or []
        found.update(dict.fromkeys(ids))
    return tuple(found)


_POSITIVE = (
    "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip


def _check_numbers(spec: ModelSpec, path: pathlib.Path) -> None:
    numbers = msgspec.structs.asdict(spec)
    for name in _POSITIVE:
        if numbers[name] < 1:
            raise ModelError(f"{path}: {name} must be positive, is {numbers[name]}")
    if spec.num_heads % spec.num_kv_heads:
        raise ModelError(f"{path}: {spec.num_heads} attention heads cannot share {spec.num_kv_heads} key-value heads evenly")
    if spec.head_dim % 2:
        raise ModelError(f"{path}: head_dim {spec.head_dim} is odd, so it cannot be rotated in halves")
    _check_images(spec, path)
    bad = [token for token in spec.eos_token_ids if not 0 <= token < spec.vocab_size]
    if bad:
        raise ModelError(f"{path}: eos_token_id {bad[0]} is outside the vocabulary of {spec.vocab_size}")


def _check_images(spec: ModelSpec, path: pathlib.Path) -> None:
    if spec.rope.mrope_section is not None and sum(spec.rope.mrope_section) != spec.head_dim // 2:
        raise ModelError(
            f"{path}: mrope_section {list(spec.rope.mrope_section)} does not add up to half of head_dim {spec.head_dim}"
        )
    if spec.vision is None:
        return
    if not 0 <= spec.vision.image_token_id < spec.vocab_size:
        raise ModelError(f"{path}: image_token_id {spec.vision.image_token_id} is outside the vocabulary of {spec.vocab_size}")
    if spec.vision.num_deepstack >= spec.num_layers:
        raise ModelError(f"{path}: {spec.vision.num_deepstack} deepstack features need more layers than {spec.num_layers}")
