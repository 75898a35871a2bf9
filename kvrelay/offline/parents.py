"""What the offline API can continue from: requests whose KV was to be kept, each sample under the id of its lease.

    begun     submitted: a child has to wait (of an AsyncLLM; an LLM has one call at a time)
    ended     its tokens are known
    told      whoever served it keeps its KV, or does not
    find      a child names it, by the lease's id or the request's, or by what was given back for it

What is kept is remembered for as long as it is; of the others, the `capacity` that were used last. The tokens are all that a
child needs: if the KV is gone, it is found in the prefix cache or computed again.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvrelay.errors import ConflictError, InvalidRequestError, NotFoundError
from kvrelay.ids import KeptId
from kvrelay.offline.outputs import CompletionOutput, Origin, RequestOutput
from kvrelay.wire.serving import KeptNews

ParentName = str | CompletionOutput | RequestOutput

_MAX_REASONS = 4096  # names that lead nowhere any more, of which it is known why


@dataclass(slots=True, eq=False)
class OfflineParent:
    """One sample that may be continued from."""

    name: str  # of its request
    kept_id: KeptId
    tokens: list[int] | None = None  # prompt and output; None while it runs
    refused: bool = False  # its KV is not kept
    kept_until: float = 0.0
    waiting: list[Callable[[], None]] = field(default_factory=list)  # called at its end

    @property
    def origin(self) -> Origin:
        if self.tokens is None:
            raise ConflictError(f"{self.name!r} is still being generated", param="parent")
        return Origin(of=self.kept_id, tokens=self.tokens, kept_id=None if self.refused else self.kept_id)


class OfflineParents:
    """Of one LLM."""

    def __init__(self, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._capacity = capacity
        self._clock = clock
        self._parents: OrderedDict[KeptId, OfflineParent] = OrderedDict()  # the one unused for longest comes first
        self._names: dict[str, list[OfflineParent]] = {}
        self._reasons: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._parents)

    def begun(self, name: str, kept_ids: Sequence[KeptId]) -> None:
        """A request that takes a name takes it from an earlier one."""
        parents = [OfflineParent(name, kept_id) for kept_id in kept_ids]
        self._names[name] = parents
        self._parents.update({parent.kept_id: parent for parent in parents})

    def ended(self, kept_id: KeptId, tokens: list[int]) -> None:
        parent = self._parents.get(kept_id)
        if parent is not None and parent.tokens is None:
            parent.tokens = tokens
            self._wake(parent)
            self._trim()

    def told(self, news: KeptNews) -> bool:
        """False: nobody can name it any more."""
        parent = self._parents.get(news.kept_id)
        if parent is None:
            return False
        parent.refused = not news.kept
        parent.kept_until = self._clock() + news.ttl_s
        return True

    def forget(self, kept_id: KeptId, reason: str) -> None:
        parent = self._parents.pop(kept_id, None)
        if parent is None:
            return
        named = self._names.get(parent.name, [])
        if parent in named:
            named.remove(parent)
            self._because(parent.name, reason)
            if not named:
                del self._names[parent.name]
        self._because(kept_id, reason)
        self._wake(parent)

    def find(self, name: ParentName) -> OfflineParent | Origin:
        """An Origin where all that is needed was handed in. Raises NotFoundError, InvalidRequestError."""
        match name:
            case str():
                return self._named(name)
            case CompletionOutput():
                if name.continuation is None:
                    raise InvalidRequestError(
                        "its KV was not to be kept: generate with keep_kv, or continue from the RequestOutput", param="parent"
                    )
                return self._named(name.continuation.handle)
            case RequestOutput():
                return self._given_back(name)

    def lease_of(self, name: ParentName) -> KeptId:
        found = self.find(name)
        kept_id = found.kept_id
        if kept_id is None or kept_id not in self._parents:
            raise NotFoundError("its KV is not kept", param="parent", code="continuation_not_found")
        return kept_id

    def _given_back(self, output: RequestOutput) -> OfflineParent | Origin:
        if not output.finished:
            return self._named(output.request_id)
        if len(output.outputs) != 1:
            raise InvalidRequestError(
                f"{output.request_id!r} has {len(output.outputs)} outputs: continue from one of them", param="parent"
            )
        sample = output.outputs[0]
        kept = sample.continuation is not None and sample.continuation.kept
        return Origin(
            of=output.request_id if sample.continuation is None else sample.continuation.handle,
            tokens=[*output.prompt_token_ids, *sample.token_ids],
            kept_id=KeptId(sample.continuation.handle) if kept and sample.continuation is not None else None,
        )

    def _named(self, name: str) -> OfflineParent:
        parent = self._parents.get(KeptId(name))
        parents = self._names.get(name, []) if parent is None else [parent]
        if len(parents) > 1:
            raise InvalidRequestError(f"{name!r} has {len(parents)} outputs: name one by its handle", param="parent")
        if not parents:
            why = self._reasons.get(name, "no request of this name was to be kept here")
            raise NotFoundError(
                f"there is nothing to continue from under {name[:200]!r}: {why}", param="parent", code="continuation_not_found"
            )
        self._parents.move_to_end(parents[0].kept_id)
        return parents[0]

    def _trim(self) -> None:
        now = self._clock()
        surplus = len(self._parents) - self._capacity
        if surplus > 0:
            idle = [parent for parent in self._parents.values() if parent.tokens is not None and parent.kept_until <= now]
            for parent in idle[:surplus]:
                self.forget(parent.kept_id, f"it was forgotten, as {self._capacity} others were used since")

    def _because(self, name: str, reason: str) -> None:
        self._reasons[name] = reason
        self._reasons.move_to_end(name)
        if len(self._reasons) > _MAX_REASONS:
            self._reasons.popitem(last=False)

    @staticmethod
    def _wake(parent: OfflineParent) -> None:
        waiting, parent.waiting = parent.waiting, []
        for wake in waiting:
            wake()
