"""`kvrelay serve` (router and workers) and `kvrelay router` (the router alone).

    resolve the model -> listen on the HTTP port -> registry, router, HTTP server -> start the workers
    -> all of them usable: one ready line -> signal -> HTTP ends, router closes, workers end

The router lives in this process; torch does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import pathlib
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import assert_never, get_args

import msgspec
import uvicorn
import uvloop

from kvrelay.checkpoint.weight_file import memory_folder, sweep
from kvrelay.config import (
    CardOptions,
    ClusterOptions,
    EngineOptions,
    Environment,
    ModelOptions,
    RouterOptions,
    TransferOptions,
)
from kvrelay.events.eviction_sync import EvictionSyncAdapter
from kvrelay.events.removals import RemovalQueue
from kvrelay.frontend.app import create_app
from kvrelay.frontend.feed.feed import Feed
from kvrelay.frontend.http.connections import close_slow, limited
from kvrelay.launch.cards import sharing, visible_cards
from kvrelay.launch.cluster import WorkerSettings, open_router, until_ready, worker_roles
from kvrelay.launch.entrance import BACKLOG, listening, prepare, ready_line
from kvrelay.launch.launch import Launch, Tie
from kvrelay.launch.routers import serve_routers
from kvrelay.launch.supervise import Supervisor, first_of, stop_signal
from kvrelay.log import configure, take_over
from kvrelay.media.image_spec import ImageSpec, read_image_spec
from kvrelay.metrics import Metrics
from kvrelay.options import RoleOptions, check_roles
from kvrelay.progress import Progress
from kvrelay.router.router import OpenSync
from kvrelay.states import Role
from kvrelay.text.tokenizer import Tokenizer
from kvrelay.wire.launcher import AtRegistry, Crashed, CrashOutcome, ToRouter

# libuv accepts one connection per listening descriptor and turn of the loop. A turn in which hundreds of streams get their
# tokens takes tens of milliseconds, so with one descriptor new clients would wait for seconds.
_ACCEPTS_PER_TURN = 48
_KEEP_ALIVE_S = 75  # longer than common proxies keep idle connections, so that they close first
COLLECTOR_THRESHOLDS = (20_000, 20, 50)  # a request leaves few cycles behind
DEFAULT_LISTEN = "tcp://127.0.0.1:5600"
_TICKS_PER_CHECK = 50  # of a tenth of a second
_LAST_REMOVALS_S = 2.0  # for telling a context index what went with the workers


def serve(
    model: ModelOptions,
    engine: EngineOptions,
    router: RouterOptions,
    cluster: ClusterOptions,
    transfer: TransferOptions,
    environment: Environment,
    progress: Progress,
    per_role: Mapping[Role, RoleOptions],
    card_options: CardOptions,
) -> int:
    """Runs until a signal; returns the exit status. `per_role` is what each role is told instead of `model` and `engine`."""
    roles = worker_roles(cluster)
    check_roles({role: per_role[role] for role in roles})
    cards = visible_cards(card_options, environment)

    def commands(folder: pathlib.Path, registry_address: str) -> list[list[str]]:
        workers = WorkerSettings(
            model=msgspec.structs.replace(model, model=str(folder)),
            engine=engine,
            transfer=transfer,
            registration_s=cluster.registration_s,
            cluster_key=cluster.cluster_key,
            flags=["--progress=plain"] if len(roles) > 1 else [],
            per_role=per_role,
            cards=cards,
            card_options=card_options,
            mps=mps,
        )
        return workers.commands(roles, registry_address)

    launch = Launch(model, router, cluster, environment, roles, commands)
    launch.check_adapters(per_role)
    route_them = serve_routers if cluster.routers > 1 else _route
    with sharing([(role, per_role[role].model) for role in roles], cards, card_options, environment) as mps:
        try:
            return route_them(launch, progress)
        finally:
            sweep(memory_folder())  # a killed worker leaves its weights to the next


def route(
    model: ModelOptions,
    router: RouterOptions,
    cluster: ClusterOptions,
    environment: Environment,
    progress: Progress,
    *,
    num_workers: int = 0,
    tie: Tie | None = None,
) -> int:
    """The router alone: workers are started elsewhere and register here. It is ready when there are `num_workers`; `tie` tells
    that to the process that launched it, and hears of workers that crash there."""
    launch = Launch(model, router, cluster, environment, default_listen=DEFAULT_LISTEN)
    return _route(launch, progress, num_workers=num_workers, tie=tie)


def _route(launch: Launch, progress: Progress, *, num_workers: int = 0, tie: Tie | None = None) -> int:
    router = with_index(launch.router, launch.environment)
    prepare(router, launch.cluster, launch.environment)
    with contextlib.ExitStack() as listeners:
        listener = listeners.enter_context(listening(router.host, router.port, is_shared=router.reuse_port))
        own = [listeners.enter_context(listening(router.host, router.own_port))] if router.own_port else []
        folder = launch.fetch(progress)
        tokenizer, image_spec = Tokenizer.load(folder, chat_template=router.chat_template), read_image_spec(folder)

        async def main() -> int:
            front = Front(router, launch.cluster, launch.served[0], tokenizer, image_spec, default_listen=launch.default_listen)
            if tie is not None:
                tie.on_told = front.count_told
                configure(launch.environment.log_level, front.router.router_id)  # one of several in the same log
            line = ready_line(listener, front.served_name, launch.roles, registry=front.registry_address)
            return await _run(
                front,
                [listener, *own],
                launch.commands(folder, front.registry_address),
                num_workers or len(launch.roles),
                functools.partial(print, line, flush=True) if tie is None else tie.ready,
            )

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(main())


class Front:
    """Registry, router and HTTP application of one process. Made on the running loop."""

    def __init__(
        self,
        options: RouterOptions,
        cluster: ClusterOptions,
        served_name: str,
        tokenizer: Tokenizer,
        image_spec: ImageSpec | None = None,
        *,
        default_listen: str,
    ) -> None:
        self._metrics = metrics = Metrics()
        self._crashes = {outcome: metrics.worker_crashes.labels(outcome) for outcome in get_args(CrashOutcome)}
        self.served_name = served_name
        self.removals = _open_removals(options, metrics)
        self.router, self.registry_address = open_router(
            options,
            cluster,
            metrics,
            served_name,
            default_listen=default_listen,
            sync=_open_sync(options, self.removals, metrics),
        )
        take_over("uvicorn.error")  # it has a line for every request that is none
        app = create_app(self.router, tokenizer, metrics=metrics, options=options, model=served_name, image_spec=image_spec)
        self.server = HttpServer(
            uvicorn.Config(
                app,
                loop="none",
                http=limited(options.max_connections, metrics),
                ws="none",
                lifespan="off",
                interface="asgi3",
                access_log=False,
                log_config=None,
                log_level="warning",
                proxy_headers=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=options.shutdown_wait_s,
            ),
            app.feed,
        )

    def count_crash(self, outcome: CrashOutcome) -> None:
        self._crashes[outcome].inc()

    def count_told(self, message: ToRouter) -> None:
        """What the process counts that launched this one and others."""
        match message:
            case Crashed():
                self.count_crash(message.outcome)
            case AtRegistry(what="refused peer"):
                self._metrics.refused_peers.inc()
            case AtRegistry():
                self._metrics.malformed.labels("registry").inc()
            case _:
                assert_never(message)


class HttpServer(uvicorn.Server):
    """Leaves signals to us, closes connections whose requests never arrive, and ends the dashboards' feeds before it ends."""

    def __init__(self, config: uvicorn.Config, feed: Feed) -> None:
        super().__init__(config)
        self._feed = feed

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def end_at_once(self) -> None:
        """Without waiting for running responses, once it is to end."""
        self.force_exit = True

    async def on_tick(self, counter: int) -> bool:
        if counter % _TICKS_PER_CHECK == 0:
            close_slow(self.server_state.connections, asyncio.get_running_loop().time())
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._feed.close()
        await super().shutdown(sockets)


