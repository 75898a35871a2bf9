"""What `LLM` and `AsyncLLM` have in common: the options, the service behind them, and what a request can be continued from."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from kvrelay.config import read_environment
from kvrelay.engine.engine import Engine
from kvrelay.errors import ConfigError, ConflictError, EngineClosedError, InvalidRequestError, NotFoundError
from kvrelay.offline.options import split_options
from kvrelay.offline.outputs import CompletionOutput, Job, Origin, RequestOutput, prepare
from kvrelay.offline.service import Service, open_engine, open_workers
from kvrelay.progress import Progress, Silent
from kvrelay.router.backend import Backend
from kvrelay.router.parent import Parent
from kvrelay.sampling import SamplingParams
from kvrelay.text.tokenizer import Tokenizer

Prompt = str | list[int]
KeepKV = bool | float | None  # True: for the usual time; or for so many seconds
ParentName = str | CompletionOutput | RequestOutput

_PARENT_WAIT_S = 24 * 3600.0  # a child waits for its parent's end


class Base:
    """Options are those of `kvrelay serve`, with underscores: LLM("smollm2", max_model_len=1024)."""

    tokenizer: Tokenizer
    relay: Service | None = None  # with worker processes

    def __init__(self, model: str, options: dict[str, Any], *, progress: bool) -> None:
        """Returns when the model is loaded. With worker processes it raises WorkerDiedError if one of them cannot start."""
        chosen = split_options(model, options)
        self._progress = shown_progress(progress)
        self._keep_default_s = chosen.router.keep_kv_default_s
        self._max_keep_kv_s = chosen.router.max_keep_kv_s
        self._engine: Engine | None = None
        self._closed = False
        if chosen.relay:
            self.tokenizer, opened = open_workers(chosen, self._progress, shown=progress)
            self.relay = self._service = Service(opened, chosen.engine.max_queue)
        else:
            from kvrelay.worker.whole import build_engine  # loads PyTorch

            self.tokenizer, self._engine = build_engine(chosen.model, chosen.engine, read_environment(), self._progress)
            self._service = Service(open_engine(self._engine, chosen), chosen.engine.max_queue)
        weakref.finalize(self, self._service.close)  # one that is dropped, or left at the interpreter's end, leaves no process

    @property
    def engine(self) -> Engine:
        """Of a model in this process."""
        if self._engine is None:
            raise ConfigError("the engines of this model are in worker processes")
        return self._engine

    def release(self, parent: ParentName) -> None:
        """No request will continue from it: its KV need not be kept. Raises NotFoundError if it is not."""
        self._check_open()
        self._service.run(_release(self._service.backend, parent))

    def close(self) -> None:
        """Ends what still runs with an error, then the engine or the worker processes. May be called twice."""
        self._closed = True
        self._service.close()

    def load_lora(self, name: str, path: str, *, replace: bool = False) -> None:
        """From now on `lora=name` is this adapter. Raises ModelError or RequestError."""
        self._check_open()
        self._service.run(self._service.backend.load_adapter(name, path, in_place=replace))

    def unload_lora(self, name: str) -> None:
        """Raises NotFoundError."""
        self._check_open()
        self._service.run(self._service.backend.unload_adapter(name))

    def _adapter(self, lora: str | None) -> str:
        """The digest of the adapter of that name; empty for the base model."""
        if lora is None:
            return ""
        adapters = self._service.backend.adapters
        if lora not in adapters:
            known = ", ".join(map(repr, adapters)) or "none"
            raise NotFoundError(f"there is no LoRA adapter {lora!r}; there are {known}", param="lora", code="model_not_found")
        return adapters[lora].digest

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError(f"this {type(self).__name__} is closed")

    def _keep_ttl_s(self, keep_kv: KeepKV) -> float | None:
        if keep_kv is None or keep_kv is False:
            return None
        ttl_s = self._keep_default_s if keep_kv is True else float(keep_kv)
        if not 0.0 < ttl_s <= self._max_keep_kv_s:
            raise InvalidRequestError(f"keep_kv must be above 0 and at most {self._max_keep_kv_s:g} seconds", param="keep_kv")
        return ttl_s

    def _child_job(
        self, origin: Origin, suffix: str, token_ids: Sequence[int] | None, params: SamplingParams, keep_ttl_s: float | None
    ) -> Job:
        if token_ids is not None and suffix:
            raise InvalidRequestError("suffix and token_ids exclude each other", param="token_ids")
        added = self.tokenizer.encode(suffix, add_special_tokens=False) if token_ids is None else token_ids
        return prepare(self.tokenizer, [*origin.tokens, *added], params, None, keep_ttl_s, origin)


async def find_origin(backend: Backend, name: ParentName) -> Origin:
    """A parent that still runs is waited for. Raises NotFoundError, InvalidRequestError."""
    if isinstance(name, RequestOutput) and name.finished:
        return await _given_back(backend, name)
    found = await _find(backend, _handle_of(name))
    return Origin(of=found.name, tokens=list(found.tokens), parent=found, adapter=found.adapter)


async def _given_back(backend: Backend, output: RequestOutput) -> Origin:
    """It brings all its tokens along; if its KV is gone, that does no harm."""
    if len(output.outputs) != 1:
        raise InvalidRequestError(
            f"{output.request_id!r} has {len(output.outputs)} outputs: continue from one of them", param="parent"
        )
    sample = output.outputs[0]
    tokens = [*output.prompt_token_ids, *sample.token_ids]
    if sample.continuation is None:
        return Origin(of=output.request_id, tokens=tokens, parent=None, adapter=output.adapter)
    try:
        parent = await _find(backend, sample.continuation.handle)
    except NotFoundError:
        parent = None
    return Origin(of=sample.continuation.handle, tokens=tokens, parent=parent, adapter=output.adapter)


async def _find(backend: Backend, handle: str) -> Parent:
    with _argument():
        return await backend.find_parent(handle, "", wait_s=_PARENT_WAIT_S)


@contextlib.contextmanager
def _argument() -> Iterator[None]:
    """What an HTTP client calls `continuation_of` is the argument `parent` here."""
    try:
        yield
    except (NotFoundError, InvalidRequestError, ConflictError) as error:
        error.param = "parent"
        raise


def _handle_of(name: ParentName) -> str:
    match name:
        case str():
            return name
        case RequestOutput():
            return name.request_id
        case CompletionOutput(continuation=None):
            raise InvalidRequestError(
                "its KV was not to be kept: generate with keep_kv, or continue from the RequestOutput", param="parent"
            )
        case CompletionOutput():
            assert name.continuation is not None
            return name.continuation.handle


async def _release(backend: Backend, name: ParentName) -> None:
    if isinstance(name, RequestOutput) and name.finished:
        kept = [sample for sample in name.outputs if sample.continuation is not None]
        if len(kept) != 1:
            raise NotFoundError("its KV is not kept", param="parent", code="continuation_not_found")
        name = kept[0]
    handle = _handle_of(name)
    with _argument():
        backend.continuations.find(handle, "")  # one sample, not several
        await backend.delete_parents(handle, "")


def shown_progress(shown: bool) -> Progress:
    if not shown:
        return Silent()
    from kvrelay.launch.console import console_progress

    return console_progress()
