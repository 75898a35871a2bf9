"""The tensor formats of GGUF, turned into float32 by whole-array numpy.

A quantised tensor is a row of equal blocks. Each function gets the blocks as a structured array and returns
[blocks, elements per block]. Field names follow ggml: d and dmin are scales, m a minimum, qs / ql / qh the (low / high) bits
of the quants. In the K formats a block of 256 has sub-blocks with small scales of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[Any]  # uint8; numpy's types lose that in arithmetic
Blocks = npt.NDArray[Any]  # structured


class Format(msgspec.Struct, frozen=True):
    """One tensor type: how its blocks lie in memory and what they mean."""

    name: str
    block_elements: int
    fields: npt.DTypeLike
    convert: Callable[[Blocks], Floats]

    @property
    def block_bytes(self) -> int:
        return np.dtype(self.fields).itemsize

    def dequantise(self, data: Bytes) -> Floats:
        """Flat float32 values of whole blocks."""
        values = self.convert(data.view(np.dtype(self.fields)))
        return np.ascontiguousarray(values, dtype=np.float32).reshape(-1)


def _plain(values: Blocks) -> Floats:
    return values.astype(np.float32)


def _bf16(values: Blocks) -> Floats:
    """The upper half of a float32."""
    return (values.astype(np.uint32) << 16).view(np.float32)


def _scale(blocks: Blocks, field: str) -> Floats:
    return blocks[field].astype(np.float32)[:, None]


def _nibbles(packed: Bytes) -> Bytes:
    """Low halves of all bytes, then the high halves, along the last axis."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def _bits(words: npt.NDArray[np.uint32]) -> Bytes:
    """[blocks] 32-bit words -> [blocks, 32] of 0 and 1, lowest bit first."""
    return ((words[:, None] >> np.arange(32, dtype=np.uint32)) & 1).astype(np.uint8)


def _q4_0(blocks: Blocks) -> Floats:
    return _scale(blocks, "d") * (_nibbles(blocks["qs"]).astype(np.float32) - 8)


def _q4_1(blocks: Blocks) -> Floats:
    return _scale(blocks, "d") * _nibbles(blocks["qs"]) + _scale(blocks, "m")


def _q5_0(blocks: Blocks) -> Floats:
    quants: Bytes = _nibbles(blocks["qs"]) | _bits(blocks["qh"]) << 4
    return _scale(blocks, "d") * (quants.astype(np.float32) - 16)


def _q5_1(blocks: Blocks) -> Floats:
    quants: Bytes = _nibbles(blocks["qs"]) | _bits(blocks["qh"]) << 4
    return _scale(blocks, "d") * quants + _scale(blocks, "m")


def _q8_0(blocks: Blocks) -> Floats:
    values: Floats = _scale(blocks, "d") * blocks["qs"]
    return values


def _q2_k(blocks: Blocks) -> Floats:
    """16 sub-blocks of 16: two halves x four bit pairs x two runs of 16 bytes."""
    packed = blocks["qs"].reshape(-1, 2, 1, 2, 16)
    quants: Bytes = packed >> _shifts(0, 2, 4, 6) & 3
    scales = blocks["scales"]
    return _sub_blocks(blocks, quants, scales & 15, scales >> 4)


def _q3_k(blocks: Blocks) -> Floats:
    """As Q2_K, with a third bit in hmask whose absence means minus 4."""
    packed = blocks["qs"].reshape(-1, 2, 1, 2, 16)
    low = (packed >> _shifts(0, 2, 4, 6) & 3).astype(np.int8)
    planes = np.arange(8, dtype=np.uint8).reshape(1, 2, 4, 1, 1)
    high = (blocks["hmask"].reshape(-1, 1, 1, 2, 16) >> planes & 1).astype(np.int8)
    quants: Floats = (low + 4 * high - 4).reshape(-1, 16, 16).astype(np.float32)
    small = blocks["scales"]
    low_scales = _nibbles(small[:, :8])
    high_scales = (small[:, None, 8:] >> np.array([0, 2, 4, 6], dtype=np.uint8)[None, :, None] & 3).reshape(-1, 16)
    scales: Floats = (low_scales | high_scales << 4).astype(np.float32) - 32
    return (_scale(blocks, "d") * scales)[:, :, None] * quants


