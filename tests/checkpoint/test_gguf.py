"""GGUF files: what is in them, in every tensor format, and what is said of broken ones."""

from __future__ import annotations

import pathlib
import struct
from collections.abc import Callable

import numpy as np
import pytest
from gguf_files import BF16, F16, F32, write_gguf

from kvrelay.checkpoint.dequantise import FORMATS
from kvrelay.checkpoint.gguf import GGUFFile
from kvrelay.errors import ModelError

RANDOM = np.random.default_rng(5)


def half(data: bytes, at: int) -> float:
    return float(np.frombuffer(data[at : at + 2], dtype="<f2")[0])


# One block of each format, element by element, as ggml's structs lay it out. Slow and plain on purpose.


def q4_0(b: bytes) -> list[float]:
    return [half(b, 0) * ((b[2 + i % 16] >> 4 * (i // 16) & 15) - 8) for i in range(32)]


def q4_1(b: bytes) -> list[float]:
    return [half(b, 0) * (b[4 + i % 16] >> 4 * (i // 16) & 15) + half(b, 2) for i in range(32)]


def q5_0(b: bytes) -> list[float]:
    high = int.from_bytes(b[2:6], "little")
    return [half(b, 0) * (((b[6 + i % 16] >> 4 * (i // 16) & 15) | (high >> i & 1) << 4) - 16) for i in range(32)]


def q5_1(b: bytes) -> list[float]:
    high = int.from_bytes(b[4:8], "little")
    return [half(b, 0) * ((b[8 + i % 16] >> 4 * (i // 16) & 15) | (high >> i & 1) << 4) + half(b, 2) for i in range(32)]


def q8_0(b: bytes) -> list[float]:
    return [half(b, 0) * value for value in struct.unpack("<32b", b[2:34])]


def scale_and_minimum(scales: bytes, j: int) -> tuple[int, int]:
    if j < 4:
        return scales[j] & 63, scales[j + 4] & 63
    return (scales[j + 4] & 15) | (scales[j - 4] >> 6) << 4, (scales[j + 4] >> 4) | (scales[j] >> 6) << 4


def q4_k(b: bytes) -> list[float]:
    out = []
    for i in range(256):
        scale, minimum = scale_and_minimum(b[4:16], i // 32)
        quant = b[16 + 32 * (i // 64) + i % 32] >> 4 * (i // 32 % 2) & 15
        out.append(half(b, 0) * scale * quant - half(b, 2) * minimum)
    return out


def q5_k(b: bytes) -> list[float]:
    out = []
    for i in range(256):
        scale, minimum = scale_and_minimum(b[4:16], i // 32)
        low = b[48 + 32 * (i // 64) + i % 32] >> 4 * (i // 32 % 2) & 15
        high = b[16 + i % 32] >> (i // 32) & 1
        out.append(half(b, 0) * scale * (low | high << 4) - half(b, 2) * minimum)
    return out


def q6_k(b: bytes) -> list[float]:
    scales, out = struct.unpack("<16b", b[192:208]), []
    for i in range(256):
        part, run, l = i // 128, i // 32 % 4, i % 32
        low = b[64 * part + 32 * (run % 2) + l] >> 4 * (run // 2) & 15
        high = b[128 + 32 * part + l] >> 2 * run & 3
        out.append(half(b, 208) * scales[i // 16] * ((low | high << 4) - 32))
    return out


def q2_k(b: bytes) -> list[float]:
    out = []
    for i in range(256):
        scale = b[i // 16]
        quant = b[16 + 32 * (i // 128) + i % 32] >> 2 * (i // 32 % 4) & 3
        out.append(half(b, 80) * (scale & 15) * quant - half(b, 82) * (scale >> 4))
    return out


def q3_k(b: bytes) -> list[float]:
    packed, out = b[96:108], []
    for i in range(256):
        s = i // 16
        scale = (packed[s % 8] >> 4 * (s // 8) & 15) | (packed[8 + s % 4] >> 2 * (s // 4) & 3) << 4
        low = b[32 + 32 * (i // 128) + i % 32] >> 2 * (i // 32 % 4) & 3
        high = b[i % 32] >> (i // 32) & 1
        out.append(half(b, 108) * (scale - 32) * (low - (0 if high else 4)))
    return out


BLOCK_FORMATS: dict[str, tuple[int, Callable[[bytes], list[float]], tuple[int, ...]]] = {
    # name: type id, one block by hand, where the half-precision scales lie
    "Q4_0": (2, q4_0, (0,)),
    "Q4_1": (3, q4_1, (0, 2)),
    "Q5_0": (6, q5_0, (0,)),
    "Q5_1": (7, q5_1, (0, 2)),
    "Q8_0": (8, q8_0, (0,)),
    "Q2_K": (10, q2_k, (80, 82)),
    "Q3_K": (11, q3_k, (108,)),
    "Q4_K": (12, q4_k, (0, 2)),
    "Q5_K": (13, q5_k, (0, 2)),
    "Q6_K": (14, q6_k, (208,)),
}


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_quantised_blocks(name: str, tmp_path: pathlib.Path) -> None:
    type_id, by_hand, scale_offsets = BLOCK_FORMATS[name]
    layout = FORMATS[type_id]
    assert layout.name == name
    blocks = RANDOM.integers(0, 256, (6, layout.block_bytes), dtype=np.uint8)
    for offset in scale_offsets:
        scales = RANDOM.normal(size=6).astype("<f2")
        blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(6, 2)
    shape = (3, 2 * layout.block_elements)
    path = write_gguf(tmp_path / "x.gguf", {}, {"t": (type_id, shape, blocks.tobytes())})
    with GGUFFile(path) as file:
        got = file.read("t")
    expected = np.array([by_hand(block.tobytes()) for block in blocks]).reshape(shape)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("type_id", "dtype"), [(F32, "<f4"), (F16, "<f2"), (28, "<f8")])
def test_plain_formats(type_id: int, dtype: str, tmp_path: pathlib.Path) -> None:
    values = RANDOM.normal(size=(3, 5)).astype(dtype)
    path = write_gguf(tmp_path / "x.gguf", {}, {"t": (type_id, (3, 5), values.tobytes())})
    with GGUFFile(path) as file:
        np.testing.assert_array_equal(file.read("t"), values.astype(np.float32))


def test_bfloat16(tmp_path: pathlib.Path) -> None:
    values = np.array([1.0, -2.5, 3.140625, 0.0], dtype=np.float32)  # all exact in bfloat16
    upper = (values.view(np.uint32) >> 16).astype("<u2")
    path = write_gguf(tmp_path / "x.gguf", {}, {"t": (BF16, (4,), upper.tobytes())})
    with GGUFFile(path) as file:
        np.testing.assert_array_equal(file.read("t"), values)


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_and_tensor_list(version: int, tmp_path: pathlib.Path) -> None:
    metadata = {"a": 7, "b": -1.5, "c": True, "d": "grüß", "e": ["x", "yz"], "f": [1, 2, 3], "g": []}
    tensors = {"first": (F32, (2, 3), bytes(24)), "second": (F32, (2,), struct.pack("<2f", 1, 2))}
    with GGUFFile(write_gguf(tmp_path / "x.gguf", metadata, tensors, version=version)) as file:
        assert file.metadata == metadata
        assert {name: tensor.shape for name, tensor in file.tensors.items()} == {"first": (2, 3), "second": (2,)}
        assert file.read("second").tolist() == [1, 2]


def test_what_is_said_of_broken_files(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.gguf"

    def problem(data: bytes) -> str:
        path.write_bytes(data)
        with pytest.raises(ModelError) as caught:
            GGUFFile(path)
        assert str(path) in str(caught.value)
        return str(caught.value)

    assert "empty" in problem(b"")
    assert "it begins with b'PK\\x03\\x04'" in problem(b"PK\x03\x04" + bytes(100))
    assert "version 1 is not supported" in problem(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    assert "big-endian" in problem(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    assert "truncated" in problem(b"GGUF" + struct.pack("<IQQ", 3, 0, 1))
    key = struct.pack("<Q", 1) + b"k"
    assert "k has unknown type 99" in problem(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + struct.pack("<I", 99))
    huge = struct.pack("<IIQ", 9, 0, 1 << 60)
    assert f"k has {1 << 60} elements" in problem(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + huge)
    assert "truncated" in problem(b"GGUF" + struct.pack("<IQQ", 3, 1 << 62, 0))


@pytest.mark.parametrize(
    ("kind", "shape", "message"),
    [
        (20, (32,), "tensor t has type IQ4_NL, which is not supported"),
        (250, (32,), "tensor t has type number 250"),
        (8, (33,), "rows of tensor t (33) are no whole blocks of Q8_0"),
        (F32, (4, 64), "tensor t ends at byte"),
        (F32, (1, 1, 1, 1, 1), "tensor t has 5 dimensions"),
    ],
)
def test_broken_tensors_are_named(kind: int, shape: tuple[int, ...], message: str, tmp_path: pathlib.Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", {}, {"t": (kind, shape, bytes(34))})
    with pytest.raises(ModelError) as caught:
        GGUFFile(path)
    assert message in str(caught.value)


def test_every_truncation_of_a_good_file_is_an_error_of_ours(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.gguf"
    whole = write_gguf(path, {"k": ["ab", "c"], "n": 3}, {"t": (F32, (8,), bytes(32))}).read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError):
            GGUFFile(path)


def test_a_missing_file(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        GGUFFile(tmp_path / "none.gguf")
