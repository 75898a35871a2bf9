"""Pages about the server: models, health, cluster, metrics and version."""

from __future__ import annotations

import platform
from typing import Any, Literal

import msgspec

from kvrelay.errors import UnavailableError
from kvrelay.frontend.http.call import Call
from kvrelay.frontend.service import Service
from kvrelay.metrics import CONTENT_TYPE
from kvrelay.version import version


class Model(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    created: int
    root: str
    parent: str | None  # of an adapter, the model that it adapts
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: Literal["kvrelay"] = "kvrelay"


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    data: list[Model]
    object: Literal["list"] = "list"


class Health(msgspec.Struct, frozen=True, kw_only=True):
    status: Literal["ok"] = "ok"


class Versions(msgspec.Struct, frozen=True, kw_only=True):
    version: str
    python: str


async def models(service: Service, call: Call) -> None:
    names = dict.fromkeys([*service.models, *service.backend.adapters])
    await call.answer_json(ModelList(data=[_model(service, name) for name in names]))


async def one_model(service: Service, call: Call) -> None:
    name: str = call.scope["path_params"]["model"]
    service.adapter_of(name)
    await call.answer_json(_model(service, name))


def _model(service: Service, name: str) -> Model:
    adapter = None if name in service.models else service.backend.adapters[name]
    return Model(
        id=name,
        created=service.started_at,
        root=service.root if adapter is None else adapter.path,
        parent=None if adapter is None else service.model,
        max_model_len=service.backend.max_model_len,
    )


async def health(service: Service, call: Call) -> None:
    if not service.backend.ready:
        raise UnavailableError("no worker is ready", code="not_ready")
    await call.answer_json(Health())


async def cluster(service: Service, call: Call) -> None:
    await call.answer_json(service.backend.cluster())


async def metrics_page(service: Service, call: Call) -> None:
    await call.answer(200, service.metrics.render(), [(b"content-type", CONTENT_TYPE.encode())])


async def version_page(service: Service, call: Call) -> None:
    await call.answer_json(Versions(version=version(), python=platform.python_version()))


async def index(service: Service, call: Call) -> None:
    paths = {
        "docs": "/docs",
        "openapi": "/openapi.json",
        "api": "/v1",
        "health": "/health",
        "cluster": "/cluster",
        "requests": "/requests",
        "metrics": "/metrics",
    }
    root = service.options.root_path
    about: dict[str, Any] = {"name": "kvrelay", "version": version(), "model": service.model}
    await call.answer_json(about | {name: root + path for name, path in paths.items()})
