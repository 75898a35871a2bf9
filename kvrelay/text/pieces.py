"""The piece of each token: text, or bytes that form characters only together with their neighbours.

In two families of tokenizers, the text of a sequence is the pieces of its tokens in a row:

- byte level (GPT-2, Llama 3, Qwen, SmolLM): every character of a token stands for one byte;
- sentence piece (Llama 2, Mistral): "▁" is a space, "<0x0A>" is a byte, and a text loses its first space.

Others (WordPiece, ...) join tokens by rules that look at several of them, and have no table of pieces.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Markup that parsers of the output must see even if a tokenizer calls it special.
_MARKUP = frozenset({"<think>", "</think>", "<tool_call>", "</tool_call>"})


class Family(enum.Enum):
    BYTE_LEVEL = "byte level"
    SENTENCE_PIECE = "sentence piece"
    OTHER = "other"


class AddedToken(Protocol):
    """A token beside the model's vocabulary, as the `tokenizers` library describes it."""

    @property
    def content(self) -> str: ...

    @property
    def special(self) -> bool: ...


class PieceTable(dict[int, str | bytes]):
    """Token id -> its piece, made on first use: a str if it is complete by itself, else bytes; "" if it is skipped."""

    def __init__(
        self,
        family: Family,
        token_of: Callable[[int], str | None],
        added: Mapping[int, AddedToken],
        *,
        skip_special: bool,
    ) -> None:
        super().__init__()
        self._piece_of = _byte_level_piece if family is Family.BYTE_LEVEL else _sentence_piece
        self._token_of = token_of
        self._added = added
        self._skip_special = skip_special

    def __missing__(self, token: int) -> str | bytes:
        piece = self._find(token)
        self[token] = piece
        return piece

    def _find(self, token: int) -> str | bytes:
        added = self._added.get(token)
        if added is not None and self._skip_special and added.special and added.content not in _MARKUP:
            return ""
        text = self._token_of(token)
        return "" if text is None else self._piece_of(text)


def family_of(decoder: Any) -> tuple[Family, bool]:
    """From the `decoder` of a tokenizer.json: the family, and whether a text loses its first space."""
    steps = _steps(decoder)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return Family.BYTE_LEVEL, False
    if kinds == ["Metaspace"] and steps[0].get("replacement") == "▁":
        return Family.SENTENCE_PIECE, steps[0].get("prepend_scheme", "always") != "never"
    spaces = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and steps[0] == spaces:
        if kinds[3:] == []:
            return Family.SENTENCE_PIECE, False
        if steps[3:] == [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]:
            return Family.SENTENCE_PIECE, True
    return Family.OTHER, False


def _steps(decoder: Any) -> list[dict[str, Any]]:
    if not isinstance(decoder, dict):
        return []
    return decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]


def _byte_level_piece(token: str) -> str | bytes:
    try:
        raw = bytes([_BYTE_OF[character] for character in token])
    except KeyError:  # an added token, which is written as it is
        return token
    return _text_if_whole(raw)


def _sentence_piece(token: str) -> str | bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    if byte is not None:
        return bytes([int(byte.group(1), 16)])
    return token.replace("▁", " ")


def _text_if_whole(raw: bytes) -> str | bytes:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def _byte_alphabet() -> dict[str, int]:
    """Byte-level tokenizers write printable bytes as themselves and all others as characters from 256 on, in order."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + place): byte for place, byte in enumerate(others)})
    return alphabet


_BYTE_OF = _byte_alphabet()
