"""The HTTP application: which path is served by what."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from kvrelay.config import RouterOptions
from kvrelay.errors import ConfigError
from kvrelay.frontend.answer.chat import chat_completions
from kvrelay.frontend.answer.completions import completions
from kvrelay.frontend.answer.messages import count_tokens, messages
from kvrelay.frontend.answer.responses import responses
from kvrelay.frontend.feed.feed import Feed
from kvrelay.frontend.http.auth import ApiKeys, KeyRing, Operators
from kvrelay.frontend.http.call import Call, Receive, Scope, Send
from kvrelay.frontend.http.endpoint import Endpoint, Handler
from kvrelay.frontend.http.errors import error_body, unknown_path
from kvrelay.frontend.pages.admin import change_role, drain, load_adapter, unload_adapter
from kvrelay.frontend.pages.continuations import delete_continuation, list_continuations, one_continuation
from kvrelay.frontend.pages.feed import feed
from kvrelay.frontend.pages.info import cluster, health, metrics_page, models, one_model, version_page
from kvrelay.frontend.pages.openapi import openapi_page
from kvrelay.frontend.pages.responses import delete_response, one_response
from kvrelay.frontend.pages.site import asset, dashboard, docs
from kvrelay.frontend.pages.timelines import list_requests, one_request
from kvrelay.frontend.pages.tokenize import detokenize, tokenize, tokenizer_info
from kvrelay.frontend.prompt.images import Images
from kvrelay.frontend.service import Service
from kvrelay.media.image_spec import ImageSpec
from kvrelay.metrics import Metrics
from kvrelay.router.backend import Backend
from kvrelay.text.tokenizer import Tokenizer

Lifespan = Callable[[Starlette], AbstractAsyncContextManager[None]]

ROUTES: tuple[tuple[str, str, Callable[[Service, Call], Awaitable[None]]], ...] = (
    ("/v1/chat/completions", "POST", chat_completions),
    ("/v1/completions", "POST", completions),
    ("/v1/responses", "POST", responses),
    ("/v1/responses/{id}", "GET", one_response),
    ("/v1/responses/{id}", "DELETE", delete_response),
    ("/v1/messages", "POST", messages),
    ("/v1/messages/count_tokens", "POST", count_tokens),
    ("/v1/continuations", "GET", list_continuations),
    ("/v1/continuations/{id:path}", "GET", one_continuation),
    ("/v1/continuations/{id:path}", "DELETE", delete_continuation),
    ("/v1/models", "GET", models),
    ("/v1/models/{model:path}", "GET", one_model),
    ("/tokenize", "POST", tokenize),
    ("/detokenize", "POST", detokenize),
    ("/tokenizer_info", "GET", tokenizer_info),
    ("/admin/drain", "POST", drain),
    ("/admin/role", "POST", change_role),
    ("/v1/load_lora_adapter", "POST", load_adapter),
    ("/v1/unload_lora_adapter", "POST", unload_adapter),
    ("/health", "GET", health),
    ("/cluster", "GET", cluster),
    ("/requests", "GET", list_requests),
    ("/requests/{id:path}", "GET", one_request),
    ("/metrics", "GET", metrics_page),
    ("/version", "GET", version_page),
    ("/openapi.json", "GET", openapi_page),
    ("/docs", "GET", docs),
    ("/assets/{name}", "GET", asset),
    ("/feed", "GET", feed),
    ("/", "GET", dashboard),
)

# Headers of answers that scripts of other origins may read, beside those that they always may.
_EXPOSED_HEADERS = [
    "x-request-id", "x-kvrelay-prefill", "x-kvrelay-decode", "x-kvrelay-transfer-id", "x-kvrelay-encode",
    "x-kvrelay-continuation", "x-kvrelay-continued", "x-data-parallel-rank", "traceparent", "retry-after",
]  # fmt: skip


class FrontEnd(Starlette):
    """Starlette, except that known paths go straight to their endpoints: a stream is resumed once per token, and each time it
    would pass through every layer in between."""

    def __init__(
        self,
        endpoints: Mapping[str, Endpoint],
        keys: KeyRing,
        admin_keys: KeyRing,
        lifespan: Lifespan | None,
        feed: Feed,
        metrics: Metrics,
        *,
        root_path: str = "",
        allowed_origins: str = "",
    ) -> None:
        super().__init__(
            routes=[Route(path, endpoint) for path, endpoint in endpoints.items()],
            exception_handlers={HTTPException: self._not_found},
            lifespan=lifespan,
        )
        self.router.redirect_slashes = False
        self._endpoints = endpoints
        self._metrics = metrics
        self.feed = feed
        self._root_path = root_path
        self._serve = _with_origins(ApiKeys(self._dispatch, keys, admin_keys, metrics), allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._root_path and scope["type"] == "http" and f"{scope['path']}/".startswith(f"{self._root_path}/"):
            scope["path"] = scope["path"].removeprefix(self._root_path) or "/"  # a proxy that passes paths on as they are
        await self._serve(scope, receive, send)

    def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        if scope["type"] == "http":
            endpoint = self._endpoints.get(scope["path"])
            if endpoint is not None:
                return endpoint(scope, receive, send)
        return super().__call__(scope, receive, send)

    async def _not_found(self, request: Request, error: Exception) -> Response:
        """Endpoints raise no HTTPException: it can only come from Starlette's router."""
        assert isinstance(error, HTTPException)
        self._metrics.turned_away(404)
        return Response(error_body(unknown_path(request.url.path)), status_code=404, media_type="application/json")


def create_app(
    backend: Backend,
    tokenizer: Tokenizer,
    *,
    metrics: Metrics,
    options: RouterOptions,
    model: str,
    image_spec: ImageSpec | None = None,
    lifespan: Lifespan | None = None,
) -> FrontEnd:
    """`model` is the server's argument, and the model's name to clients unless `served_model_name` is set. With an `image_spec`
    the server takes images."""
    keys = KeyRing(options.api_key, options.api_key_file)
    admin_keys = KeyRing("", options.admin_key_file, option="--admin-key-file")
    operators = Operators(keys, admin_keys)
    service = Service(backend, tokenizer, metrics, options, model, _images(image_spec, options), operators)
    handlers: dict[str, dict[str, Handler]] = {}
    for path, method, handler in ROUTES:
        handlers.setdefault(path, {})[method] = functools.partial(handler, service)
    log_requests = options.log_requests
    endpoints = {
        path: Endpoint(path, taken, metrics, log_requests=log_requests, is_timed=path != "/feed")
        for path, taken in handlers.items()
    }
    root_path = options.root_path
    if root_path and (not root_path.startswith("/") or root_path.endswith("/")):
        raise ConfigError(f"--root-path {root_path} must begin with a slash, and not end with one")
    return FrontEnd(
        endpoints,
        keys,
        admin_keys,
        lifespan,
        service.feed,
        metrics,
        root_path=root_path,
        allowed_origins=options.allowed_origins,
    )


def _with_origins(app: ASGIApp, allowed: str) -> ASGIApp:
    """Answers browsers that ask whether pages of other origins may use the server (CORS)."""
    origins = [origin.strip() for origin in allowed.split(",") if origin.strip()]
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=sorted({method for _, method, _ in ROUTES}),
        allow_headers=["*"],
        expose_headers=_EXPOSED_HEADERS,
        max_age=3600,
    )


def _images(image_spec: ImageSpec | None, options: RouterOptions) -> Images:
    if image_spec is None:
        return Images()
    from kvrelay.frontend.prompt.media import Media  # loads Pillow, which servers of text models do not need

    return Media(image_spec, options)
