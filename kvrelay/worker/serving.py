"""The worker's serving loop: requests of any number of routers in, one message per step and router out.

    receive everything that waits -> engine has work? -> step -> send each router its outputs
                                  -> else wait for a message

Every router is known by the identity of its connection. A router that was silent for too long (`Hello.silence_s`), or whose
connection is gone, has its requests aborted and is forgotten; if it speaks again it is told so (Refused) and has to say Hello.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import assert_never

import msgspec
import zmq

from kvrelay.errors import ConfigError, InternalError, ProtocolError, RequestError, UnavailableError
from kvrelay.ids import RequestId, as_request_id, as_router_id
from kvrelay.log import Log
from kvrelay.planes.curve import Socket, listening
from kvrelay.planes.loop_socket import bound_address, try_send
from kvrelay.states import Role, WorkerState
from kvrelay.wire import PROTOCOL_VERSION, check_version
from kvrelay.wire.adapters import AdaptersTold, DropAdapter, LoadAdapter, UnloadAdapter, UseAdapter
from kvrelay.wire.codec import Decoder, encode
from kvrelay.wire.registry import WorkerLoad, WorkerRecord
from kvrelay.wire.serving import (
    Abort,
    AskKept,
    Drain,
    Encode,
    Failure,
    Finish,
    Forget,
    Forgotten,
    Hello,
    KeptTold,
    PeerLost,
    Ping,
    Refused,
    ReleaseKept,
    Remember,
    StepOutputs,
    Submit,
    ToRouter,
    ToWorker,
    Welcome,
)
from kvrelay.wire.timelines import AskTimelines, TimelinesTold
from kvrelay.worker.adapters import AdapterOrders
from kvrelay.worker.callers import Caller, Callers
from kvrelay.worker.checks import check_submit, check_transfers
from kvrelay.worker.recent import Recent
from kvrelay.worker.remembered import Remembered
from kvrelay.worker.serving_engine import ServingEngine
from kvrelay.worker.status import Status
from kvrelay.worker.tally import Tally

log = Log("worker")

_MAX_MESSAGE_BYTES = 256 << 20
_SEND_QUEUE = 100_000  # messages to one router; one so far behind is as good as gone
_WAIT_MS = 100  # while requests are open: how late it is noticed that one has waited too long
_IDLE_WAIT_MS = 500
_MESSAGES_PER_STEP = 1024
_CHECK_ROUTERS_EVERY_S = 0.2
_MAX_SILENCE_S = 600.0
_REMEMBERED_IDS = 16_384


class EngineFailedError(Exception):
    """A step raised. The engine's state is unknown, so the process ends; its supervisor starts another."""


