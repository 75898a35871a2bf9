"""ContextPilot's index server as a `ContextIndex`: `POST /evict {"request_ids": [...]}`.

    200    {"evicted_request_ids": [...], "not_found": [...], ...}   an id that only its proxy has seen counts as evicted
    503    no index yet: /reorder has not been called since it started
    422    a body that it will never take

The server has one thread, and building an index keeps it busy for seconds: until then it does not answer, which is no reason
to think it dead.
"""

from __future__ import annotations

from collections.abc import Sequence

import httpx
import msgspec

from kvrelay.errors import ConfigError, ContextIndexError, IndexNotReadyError, IndexRefusedError
from kvrelay.events.context_index import Removal

_TIMEOUT_S = 10.0
_CONNECT_TIMEOUT_S = 2.0
_JSON = {"content-type": "application/json"}
_SHOWN_CHARACTERS = 200


class _EvictRequest(msgspec.Struct, frozen=True):
    request_ids: list[str]


class _Evicted(msgspec.Struct, frozen=True):
    """What we read of the answer."""

    evicted_request_ids: list[str]
    not_found: list[str]


class ContextPilotIndex:
    """One connection, made when it is needed and kept. The index is a neighbour: proxies of the environment are not asked."""

    def __init__(self, url: str, *, timeout_s: float = _TIMEOUT_S) -> None:
        """Raises ConfigError for what is no URL."""
        try:
            base = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"--context-index {url!r}: {error}") from error
        if base.scheme not in ("http", "https") or not base.host:
            raise ConfigError(f"--context-index {url!r}: expected http://HOST:PORT")
        timeout = httpx.Timeout(timeout_s, connect=min(_CONNECT_TIMEOUT_S, timeout_s))
        self._client = httpx.AsyncClient(base_url=base, timeout=timeout, trust_env=False)

    async def remove_requests(self, request_ids: Sequence[str]) -> Removal:
        body = msgspec.json.encode(_EvictRequest(list(request_ids)))
        try:
            response = await self._client.post("/evict", content=body, headers=_JSON)
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise ContextIndexError(f"{type(error).__name__}: {error}") from error
        match response.status_code:
            case 200:
                return _read(response.content)
            case 503:
                raise IndexNotReadyError(_reason(response))
            case 422:
                raise IndexRefusedError(_reason(response))
            case _:
                raise ContextIndexError(_reason(response))

    async def close(self) -> None:
        await self._client.aclose()


def _read(body: bytes) -> Removal:
    try:
        answer = msgspec.json.decode(body, type=_Evicted)
    except msgspec.MsgspecError as error:
        raise ContextIndexError(f"an answer that is none of ContextPilot's: {error}") from error
    return Removal(num_removed=len(answer.evicted_request_ids), num_not_found=len(answer.not_found))


def _reason(response: httpx.Response) -> str:
    return f"/evict answered {response.status_code}: {response.text[:_SHOWN_CHARACTERS]}"
