"""The thread of an LLM: an event loop with, on it, the `Backend` that serves the LLM's requests.

    Service(open_engine(...))     one engine in this process (engine_backend.py)
    Service(open_workers(...))    worker processes of this machine and their router (launch/cluster.py)

    run(coroutine), await ask(coroutine)    from the thread of the LLM's caller: the result of a coroutine on the service's loop
    close()                                 requests that are open fail, engine or workers end; also at the interpreter's end

If this process dies in any other way, its workers see that and end too (worker/launcher.py).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import uvloop

from kvrelay.checkpoint.fetch import resolve
from kvrelay.config import read_environment
from kvrelay.engine.engine import Engine
from kvrelay.errors import EngineClosedError, InternalError, QueueFullError
from kvrelay.launch.cluster import WorkerSettings, local_cluster
from kvrelay.log import Log
from kvrelay.offline.engine_backend import EngineBackend
from kvrelay.offline.options import OfflineOptions
from kvrelay.progress import Progress
from kvrelay.router.backend import Backend, GenerateRequest
from kvrelay.router.shown import ClusterShown
from kvrelay.router.stream import RequestStream
from kvrelay.text.tokenizer import Tokenizer

log = Log("llm")
T = TypeVar("T")

_LOOK_EVERY_S = 0.005
CLOSED = "the engine was closed"


@dataclass(frozen=True, slots=True)
class Opened:
    """A backend that is ready. `failed` is done, with the reason as its result or exception, when it cannot go on."""

    backend: Backend
    failed: asyncio.Future[Any]
    settle: Callable[[], Awaitable[None]]  # returns when nothing of requests that have ended is left in this process


Open = Callable[[], AbstractAsyncContextManager[Opened]]


def open_engine(engine: Engine, options: OfflineOptions) -> Open:
    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[Opened]:
        backend = EngineBackend(engine, options.router.continuation_cache, options.router.max_kept_per_key)
        driver = asyncio.create_task(backend.drive())  # ends only with an error
        try:
            yield Opened(backend, driver, backend.until_idle)
        finally:
            backend.ready = False
            driver.cancel()
            await asyncio.wait([driver])
            engine.close()

    return opened


def open_workers(options: OfflineOptions, progress: Progress, *, shown: bool) -> tuple[Tokenizer, Open]:
    """The model in worker processes, which show their own progress if `shown`."""
    folder = resolve(options.model.model, read_environment(), progress)
    workers = WorkerSettings(
        model=msgspec.structs.replace(options.model, model=str(folder)),
        engine=options.engine,
        transfer=options.transfer,
        registration_s=options.cluster.registration_s,
        cluster_key=options.cluster.cluster_key,
        flags=["--quiet", "--progress=plain" if shown else "--progress=none"],
    )

    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[Opened]:
        async with local_cluster(workers, options.router, options.cluster) as (router, supervisor):
            yield Opened(router, supervisor.failed, lambda: asyncio.sleep(0))  # workers come to rest by themselves

    return Tokenizer.load(folder), opened


class Service:
    """One thread. Requests beyond `max_open` wait here, in the order they came."""

    def __init__(self, open_backend: Open, max_open: int) -> None:
        """Blocks until the backend is ready. Raises ConfigError, and WorkerDiedError with a worker's reason."""
        self._open_backend = open_backend
        self._max_open = max_open
        self._streams: set[RequestStream] = set()
        self._ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.reason = ""  # why it has ended; empty while it serves
        self._thread = threading.Thread(target=self._work, name="kvrelay-llm", daemon=True)
        self._loop = uvloop.new_event_loop()
        self._main = self._loop.create_task(self._serve())
        self._thread.start()
        try:
            self._ready.result()
        except BaseException:  # also Ctrl-C while workers load: none of them may be left
            self.close()
            raise

    # From any thread

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Blocks. Ctrl-C cancels the work."""
        future = self._begin(work)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise InternalError(self.reason) from None
        except BaseException:
            future.cancel()
            raise

    async def ask(self, work: Coroutine[Any, Any, T]) -> T:
        """On the loop of the caller. Cancelled with its caller."""
        try:
            return await asyncio.wrap_future(self._begin(work))
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if not self.reason or (caller is not None and caller.cancelling()):
                raise
            raise InternalError(self.reason) from None

    def tell(self, work: Callable[[], object]) -> None:
        """Done soon, unless the service has ended."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(work)

    def describe(self) -> ClusterShown:
        """The JSON of GET /cluster."""

        async def cluster() -> ClusterShown:
            return self.backend.cluster()

        return self.run(cluster())

    def close(self) -> None:
        """Returns when no engine and no worker runs any more. May be called twice."""
        self.tell(self._main.cancel)
        if threading.current_thread() is not self._thread:  # the garbage collector may call from there
            self._thread.join()

    def _begin(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Raises EngineClosedError if the service has ended."""
        try:
            if not self.reason:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # the loop was closed this very moment
            self.reason = self.reason or CLOSED
        work.close()
        raise EngineClosedError(self.reason)

    # On the service's loop

    async def submit(self, request: GenerateRequest) -> RequestStream:
        """Waits for room. Raises UnavailableError."""
        async with self._door:
            while (stream := self._submit_now(request)) is None:
                await asyncio.sleep(_LOOK_EVERY_S)
            return stream

    def _submit_now(self, request: GenerateRequest) -> RequestStream | None:
        """None: there is no room."""
        if len(self._streams) >= self._max_open:
            self._streams = {stream for stream in self._streams if not stream.done}
            if len(self._streams) >= self._max_open:
                return None
        try:
            stream = self.backend.submit(request)
        except QueueFullError:
            return None
        self._streams.add(stream)
        return stream

    def left(self, stream: RequestStream) -> None:
        """It is over, and its reader has done with it."""
        self._streams.discard(stream)

    def _work(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main)
        except asyncio.CancelledError:
            self.reason = self.reason or CLOSED
        except Exception as error:  # the thread's main: the caller learns of it
            self.reason = str(error)
            if self._ready.done():
                log.exception("the service of an LLM failed")
            else:
                self._ready.set_exception(error)
        finally:
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.close()
            self._ready.cancel()

    async def _serve(self) -> None:
        self._door = asyncio.Lock()
        async with self._open_backend() as opened:
            self.backend, self.settle = opened.backend, opened.settle
            self._ready.set_result(None)
            try:
                await asyncio.wait([opened.failed])
            finally:
                self.reason = str(opened.failed.exception() or opened.failed.result()) if opened.failed.done() else CLOSED
                for stream in self._streams:
                    stream.abort()  # a worker that is told to end finishes what it has first
