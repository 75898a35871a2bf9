"""Reads GGUF files (versions 2 and 3, little-endian): metadata, tensor list, and tensors dequantised to float32.

    magic "GGUF" | version u32 | tensors u64 | pairs u64 | pairs: key, type, value | tensors: name, dims, type, offset
    | padding to `general.alignment` | tensor data

The file is mapped. Every length in it is checked against the file's size before it is believed.
"""

from __future__ import annotations

import math
import mmap
import pathlib
import struct
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvrelay.checkpoint.dequantise import FORMATS, format_name
from kvrelay.errors import ModelError

Value = bool | int | float | str | list["Value"]
Wanted = TypeVar("Wanted", int, float, str, bool)

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SCALARS = {type_id: struct.Struct("<" + code) for type_id, code in _CODES.items()}
_STRING, _ARRAY = 8, 9
_MAX_NESTING = 4


class GGUFTensor(msgspec.Struct, frozen=True):
    """One tensor as the file describes it. `shape` is in numpy's order: rows first."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    begin: int  # in the file
    size_bytes: int

    @property
    def format_name(self) -> str:
        return FORMATS[self.type_id].name

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class GGUFFile:
    """An open GGUF file. Use as a context manager; arrays made by `read` are copies and outlive it."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._map = _map_file(path)
        try:
            reader = _Reader(self._map, path)
            num_tensors, num_pairs = reader.header()
            self.metadata = reader.metadata(num_pairs)
            self.tensors = {tensor.name: tensor for tensor in reader.tensors(num_tensors, self._alignment())}
        except BaseException:
            self._map.close()
            raise

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor, dequantised, in its own memory."""
        tensor = self.tensors[name]
        return FORMATS[tensor.type_id].dequantise(self._bytes(tensor)).reshape(tensor.shape)

    def read_blocks(self, name: str) -> npt.NDArray[np.uint8]:
        """The tensor's rows as the file has them, in their own memory."""
        tensor = self.tensors[name]
        return self._bytes(tensor).reshape(tensor.shape[0], -1)

    def _bytes(self, tensor: GGUFTensor) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self._map[tensor.begin : tensor.begin + tensor.size_bytes], dtype=np.uint8)

    def close(self) -> None:
        self._map.close()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
            raise ModelError(f"{self.path}: general.alignment is {alignment!r}")
        return alignment


class Metadata:
    """The key-value pairs of one file, read by type: a missing or mistyped key is an error that names it. A key that begins
    with a dot belongs to the file's architecture."""

    def __init__(self, file: GGUFFile) -> None:
        self._pairs = file.metadata
        self.path: pathlib.Path = file.path
        self.architecture = ""
        self.architecture = self.required("general.architecture", str)

    def required(self, key: str, kind: type[Wanted]) -> Wanted:
        value = self.optional(key, kind)
        if value is None:
            raise ModelError(f"{self.path} lacks metadata {self._full(key)}")
        return value

    def optional(self, key: str, kind: type[Wanted]) -> Wanted | None:
        value = self._pairs.get(self._full(key))
        if value is None:
            return None
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self._wrong(key, value, kind.__name__)
        return value

    def list_of(self, kind: type[Wanted], key: str) -> list[Wanted]:
        value = self._pairs.get(self._full(key))
        if value is None:
            raise ModelError(f"{self.path} lacks metadata {self._full(key)}")
        if not isinstance(value, list):
            raise self._wrong(key, value, "list")
        found = [element for element in value if isinstance(element, kind)]
        if len(found) < len(value):
            wrong = next(element for element in value if not isinstance(element, kind))
            raise self._wrong(key, wrong, f"list of {kind.__name__}")
        return found

    def _full(self, key: str) -> str:
        return self.architecture + key if key.startswith(".") else key

    def _wrong(self, key: str, value: Value, wanted: str) -> ModelError:
        return ModelError(f"{self.path}: metadata {self._full(key)} should be {wanted}, is {str(value)[:40]!r}")


