"""A worker in virtual time: a real engine, driven as `worker/serving.py` drives it.

    turn:  what was computed is told -> messages are taken -> the engine steps -> the next turn is when that step has ended

A step is one event. It is committed when it begins, by a clock that is ahead then: nothing outside sees what came of it before
it has ended, because messages to the worker wait for its next turn.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

import msgspec

from kvrelay.config import EngineOptions
from kvrelay.engine import invariants
from kvrelay.engine.encode import EncodeEngine
from kvrelay.engine.engine import Engine
from kvrelay.engine.memory.events import EventRecorder
from kvrelay.simulate.audience import Audience, OnOutputs
from kvrelay.simulate.costs import ALONE, most_like
from kvrelay.simulate.engines import Hooks, encode_engine, text_engine
from kvrelay.simulate.host import Host, Pass
from kvrelay.simulate.leap import leap, leaves_room, possible_steps
from kvrelay.simulate.loop import VirtualLoop
from kvrelay.simulate.relay import Network
from kvrelay.simulate.runner import CostRunner
from kvrelay.states import Role, WorkerState
from kvrelay.wire.adapters import AdapterMessage
from kvrelay.wire.registry import WorkerRecord
from kvrelay.wire.serving import (
    Abort,
    AskKept,
    Drain,
    Encode,
    Finish,
    Forget,
    Hello,
    PeerLost,
    Ping,
    ReleaseKept,
    Remember,
    StepOutputs,
    Submit,
    ToWorker,
)
from kvrelay.wire.timelines import TimelineMessage


@dataclass(slots=True, eq=False)
class Leap:
    """Steps under way that are taken together."""

    began_at: float
    step_s: float
    count: int
    is_cut: bool = False
    num_begun: int = 0  # prompts that prefill workers began meanwhile, and that have no blocks here yet

    @property
    def ends_at(self) -> float:
        return self.began_at + self.count * self.step_s

    def end_of_step(self, now: float) -> float:
        """Of the one that is under way."""
        return self.began_at + (1 + int((now - self.began_at) / self.step_s)) * self.step_s


class SimulatedWorker:
    """`host` is one that it shares with others, if it does. `on_outputs` brings what it says to the router; `on_draining`
    is called when it is told to drain, `on_drained` once it has nothing left to do."""

    def __init__(
        self,
        record: WorkerRecord,
        options: EngineOptions,
        network: Network,
        host: Host | None,
        *,
        num_blocks: int,
        takes_images: bool,
        on_outputs: OnOutputs,
        on_draining: Callable[[SimulatedWorker], None],
        on_drained: Callable[[SimulatedWorker], None],
    ) -> None:
        self.record = record
        self._loop: VirtualLoop = network.loop
        self.now = self._loop.now
        self._host = host
        self._jitter = network.costs.jitter
        self._random = random.Random(record.id)  # decides which steps take longer than others
        self._on_draining = on_draining
        self._on_drained = on_drained
        self._inbox: deque[tuple[bytes, ToWorker]] = deque()  # each with the identity of its router
        self._told: StepOutputs | None = None  # by the step under way
        self._is_busy = False
        self._number = 0  # of the turn that is awaited: earlier ones were given up
        self._leap: Leap | None = None
        self.num_leapt = 0  # steps
        self.is_alive = True
        self.state = WorkerState.READY
        self.next_role: Role | None = None  # after it has drained
        self.began_at = self.now
        self.died_at = 0.0  # 0 while it lives
        self.busy_s = 0.0
        self._work_s, self._has_prompts = 0.0, False  # of the step that is planned now
        self._pass: Pass | None = None  # of the step under way, on a host that is shared
        self._step_began_at = 0.0
        self._at_end: list[tuple[Callable[..., object], tuple[object, ...]]] = []
        self._runner: CostRunner | None = None  # of one that computes text
        self._recorder: EventRecorder | None = None
        hooks = Hooks(
            network=network,
            clock=self.clock,
            wake=self.wake,
            prefill_began=self._prefill_began,
            spend=self._spend,
            at_end=self._when_over,
        )
        self.engine: Engine | EncodeEngine
        if record.role is Role.ENCODE:
            self.engine = encode_engine(record, options, hooks)
        else:
            engine, self._runner = text_engine(record, options, hooks, num_blocks=num_blocks, takes_images=takes_images)
            self.engine = engine
            self._recorder = engine.kv.record_events() if options.kv_events else None
        self.audience = Audience(record, self.engine.load(), on_outputs)

    def clock(self) -> float:
        """The loop's, but during a step the moment at which that will have ended."""
        return self.now

    def _spend(self, seconds: float, has_prompts: bool) -> None:
        if self._jitter and not has_prompts:
            state = ALONE if self._host is None else self._host.state_with(has_prompts=False)
            seconds *= self._random.choice(most_like(self._jitter, state))
        self._work_s += seconds
        self._has_prompts |= has_prompts
        self.now += seconds if self._host is None else self._host.takes_s(seconds, has_prompts=has_prompts)

    def _when_over(self, function: Callable[..., object], *arguments: object) -> None:
        self._at_end.append((function, arguments))

    @property
    def is_idle(self) -> bool:
        return not self._is_busy and not self._inbox

    @property
    def num_transfers(self) -> int:
        """On their way, of KV or of embeddings."""
        if not isinstance(self.engine, Engine):
            return self.engine.load().transfers.in_flight
        core = self.engine.core
        return core.mover.counts().in_flight + (core.images.counts().in_flight if core.limits.takes_images else 0)

    @property
    def num_steps(self) -> int:
        return self.engine.load().steps + self.num_leapt

    def check(self) -> None:
        """Every block is held by a request that it knows, or by nothing."""
        if isinstance(self.engine, Engine):
            invariants.check(self.engine.core)

    def check_idle(self) -> None:
        """The leak check: it has nothing left to do, and holds nothing."""
        load = self.engine.load()
        assert not self.num_transfers, f"{self.record.id} has transfers left behind"
        assert load.images is None or not load.images.held, f"{self.record.id} holds images"
        if isinstance(self.engine, Engine):
            invariants.check_idle(self.engine.core)
        else:
            assert load.waiting == load.transferring == 0, f"{self.record.id} has images left behind"

    def die(self) -> None:
        """Nothing more is heard of it. What it has computed before was told."""
        if self._leap is not None:
            self._land(int((self._loop.now - self._leap.began_at) / self._leap.step_s))
        self._end_pass()
        self.is_alive, self.died_at = False, self._loop.now
        self._inbox.clear()

    def receive(self, identity: bytes, message: ToWorker) -> None:
        """From the router of that identity."""
        if not self.is_alive:
            return
        if isinstance(message, Submit) and message.transfer is not None and self._leap is not None:
            self._take(identity, message)  # nothing can be done before its prefill worker begins
        elif not self._is_late(identity, message):
            self._inbox.append((identity, message))
            self.wake()

    def _is_late(self, identity: bytes, message: ToWorker) -> bool:
        """An abort of what has ended here, as a router sends it behind every hand-over: nothing comes of it."""
        if not isinstance(message, Abort) or self._inbox:
            return False
        router = self.audience.callers.get(identity)
        return router is not None and router.open.keys().isdisjoint(message.request_ids)

    def wake(self) -> None:
        """There is something to do: at once, or when the step under way has ended."""
        if not self.is_alive:
            return
        if not self._is_busy:
            self._is_busy = True
            self._loop.at(self._loop.now, self._turn, self._number)
        elif self._leap is not None and not self._leap.is_cut:
            self._leap.is_cut = True
            self._number += 1
            num_steps = 1 + int((self._loop.now - self._leap.began_at) / self._leap.step_s)
            self._leap.count = min(self._leap.count, num_steps)
            self._loop.at(self._leap.ends_at, self._turn, self._number)

    def _prefill_began(self) -> None:
        """Blocks are to be reserved when the step under way has ended. If that is one of several, these need not end for it."""
        flight = self._leap
        if flight is None or flight.is_cut:
            self.wake()
        elif (ends_at := flight.end_of_step(self._loop.now)) < flight.ends_at:
            flight.num_begun += 1
            self._loop.at(ends_at, self._reserve, flight)

    def _reserve(self, flight: Leap) -> None:
        if self._leap is not flight or flight.is_cut:
            return
        assert isinstance(self.engine, Engine)
        self.now, core = self._loop.now, self.engine.core
        if not leaves_room(core, flight.count, flight.num_begun):
            self.wake()
            return
        flight.num_begun = 0
        arrived = core.incoming.poll()
        assert not arrived, "an arrival ends a leap"
        core.scheduler.reserve_early()
        if core.incoming.startable:
            self.wake()

    def _turn(self, number: int) -> None:
        if not self.is_alive or number != self._number:
            return  # it died, or its leap was cut short
        self.now = self._loop.now
        if self._leap is not None:
            self._land(self._leap.count)
        if self._told is not None:
            self._end_step(self._told)
        while self._inbox:
            self._take(*self._inbox.popleft())
        self._go_on()

    def _go_on(self) -> None:
        if not self.engine.has_work:
            self._is_busy = False
            self.audience.tell_load(self.engine.load)
            if self.engine.drained:
                self._on_drained(self)
        elif (flight := self._possible_leap()) is not None:
            self._leap = flight
            self._loop.at(flight.ends_at, self._turn, self._number)
        else:
            self._begin_step()

    def _begin_step(self) -> None:
        self._step_began_at, self._work_s, self._has_prompts = self.now, 0.0, False
        self._told = self.engine.step()
        if self._host is not None and self._work_s:
            self._pass = self._host.begin(self._work_s, self._ends_at, has_prompts=self._has_prompts)
        else:
            self._loop.at(self.now, self._turn, self._number)

    def _ends_at(self, when: float) -> None:
        """What was said before does not hold any more."""
        self._number += 1
        self._loop.at(when, self._turn, self._number)

    def _end_step(self, told: StepOutputs) -> None:
        self._end_pass()
        self.busy_s += self.now - self._step_began_at
        at_end, self._at_end = self._at_end, []
        for function, arguments in at_end:
            function(*arguments)
        self._told = None
        self._tell(told, 1, 0.0)

    def _end_pass(self) -> None:
        if self._host is not None and self._pass is not None:
            ended, self._pass = self._pass, None
            self._host.end(ended)

    def _possible_leap(self) -> Leap | None:
        """Not where how long a step takes depends on others, or on chance."""
        if self._host is not None or self._runner is None or self._jitter:
            return None
        assert isinstance(self.engine, Engine)
        core = self.engine.core
        running = core.scheduler.running
        if not running or core.outgoing.producer.has_news or core.incoming.consumer.has_news or core.images.has_news:
            return None
        most = possible_steps(core)
        if most < 2:
            return None
        count, step_s = self._runner.steps_s(len(running), sum([len(sequence.tokens) for sequence in running]), most)
        return Leap(self.now, step_s, count) if count > 1 else None

    def _land(self, count: int) -> None:
        """Of the leap, so many steps were taken."""
        flight, self._leap = self._leap, None
        assert flight is not None
        if count:
            self.now = flight.began_at + count * flight.step_s
            self.busy_s += count * flight.step_s
            self.num_leapt += count
            assert isinstance(self.engine, Engine)
            leap(self.engine.core, count)
            self._tell(self.engine.say(), count, flight.step_s)

    def _tell(self, outputs: StepOutputs, num_steps: int, step_s: float) -> None:
        if self._recorder:
            self.audience.tell_events(self._recorder.take())
        self.audience.tell(outputs, num_steps, step_s)

    def _take(self, identity: bytes, message: ToWorker) -> None:
        callers = self.audience.callers
        if isinstance(message, Hello):
            record = msgspec.structs.replace(self.record, load=self.engine.load(), state=self.state)
            self.audience.welcome(identity, message, record, self.now)
            return
        router = callers.get(identity)
        assert router is not None, "a router has not said Hello"
        match message:
            case Submit():
                callers.open(router, message)
                self.engine.submit(message)
            case Abort():
                request_ids = [request_id for request_id in message.request_ids if request_id in router.open]
                callers.close(router, request_ids)
                self.engine.abort(request_ids)
            case Finish():
                self.engine.finish(message)
                callers.close_sample(router, message.request_id, message.sample)
            case Encode():
                callers.open_encode(router, message.request_id)
                self.engine.encode(message)
            case PeerLost():
                self.engine.peer_lost(message.worker_id)
            case Drain():
                self.next_role, self.state = message.role, WorkerState.DRAINING
                self.engine.drain()
                self._on_draining(self)
            case ReleaseKept():
                self.engine.release_kept(message.kept_ids)
            case Ping() | Remember() | Forget() | AskKept() | TimelineMessage() | AdapterMessage():
                pass  # of no concern in a simulation
            case _:
                assert_never(message)
