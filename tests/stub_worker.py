"""A worker in a thread: the real serving loop, heartbeat and registration around an engine that computes nothing."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable

import msgspec
from patience import PATIENCE_S

from kvrelay.discovery.choose import open_registration
from kvrelay.ids import KeptId, RequestId, WorkerId, new_worker_id
from kvrelay.states import FinishReason, Role, WorkerState
from kvrelay.wire import PROTOCOL_VERSION
from kvrelay.wire.registry import BlockCounts, WorkerLoad, WorkerRecord
from kvrelay.wire.serving import (
    Encode,
    Failure,
    Finish,
    Inherited,
    KeptInfo,
    KeptNews,
    News,
    SequenceOutput,
    StepOutputs,
    Submit,
    of_kind,
)
from kvrelay.worker.heartbeat import Heartbeat
from kvrelay.worker.serving import EngineFailedError, ServingLoop
from kvrelay.worker.vigil import Vigil

NUM_BLOCKS = 64


def stub_token(prompt: list[int], sample: int, position: int) -> int:
    """What the stub answers: a function of the prompt, so that cross-talk shows."""
    return (sum(prompt) + 7 * sample + position) % 1000


class StubEngine:
    """One token per request, sample and step, while `gate` is open. One block per sample. Keeps what it is asked to keep, while
    `keeps`, until it is told to release it."""

    def __init__(self, worker_id: WorkerId) -> None:
        self.worker_id = worker_id
        self.gate = threading.Event()
        self.gate.set()
        self.step_error: Exception | None = None
        self.stuck_s = 0.0
        self.aborted: list[RequestId] = []
        self.finished: list[Finish] = []
        self.submitted: list[Submit] = []
        self.closed = False
        self._open: dict[RequestId, tuple[Submit, dict[int, int]]] = {}
        self._steps = 0
        self._draining = False
        self.lost_peers: list[WorkerId] = []
        self.keeps = True
        self.leases: dict[KeptId, KeptInfo] = {}
        self._news: list[News] = []

    @property
    def has_work(self) -> bool:
        return bool(self._news) or (bool(self._open) and self.gate.is_set())

    @property
    def drained(self) -> bool:
        return self._draining and not self._open and not of_kind(Failure, self._news)

    def submit(self, submit: Submit) -> None:
        if self._draining:
            self._news.append(Failure(submit.request_id, "service_unavailable_error", "draining"))
            return
        self.submitted.append(submit)
        samples = dict.fromkeys(range(submit.params.n), 0)
        if submit.resume:
            samples = {sample.sample: len(sample.tokens) for sample in submit.resume}
            for sample in submit.resume:
                so_far = [stub_token(submit.prompt, sample.sample, position) for position in range(len(sample.tokens))]
                assert sample.tokens == so_far, "resumed with tokens that nobody made"
        self._open[submit.request_id] = (submit, samples)
        if submit.inherit is not None:
            lease = self.leases.get(submit.inherit)
            assert lease is None or submit.prompt[: len(lease.tokens)] == lease.tokens
            self._news.append(Inherited(submit.request_id, 0 if lease is None else len(lease.tokens) - 1))

    def _keep(self, submit: Submit, sample: int, count: int) -> None:
        if submit.keep is None:
            return
        kept_id, owner = submit.keep.kept_ids[sample], submit.keep.owner
        tokens = [*submit.prompt, *(stub_token(submit.prompt, sample, position) for position in range(count))]
        if self.keeps:
            self.leases[kept_id] = KeptInfo(
                kept_id=kept_id,
                external_id=submit.external_id,
                owner=owner,
                cache_salt=submit.cache_salt,
                tokens=tokens,
                num_prompt_tokens=len(submit.prompt),
                num_blocks=1,
                on_host=False,
                ttl_s=submit.keep.ttl_s,
            )
        reason = "" if self.keeps else "no room"
        self._news.append(KeptNews(submit.request_id, sample, kept_id, self.keeps, submit.keep.ttl_s, len(tokens), 1, reason))

    def _cut(self, finish: Finish) -> None:
        """It had ended, further on than its client saw."""
        submit = next(one for one in self.submitted if one.request_id == finish.request_id)
        assert submit.keep is not None, "nobody needs to know"
        kept_id = submit.keep.kept_ids[finish.sample]
        if kept_id in self.leases:
            lease = self.leases[kept_id]
            tokens = lease.tokens[: lease.num_prompt_tokens + finish.keep_tokens]
            self.leases[kept_id] = msgspec.structs.replace(lease, tokens=tokens)

    def release_kept(self, kept_ids: Iterable[KeptId]) -> None:
        for kept_id in kept_ids:
            self.leases.pop(kept_id, None)

    def find_kept(self, handle: str, owner: str) -> list[KeptInfo]:
        return [one for one in self.leases.values() if handle in (one.kept_id, one.external_id) and one.owner == owner]

    def abort(self, request_ids: Iterable[RequestId]) -> None:
        for request_id in request_ids:
            self.aborted.append(request_id)
            submit, samples = self._open.pop(request_id, (None, {}))
            for sample, count in samples.items():
                if submit is not None:
                    self._keep(submit, sample, count)

    def fail_all(self, kind: str, *, by_producer: bool = False) -> None:
        """Every request fails, and none of them is kept."""
        for request_id, (submit, samples) in self._open.items():
            self._news.append(Failure(request_id, kind, "the stub was told to", by_producer=by_producer))
            for sample in samples if submit.keep is not None else ():
                self._news.append(KeptNews(request_id, sample, submit.keep.kept_ids[sample], False, reason="it failed"))
        self._open.clear()

    def finish(self, finish: Finish) -> None:
        self.finished.append(finish)
        if finish.request_id not in self._open:
            self._cut(finish)
            return
        submit, samples = self._open[finish.request_id]
        if samples.pop(finish.sample, None) is not None:
            self._keep(submit, finish.sample, finish.keep_tokens)
        if not samples:
            del self._open[finish.request_id]

    def encode(self, message: Encode) -> None:
        """As of one that is slow: nothing comes of it."""

    def step(self) -> StepOutputs:
        if self.stuck_s:
            time.sleep(self.stuck_s)
        if self.step_error is not None:
            raise self.step_error
        self._steps += 1
        outputs = []
        if self.gate.is_set():
            outputs = [output for submit, samples in list(self._open.values()) for output in self._advance(submit, samples)]
        news, self._news = self._news, []
        return StepOutputs(worker_id=self.worker_id, step=self._steps, load=self.load(), outputs=outputs, news=news)

    def _advance(self, submit: Submit, samples: dict[int, int]) -> list[SequenceOutput]:
        outputs = []
        for sample, position in list(samples.items()):
            ended = position + 1 >= submit.params.max_tokens
            token = stub_token(submit.prompt, sample, position)
            reason = FinishReason.LENGTH if ended else None
            outputs.append(SequenceOutput(submit.request_id, sample, position, [token], reason))
            samples[sample] = position + 1
            if ended:
                del samples[sample]
                self._keep(submit, sample, position + 1)
        if not samples:
            del self._open[submit.request_id]
        return outputs

    def load(self) -> WorkerLoad:
        in_use = sum(len(samples) for _, samples in self._open.values())
        blocks = BlockCounts(total=NUM_BLOCKS, free=NUM_BLOCKS - in_use, in_use=in_use)
        return WorkerLoad(running=in_use, blocks=blocks, steps=self._steps, kept=len(self.leases))

    def drain(self) -> None:
        self._draining = True

    def peer_lost(self, worker_id: WorkerId) -> None:
        self.lost_peers.append(worker_id)

    def close(self) -> None:
        self.closed = True


class StubWorker:
    """Registers at `registry` (or nowhere, if that is empty) and serves until stopped."""

    def __init__(
        self,
        registry: str,
        *,
        registration_s: float = 4.0,
        watchdog_s: float = 120.0,
        max_batch: int = 4,
        max_queue: int = 4,
        fingerprint: str = "stub",
        step_s: float = 0.0,
        role: Role = Role.WHOLE,
        data_parallel_rank: int = 0,
    ) -> None:
        self.id = new_worker_id(role.value)
        self.engine = StubEngine(self.id)
        self.engine.stuck_s = step_s
        self.loop = ServingLoop(self.engine, host="127.0.0.1", port=0)
        self.record = self.loop.record = WorkerRecord(
            id=self.id,
            role=role,
            state=WorkerState.READY,
            host="here",
            pid=os.getpid(),
            serving_address=self.loop.address,
            model="stub",
            fingerprint=fingerprint,
            max_model_len=128,
            max_batch=max_batch,
            max_queue=max_queue,
            version=PROTOCOL_VERSION,
            load=self.engine.load(),
            data_parallel_rank=data_parallel_rank,
        )
        self.vigil = Vigil(registration_s)
        self.heartbeat = Heartbeat(
            open_registration(registry or "static"),
            self.record,
            self.loop.status,
            registration_s=registration_s,
            watchdog_s=watchdog_s,
            vigil=self.vigil,
            on_refused=lambda error: None,
        )
        self.failed = False
        self._crashed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.vigil.start()
        self.heartbeat.start()

    @property
    def address(self) -> str:
        return self.loop.address

    def stop(self) -> None:
        """Ends in order: leaves the registry, tells open requests."""
        self.loop.stop_asked = True
        self.loop.wake()
        self._thread.join(PATIENCE_S)

    def drain(self) -> None:
        self.loop.drain_asked = True
        self.loop.wake()

    def join(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def crash(self) -> None:
        """Ends as a killed process does: the connection closes, and nothing is said."""
        self._crashed = True
        self.stop()

    def _run(self) -> None:
        try:
            self.loop.run(on_draining=self.heartbeat.soon)
        except EngineFailedError:
            self.failed = True
        if self._crashed:
            self.loop._socket.close(linger=0)
            self.heartbeat.registration.leave = lambda: None  # a killed process does not say that it leaves
        self.heartbeat.stop()
        self.vigil.stop()
        if not self._crashed:
            self.loop.close()
            self.engine.close()
