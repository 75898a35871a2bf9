"""The GET endpoints: models, health, cluster, metrics, version, and the documentation."""

from __future__ import annotations

import functools
import pathlib
import platform
from typing import Any

import msgspec

from kvrelay.errors import NotFoundError, UnavailableError
from kvrelay.frontend.answer.types import Model, ModelList
from kvrelay.frontend.http.call import Call
from kvrelay.frontend.http.errors import JSON_TYPE
from kvrelay.frontend.pages.openapi import openapi
from kvrelay.frontend.service import Service
from kvrelay.metrics import CONTENT_TYPE
from kvrelay.version import version

_HTML = (b"content-type", b"text/html; charset=utf-8")


async def models(service: Service, call: Call) -> None:
    await call.answer_json(ModelList(data=[_model(service)]))


async def one_model(service: Service, call: Call) -> None:
    name: str = call.scope["path_params"]["model"]
    if name != service.model:
        raise NotFoundError(f"the model {name[:200]!r} does not exist", param="model", code="model_not_found")
    await call.answer_json(_model(service))


def _model(service: Service) -> Model:
    return Model(id=service.model, created=service.started_at, root=service.root, max_model_len=service.backend.max_model_len)


async def health(service: Service, call: Call) -> None:
    if not service.backend.ready:
        raise UnavailableError("no worker is ready", code="not_ready")
    await call.answer_json({"status": "ok"})


async def cluster(service: Service, call: Call) -> None:
    await call.answer_json(service.backend.cluster())


async def metrics_page(service: Service, call: Call) -> None:
    await call.answer(200, service.metrics.render(), [(b"content-type", CONTENT_TYPE.encode())])


async def version_page(service: Service, call: Call) -> None:
    await call.answer_json({"version": version(), "python": platform.python_version()})


async def openapi_page(service: Service, call: Call) -> None:
    await call.answer(200, _openapi_body(), [JSON_TYPE])


@functools.cache
def _openapi_body() -> bytes:
    return msgspec.json.encode(openapi())


async def docs(service: Service, call: Call) -> None:
    await call.answer(200, _docs_body(), [_HTML])


@functools.cache
def _docs_body() -> bytes:
    return (pathlib.Path(__file__).parent / "docs.html").read_bytes()


async def index(service: Service, call: Call) -> None:
    links: dict[str, Any] = {
        "name": "kvrelay",
        "version": version(),
        "model": service.model,
        "docs": "/docs",
        "openapi": "/openapi.json",
        "api": "/v1",
        "health": "/health",
        "cluster": "/cluster",
        "metrics": "/metrics",
    }
    await call.answer_json(links)
