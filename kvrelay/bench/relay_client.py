"""Requests to a local cluster, with the time at which the router saw each token."""

from __future__ import annotations

import os
import pathlib
import random
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from kvrelay.config import ClusterOptions, EngineOptions, ModelOptions, RouterOptions, TransferOptions
from kvrelay.errors import BenchError
from kvrelay.ids import RequestId, new_request_id
from kvrelay.launch.cluster import LocalCluster, WorkerSettings
from kvrelay.offline.outputs import Answers
from kvrelay.sampling import SamplingParams
from kvrelay.wire.serving import Abort, Failure, Submit, of_kind

_ANSWER_S = 120.0
_IDLE_S = 10.0
# Room for everything a scenario runs, so that nothing is ever preempted.
ENGINE = EngineOptions(kv_blocks=1024, max_model_len=4096)


@dataclass(slots=True, eq=False)
class Tracked:
    """One request, in seconds of `time.perf_counter`."""

    request_id: RequestId
    submitted_at: float
    tokens_at: list[float] = field(default_factory=list)
    problem: str = ""
    done: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> list[float]:
        if not self.done.wait(_ANSWER_S):
            raise BenchError(f"a request was not answered within {_ANSWER_S:g} s")
        if self.problem:
            raise BenchError(f"a request failed: {self.problem}")
        return self.tokens_at


class RelayClient:
    """Starts the workers, each on cores of its own: one list of cores per worker, in the order prefill, decode, whole."""

    def __init__(self, model: str, cluster: ClusterOptions, cores: list[list[int]], vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._random = random.Random(1)
        self._tracked: dict[RequestId, Tracked] = {}
        workers = WorkerSettings(
            model=ModelOptions(model=model, dtype="float32", threads=len(cores[0])),
            engine=ENGINE,
            transfer=TransferOptions(),
            registration_s=cluster.registration_s,
            flags=["--quiet", "--progress=none"],
        )
        self._cluster = LocalCluster(workers, RouterOptions(local_prefill_tokens=64), cluster, self._on_answers)
        by_role = sorted(self.workers(), key=lambda worker: ["prefill", "decode", "whole"].index(worker["role"]))
        for worker, own_cores in zip(by_role, cores, strict=True):
            pin(worker["pid"], own_cores)

    def __enter__(self) -> RelayClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._cluster.close()

    def submit(self, num_tokens: int, max_tokens: int) -> Tracked:
        """A prompt of random tokens that no cache has seen."""
        prompt = [self._random.randrange(self._vocab_size) for _ in range(num_tokens)]
        tracked = Tracked(new_request_id(), time.perf_counter())
        self._tracked[tracked.request_id] = tracked
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
        self._cluster.send(Submit(request_id=tracked.request_id, external_id=tracked.request_id, prompt=prompt, params=params))
        return tracked

    def abort(self, requests: Iterable[Tracked]) -> None:
        self._cluster.send(Abort(request_ids=[tracked.request_id for tracked in requests]))

    def workers(self) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = self._cluster.describe()["workers"]
        return workers

    def idle_workers(self) -> list[dict[str, Any]]:
        """Their counts, once nothing is open any more."""
        deadline = time.monotonic() + _IDLE_S
        while time.monotonic() < deadline:
            time.sleep(0.1)
            workers = self.workers()
            if not any(_is_busy(worker) for worker in workers):
                time.sleep(0.1)
                return self.workers()
        raise BenchError(f"the workers did not come to rest within {_IDLE_S:g} s")

    def _on_answers(self, answers: Answers) -> None:
        """In the cluster's thread."""
        now = time.perf_counter()
        for output in answers.outputs:
            tracked = self._tracked[output.request_id]
            tracked.tokens_at.extend([now] * len(output.tokens))
            if output.finish is not None:
                tracked.done.set()
        for failure in of_kind(Failure, answers.news):
            tracked = self._tracked[failure.request_id]
            tracked.problem = failure.message
            tracked.done.set()


def _is_busy(worker: dict[str, Any]) -> bool:
    counts = [worker[name] for name in ("running", "waiting", "transferring", "in_flight")]
    return any(counts) or worker["transfers"]["in_flight"] > 0


def pin(pid: int, cores: list[int]) -> None:
    """All threads that a process has now; later ones inherit it."""
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), cores)
