"""A worker that computes nothing: it speaks the serving plane and gives every request one token a step.

The router benchmark puts it on the load generator's core. It is leaner than a real worker (no engine, no blocks), because
the router is what is measured: one StepOutputs a step with a token for each open request, as fast as it can or once a tick.

    FakeWorker(registry, model, tokens)     registers and runs, in a thread of its own, until its process ends
    set_tick(tick_s)                        0: the next step follows at once
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from typing import assert_never

import zmq

from kvrelay.config import read_environment
from kvrelay.discovery.embedded import EmbeddedRegistration
from kvrelay.ids import RequestId, new_worker_id
from kvrelay.planes.cluster_key import key_file, load_key
from kvrelay.planes.curve import listening, use_key
from kvrelay.states import FinishReason, Role, Stage, WorkerState
from kvrelay.wire import PROTOCOL_VERSION
from kvrelay.wire.adapters import AdapterMessage
from kvrelay.wire.codec import Decoder, encode
from kvrelay.wire.registry import BlockCounts, WorkerLoad, WorkerRecord
from kvrelay.wire.serving import (
    Abort,
    AskKept,
    Drain,
    Encode,
    Finish,
    Forget,
    HandedOver,
    Hello,
    LegTimes,
    PeerLost,
    Ping,
    ReleaseKept,
    Remember,
    SequenceOutput,
    StepOutputs,
    Submit,
    ToWorker,
    Welcome,
)
from kvrelay.wire.timelines import TimelineMessage

FINGERPRINT = "fake"
_REGISTRATION_S = 60.0
_RENEW_S = 10.0
_MAX_REQUESTS = 4096
_MAX_MODEL_LEN = 2048


@dataclass(slots=True)
class _OpenRequest:
    """What is left to say to one request."""

    request_id: RequestId
    received_at: float
    max_tokens: int
    position: int = 0


class FakeWorker:
    """The step loop. `tokens` are given out in turn."""

    def __init__(self, registry: str, model: str, tokens: list[int], role: Role = Role.WHOLE) -> None:
        """Returns once it is registered. A prefill worker gives the first token and says that it has handed over."""
        self._hands_over = role is Role.PREFILL
        use_key(load_key(key_file("", read_environment())))
        self._tokens = tokens
        self._decoder: Decoder[ToWorker] = Decoder(ToWorker)
        self._open: dict[bytes, dict[RequestId, _OpenRequest]] = {}  # by the router's socket identity
        self._times: list[float] = []
        self._tick_s = 0.0
        self._step = 0
        self._next_step = 0.0
        self._next_renewal = 0.0
        self._socket = listening(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        port: int = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._record = fake_record(role, f"tcp://127.0.0.1:{port}", model, _MAX_MODEL_LEN)
        self._registration = EmbeddedRegistration(registry)
        while not self._registration.register(self._record, _REGISTRATION_S):
            pass
        threading.Thread(target=self._run, daemon=True).start()

    def set_tick(self, tick_s: float) -> list[float]:
        """Returns, for each request since the last time, the seconds from receiving it to having sent its first token. May be
        called from any thread, while no request is open."""
        self._tick_s = tick_s
        self._next_step = time.perf_counter() + tick_s
        times, self._times = self._times, []
        return times

    def _run(self) -> None:
        while True:
            if self._socket.poll(self._wait_ms()):
                self._receive_all()
            now = time.perf_counter()
            if now >= self._next_step and any(self._open.values()):
                self._next_step = self._following_step(now)
                self._emit_step()
            if now >= self._next_renewal:
                self._next_renewal = now + _RENEW_S
                self._registration.renew(WorkerState.READY, self._load())

    def _wait_ms(self) -> int:
        now = time.perf_counter()
        if any(self._open.values()):
            return max(0, round((self._next_step - now) * 1000))
        return max(0, round((self._next_renewal - now) * 1000))

    def _following_step(self, now: float) -> float:
        """Ticks keep their beat: a late step does not delay the next one, unless a whole tick was lost."""
        if not self._tick_s:
            return now
        following = self._next_step + self._tick_s
        return following if following > now else now + self._tick_s

    def _receive_all(self) -> None:
        while True:
            try:
                identity, frame = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._handle(identity, self._decoder.decode(frame))

    def _handle(self, identity: bytes, message: ToWorker) -> None:
        requests = self._open.setdefault(identity, {})
        match message:
            case Hello():
                self._send(identity, Welcome(version=PROTOCOL_VERSION, worker=self._record))
            case Submit():
                opened = _OpenRequest(message.request_id, time.perf_counter(), message.params.max_tokens)
                requests[message.request_id] = opened
            case Abort():
                for request_id in message.request_ids:
                    requests.pop(request_id, None)
            case Finish():
                requests.pop(message.request_id, None)
            case Ping() | PeerLost() | Drain() | ReleaseKept() | Remember() | Forget() | AskKept() | Encode():
                pass
            case TimelineMessage() | AdapterMessage():
                pass
            case _:
                assert_never(message)

    def _emit_step(self) -> None:
        self._step += 1
        for identity, requests in self._open.items():
            if not requests:
                continue
            outputs = [self._next_token(request) for request in requests.values()]
            ended = [requests[output.request_id] for output in outputs if output.finish is not None or self._hands_over]
            handed = [HandedOver(request.request_id) for request in ended if self._hands_over]
            step = StepOutputs(
                worker_id=self._record.id,
                step=self._step,
                load=self._load(),
                outputs=outputs,
                news=[*handed, *map(_times, ended)],
            )
            self._send(identity, step)
            now = time.perf_counter()
            self._times.extend(now - request.received_at for request in requests.values() if request.position == 1)
            for request in ended:
                del requests[request.request_id]

    def _next_token(self, request: _OpenRequest) -> SequenceOutput:
        position = request.position
        request.position += 1
        token = self._tokens[position % len(self._tokens)]
        is_last = request.position >= request.max_tokens and not self._hands_over
        finish = FinishReason.LENGTH if is_last else None
        return SequenceOutput(request.request_id, 0, position, [token], finish)

    def _load(self) -> WorkerLoad:
        running = sum(len(requests) for requests in self._open.values())
        return WorkerLoad(running=running, steps=self._step, blocks=BlockCounts(total=1, free=1))

    def _send(self, identity: bytes, message: Welcome | StepOutputs) -> None:
        self._socket.send_multipart([identity, encode(message)])


class FakePair:
    """A prefill and a decode worker, between which nothing moves: the decode worker has all tokens by itself, the first too."""

    def __init__(self, registry: str, model: str, tokens: list[int]) -> None:
        self._prefill, self._decode = (FakeWorker(registry, model, tokens, role) for role in (Role.PREFILL, Role.DECODE))

    def set_tick(self, tick_s: float) -> list[float]:
        """As that of a worker; the first token is the prefill worker's."""
        self._decode.set_tick(tick_s)
        return self._prefill.set_tick(tick_s)


def more_workers(registry: str, model: str, tokens: list[int], count: int) -> None:
    """Beside the one that is kept. They live as long as their process."""
    for _ in range(count):
        FakeWorker(registry, model, tokens)


def _times(request: _OpenRequest) -> LegTimes:
    now = time.monotonic()
    stages = [(Stage.QUEUE, request.received_at), (Stage.PREFILL, request.received_at), (Stage.DECODE, now)]
    return LegTimes(request.request_id, stages, now)


def fake_record(role: Role, address: str, model: str, max_model_len: int) -> WorkerRecord:
    return WorkerRecord(
        id=new_worker_id(role.value),
        role=role,
        state=WorkerState.READY,
        host="127.0.0.1",
        pid=os.getpid(),
        serving_address=address,
        model=model,
        fingerprint=FINGERPRINT,
        max_model_len=max_model_len,
        max_batch=_MAX_REQUESTS,
        max_queue=_MAX_REQUESTS,
        version=PROTOCOL_VERSION,
    )
