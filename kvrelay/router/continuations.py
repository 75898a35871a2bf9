"""Which requests can be continued from, and what is left of each: the router's half of continuation.

    begun     a request was submitted: each of its samples is a Parent, RUNNING
    ended     a sample has its last token (or its client left): its tokens are known
    told      its worker says whether it keeps the KV: HELD, or KNOWN
    lost      that worker is gone or drains: HELD becomes KNOWN
    adopt     another router served it, and a worker told us of the kept KV, or of what that router had remembered
    find      a client names a parent, by the id of its kept KV, by the id it gave the request, or by the answer's id

Everything is looked up within an owner (a digest of the API key): what belongs to another is as unknown as what never was.
Parents whose KV is kept are remembered for as long as it is; of the others that have ended, the `capacity` samples that ended,
or were continued from, last; and, for a time, those whose answers are stored. Why the rest is gone is remembered for a while
too, so that the client can be told.

One event loop's thread. Nothing here talks to workers: `told` returns False where kept KV should be released.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Iterable, Sequence

from kvrelay.errors import ConflictError, InvalidRequestError, NotFoundError
from kvrelay.ids import KeptId, RequestId, WorkerId
from kvrelay.metrics import Metrics
from kvrelay.router.names import Names
from kvrelay.router.parent import Parent
from kvrelay.router.shelf import Shelf
from kvrelay.states import HandleState
from kvrelay.wire.serving import KeptInfo, KeptNews

NEWS_WAIT_S = 30.0  # how long after a sample's end its worker may say whether its KV is kept


class Continuations:
    """All parents of one router."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        capacity: int = 1024,
        max_kept_per_owner: int = 64,
        max_stored: int = 1024,
        stored_s: float = 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._max_kept = max_kept_per_owner
        self._clock = clock
        self._names = Names()
        self._kept: dict[KeptId, Parent] = {}
        self._held: dict[str, set[Parent]] = {}  # by owner: parents whose KV is kept, or was asked to be
        self._ended = Shelf(capacity)  # KNOWN
        self._stored = Shelf(max_stored)  # as these, of those whose answers are stored
        self._stored_s = stored_s
        self.on_known: Callable[[Parent], None] = lambda parent: None  # all of it is known, or more than before
        metrics.kept_kv.set_function(lambda: sum(parent.state is HandleState.HELD for parent in self._all_held()))

    def __len__(self) -> int:
        return len(self._ended)

    # What becomes of requests

    def begun(self, parents: list[Parent]) -> list[Parent]:
        """All samples of a request. Those to be kept are `asked`, unless their owner has all the kept KV that it may have."""
        self._names.give(parents)
        if parents[0].kept_id is not None:
            self._ask(parents)
        return parents

    def sent(self, parent: Parent, worker_id: WorkerId, fingerprint: str = "", request_id: RequestId | None = None) -> None:
        """To the worker that generates it; again, if another one was lost."""
        parent.worker_id, parent.fingerprint, parent.request_id, parent.news = worker_id, fingerprint, request_id, None

    def given_up(self, parent: Parent) -> None:
        """It goes to another worker: what the one before has to say of it does not count any more."""
        parent.worker_id, parent.request_id, parent.news = None, None, None

    def ended(self, parent: Parent, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Its output is exactly what its client saw."""
        if parent.state is not HandleState.RUNNING:
            return
        tokens = array("I", prompt)
        tokens.extend(output)
        parent.tokens, parent.ended = tokens, True
        parent.unheard_until = self._clock() + NEWS_WAIT_S
        self._conclude(parent)
        if not parent.is_stored:
            self.on_known(parent)

    def cut(self, parent: Parent, num_output_tokens: int) -> None:
        """Its client saw less of it than was thought."""
        parent.tokens = parent.tokens[: parent.num_prompt_tokens + num_output_tokens]
        self.on_known(parent)

    def store(self, parent: Parent, record: bytes) -> None:
        """The answer of one that is to be stored is complete."""
        parent.record, parent.forget_at = record, self._clock() + self._stored_s
        if parent.state is HandleState.KNOWN:
            self._shelve(parent)
        self.on_known(parent)

    def failed(self, parent: Parent, reason: str) -> None:
        if parent.state is HandleState.RUNNING:
            self._go(parent, f"it failed: {reason}")

    def refused(self, parent: Parent, reason: str, label: str) -> None:
        """Its KV will not be kept."""
        if parent.state is HandleState.RUNNING:
            parent.asked, parent.reason, parent.news = False, reason, None
            self._metrics.kept_kv_refusals.labels(label).inc()
            self._not_held(parent)
            self._conclude(parent)

    # What workers say

    def told(self, worker_id: WorkerId, news: KeptNews) -> bool:
        """False: no request can inherit this KV (any more); the worker should release it."""
        parent = self._kept.get(news.kept_id)
        if parent is None or not parent.asked or not parent.is_generated_by(worker_id, news.request_id):
            known = parent is not None and parent.state is HandleState.HELD and parent.worker_id == worker_id
            return known or not news.kept
        if not news.kept:
            self.refused(parent, news.reason or "the worker did not keep it", "worker")
            return True
        parent.news, parent.num_blocks = news, news.num_blocks
        parent.expires_at = self._clock() + news.ttl_s
        parent.wake()
        self._conclude(parent)
        return parent.asked

    def lost(self, worker_id: WorkerId, reason: str) -> None:
        """The KV that it kept is gone, or cannot be inherited any more. What it still generates goes to another worker."""
        self.unheard(worker_id, reason)
        for parent in self._all_held():
            if parent.worker_id == worker_id and parent.state is HandleState.HELD:
                self._release(parent, reason)

    def unheard(self, worker_id: WorkerId, reason: str) -> None:
        """It still keeps what it said it keeps, but what it had to say of other samples was lost on the way."""
        for parent in self._all_held():
            if parent.worker_id == worker_id and parent.state is HandleState.RUNNING and parent.ended:
                self.refused(parent, reason, "worker_lost")

    def adopt(self, worker_id: WorkerId, fingerprint: str, kept: Iterable[KeptInfo]) -> None:
        """Another router served these."""
        for info in kept:
            if info.kept_id in self._kept:
                continue
            choice = len(self._names.get(info.owner, info.external_id))
            parent = Parent.of_kept(info, choice=choice, worker_id=worker_id, fingerprint=fingerprint)
            parent.expires_at = self._clock() + info.ttl_s
            self._names.join(parent)
            self._kept[info.kept_id] = parent
            self._held.setdefault(parent.owner, set()).add(parent)
            parent.become(HandleState.HELD)

    def adopt_known(self, known: Parent, forget_in_s: float) -> None:
        """Another router served it, and had it remembered. Its KV, if it is kept, was adopted before."""
        forget_at = self._clock() + forget_in_s if known.record else math.inf
        kept = None if known.kept_id is None else self._kept.get(known.kept_id)
        if kept is not None:
            kept.answer_id, kept.data_parallel_rank = known.answer_id, known.data_parallel_rank
            kept.is_stored, kept.record, kept.forget_at, kept.is_whole = known.is_stored, known.record, forget_at, True
            self._names.join(kept)
        elif all(known.choice != other.choice for other in self._names.get(known.owner, known.answer_id or known.external_id)):
            known.forget_at = forget_at
            self._names.join(known)
            if known.kept_id is not None:
                self._kept[known.kept_id] = known
            self._remember(known)

    # What clients ask

    def find(self, handle: str, owner: str) -> Parent:
        """The one parent of that name. Raises NotFoundError, or InvalidRequestError if it has several choices."""
        parents = self.find_all(handle, owner)
        if len(parents) > 1:
            raise InvalidRequestError(
                f"{_shown(handle)} has {len(parents)} choices: name the continuation id of one of them",
                param="continuation_of",
            )
        self._shelf(parents[0]).use(parents[0])
        return parents[0]

    def find_all(self, handle: str, owner: str) -> list[Parent]:
        """All choices of that name, at least one. Raises NotFoundError."""
        kept = self._kept.get(KeptId(handle))
        parents = [kept] if kept is not None and kept.owner == owner else self._names.get(owner, handle)
        left = self._looked_at(parents)
        if not left:
            raise _not_found(handle, self._names.why(owner, handle))
        return left

    def is_unheard_of(self, handle: str, owner: str) -> bool:
        """Neither here as a whole, nor known to be gone: another router may know it. Its worker may tell of the KV that it
        keeps before it is told what to remember of it."""
        kept = self._kept.get(KeptId(handle))
        known = any(parent.is_whole for parent in self._names.get(owner, handle))
        known = known or (kept is not None and kept.owner == owner and kept.is_whole)
        return not known and not self._names.why(owner, handle)

    def has_ended(self, handle: str, owner: str) -> bool:
        """Whether `find` gives one that need not be waited for, nor looked for elsewhere."""
        if self.is_unheard_of(handle, owner):
            return False
        return all(parent.state is not HandleState.RUNNING for parent in self.find_all(handle, owner))

    async def until_ended(self, parent: Parent, handle: str, wait_s: float) -> None:
        """A child waits for its parent. Raises NotFoundError if that failed, ConflictError if it takes longer than `wait_s`."""
        until = self._clock() + wait_s
        while parent.state is HandleState.RUNNING:
            now = self._clock()
            if now >= until:
                raise ConflictError(
                    f"{_shown(handle)} is still being generated, after {wait_s:g} s of waiting for its end",
                    param="continuation_of",
                    code="continuation_running",
                )
            last = min(until, parent.unheard_until) if parent.ended else until
            await parent.change(max(0.0, last - now))
            self._look(parent)
        if parent.state is HandleState.GONE:
            raise _not_found(handle, parent.reason)

    async def until_settled(self, parents: Iterable[Parent], timeout_s: float) -> None:
        """Returns when it is known of each whether its KV is kept, or after that time."""
        until = self._clock() + timeout_s
        for parent in parents:
            if parent.asked and parent.news is None and parent.state is HandleState.RUNNING:
                await parent.change(max(0.0, until - self._clock()))

    def of_owner(self, owner: str) -> list[Parent]:
        """Those that were to be kept, and are not gone."""
        return self._looked_at([parent for parent in self._kept.values() if parent.owner == owner])

    def delete(self, handle: str, owner: str) -> list[Parent]:
        """It cannot be continued from any more. Returns those whose KV a worker may keep. Raises NotFoundError."""
        parents = self.find_all(handle, owner)
        held = [parent for parent in parents if parent.asked]
        for parent in parents:
            self._go(parent, "it was deleted")
        return held

    def remaining_s(self, parent: Parent) -> float:
        return max(0.0, parent.expires_at - self._clock())

    # States

    def _conclude(self, parent: Parent) -> None:
        """It has ended, and its worker has said what there is to say."""
        if not parent.ended or parent.state is not HandleState.RUNNING:
            return
        if parent.news is not None and parent.news.num_tokens < len(parent.tokens):
            self.refused(parent, "its worker had fewer tokens than the client", "worker")
        elif parent.news is not None:
            parent.become(HandleState.HELD)
        elif not parent.asked:
            self._remember(parent)

    def _looked_at(self, parents: Iterable[Parent]) -> list[Parent]:
        """Those that are not gone, after the time that has passed."""
        found = list(parents)
        for parent in found:
            self._look(parent)
        return [parent for parent in found if parent.state is not HandleState.GONE]

    def _look(self, parent: Parent) -> None:
        """Time passes without any word."""
        now = self._clock()
        if parent.state is HandleState.HELD and parent.expires_at <= now:
            self._release(parent, "its KV is not kept any longer: the time asked for is over")
        elif parent.state is HandleState.RUNNING and parent.ended and parent.asked and parent.unheard_until <= now:
            self.refused(parent, "its worker did not say whether it keeps it", "no_answer")
        elif parent.state is HandleState.KNOWN and parent.forget_at <= now:
            self._go(parent, "it was stored for a time that is over")

    def _release(self, parent: Parent, reason: str) -> None:
        parent.reason, parent.num_blocks, parent.asked = reason, 0, False
        self._not_held(parent)
        self._remember(parent)

    def _remember(self, parent: Parent) -> None:
        parent.become(HandleState.KNOWN)
        self._shelve(parent)

    def _shelve(self, parent: Parent) -> None:
        for oldest in self._shelf(parent).add(parent):
            self._go(oldest, "it was forgotten: others have ended since")

    def _shelf(self, parent: Parent) -> Shelf:
        return self._stored if parent.is_stored else self._ended

    def _go(self, parent: Parent, reason: str) -> None:
        if parent.state is HandleState.GONE:
            return
        self._shelf(parent).remove(parent)
        parent.reason, parent.tokens, parent.images, parent.record, parent.asked = reason, (), (), b"", False
        self._not_held(parent)
        if parent.kept_id is not None and self._kept.get(parent.kept_id) is parent:
            del self._kept[parent.kept_id]
            self._names.explain(parent.owner, parent.kept_id, reason)
        self._names.take(parent, reason)
        parent.become(HandleState.GONE)

    # Quota

    def _ask(self, parents: list[Parent]) -> None:
        owner = parents[0].owner
        held = self._held.setdefault(owner, set())
        for parent in list(held):
            self._look(parent)
        within = len(held) + len(parents) <= self._max_kept
        for parent in parents:
            assert parent.kept_id is not None
            self._kept[parent.kept_id] = parent
            if within:
                parent.asked = True
                self._held.setdefault(owner, set()).add(parent)
            else:
                self.refused(parent, f"over the quota of {self._max_kept} samples kept at once", "quota")

    def _not_held(self, parent: Parent) -> None:
        held = self._held.get(parent.owner, set())
        held.discard(parent)
        if not held:
            self._held.pop(parent.owner, None)

    def _all_held(self) -> list[Parent]:
        return self._looked_at([parent for held in self._held.values() for parent in held])


def _shown(handle: str) -> str:
    return repr(handle[:200])


def _not_found(handle: str, reason: str) -> NotFoundError:
    why = reason or "nothing is known of it: it never was, or was forgotten"
    return NotFoundError(
        f"{_shown(handle)} cannot be continued from: {why}",
        param="continuation_of",
        code="continuation_not_found",
    )
