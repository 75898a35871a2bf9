"""Tokenises a conversation piece by piece, remembering the pieces.

A tokenizer first cuts a text at its added tokens (such as <|im_end|>) and then tokenises every piece by itself, so the tokens
of a text are those of its pieces in a row. A chat sends the same pieces again with every turn, and many chats share their
system message, so pieces that were tokenised before are looked up.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable

_MAX_PIECES = 4096
_MAX_PIECE_CHARACTERS = 2048  # so that the memory for all of them stays below about 80 MB


class SegmentEncoder:
    """`encode_piece` gives the tokens of a text without those that a post-processor adds."""

    def __init__(self, added_tokens: Iterable[str], encode_piece: Callable[[str], list[int]]) -> None:
        # The longest first: of two added tokens that begin at the same place, the longer one counts.
        alternatives = sorted(added_tokens, key=len, reverse=True)
        self._cut = re.compile(f"({'|'.join(map(re.escape, alternatives))})")
        self._encode_piece = encode_piece
        self._remembered = functools.lru_cache(maxsize=_MAX_PIECES)(encode_piece)

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = []
        for piece in self._cut.split(text):
            if piece:
                tokens += self._remembered(piece) if len(piece) <= _MAX_PIECE_CHARACTERS else self._encode_piece(piece)
        return tokens
