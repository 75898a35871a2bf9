"""`kvrelay serve --routers N`: several router processes behind one port, since one Python process is one core.

    launcher (this process)              router 0 ... router N-1 (`kvrelay router --reuse-port`)
      holds the port, accepts nothing      listen on it too: the system deals connections among them (SO_REUSEPORT)
      the embedded registry  <------------ join it (discovery/joined.py), as workers register there
      starts routers and workers           end with it

A router that dies is replaced: the others take new connections meanwhile, and the workers abort its requests when they have not
heard of it for `registration_s`. One that is told to end (SIGTERM) finishes its responses first, and is
replaced too: so all of them can be replaced one after the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import signal
import socket
import sys
import tempfile
from typing import Any

import msgspec
import uvloop

from kvrelay.config import RouterOptions
from kvrelay.discovery.choose import open_embedded, registry_kind
from kvrelay.launch.entrance import listening, prepare, ready_line
from kvrelay.launch.launch import Launch
from kvrelay.launch.supervise import STOP_PATIENCE_S, Supervisor, first_of, stop_signal
from kvrelay.progress import Progress
from kvrelay.wire.launcher import AtRegistry, Crashed


def serve_routers(launch: Launch, progress: Progress) -> int:
    """Runs until a signal; returns the exit status."""
    prepare(launch.router, launch.cluster, launch.environment)
    with (
        listening(launch.router.host, launch.router.port, is_shared=True, accepts=False) as port,
        tempfile.TemporaryDirectory(prefix="kvrelay-") as settings,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(_run(launch, launch.fetch(progress), pathlib.Path(settings), port))


async def _run(launch: Launch, folder: pathlib.Path, settings: pathlib.Path, port: socket.socket) -> int:
    """What was opened last is closed first."""
    loop = asyncio.get_running_loop()
    routers: Supervisor  # there is nothing to tell them before the loop goes on

    def peer_refused() -> None:
        """On a thread of the registry's socket."""
        loop.call_soon_threadsafe(lambda: routers.tell(AtRegistry(what="refused peer")))

    async with contextlib.AsyncExitStack() as ends:
        registry = launch.cluster.registry
        if registry_kind(launch.cluster) == "embedded":
            embedded = open_embedded(
                launch.cluster,
                launch.default_listen,
                on_malformed=lambda: routers.tell(AtRegistry(what="malformed message")),
                on_refused=peer_refused,
            )
            embedded.start(lambda _: None, lambda _: None, lambda *_: None)  # its routers hear of workers, and tell of them
            ends.callback(embedded.close)
            registry = embedded.address
        workers = Supervisor(launch.commands(folder, registry), on_crash=lambda outcome: routers.tell(Crashed(outcome=outcome)))
        ends.push_async_callback(workers.stop)
        commands = router_commands(launch, folder, settings, port.getsockname()[1], registry)
        routers = Supervisor(commands, what="router", comes_back=True)
        ends.push_async_callback(routers.stop, launch.router.shutdown_wait_s + STOP_PATIENCE_S)
        stopped = asyncio.create_task(stop_signal(lambda: routers.signal(signal.SIGTERM)).wait())
        ends.callback(stopped.cancel)
        workers.start()
        routers.start()
        ready = asyncio.create_task(routers.until_ready())
        ends.callback(ready.cancel)
        await first_of([ready, stopped], workers, routers)
        if not stopped.done():
            workers.all_ready()
            routers.all_ready()
            line = ready_line(port, launch.served[0], launch.roles, routers=launch.cluster.routers, registry=registry)
            print(line, flush=True)
            await first_of([stopped], workers, routers)
    return 0


def router_commands(launch: Launch, folder: pathlib.Path, settings: pathlib.Path, port: int, registry: str) -> list[list[str]]:
    """Their options are in files, which only this user can read: there may be a key among them."""
    cluster = ["--registry", registry, "--registration-s", str(launch.cluster.registration_s)]
    if launch.cluster.cluster_key:
        cluster += ["--cluster-key", launch.cluster.cluster_key]
    commands: list[list[str]] = []
    for number in range(launch.cluster.routers):
        file = settings / f"router-{number}.json"
        file.write_bytes(msgspec.json.encode(_said(_options(launch, number, port))))
        place = ["--config", str(file), "--num-workers", str(len(launch.roles)), *cluster]
        commands.append([sys.executable, "-m", "kvrelay", "router", str(folder), *place])
    return commands


def _options(launch: Launch, number: int, port: int) -> RouterOptions:
    options = launch.router
    return msgspec.structs.replace(
        options,
        port=port,
        reuse_port=True,
        own_port=options.own_port + number if options.own_port else 0,
        served_model_name=",".join(launch.served),
        eviction_sync=options.eviction_sync if number == 0 else "off",  # the index is to be told once
    )


def _said(options: RouterOptions) -> dict[str, Any]:
    usual = msgspec.structs.asdict(RouterOptions())
    return {name: value for name, value in msgspec.structs.asdict(options).items() if value != usual[name]}