def with_index(options: RouterOptions, environment: Environment) -> RouterOptions:
    """The option wins over the environment."""
    return msgspec.structs.replace(options, context_index=options.context_index or environment.context_index)


def _open_removals(options: RouterOptions, metrics: Metrics) -> RemovalQueue | None:
    """On the running loop. None where there is no context index, or nothing to tell it."""
    if not options.context_index or options.eviction_sync == "off":
        return None
    from kvrelay.events.contextpilot import ContextPilotIndex  # loads an HTTP client, which nothing else here needs

    return RemovalQueue(ContextPilotIndex(options.context_index), metrics)


def _open_sync(options: RouterOptions, removals: RemovalQueue | None, metrics: Metrics) -> OpenSync | None:
    if removals is None or options.eviction_sync == "off":
        return None
    return functools.partial(EvictionSyncAdapter, removals, mode=options.eviction_sync, metrics=metrics)


async def _run(
    front: Front,
    sockets: Sequence[socket.socket],
    commands: list[list[str]],
    num_workers: int,
    tell_ready: Callable[[], None],
) -> int:
    """`commands` start the workers of this machine. What was opened last is closed first."""
    stop = stop_signal(front.server.end_at_once)
    async with contextlib.AsyncExitStack() as ends:
        front.router.start()
        ends.callback(front.router.close)
        if front.removals is not None:
            ends.push_async_callback(front.removals.close, _LAST_REMOVALS_S)
        supervisor = Supervisor(commands, on_crash=front.count_crash)
        ends.push_async_callback(supervisor.stop)  # before the router: a worker that leaves wants an answer of the registry
        listeners = [listener.dup() for listener in sockets for _ in range(_ACCEPTS_PER_TURN)]
        for listener in sockets:
            listener.close()
        http = asyncio.create_task(front.server.serve(sockets=listeners))
        ends.push_async_callback(_end_http, front.server, http)
        stopped = asyncio.create_task(stop.wait())
        ends.callback(stopped.cancel)
        supervisor.start()
        await until_ready(front.router, supervisor, num_workers, stopped)
        if not stop.is_set():
            _spare_the_collector()
            tell_ready()
            await first_of([http, stopped], supervisor)
            if http.done():
                http.result()  # it ends by itself only with an error
    return 0


async def _end_http(server: HttpServer, http: asyncio.Task[None]) -> None:
    server.should_exit = True
    await asyncio.wait([http])


def _spare_the_collector() -> None:
    """What exists now lives as long as the process: the garbage collector need not look at it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTOR_THRESHOLDS)
