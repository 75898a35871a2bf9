"""A request that others may continue from, one sample of it: what a router knows of it while it runs and after it ended.

RUNNING --> HELD    it ended, and a worker keeps its KV for a time
        --> KNOWN   it ended; its tokens are here, and nothing else is promised
        --> GONE    it failed, or was deleted
HELD    --> KNOWN   that time is over, or its worker is gone
KNOWN   --> GONE    deleted, or forgotten since others ended later
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrelay.ids import KeptId, RequestId, WorkerId
from kvrelay.states import HANDLE_EDGES, HandleState, advance
from kvrelay.wire.serving import Image, KeptInfo, KeptNews, ParentInfo


@dataclass(slots=True, eq=False, kw_only=True)
class Parent:
    """Changed by the router's `Continuations` alone. `tokens` are prompt and output, there once it has ended."""

    external_id: str  # what its client called it
    answer_id: str  # what our answer is called; empty where there is none
    choice: int  # among all choices of that answer
    owner: str
    cache_salt: str
    num_prompt_tokens: int
    images: Sequence[Image] = ()
    adapter: str = ""
    data_parallel_rank: int | None = None  # that it asked for
    kept_id: KeptId | None = None  # None: its KV was not to be kept
    state: HandleState = HandleState.RUNNING
    tokens: Sequence[int] = ()
    worker_id: WorkerId | None = None  # that generates it, or keeps its KV
    request_id: RequestId | None = None  # of its request there
    fingerprint: str = ""  # of that worker's model
    num_blocks: int = 0
    expires_at: float = 0.0  # of its kept KV, by the clock of `Continuations`
    reason: str = ""  # why it is not HELD
    asked: bool = False  # its worker was told to keep it
    ended: bool = False
    unheard_until: float = 0.0  # after its end: until then the worker may say whether it keeps it
    news: KeptNews | None = None
    is_stored: bool = False  # its client wants to have its answer again: `record`, once it is complete
    record: bytes = b""
    forget_at: float = float("inf")  # of a stored one
    is_whole: bool = True  # else another router served it, and what that one had remembered has not been heard
    _waiters: list[asyncio.Future[None]] = field(default_factory=list)

    @classmethod
    def of_kept(cls, info: KeptInfo, *, choice: int, worker_id: WorkerId, fingerprint: str) -> Parent:
        """Another router served it; its worker tells of the KV that it keeps."""
        return cls(
            external_id=info.external_id,
            answer_id="",
            choice=choice,
            owner=info.owner,
            cache_salt=info.cache_salt,
            num_prompt_tokens=info.num_prompt_tokens,
            images=info.images,
            adapter=info.adapter,
            kept_id=info.kept_id,
            tokens=array("I", info.tokens),
            worker_id=worker_id,
            fingerprint=fingerprint,
            num_blocks=info.num_blocks,
            asked=True,
            ended=True,
            is_whole=False,
        )

    @classmethod
    def of_known(cls, info: ParentInfo) -> Parent:
        """Another router served it, and had it remembered. Raises ValueError if its tokens are not whole."""
        tokens = array("I")
        tokens.frombytes(info.tokens)
        return cls(
            external_id=info.external_id,
            answer_id=info.answer_id,
            choice=info.choice,
            owner=info.owner,
            adapter=info.adapter,
            cache_salt=info.cache_salt,
            num_prompt_tokens=info.num_prompt_tokens,
            images=info.images,
            data_parallel_rank=info.data_parallel_rank,
            kept_id=info.kept_id,
            tokens=tokens,
            ended=True,
            is_stored=bool(info.record),
            record=info.record,
        )

    def info(self, forget_at: float) -> ParentInfo:
        """For other routers. It has ended."""
        return ParentInfo(
            external_id=self.external_id,
            answer_id=self.answer_id,
            choice=self.choice,
            owner=self.owner,
            cache_salt=self.cache_salt,
            adapter=self.adapter,
            num_prompt_tokens=self.num_prompt_tokens,
            tokens=array("I", self.tokens).tobytes(),
            kept_id=self.kept_id,
            images=list(self.images),
            data_parallel_rank=self.data_parallel_rank,
            record=self.record,
            forget_at=forget_at,
        )

    @property
    def name(self) -> str:
        """What an error calls it."""
        return self.kept_id or self.external_id

    @property
    def kept(self) -> bool:
        """Whether its worker has promised to keep its KV, and has not been lost, nor the time been over, since."""
        return (self.news is not None and self.state is HandleState.RUNNING) or self.state is HandleState.HELD

    def is_generated_by(self, worker_id: WorkerId, request_id: RequestId) -> bool:
        """Or was until now. Not if that was an attempt that failed."""
        return self.state is HandleState.RUNNING and (self.worker_id, self.request_id) == (worker_id, request_id)

    def become(self, state: HandleState) -> None:
        self.state = advance(HANDLE_EDGES, self.state, state)
        self.wake()

    def wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def change(self, timeout_s: float) -> None:
        """Returns when there is news of it, or after that time."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(timeout_s):  # Python 3.11's `wait_for` loses a cancellation that comes with the news
                await waiter
        except TimeoutError:
            pass
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
