"""What every handler works with: the tokenizer, the backend, the options, and the rules that hold for all endpoints."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from kvrelay.config import RouterOptions
from kvrelay.errors import ConfigError, InvalidRequestError, NotFoundError
from kvrelay.frontend.feed.feed import Feed
from kvrelay.frontend.http.auth import Operators
from kvrelay.frontend.http.call import Call
from kvrelay.frontend.prompt.call_formats import format_of
from kvrelay.frontend.prompt.images import Images
from kvrelay.frontend.prompt.messages_types import CountTokensRequest, MessagesRequest
from kvrelay.frontend.prompt.responses_types import ResponsesRequest
from kvrelay.frontend.prompt.types import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from kvrelay.metrics import Metrics
from kvrelay.router.backend import Backend
from kvrelay.sampling import Grammar
from kvrelay.text.grammar_check import check_grammar
from kvrelay.text.tokenizer import Tokenizer

T = TypeVar("T")
R = TypeVar(
    "R",
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
    MessagesRequest,
    CountTokensRequest,
    TokenizeRequest,
    DetokenizeRequest,
)
# Tokenising takes about 1 us per character. Longer texts go to a thread, so that streams do not stutter.
_INLINE_CHARACTERS = 20_000
_check_grammar = functools.lru_cache(maxsize=512)(check_grammar)


class Service:
    """Made once per server. Holds no state of requests."""

    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        metrics: Metrics,
        options: RouterOptions,
        model: str,
        images: Images,
        operators: Operators,
    ) -> None:
        self.backend = backend
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.options = options
        self.models = served_names(options, model)
        self.model = self.models[0]  # what answers say
        self.root = model
        self.images = images
        self.operators = operators
        self.feed = Feed(backend, metrics)
        self.started_at = int(time.time())
        self.call_format, self.reads_tool_calls = format_of(tokenizer, options.tool_parser)

    async def read(self, call: Call, decoder: msgspec.json.Decoder[R]) -> R:
        """The body of a request that may name its model."""
        request = await call.read(decoder, self.options.max_body_bytes)
        self.adapter_of(request.model)
        return request

    def adapter_of(self, name: str | None) -> str:
        """The digest of the LoRA adapter of that name; empty for the model itself. Raises NotFoundError."""
        if name is None or name in self.models:
            return ""
        adapters = self.backend.adapters
        if name not in adapters:
            served = ", ".join(map(repr, [*self.models, *adapters]))
            raise NotFoundError(f"the model {name[:200]!r} does not exist; this server serves {served}",
                                param="model", code="model_not_found")  # fmt: skip
        return adapters[name].digest

    def answer_name(self, name: str | None) -> str:
        """What an answer calls the model that a request asked for: an adapter by its name, the model always by its first."""
        return self.model if name is None or name in self.models else name

    async def off_loop_if_long(self, length: int, work: Callable[[], T]) -> T:
        return work() if length <= _INLINE_CHARACTERS else await asyncio.to_thread(work)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return await self.off_loop_if_long(
            len(text), lambda: self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        )

    async def encode_chat(self, text: str) -> list[int]:
        return await self.off_loop_if_long(len(text), lambda: self.tokenizer.encode_chat(text))

    async def check_grammar(self, grammar: Grammar, param: str) -> None:
        """Refuses a grammar that cannot be compiled, naming the field it came from."""
        problem = await asyncio.to_thread(_check_grammar, grammar)
        if problem is not None:
            raise InvalidRequestError(f"{param}: {problem.removeprefix('response_format: ')}", param=param)

    def check_tokens(self, tokens: Sequence[int], param: str) -> None:
        largest = max(tokens, default=0)
        if largest >= self.tokenizer.vocab_size:
            size = self.tokenizer.vocab_size
            raise InvalidRequestError(f"{param}: {largest} is not a token id of this model (0 to {size - 1})", param=param)

    def room_after(self, num_prompt_tokens: int, param: str) -> int:
        """Tokens that fit behind a prompt. At least one must fit."""
        limit = self.backend.max_model_len
        if limit == 0:  # no worker is up: `submit` will say so
            return 1
        if num_prompt_tokens >= limit:
            raise InvalidRequestError(
                f"this model's maximum context length is {limit} tokens, prompt and output together; "
                f"the prompt alone has {num_prompt_tokens}",
                param=param,
                code="context_length_exceeded",
            )
        return limit - num_prompt_tokens


def served_names(options: RouterOptions, model: str) -> list[str]:
    """The names under which clients know the model."""
    if not options.served_model_name:
        return [model]
    names = [name.strip() for name in options.served_model_name.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise ConfigError(f"--served-model-name {options.served_model_name}: names must not be empty, nor given twice")
    return names