def _map_file(path: pathlib.Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except ValueError:
        raise ModelError(f"{path} is empty, so not a GGUF file") from None
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error


class _Reader:
    """A cursor over the mapped file."""

    def __init__(self, data: mmap.mmap, path: pathlib.Path) -> None:
        self._data = data
        self._path = path
        self._at = 0

    def header(self) -> tuple[int, int]:
        magic = self._take(4)
        if magic != _MAGIC:
            raise ModelError(f"{self._path} is not a GGUF file: it begins with {magic!r}, not {_MAGIC!r}")
        version = self._unsigned(4)
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            what = "a big-endian file" if swapped else f"version {version}"
            raise ModelError(f"{self._path}: GGUF {what} is not supported; supported: little-endian versions 2 and 3")
        return self._unsigned(8), self._unsigned(8)

    def metadata(self, count: int) -> dict[str, Value]:
        pairs: dict[str, Value] = {}
        for _ in range(count):
            key = self._string()
            pairs[key] = self._value(self._unsigned(4), key, 0)
        return pairs

    def tensors(self, count: int, alignment: int) -> list[GGUFTensor]:
        described = [self._tensor() for _ in range(count)]
        data_begin = -(-self._at // alignment) * alignment
        tensors = [
            GGUFTensor(name, shape, type_id, data_begin + offset, size) for name, shape, type_id, offset, size in described
        ]
        for tensor in tensors:
            if tensor.begin + tensor.size_bytes > len(self._data):
                raise self._truncated(f"tensor {tensor.name} ends at byte {tensor.begin + tensor.size_bytes}")
        if len({tensor.name for tensor in tensors}) != len(tensors):
            raise ModelError(f"{self._path} names a tensor twice")
        return tensors

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int, int]:
        name = self._string()
        num_dims = self._unsigned(4)
        if not 1 <= num_dims <= 4:
            raise ModelError(f"{self._path}: tensor {name} has {num_dims} dimensions")
        shape = tuple(reversed([self._unsigned(8) for _ in range(num_dims)]))
        type_id, offset = self._unsigned(4), self._unsigned(8)
        if type_id not in FORMATS:
            supported = ", ".join(layout.name for layout in FORMATS.values())
            raise ModelError(
                f"{self._path}: tensor {name} has type {format_name(type_id)}, which is not supported; supported: {supported}"
            )
        layout = FORMATS[type_id]
        if shape[-1] % layout.block_elements:
            raise ModelError(f"{self._path}: rows of tensor {name} ({shape[-1]}) are no whole blocks of {layout.name}")
        return name, shape, type_id, offset, math.prod(shape) // layout.block_elements * layout.block_bytes

    def _value(self, type_id: int, key: str, depth: int) -> Value:
        if type_id == _ARRAY and depth < _MAX_NESTING:
            element_type, count = self._unsigned(4), self._unsigned(8)
            if count > len(self._data) - self._at:  # an element takes a byte at least
                raise self._truncated(f"{key} has {count} elements")
            return [self._value(element_type, key, depth + 1) for _ in range(count)]
        if type_id == _STRING:
            return self._string()
        if type_id not in _SCALARS:
            raise ModelError(f"{self._path}: metadata {key} has unknown type {type_id}")
        form = _SCALARS[type_id]
        value: bool | int | float = form.unpack(self._take(form.size))[0]
        return value

    def _string(self) -> str:
        # Tokens of byte-level vocabularies are valid text; a stray byte must not stop the whole file from loading
        return self._take(self._unsigned(8)).decode("utf-8", "replace")

    def _unsigned(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise self._truncated(f"something at byte {self._at} takes {size} bytes")
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def _truncated(self, detail: str) -> ModelError:
        return ModelError(f"{self._path} is truncated or damaged: {detail}, the file has {len(self._data)}")
