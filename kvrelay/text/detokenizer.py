"""Tokens in, text out, one piece per token, for one sample.

A piece is empty if its bytes only begin a character, or its text may begin a stop string. All pieces and the final flush
together are exactly the sample's text: decoding prompt and output together gives the prompt's text followed by it. One
exception: if a sentence-piece model writes bytes that are not valid UTF-8, valid characters before them in the same run have
already been shown and stay.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from kvrelay.sampling import SamplingParams
from kvrelay.text.pieces import Family, PieceTable
from kvrelay.text.stop import StopSearch
from kvrelay.text.tokenizer import Tokenizer

_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")
_CONTEXT_TOKENS = 6  # of the prompt: enough for any tokenizer to decode what follows them


class _Unfinished(Protocol):
    """Joins pieces that are not complete by themselves: bytes, and text that follows bytes."""

    pending: bool

    def push(self, piece: str | bytes) -> str: ...

    def flush(self) -> str: ...


class Detokenizer:
    """Of one sample. `push` each token until `stopped`; then, or after the last token, `flush` once."""

    __slots__ = ("_context", "_min_tokens", "_pieces", "_search", "_strip", "_unfinished", "num_tokens")

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt: Sequence[int] = ()) -> None:
        skip = params.skip_special_tokens
        self.num_tokens = 0  # pushed so far; when a stop string is complete, the tokens to keep
        self._pieces: PieceTable | None = tokenizer.pieces(skip_special_tokens=skip)
        self._context = None if self._pieces is not None else _ContextDecoder(tokenizer, prompt, skip)
        self._strip = tokenizer.strips_first_space and not prompt
        self._unfinished: _Unfinished | None = None
        if tokenizer.family is Family.SENTENCE_PIECE:
            self._unfinished = _ByteRuns()
        self._search = StopSearch(params.stop, include_stop=params.include_stop_str_in_output) if params.stop else None
        self._min_tokens = params.min_tokens

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text."""
        return None if self._search is None else self._search.stopped

    def push(self, token: int) -> str:
        self.num_tokens += 1
        if self._pieces is None:
            piece = self._push_context(token)
        else:
            found = self._pieces[token]
            unfinished = self._unfinished
            if type(found) is str and (unfinished is None or not unfinished.pending):
                piece = found
            else:
                piece = self._join(found)
            if self._strip and piece:
                piece = self._without_first_space(piece)
        if self._search is None:
            return piece
        return self._search.push(piece, armed=self.num_tokens >= self._min_tokens)

    def push_silent(self) -> str:
        """A token that ended the sample and has no text (end of text, a stop token)."""
        self.num_tokens += 1
        return ""

    def flush(self) -> str:
        """The text ends here. Returns what is still held back."""
        if self.stopped is not None:
            return ""
        rest = self._flush_bytes()
        if self._search is None:
            return rest
        shown = self._search.push(rest, armed=self.num_tokens >= self._min_tokens)
        return shown if self._search.stopped is not None else shown + self._search.flush()

    def _join(self, found: str | bytes) -> str:
        if self._unfinished is None:
            self._unfinished = _Utf8Bytes()
        return self._unfinished.push(found)

    def _push_context(self, token: int) -> str:
        assert self._context is not None
        return self._context.push(token)

    def _flush_bytes(self) -> str:
        if self._context is not None:
            return self._context.flush()
        if self._unfinished is None:
            return ""
        rest = self._unfinished.flush()
        return self._without_first_space(rest) if self._strip and rest else rest

    def _without_first_space(self, piece: str) -> str:
        self._strip = False
        return piece.removeprefix(" ")


class _Utf8Bytes:
    """Byte-level tokenizers: the bytes of all tokens in a row are one UTF-8 text; invalid bytes show as U+FFFD."""

    __slots__ = ("_decoder", "pending")

    def __init__(self) -> None:
        self._decoder = _new_utf8_decoder(errors="replace")
        self.pending = False

    def push(self, piece: str | bytes) -> str:
        text = self._decoder.decode(piece if isinstance(piece, bytes) else piece.encode())
        self.pending = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        self.pending = False
        return self._decoder.decode(b"", final=True)


class _ByteRuns:
    """Sentence-piece tokenizers: a run of byte tokens is one UTF-8 text, or else every byte of it shows as U+FFFD."""

    __slots__ = ("_run", "pending")

    def __init__(self) -> None:
        self._run = b""
        self.pending = False

    def push(self, piece: str | bytes) -> str:
        if isinstance(piece, str):
            # A skipped token leaves no trace, so the run goes on after it.
            return self.flush() + piece if piece else ""
        self._run += piece
        try:
            text = self._run.decode()
        except UnicodeDecodeError:
            self.pending = True
            return ""
        self._run, self.pending = b"", False
        return text

    def flush(self) -> str:
        text = "�" * len(self._run)
        self._run, self.pending = b"", False
        return text


class _ContextDecoder:
    """All other tokenizers: decodes the newest tokens together with those before them, and takes the text they add."""

    __slots__ = ("_shown", "_skip", "_start", "_tokenizer", "_tokens")

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._tokens = list(prompt[-_CONTEXT_TOKENS:])
        self._start = 0  # tokens from here on are decoded again
        self._shown = len(self._tokens)  # tokens whose text was shown

    def push(self, token: int) -> str:
        self._tokens.append(token)
        text = self._added_text()
        if not text or text.endswith("�"):
            return ""
        self._start, self._shown = self._shown, len(self._tokens)
        return text

    def flush(self) -> str:
        return self._added_text()

    def _added_text(self) -> str:
        known = self._decode(self._tokens[self._start : self._shown])
        return self._decode(self._tokens[self._start :])[len(known) :]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip)
