"""A checkpoint's tokenizer: text to token ids and back, and conversations to prompts. Needs neither torch nor transformers."""

from __future__ import annotations

import functools
import json
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import tokenizers

from kvrelay.errors import ConfigError, InvalidRequestError, ModelError
from kvrelay.text.chat_template import ChatTemplate, Message
from kvrelay.text.pieces import Family, PieceTable, family_of
from kvrelay.text.segments import SegmentEncoder


class _TokenizerFile(msgspec.Struct):
    """The parts of tokenizer.json that the library does not expose."""

    decoder: Any = None
    pre_tokenizer: Any = None


class Tokenizer:
    """Immutable once loaded; several threads may use it."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        file: _TokenizerFile,
        special_tokens: Mapping[str, str],
        template: str | None,
        tool_template: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = dict(config or {})  # tokenizer_config.json
        self._backend = backend
        self._backend.no_truncation()
        self._backend.no_padding()
        self.special_tokens = dict(special_tokens)  # by role: bos_token, eos_token, ...
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.template = None if template is None else ChatTemplate(template, special_tokens)
        self._tool_template = None if tool_template is None else ChatTemplate(tool_template, special_tokens)
        added = backend.get_added_tokens_decoder()
        self._added_texts = frozenset(entry.content for entry in added.values())
        self.special_ids = frozenset(token for token, entry in added.items() if entry.special)
        self.family, self.strips_first_space = family_of(file.decoder)
        self._segments = self._segment_encoder(added.values(), file.pre_tokenizer)
        self._pieces = {skip: PieceTable(self.family, backend.id_to_token, added, skip_special=skip) for skip in (False, True)}

    @classmethod
    def load(cls, folder: str | pathlib.Path, *, chat_template: str = "") -> Tokenizer:
        """From tokenizer.json, tokenizer_config.json and, if there, chat_template.jinja or chat_template.json. The file
        `chat_template` replaces the model's own templates."""
        folder = pathlib.Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{folder} has no tokenizer.json")
        content = path.read_bytes()
        try:
            backend = tokenizers.Tokenizer.from_buffer(content)
            file = msgspec.json.decode(content, type=_TokenizerFile)
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"{path} cannot be read: {error}") from error
        config = _read_json(folder / "tokenizer_config.json")
        template, tool_template = _chat_templates(folder, config)
        if chat_template:
            template, tool_template = _read_template(chat_template), None
        return cls(
            backend,
            file=file,
            special_tokens=_special_tokens(config),
            template=template,
            tool_template=tool_template,
            config=config,
        )

    def _segment_encoder(self, added: Iterable[tokenizers.AddedToken], pre_tokenizer: Any) -> SegmentEncoder | None:
        """For tokenizers that tokenise a piece the same way everywhere, and cut at added tokens whatever surrounds them."""
        cuts = [entry for entry in added if not entry.normalized]
        looks_around = any(entry.lstrip or entry.rstrip or entry.single_word for entry in cuts)
        if not cuts or looks_around or self.family is not Family.BYTE_LEVEL or "Metaspace" in str(pre_tokenizer):
            return None
        return SegmentEncoder((entry.content for entry in cuts), self._encode_alone)

    def encode_chat(self, text: str) -> list[int]:
        """A rendered conversation, as `encode` without special tokens; faster for parts that were seen before."""
        return self._encode_alone(text) if self._segments is None else self._segments.encode(text)

    def _encode_alone(self, text: str) -> list[int]:
        return self.encode(text, add_special_tokens=False)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def bad_tokens(self, words: Sequence[str]) -> list[list[int]]:
        """The tokens of words that must not be written: at the beginning of a text, and behind a space."""
        forms = [form for word in words for form in (word, f" {word.lstrip()}")]
        return [tokens for tokens in self.encode_batch(forms, add_special_tokens=False) if tokens] if forms else []

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        text: str = self._backend.decode(tokens, skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token: int) -> bytes:
        """The bytes that the token adds to a text, also if it is special. Several tokens may share one character's bytes."""
        if self.family is Family.OTHER:
            return self.decode([token]).encode()
        piece = self._pieces[False][token]
        return piece if isinstance(piece, bytes) else piece.encode()

    def token_text(self, token: int) -> str:
        """As `token_bytes`, with U+FFFD for bytes that are not a whole character."""
        return self.token_bytes(token).decode(errors="replace")

    def pieces(self, *, skip_special_tokens: bool) -> PieceTable | None:
        """The table of pieces; None for tokenizers without one."""
        return None if self.family is Family.OTHER else self._pieces[skip_special_tokens]

    def token_id(self, text: str) -> int | None:
        token: int | None = self._backend.token_to_id(text)
        return token

    def has_own_token(self, text: str) -> bool:
        """Whether the text is an added token, which no other tokens can spell."""
        return text in self._added_texts

    def split_own_tokens(self, text: str) -> list[str]:
        """The text in pieces: added tokens, and what is between them."""
        if not self._added_texts:
            return [text] if text else []
        return [piece for piece in self._own_tokens.split(text) if piece]

    @functools.cached_property
    def _own_tokens(self) -> re.Pattern[str]:
        longest_first = sorted(self._added_texts, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    @functools.cached_property
    def eos_token_id(self) -> int | None:
        text = self.special_tokens.get("eos_token")
        return None if text is None else self.token_id(text)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as the model's prompt, special tokens included: encode it with add_special_tokens=False."""
        if self.template is None:
            raise InvalidRequestError("this model has no chat template; use /v1/completions", param="messages")
        template = self._tool_template if tools and self._tool_template is not None else self.template
        return template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )

    @property
    def tool_template_source(self) -> str:
        """The template that tools are rendered with; empty if there is none."""
        template = self._tool_template or self.template
        return "" if template is None else template.source

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template has a variable for tools."""
        return self._tool_template is not None or (self.template is not None and self.template.takes_tools)


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object")
    return content


def _read_template(path: str) -> str:
    try:
        return pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {path} cannot be read: {error}") from error


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Entries such as "bos_token", which are text or an object with `content`."""
    found: dict[str, str] = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found


def _chat_templates(folder: pathlib.Path, config: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The default template and, if the checkpoint has a separate one, the template for tools."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8"), None
    entry = _read_json(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(entry, list):
        by_name = {item["name"]: item["template"] for item in entry}
        return by_name.get("default"), by_name.get("tool_use")
    if entry is None or isinstance(entry, str):
        return entry, None
    raise ModelError(f"{folder}: chat_template is neither text nor a list of named templates")
