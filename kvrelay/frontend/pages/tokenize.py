"""POST /tokenize, POST /detokenize and GET /tokenizer_info."""

from __future__ import annotations

import msgspec

from kvrelay.errors import InvalidRequestError
from kvrelay.frontend.http.call import Call
from kvrelay.frontend.http.errors import refuse
from kvrelay.frontend.prompt.images import refuse_parts
from kvrelay.frontend.prompt.template import render
from kvrelay.frontend.prompt.types import DetokenizeRequest, TokenizeRequest
from kvrelay.frontend.service import Service

_tokenize = msgspec.json.Decoder(TokenizeRequest)
_detokenize = msgspec.json.Decoder(DetokenizeRequest)


class Tokenized(msgspec.Struct, frozen=True, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str


class TokenizerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """tokenizer_config.json has more fields, which are answered too."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    chat_template: str | None


async def tokenizer_info(service: Service, call: Call) -> None:
    tokenizer = service.tokenizer
    own = TokenizerInfo(
        tokenizer_class=str(tokenizer.config.get("tokenizer_class", "PreTrainedTokenizerFast")),
        vocab_size=tokenizer.vocab_size,
        model_max_length=service.backend.max_model_len,
        chat_template=None if tokenizer.template is None else tokenizer.template.source,
    )
    await call.answer_json({**tokenizer.config, **tokenizer.special_tokens, **msgspec.structs.asdict(own)})


async def tokenize(service: Service, call: Call) -> None:
    request = await service.read(call, _tokenize)
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequestError("exactly one of prompt and messages is needed", param="prompt")
    is_text = request.messages is None
    text = await _text(service, request)
    special = is_text if request.add_special_tokens is None else request.add_special_tokens
    tokens = await service.encode(text, add_special_tokens=special)
    answer = Tokenized(
        count=len(tokens),
        max_model_len=service.backend.max_model_len,
        tokens=tokens,
        token_strs=[service.tokenizer.token_text(token) for token in tokens] if request.return_token_strs else None,
    )
    await call.answer_json(answer)


async def _text(service: Service, request: TokenizeRequest) -> str:
    if request.messages is None:
        refuse({"tools": request.tools, "chat_template_kwargs": request.chat_template_kwargs}, "needs messages")
        return request.prompt or ""
    refuse_parts(request.messages, "/tokenize")
    return await render(service, request, request.messages, request.tools or [])


async def detokenize(service: Service, call: Call) -> None:
    request = await service.read(call, _detokenize)
    service.check_tokens(request.tokens, "tokens")
    text = service.tokenizer.decode(request.tokens, skip_special_tokens=request.skip_special_tokens)
    await call.answer_json(Detokenized(prompt=text))