def _q4_k(blocks: Blocks) -> Floats:
    """8 sub-blocks of 32; each 32 bytes hold one sub-block in the low nibbles and the next in the high ones."""
    packed = blocks["qs"].reshape(-1, 4, 1, 32)
    quants: Bytes = np.concatenate((packed & 15, packed >> 4), axis=2)
    return _sub_blocks(blocks, quants, *_six_bit_scales(blocks["scales"]))


def _q5_k(blocks: Blocks) -> Floats:
    """As Q4_K, with the fifth bits of sub-block i in bit i of qh."""
    packed = blocks["qs"].reshape(-1, 4, 1, 32)
    low = np.concatenate((packed & 15, packed >> 4), axis=2).reshape(-1, 8, 32)
    high = blocks["qh"].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1) & 1
    return _sub_blocks(blocks, low | high << 4, *_six_bit_scales(blocks["scales"]))


def _q6_k(blocks: Blocks) -> Floats:
    """Two halves of 128: four runs of 32, whose low 4 bits lie in 64 bytes and whose high 2 bits share 32 bytes."""
    packed = blocks["ql"].reshape(-1, 2, 1, 2, 32)
    low = np.concatenate((packed & 15, packed >> 4), axis=2).reshape(-1, 2, 4, 32)
    high = blocks["qh"].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1) & 3
    quants: Floats = (low | high << 4).reshape(-1, 16, 16).astype(np.float32) - 32
    scales: Floats = _scale(blocks, "d") * blocks["scales"]
    return scales[:, :, None] * quants


def _shifts(*bits: int) -> Bytes:
    """Along the third axis of [blocks, halves, pairs, runs, bytes]."""
    return np.array(bits, dtype=np.uint8).reshape(1, 1, -1, 1, 1)


def _six_bit_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """[blocks, 12] -> eight 6-bit scales and eight 6-bit minima. The first four of each are the low bits of bytes 0-3 and
    4-7; of the last four, the low halves lie in bytes 8-11 and the upper two bits on top of the first eight bytes."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate((first & 63, (third & 15) | (first >> 6) << 4), axis=1)
    minima = np.concatenate((second & 63, (third >> 4) | (second >> 6) << 4), axis=1)
    return scales, minima


def _sub_blocks(blocks: Blocks, quants: Bytes, scales: Bytes, minima: Bytes) -> Floats:
    """d * scale * quant - dmin * minimum, sub-block by sub-block."""
    wide: Floats = quants.reshape(*scales.shape, -1).astype(np.float32)
    return (_scale(blocks, "d") * scales)[:, :, None] * wide - (_scale(blocks, "dmin") * minima)[:, :, None]


def _fields(*fields: tuple[str, str] | tuple[str, str, int]) -> np.dtype[Any]:
    return np.dtype(list(fields))


FORMATS: dict[int, Format] = {
    0: Format("F32", 1, np.dtype("<f4"), _plain),
    1: Format("F16", 1, np.dtype("<f2"), _plain),
    2: Format("Q4_0", 32, _fields(("d", "<f2"), ("qs", "u1", 16)), _q4_0),
    3: Format("Q4_1", 32, _fields(("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)), _q4_1),
    6: Format("Q5_0", 32, _fields(("d", "<f2"), ("qh", "<u4"), ("qs", "u1", 16)), _q5_0),
    7: Format("Q5_1", 32, _fields(("d", "<f2"), ("m", "<f2"), ("qh", "<u4"), ("qs", "u1", 16)), _q5_1),
    8: Format("Q8_0", 32, _fields(("d", "<f2"), ("qs", "i1", 32)), _q8_0),
    10: Format("Q2_K", 256, _fields(("scales", "u1", 16), ("qs", "u1", 64), ("d", "<f2"), ("dmin", "<f2")), _q2_k),
    11: Format("Q3_K", 256, _fields(("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", "<f2")), _q3_k),
    12: Format("Q4_K", 256, _fields(("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", 128)), _q4_k),
    13: Format(
        "Q5_K", 256, _fields(("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)), _q5_k
    ),
    14: Format("Q6_K", 256, _fields(("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2")), _q6_k),
    28: Format("F64", 1, np.dtype("<f8"), _plain),
    30: Format("BF16", 1, np.dtype("<u2"), _bf16),
}

_OTHER_NAMES = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S",
    23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


def format_name(type_id: int) -> str:
    """For messages, of types we cannot read too."""
    return FORMATS[type_id].name if type_id in FORMATS else _OTHER_NAMES.get(type_id, f"number {type_id}")
