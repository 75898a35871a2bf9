"""The worker process: registers as starting, builds its stage, listens, registers as ready, serves, drains, leaves.

SIGTERM          drains: takes nothing new, finishes what it has, leaves the registry, ends with status 0
a second one     stops at once: open requests fail with 503
Drain            the same by message; with a role, the process then starts again in it, as a new worker
standing still   (SIGSTOP ... SIGCONT) for most of its registration's time: drops everything in silence and starts again as a
                 new worker; one that was told to leave just ends
an engine error  every open request fails with 500, then the process ends with status 1: what a step left behind
                 cannot be trusted, and its supervisor starts a fresh worker
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from types import FrameType

import msgspec

from kvrelay.config import EngineOptions, Environment, ModelOptions, WorkerOptions
from kvrelay.discovery.base import Registration
from kvrelay.discovery.choose import open_registration
from kvrelay.errors import ConfigError, ProtocolError
from kvrelay.ids import new_worker_id
from kvrelay.log import Log, configure
from kvrelay.planes.cluster_key import key_file, load_key
from kvrelay.planes.curve import use_key, warn_if_open
from kvrelay.progress import Progress
from kvrelay.states import Role, WorkerState
from kvrelay.wire import PROTOCOL_VERSION
from kvrelay.wire.registry import WorkerRecord
from kvrelay.worker.cache_events import CacheEvents
from kvrelay.worker.collector import spare_the_collector
from kvrelay.worker.heartbeat import Heartbeat
from kvrelay.worker.launcher import LauncherTie
from kvrelay.worker.restart import execute_again
from kvrelay.worker.serving import EngineFailedError, ServingLoop
from kvrelay.worker.stage import BuildStage, Setup, Stage
from kvrelay.worker.starting import announced
from kvrelay.worker.tally import Tally
from kvrelay.worker.vigil import Vigil

log = Log("worker")

_SWITCH_INTERVAL_S = {"cpu": 0.0005, "cuda": 0.0001}  # so that heartbeat and relay get their turn beside a busy engine


def run_worker(
    model_options: ModelOptions,
    engine_options: EngineOptions,
    worker_options: WorkerOptions,
    environment: Environment,
    progress: Progress,
    build_stage: BuildStage,
    *,
    tie: LauncherTie | None = None,
) -> int:
    """The life of a worker; returns its exit status. With a tie to a launcher, Ctrl-C is for the launcher, not for us."""
    engine_options = engine_options.for_device(model_options.device)
    role = Role(worker_options.role)
    sys.setswitchinterval(_SWITCH_INTERVAL_S[model_options.device])
    if worker_options.worker_host in ("0.0.0.0", "*", "::"):
        raise ConfigError("--worker-host must be an address that routers can reach, not every address")
    worker_id = new_worker_id(role.value)
    configure(environment.log_level, worker_id)
    use_key(load_key(key_file(worker_options.cluster_key, environment)))
    warn_if_open("--worker-host", worker_options.worker_host)
    tally = Tally()
    registration = open_registration(worker_options.registry, on_retry=tally.registry_retried)
    record = WorkerRecord(
        id=worker_id,
        role=role,
        state=WorkerState.STARTING,
        host=socket.gethostname(),
        pid=os.getpid(),
        model=model_options.model,
        max_batch=engine_options.max_batch,
        max_queue=engine_options.max_queue,
        version=PROTOCOL_VERSION,
        block_size=engine_options.block_size,
        device=model_options.device,
        kv_dtype=model_options.kv_dtype,
        data_parallel_rank=worker_options.data_parallel_rank,
    )
    with announced(registration, record, worker_options.registration_s):
        stage = build_stage(Setup(worker_id, model_options, engine_options, environment, progress, _end_at_once))
    spare_the_collector()
    loop = ServingLoop(stage.engine, host=worker_options.worker_host, port=worker_options.worker_port, tally=tally)
    events = CacheEvents(stage.recorder, worker_id, worker_options)
    tally.events_malformed = lambda: events.num_malformed
    loop.record = msgspec.structs.replace(
        record,
        state=WorkerState.READY,
        serving_address=loop.address,
        fingerprint=stage.fingerprint,
        max_model_len=stage.max_model_len,
        load=loop.status.load,
        signal_address=stage.signal_address,
        events_address=events.events_address,
        replay_address=events.replay_address,
        adapters=stage.adapters.records(),
        block_size=engine_options.block_size if stage.block_size is None else stage.block_size,
    )
    loop.orders.adapters = stage.adapters
    loop.after_turn = events.tell
    stage.waker.bind(loop.wake)
    handle_signals(loop, launched=tie is not None)
    vigil = Vigil(worker_options.registration_s)
    status = _serve(loop, stage, registration, worker_options, vigil)
    events.close()
    if status == 0 and (loop.next_role is not None or (vigil.over and not loop.drain_asked)):
        if tie is not None and loop.next_role is not None:
            tie.becomes(loop.next_role)
        execute_again(loop.next_role, keep=None if tie is None else tie.descriptor)
    return status


def _serve(loop: ServingLoop, stage: Stage, registration: Registration, options: WorkerOptions, vigil: Vigil) -> int:
    assert loop.record is not None
    refusals: list[ProtocolError] = []

    def refused(error: ProtocolError) -> None:
        refusals.append(error)
        loop.stop_asked = True
        loop.wake()

    heartbeat = Heartbeat(
        registration,
        loop.record,
        loop.status,
        registration_s=options.registration_s,
        watchdog_s=options.watchdog_s,
        vigil=vigil,
        on_refused=refused,
    )
    loop.on_adapters = heartbeat.register_again
    vigil.start()
    heartbeat.start()
    log.info("worker listens", worker=loop.record.id, address=loop.address)
    status = 0
    try:
        loop.run(on_draining=heartbeat.soon, is_over=vigil.look)
    except EngineFailedError:
        status = 1  # logged where it happened
    heartbeat.stop()
    loop.close()
    stage.engine.close()
    vigil.stop()
    if refusals:
        raise refusals[0]
    log.info("worker ends", worker=loop.record.id, status=status)
    return status


def _end_at_once(reason: str) -> None:
    """As if killed: its peers and the router go on without it, and its supervisor starts another. To answer the open
    requests, and be it with an error, would end streams that can go on elsewhere."""
    log.error("worker ends at once", reason=reason)
    os._exit(1)


def handle_signals(loop: ServingLoop, *, launched: bool) -> None:
    def ask(_signal: int, _frame: FrameType | None) -> None:
        """The first one also takes back the wish that it come back in another role."""
        loop.stop_asked = loop.drain_asked and loop.next_role is None
        loop.drain_asked, loop.next_role = True, None
        loop.wake()

    signal.signal(signal.SIGTERM, ask)
    if not launched:
        signal.signal(signal.SIGINT, ask)
