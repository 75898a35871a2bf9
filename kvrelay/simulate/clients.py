"""The clients of a simulation: each asks one of the routers when its session says, and notes when which token came."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from kvrelay.errors import QueueFullError, RequestError
from kvrelay.ids import RequestId
from kvrelay.router.backend import GenerateRequest
from kvrelay.router.peer import Peer
from kvrelay.router.router import Router
from kvrelay.router.stream import RequestStream
from kvrelay.sampling import SamplingParams
from kvrelay.simulate.loop import VirtualLoop
from kvrelay.simulate.traffic import Prompt, Session
from kvrelay.wire.serving import StepOutputs

Outcome = Literal["finished", "failed", "refused"]

_NO_PROMPT = Prompt()
_LOOK_EVERY_S = 1.0  # a request that fails says so through no worker's outputs


@dataclass(slots=True, eq=False)
class Answer:
    """To one question."""

    session: Session
    turn: int
    prompt: Prompt  # until it has ended
    asked_at: float
    first_at: float = 0.0
    last_at: float = 0.0
    num_tokens: int = 0
    longest_s: float = 0.0  # between two tokens
    outcome: Outcome | None = None

    @property
    def ttft_s(self) -> float:
        return self.first_at - self.asked_at

    @property
    def mean_itl_s(self) -> float:
        return (self.last_at - self.first_at) / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0


class Clients:
    """All of them. `router_s` is what a request takes from its client to the workers."""

    def __init__(self, loop: VirtualLoop, router_s: float) -> None:
        self._loop = loop
        self._router_s = router_s
        self.routers: Sequence[Router] = ()
        self._random = random.Random(0)  # a load balancer that knows nothing of sessions
        self._open: dict[RequestId, tuple[RequestStream, Answer]] = {}
        self.heard_at = 0.0  # a question or a token, last
        self.answers: list[Answer] = []
        self.gaps_us: Counter[int] = Counter()  # microseconds between two tokens of an answer
        self.num_messages = 0  # with outputs, to all routers
        self.submit_us: Counter[int] = Counter()  # of processor time that the router took for a request
        self._params: dict[int, SamplingParams] = {}
        self._num_to_come = 1  # turns that will be asked, and the word to begin

    def begin(self, sessions: Iterator[Session]) -> None:
        self._num_to_come -= 1
        self._await_next(sessions)
        self._loop.at(_LOOK_EVERY_S, self._look)

    def are_done(self) -> bool:
        return not self._num_to_come and not self._open

    @property
    def num_open(self) -> int:
        return len(self._open)

    def _await_next(self, sessions: Iterator[Session]) -> None:
        session = next(sessions, None)
        if session is not None:
            self._num_to_come += 1
            self._loop.at(session.at_s, self._come, session, sessions)

    def _come(self, session: Session, sessions: Iterator[Session]) -> None:
        self._await_next(sessions)
        self._ask(session, 0, session.first_prompt())

    def _ask(self, session: Session, turn: int, prompt: Prompt) -> None:
        answer = Answer(session, turn, prompt, self._loop.now)
        self.answers.append(answer)
        self._loop.at(self._loop.now + self._router_s, self._submit, answer)

    def _submit(self, answer: Answer) -> None:
        self._num_to_come -= 1
        max_tokens = answer.session.turns[answer.turn].output_tokens
        params = self._params.get(max_tokens)
        if params is None:
            params = self._params[max_tokens] = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
        name = f"{answer.session.number}-{answer.turn}"
        router = self._random.choice(self.routers)
        began_ns = time.thread_time_ns()
        try:
            stream = router.submit(
                GenerateRequest(external_id=name, prompt=answer.prompt.tokens, params=params, images=answer.prompt.images)
            )
            self.submit_us[(time.thread_time_ns() - began_ns) // 1000] += 1
        except RequestError as error:
            self._end(answer, "refused" if isinstance(error, QueueFullError) else "failed")
            return
        self._open[stream.request_id] = stream, answer
        self.heard_at = self._loop.now

    def hear(self, peer: Peer, message: StepOutputs, num_steps: int, step_s: float) -> None:
        """Hands the outputs of a worker to the router, and notes what came of them."""
        self.num_messages += num_steps
        legs = peer.open
        streams = [leg.stream for output in message.outputs if (leg := legs.get(output.request_id)) is not None]
        peer.heard(message)
        for stream in streams:
            if stream.request_id not in self._open:
                continue  # it had two outputs in this message, and ended
            _, answer = self._open[stream.request_id]
            num_new = len(stream.tokens(0)) - answer.num_tokens
            if num_new > 0:
                self._note(answer, num_new, step_s)
            if stream.done:
                self._ended(stream, answer)
        if num_steps > 1:
            self.gaps_us[int(step_s * 1e6)] += (num_steps - 1) * len(streams)

    def _note(self, answer: Answer, num_new: int, step_s: float) -> None:
        """Of several tokens, those after the first came a step apart, and are counted together with others'."""
        first_at = self._loop.now - (num_new - 1) * step_s
        if answer.num_tokens:
            gap_s = first_at - answer.last_at
            self.gaps_us[int(gap_s * 1e6)] += 1
            answer.longest_s = max(answer.longest_s, gap_s)
        else:
            answer.first_at = first_at
        answer.last_at = self.heard_at = self._loop.now
        answer.num_tokens += num_new

    def _look(self) -> None:
        for stream, answer in list(self._open.values()):
            if stream.done:
                self._ended(stream, answer)
        self._loop.at(self._loop.now + _LOOK_EVERY_S, self._look)

    def _ended(self, stream: RequestStream, answer: Answer) -> None:
        del self._open[stream.request_id]
        self._end(answer, "failed" if stream.failed else "finished")

    def _end(self, answer: Answer, outcome: Outcome) -> None:
        assert not answer.outcome, "a request ended twice"
        answer.outcome = outcome
        session, turn, prompt = answer.session, answer.turn + 1, answer.prompt
        answer.prompt = _NO_PROMPT
        if outcome == "finished" and turn < len(session.turns):
            self._num_to_come += 1
            self._loop.at(
                self._loop.now + session.turns[turn].pause_s, self._ask, session, turn, session.next_prompt(prompt, turn)
            )
