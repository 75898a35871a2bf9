"""A request's body as one of our structs, or the 400 that says where it is wrong."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from kvrelay.frontend.http.call import Call
from kvrelay.frontend.http.errors import invalid_body
from kvrelay.frontend.prompt.responses_types import ResponsesRequest
from kvrelay.frontend.prompt.types import CompletionRequest, DetokenizeRequest, SamplingFields, TokenizeRequest
from kvrelay.frontend.service import Service

B = TypeVar("B", bound=SamplingFields | CompletionRequest | TokenizeRequest | DetokenizeRequest | ResponsesRequest)


class BodyReader(Generic[B]):
    """Reads bodies of one type. The content type is not looked at: OpenAI takes JSON whatever it is called."""

    def __init__(self, body_type: type[B]) -> None:
        self._decoder: msgspec.json.Decoder[B] = msgspec.json.Decoder(body_type)

    async def __call__(self, service: Service, call: Call) -> B:
        body = await call.body(service.options.max_body_bytes)
        try:
            request = self._decoder.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise invalid_body(error) from error
        service.check_model(request.model)
        return request
