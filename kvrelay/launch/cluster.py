"""Router and worker processes of one machine: what `kvrelay serve` puts behind HTTP, and `LocalCluster`, which has no HTTP.

    LocalCluster(...)    a thread with an event loop: registry, router, workers; returns when all of them are usable
    send(message)        from any thread: Submit, Abort, Finish, ReleaseKept, as an engine takes them
    on_answers(answers)  in the cluster's thread: what an engine's steps give
    close()              requests that are open fail, workers end; also at the end of the interpreter

If this process dies in any other way, its workers see that and end too (worker/launcher.py).
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

import msgspec
import uvloop

from kvrelay.config import (
    ClusterOptions,
    EngineOptions,
    ModelOptions,
    RouterOptions,
    TransferOptions,
    WorkerOptions,
    check_device,
    read_environment,
)
from kvrelay.discovery.choose import open_membership, registry_kind
from kvrelay.errors import ConfigError, ConflictError, EngineClosedError, InternalError, NotFoundError, RequestError
from kvrelay.ids import KeptId, RequestId, new_router_id
from kvrelay.launch.supervise import Supervisor, worker_command
from kvrelay.log import Log
from kvrelay.metrics import Metrics
from kvrelay.offline.outputs import Answers
from kvrelay.options import to_flags
from kvrelay.planes.cluster_key import key_file, load_key
from kvrelay.planes.curve import keyed
from kvrelay.router.backend import GenerateRequest
from kvrelay.router.failover import RetryRules
from kvrelay.router.parent import Parent
from kvrelay.router.router import OpenSync, Router
from kvrelay.router.stream import RequestStream
from kvrelay.states import FinishReason, Role
from kvrelay.wire.serving import Abort, Failure, Finish, KeptNews, News, ReleaseKept, SequenceOutput, Submit

log = Log("cluster")

FREE_LOCAL_PORT = "tcp://127.0.0.1:*"
_DESCRIBE_S = 30.0  # the cluster's thread never takes so long, unless the machine stands still
_NEWS_S = 5.0  # after the last token a worker says by then whether it keeps the KV


# Shared with `kvrelay serve`


def worker_roles(cluster: ClusterOptions) -> list[Role]:
    """One entry per worker to start. Without any count, one prefill and one decode worker."""
    counts = {Role.PREFILL: cluster.prefill, Role.DECODE: cluster.decode, Role.WHOLE: cluster.whole}
    encoders = [Role.ENCODE] * cluster.encode
    roles = [role for role, count in counts.items() for _ in range(count)]
    if registry_kind(cluster) == "static":
        if roles or encoders:
            raise ConfigError(
                "workers started here must be able to register: --prefill, --decode, --whole and --encode need --registry"
                " embedded or etcd://HOST:PORT"
            )
        return []
    if cluster.prefill and not cluster.decode:
        raise ConfigError("--prefill needs --decode: somebody must take over what prefill workers compute")
    if cluster.whole and (cluster.prefill or cluster.decode):
        raise ConfigError("--whole cannot be mixed with --prefill and --decode")
    return encoders + (roles or [Role.PREFILL, Role.DECODE])


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """What all workers of this machine are told. `model.model` is a folder: nobody fetches it twice."""

    model: ModelOptions
    engine: EngineOptions
    transfer: TransferOptions
    registration_s: float
    cluster_key: str = ""  # its file
    flags: Sequence[str] = ()  # how they show themselves, such as --progress=plain

    def commands(self, roles: Sequence[Role], registry_address: str) -> list[list[str]]:
        threads = self.model.threads or max(1, len(os.sched_getaffinity(0)) // max(1, len(roles)))
        model = msgspec.structs.replace(self.model, threads=threads)
        common = [*to_flags(model), *to_flags(self.engine), *to_flags(self.transfer), *self.flags]
        places = [
            WorkerOptions(
                role=role.value, registry=registry_address, registration_s=self.registration_s, cluster_key=self.cluster_key
            )
            for role in roles
        ]
        return [worker_command([*common, *to_flags(place)]) for place in places]


def open_router(
    options: RouterOptions,
    cluster: ClusterOptions,
    metrics: Metrics,
    served_name: str,
    *,
    default_listen: str,
    sync: OpenSync | None = None,
) -> tuple[Router, str]:
    """A router with its registry, and the address at which workers register. On the loop that will run it."""
    router_id = new_router_id()
    membership = open_membership(cluster, router_id, metrics, default_listen)
    router = Router(
        membership=membership,
        metrics=metrics,
        policy=options.policy,
        mode=options.mode,
        local_prefill_tokens=options.local_prefill_tokens,
        registration_s=cluster.registration_s,
        model=served_name,
        router_id=router_id,
        rules=RetryRules(max_retries=options.max_retries, wait_s=options.failover_wait_s),
        sync=sync,
        continuation_cache=options.continuation_cache,
        max_kept_per_key=options.max_kept_per_key,
    )
    return router, membership.address


async def until_ready(router: Router, supervisor: Supervisor, num_workers: int, stopped: asyncio.Task[bool]) -> None:
    """Returns when every worker is usable, or `stopped` is done. Raises WorkerDiedError."""
    usable = asyncio.create_task(router.until_usable(num_workers))
    waits: list[asyncio.Future[Any]] = [usable, stopped, supervisor.failed]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    usable.cancel()
    if supervisor.failed.done():
        raise supervisor.failed.result()
    supervisor.all_ready()


class LocalCluster:
    """Workers of this process's own, behind a router in a thread. `send` never blocks; `on_answers` must not either.

    Every Submit is answered as by an engine: by outputs until each sample has its finish reason, or by one failure. More
    requests than the workers have room for wait here, in the order they came.
    """

    def __init__(
        self,
        workers: WorkerSettings,
        router: RouterOptions,
        cluster: ClusterOptions,
        on_answers: Callable[[Answers], None],
    ) -> None:
        """Blocks until every worker can take requests. Raises ConfigError, and WorkerDiedError with a worker's reason."""
        self._workers = workers
        self._router_options = router
        self._cluster = cluster
        self._on_answers = on_answers
        self._roles = worker_roles(cluster)
        check_device(workers.model, self._roles)
        self._key = load_key(key_file(workers.cluster_key, read_environment()))
        self._ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._requests: dict[RequestId, _Served] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = uvloop.new_event_loop()
        self._stop = asyncio.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="kvrelay-cluster", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        try:
            self._ready.result()
        except BaseException:  # also Ctrl-C while workers load: none of them may be left
            self.close()
            raise

    def send(self, message: Submit | Abort | Finish | ReleaseKept) -> None:
        """Raises EngineClosedError if the workers have ended; then the message has no answer."""
        self._call(lambda: self._take(message))

    def describe(self) -> dict[str, Any]:
        """The JSON of GET /cluster."""
        answer: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()
        self._call(lambda: answer.set_result(self._router.cluster()))
        return answer.result(_DESCRIBE_S)

    def close(self) -> None:
        """Returns when no worker runs any more. May be called twice."""
        atexit.unregister(self.close)
        if not self._closed:
            self._closed = True
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                self._loop.call_soon_threadsafe(self._stop.set)
        if threading.current_thread() is not self._thread:  # the garbage collector may call from there
            self._thread.join()

    def _call(self, work: Callable[[], None]) -> None:
        try:
            if not self._closed:
                self._loop.call_soon_threadsafe(work)
                return
        except RuntimeError:  # the loop ended this very moment
            self._closed = True
        raise EngineClosedError("the workers have ended")

    # In the cluster's thread

    def _work(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            with keyed(self._key):
                self._loop.run_until_complete(self._main())
        except Exception as error:  # the thread's main: whoever waits learns of it
            if self._ready.done():
                log.exception("the local cluster failed")
            else:
                self._ready.set_exception(error)
        finally:
            self._closed = True
            self._loop.close()

    async def _main(self) -> None:
        served_name = self._workers.model.model
        self._router, address = open_router(
            self._router_options, self._cluster, Metrics(), served_name, default_listen=FREE_LOCAL_PORT
        )
        self._room = asyncio.Semaphore(self._workers.engine.max_queue)
        supervisor = Supervisor(self._workers.commands(self._roles, address))
        stopped = asyncio.create_task(self._stop.wait())
        self._router.start()
        try:
            supervisor.start()
            await until_ready(self._router, supervisor, len(self._roles), stopped)
            self._ready.set_result(None)
            waits: list[asyncio.Future[Any]] = [stopped, supervisor.failed]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._closed = True  # what is sent from now on is refused
            reason = str(supervisor.failed.result()) if supervisor.failed.done() else "the workers were closed"
            await self._fail_all(reason)
            stopped.cancel()
            await supervisor.stop()
            self._router.close()

    def _take(self, message: Submit | Abort | Finish | ReleaseKept) -> None:
        match message:
            case Submit() if self._closed:  # it was under way when the end came
                self._fail(message.request_id, InternalError("the workers were closed"))
            case Submit():
                self._begin(message)
            case Abort():
                for request_id in message.request_ids:
                    self._abort(request_id)
            case Finish():
                served = self._requests.get(message.request_id)
                if served is not None and served.stream is not None:
                    served.stream.finish(message.sample, message.keep_tokens, message.reason)
            case ReleaseKept():
                task = asyncio.ensure_future(self._release(message.kept_ids))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case _:
                assert_never(message)

    def _begin(self, submit: Submit) -> None:
        served = _Served(submit)
        served.task = asyncio.ensure_future(self._serve(served))
        self._requests[submit.request_id] = served
        self._tasks.add(served.task)
        served.task.add_done_callback(lambda task: self._ended(served, task))

    async def _serve(self, served: _Served) -> None:
        """Cancelled when nobody wants the rest."""
        submit = served.submit
        async with self._room:
            parent = None if submit.inherit is None else await self._parent(submit.inherit)
            served.stream = self._router.submit(_request(submit, parent))
            try:
                while outputs := await served.stream.next():
                    self._on_answers(_answers(submit.request_id, served.stream, outputs))
            finally:
                served.stream.abort()
            if submit.keep is not None:
                await self._router.continuations.until_settled(served.stream.parents, _NEWS_S)
                self._on_answers(Answers(news=self._news(submit, served.stream.parents)))

    async def _parent(self, kept_id: KeptId) -> Parent | None:
        """None: the router knows nothing of it any more, but the prompt has all of its tokens."""
        try:
            return await self._router.find_parent(kept_id, "", wait_s=_NEWS_S)
        except (NotFoundError, ConflictError):
            return None

    def _news(self, submit: Submit, parents: Sequence[Parent]) -> list[News]:
        assert submit.keep is not None
        remaining_s = self._router.continuations.remaining_s
        return [
            KeptNews(submit.request_id, sample, kept_id, True, remaining_s(parent), len(parent.tokens), parent.num_blocks)
            if parent.kept
            else KeptNews(submit.request_id, sample, kept_id, False, reason=parent.reason or "its worker does not say so")
            for sample, (kept_id, parent) in enumerate(zip(submit.keep.kept_ids, parents, strict=True))
        ]

    async def _release(self, kept_ids: Sequence[KeptId]) -> None:
        for kept_id in kept_ids:
            with contextlib.suppress(NotFoundError):
                await self._router.delete_parents(kept_id, "")

    def _ended(self, served: _Served, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._requests.pop(served.submit.request_id, None)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            return
        if not isinstance(error, RequestError):
            log.error("a request failed unexpectedly", request=served.submit.request_id, error=repr(error))
            error = InternalError(f"{type(error).__name__}: {error}")
        self._fail(served.submit.request_id, error)

    def _fail(self, request_id: RequestId, error: RequestError) -> None:
        self._on_answers(Answers(news=[Failure.of(request_id, error)]))

    def _abort(self, request_id: RequestId) -> None:
        """Harmless if the request is over."""
        served = self._requests.pop(request_id, None)
        if served is None or served.task is None:
            return
        if served.submit.keep is not None and served.stream is not None:
            served.stream.abort()  # its task goes on to hear whether its KV is kept
        else:
            served.task.cancel()
        samples = range(served.submit.params.n)
        ends = [SequenceOutput(request_id, sample, 0, [], FinishReason.ABORT) for sample in samples]
        self._on_answers(Answers(outputs=ends, news=_never_kept(served)))

    async def _fail_all(self, reason: str) -> None:
        for served in list(self._requests.values()):
            if served.task is not None and served.task.cancel():
                self._fail(served.submit.request_id, InternalError(reason))
        self._requests.clear()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@dataclass(slots=True)
class _Served:
    """One request from Submit to its end."""

    submit: Submit
    task: asyncio.Task[None] | None = None
    stream: RequestStream | None = None  # None while it waits for room


def _answers(request_id: RequestId, stream: RequestStream, outputs: list[SequenceOutput]) -> Answers:
    """Under the id that the request has outside."""
    replace = msgspec.structs.replace
    news: list[News] = [] if stream.inherited is None else [replace(stream.inherited, request_id=request_id)]
    news += [replace(stream.beams[each.sample], request_id=request_id) for each in outputs if each.sample in stream.beams]
    return Answers(outputs=[replace(output, request_id=request_id) for output in outputs], news=news)


def _never_kept(served: _Served) -> list[News]:
    """Of a request that never came to a worker."""
    if served.submit.keep is None or served.stream is not None:
        return []
    return [
        KeptNews(served.submit.request_id, sample, kept_id, False, reason="it was aborted before it began")
        for sample, kept_id in enumerate(served.submit.keep.kept_ids)
    ]


def _request(submit: Submit, parent: Parent | None) -> GenerateRequest:
    return GenerateRequest(
        external_id=submit.external_id,
        prompt=submit.prompt,
        params=submit.params,
        priority=submit.priority,
        cache_salt=submit.cache_salt,
        trace=submit.trace,
        keep=submit.keep,
        parent=parent,
    )
