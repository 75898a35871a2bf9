"""Where a request goes: one worker that does everything, or a prefill worker and a decode worker that are sent it at once.

    whole workers up                   one of them
    prefill and decode workers up      a pair; or the decode worker alone, if the prompt is short (`local_prefill_tokens`);
                                       or the prefill worker alone, if one token is all that is wanted
    only decode workers up             one of them, which computes the prompt itself

Where there is nobody with room the client is told to come back; where there is nobody at all, why.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from kvrelay.errors import QueueFullError, UnavailableError
from kvrelay.router.backend import GenerateRequest
from kvrelay.router.peer import Peer
from kvrelay.router.policy import Policy
from kvrelay.states import Role

Mode = Literal["write", "read"]
PolicyName = Literal["round_robin", "least_loaded", "prefix_aware"]


@dataclass(frozen=True, slots=True)
class Plan:
    """The worker that generates, and the one that computes the prompt for it, if that is another."""

    decode: Peer
    prefill: Peer | None = None

    @property
    def peers(self) -> tuple[Peer, ...]:
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)


class Planner:
    """Chooses among the workers that can be used."""

    def __init__(self, policy: PolicyName, local_prefill_tokens: int) -> None:
        self._policies = {role: Policy(policy) for role in Role}
        self._local_prefill_tokens = local_prefill_tokens
        self._by_role: dict[Role, list[Peer]] = {role: [] for role in Role}

    def use(self, peers: Iterable[Peer]) -> None:
        self._by_role = {role: [] for role in Role}
        for peer in peers:
            self._by_role[peer.record.role].append(peer)

    @property
    def ready(self) -> bool:
        return bool(self._by_role[Role.WHOLE] or self._by_role[Role.DECODE])

    def plan(self, request: GenerateRequest) -> Plan:
        """Raises QueueFullError, or UnavailableError without a reason, which the caller knows better."""
        if self._by_role[Role.WHOLE]:
            return Plan(self._choose(Role.WHOLE))
        if not self._by_role[Role.DECODE]:
            raise UnavailableError("no worker can generate")
        if not self._by_role[Role.PREFILL] or len(request.prompt) <= self._local_prefill_tokens:
            return Plan(self._choose(Role.DECODE))
        if request.params.max_tokens == 1:
            return Plan(self._choose(Role.PREFILL))
        return Plan(self._choose(Role.DECODE), self._choose(Role.PREFILL))

    def _choose(self, role: Role) -> Peer:
        candidates = [peer for peer in self._by_role[role] if peer.has_room]
        if not candidates:
            raise QueueFullError(f"the queues of all {role.value} workers are full")
        return self._policies[role].choose(candidates)
