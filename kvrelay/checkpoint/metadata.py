"""Typed reading of GGUF metadata: a missing or mistyped key is an error that names it."""

from __future__ import annotations

import pathlib
from typing import TypeVar

from kvrelay.checkpoint.gguf import GGUFFile, Value
from kvrelay.errors import ModelError

Wanted = TypeVar("Wanted", int, float, str, bool)


class Metadata:
    """The key-value pairs of one file. A key that begins with a dot belongs to the file's architecture."""

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