class ServingLoop:
    """Owns the serving socket and drives the engine."""

    def __init__(self, engine: ServingEngine, *, host: str, port: int, tally: Tally | None = None) -> None:
        self._engine = engine
        self._socket = _bind(host, port)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._decoder: Decoder[ToWorker] = Decoder(ToWorker)
        self._callers = Callers()
        self._submitted: Recent[RequestId] = Recent(_REMEMBERED_IDS)  # blocks may be held under an id after its request ended
        self._remembered = Remembered()
        self._load_untold, self._next_check = False, 0.0
        self.tally = tally or Tally()
        self.status = Status(engine.load())
        self.address = bound_address(self._socket)
        self.record: WorkerRecord | None = None  # set before `run`
        self.drain_asked = self.stop_asked = False  # set by a signal handler
        self.next_role: Role | None = None  # what to come back as after draining
        self.after_turn: Callable[[], None] = lambda: None  # called by `run` after every step, and while idle
        self.on_adapters: Callable[[WorkerRecord], None] = lambda _: None  # the record has other adapters now
        self.orders = AdapterOrders(self.wake)
        self._is_over: Callable[[], bool] = lambda: False

    def run(self, on_draining: Callable[[], None], is_over: Callable[[], bool] = lambda: False) -> None:
        """Until drained or told to stop; or until `is_over` (worker/vigil.py): then no router is told anything any more."""
        assert self.record is not None
        self._is_over = is_over
        while not self.stop_asked and not self._is_over() and not self._engine.drained:
            if self.drain_asked and self.status.state is WorkerState.READY:
                self._engine.drain()
                self.status.advance(WorkerState.DRAINING)
                on_draining()
            if self._receive():
                self._forget_silent_routers()
            for identity, told in self.orders.take():
                self._tell_adapters(identity, told)
            if self._engine.has_work:
                self._step()
            else:
                self._tell_load()
                if not self._engine.drained:
                    self._wait()
            self.after_turn()

    def wake(self) -> None:
        """From any thread, or a signal handler: there is news, so `run` should look."""
        with contextlib.suppress(OSError, ValueError):  # closed: the loop waits no more
            os.eventfd_write(self._wake_fd, 1)

    def _wait(self) -> None:
        if self._wake_fd in dict(self._poller.poll(_WAIT_MS if self.num_open else _IDLE_WAIT_MS)):
            os.eventfd_read(self._wake_fd)

    def close(self) -> None:
        """Requests that are still open, or came too late, are told so, unless this incarnation is over."""
        if self._is_over():
            self._socket.close(linger=0)
        else:
            self._receive()
            self._fail_all(UnavailableError("the worker is shutting down"))
            self._socket.close(linger=1000)
        wake_fd, self._wake_fd = self._wake_fd, -1  # `wake` may still be called, and the number soon be another file's
        os.close(wake_fd)

    @property
    def num_open(self) -> int:
        return self._callers.num_open

    # In

    def _receive(self) -> bool:
        """True if everything that had arrived was read: only then is a router that was not heard really silent."""
        for _ in range(_MESSAGES_PER_STEP):
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return True
            try:
                self._handle(frames[0], frames[1:])
            except ProtocolError as error:
                self.tally.serving_malformed += 1
                log.seldom("refused on the serving plane", reason=error)
                try_send(self._socket, (frames[0], encode(Refused(reason=str(error)))))
        return False

    def _handle(self, identity: bytes, payload: list[bytes]) -> None:
        if len(payload) != 1:
            raise ProtocolError(f"a message of {len(payload)} frames where one belongs")
        message = self._decoder.decode(payload[0])
        if isinstance(message, Hello):
            self._on_hello(identity, message)
            return
        router = self._callers.get(identity)
        if router is None:
            raise ProtocolError("this worker does not know you (any more): say Hello first")
        router.heard_at = time.monotonic()
        match message:
            case Submit():
                self._on_submit(router, message)
            case Encode():
                self._on_encode(router, message)
            case Abort():
                self._abort(router, [id for id in message.request_ids if id in router.open])
            case Finish():
                self._on_finish(router, message)
            case Ping():
                pass
            case PeerLost():
                self._engine.peer_lost(message.worker_id)
            case Drain() if not self.drain_asked:
                self.drain_asked, self.next_role = True, message.role
            case Drain():
                log.info("told to drain again", role=message.role)
            case ReleaseKept():
                self._engine.release_kept(message.kept_ids)
            case LoadAdapter():
                self.orders.load(identity, message)
            case UseAdapter():
                self._tell_adapters(identity, self.orders.use(identity, message))
            case DropAdapter():
                self.orders.drop(identity, message)
            case UnloadAdapter():
                self._tell_adapters(identity, self.orders.unload(message))
            case Remember():
                self._remembered.add(message.parent)
            case Forget():
                self._on_forget(router, message)
            case AskTimelines() | TimelinesTold():
                self._tell_others(router, message)
            case AskKept():
                try_send(self._socket, (identity, encode(self._known_of(message.handle, message.owner))))
            case _:
                assert_never(message)

    def _on_forget(self, router: Caller, forget: Forget) -> None:
        self._remembered.forget(forget.handle, forget.owner)
        self._tell_others(router, Forgotten(handle=forget.handle, owner=forget.owner))

    def _tell_others(self, router: Caller, message: ToRouter) -> None:
        told = encode(message)
        for other in self._callers:
            if other is not router:
                try_send(self._socket, (other.identity, told))

    def _known_of(self, handle: str, owner: str) -> KeptTold:
        """The kept KV is found under every name that its router remembered it by."""
        known = self._remembered.find(handle, owner)
        names = dict.fromkeys([handle, *(parent.kept_id for parent in known if parent.kept_id is not None)])
        kept = {info.kept_id: info for name in names for info in self._engine.find_kept(name, owner)}
        return KeptTold(handle=handle, owner=owner, kept=list(kept.values()), known=known)

    def _on_hello(self, identity: bytes, hello: Hello) -> None:
        """A router that says Hello again has lost what it had here."""
        check_version("the router", hello.version)
        as_router_id(hello.router_id)
        if not 0.0 < hello.silence_s <= _MAX_SILENCE_S:
            raise ProtocolError(f"a silence of {hello.silence_s} s is not between 0 and {_MAX_SILENCE_S:g}")
        known = self._callers.get(identity)
        if known is not None:
            self._forget(known)
        self._callers.add(Caller(identity, hello.silence_s, time.monotonic()))
        assert self.record is not None
        record = msgspec.structs.replace(self.record, state=self.status.state, load=self._load())
        try_send(self._socket, (identity, encode(Welcome(version=PROTOCOL_VERSION, worker=record))))

    def _tell_adapters(self, identity: bytes, told: AdaptersTold) -> None:
        """The router that gave the order learns its end; all others, if it changed anything, which adapters there are."""
        assert self.record is not None
        try_send(self._socket, (identity, encode(told)))
        if told.adapters == self.record.adapters and not told.decided:
            return
        self.record = msgspec.structs.replace(self.record, adapters=told.adapters)
        self.on_adapters(self.record)
        news = encode(AdaptersTold(adapters=told.adapters, decided=told.decided))
        for router in self._callers:
            if router.identity != identity:
                try_send(self._socket, (router.identity, news))

    def _on_submit(self, router: Caller, submit: Submit) -> None:
        check_submit(submit)
        self._note_id(submit.request_id)
        try:
            submit.params.validate()
        except RequestError as error:
            self._answer(router, Failure.of(submit.request_id, error))
            return
        self._callers.open(router, submit)
        self._load_untold = True
        self._engine.submit(submit)

    def _on_encode(self, router: Caller, encode: Encode) -> None:
        as_request_id(encode.request_id)
        check_transfers(encode.transfers)
        self._note_id(encode.request_id)
        self._callers.open_encode(router, encode.request_id)
        self._load_untold = True
        self._engine.encode(encode)

    def _note_id(self, request_id: RequestId) -> None:
        if self._callers.knows(request_id) or request_id in self._submitted:
            raise ProtocolError(f"request {request_id} was submitted before")
        self._submitted.add(request_id)

    def _on_finish(self, router: Caller, finish: Finish) -> None:
        samples = router.open.get(finish.request_id)
        if samples is None or finish.sample not in samples:
            if self._callers.may_be_kept(finish.request_id):  # it ended before the router found its end: kept KV is cut
                self._engine.finish(finish)
            return
        self._engine.finish(finish)
        self._load_untold = True
        self._callers.close_sample(router, finish.request_id, finish.sample)

    def _abort(self, router: Caller, request_ids: list[RequestId]) -> None:
        self._callers.close(router, request_ids)
        if request_ids:
            self._engine.abort(request_ids)
            self._load_untold = True

    # Out

    def _step(self) -> None:
        self.status.step_begins()
        try:
            outputs = self._engine.step()
        except Exception as error:
            log.exception("the engine failed; this worker ends", requests=self.num_open)
            self._fail_all(InternalError(f"the worker's engine failed: {type(error).__name__}: {error}"))
            raise EngineFailedError(f"{type(error).__name__}: {error}") from error
        finally:
            self.status.step_ends()
        self._load_untold = True
        if not self._is_over():
            self._deal(outputs)

    def _load(self) -> WorkerLoad:
        return self._with_planes(self._engine.load())

    def _with_planes(self, load: WorkerLoad) -> WorkerLoad:
        """The engine knows how many workers it is connected with, and nothing else of the planes."""
        return msgspec.structs.replace(load, connections=load.connections + len(self._callers), planes=self.tally.counts())

    def _deal(self, step: StepOutputs) -> None:
        """Each router gets what is its own. What belongs to no router any more was aborted meanwhile."""
        self.status.load = load = self._with_planes(step.load)
        touched = self._callers.deal(step)
        if len(self._callers) == 1 and touched:
            self._load_untold = False
        for router in touched:
            self._send_outputs(router, step.step, load)

    def _send_outputs(self, router: Caller, step: int, load: WorkerLoad) -> None:
        assert self.record is not None
        if not try_send(self._socket, (router.identity, encode(router.take(self.record.id, step, load)))):
            log.warning("a router is gone; its requests are aborted", requests=len(router.open))
            self._forget(router)

    def _answer(self, router: Caller, failure: Failure) -> None:
        router.news.append(failure)
        load = self._load()
        self._send_outputs(router, load.steps, load)

    def _tell_load(self) -> None:
        """Nothing is left to do: every router gets the final numbers, also those that no step reports: after aborts, and when
        the transfer thread ended a hand-over that the engine had given up before. A new connection is news for the
        registry only."""
        load, known = self._load(), self.status.load
        self.status.load = load
        if not self._load_untold and msgspec.structs.replace(load, connections=known.connections) == known:
            return
        self._load_untold = False
        for router in self._callers:
            self._send_outputs(router, load.steps, load)

    # Endings

    def _forget_silent_routers(self) -> None:
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + _CHECK_ROUTERS_EVERY_S
        for router in [router for router in self._callers if router.heard_at + router.silence_s < now]:
            if router.open:
                log.warning("a router fell silent; its requests are aborted", requests=len(router.open))
            self._forget(router)

    def _forget(self, router: Caller) -> None:
        self._abort(router, list(router.open))
        self._callers.forget(router)
        self.orders.forget(router.identity)

    def _fail_all(self, error: RequestError) -> None:
        for router in self._callers:
            router.news.extend(Failure.of(id, error) for id in router.open)
            self._callers.close(router, list(router.open))
            if router.news:
                self._send_outputs(router, self.status.load.steps, self.status.load)


def _bind(host: str, port: int) -> Socket:
    socket = listening(zmq.ROUTER)
    socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.SNDHWM, _SEND_QUEUE)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a send to an unknown identity is an error, not a silent loss
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a router that reconnects keeps its identity
    address = f"tcp://{host}:{port or '*'}"
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close()
        raise ConfigError(f"the worker cannot listen on {address}: {error.strerror or error}") from error
    return socket
