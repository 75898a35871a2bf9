"""What a worker needs of its engine, whatever its role."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from kvrelay.ids import KeptId, RequestId, WorkerId
from kvrelay.wire.registry import WorkerLoad
from kvrelay.wire.serving import Encode, Finish, KeptInfo, StepOutputs, Submit


class ServingEngine(Protocol):
    """The part of an engine that a worker drives. One thread calls it."""

    @property
    def has_work(self) -> bool: ...

    @property
    def drained(self) -> bool: ...

    def submit(self, submit: Submit) -> None: ...

    def encode(self, encode: Encode) -> None:
        """Never raises, as `submit`: a worker that makes no embeddings answers by a Failure."""

    def abort(self, request_ids: Iterable[RequestId]) -> None: ...

    def finish(self, finish: Finish) -> None: ...

    def step(self) -> StepOutputs: ...

    def load(self) -> WorkerLoad: ...

    def drain(self) -> None: ...

    def peer_lost(self, worker_id: WorkerId) -> None:
        """Another worker is gone, says a router, which may be wrong: transfers with it fail at once."""

    def release_kept(self, kept_ids: Iterable[KeptId]) -> None:
        """No client will continue from these any more. Unknown ones are no error: they may have ended."""

    def find_kept(self, handle: str, owner: str) -> list[KeptInfo]:
        """By its id, or by the id under which a client knows the parent."""

    def close(self) -> None: ...
