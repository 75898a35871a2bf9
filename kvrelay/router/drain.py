"""An operator's word to one worker: finish what you have and leave, or come back in another role.

The worker itself does the work (worker/serving.py). The router sends it the word, gives it nothing new from that moment on, and
says what the cluster is without it.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

import msgspec

from kvrelay.errors import ConflictError, NotFoundError, UnavailableError
from kvrelay.ids import WorkerId
from kvrelay.router.backend import DrainOrder
from kvrelay.router.peer import Peer
from kvrelay.states import Role, WorkerState
from kvrelay.wire.serving import Drain


def order_drain(peers: Mapping[WorkerId, Peer], worker_id: str, role: Role | None, starting: Container[str] = ()) -> DrainOrder:
    """Sends the word. Raises NotFoundError, ConflictError or UnavailableError, and then nothing was sent."""
    peer = peers.get(WorkerId(worker_id))
    if peer is None and worker_id in starting:  # it has no address yet
        raise ConflictError(f"worker {worker_id} is starting; tell it when it is ready", param="worker", code="starting")
    if peer is None:
        raise NotFoundError(f"there is no worker {worker_id[:200]!r}", param="worker", code="worker_not_found")
    if peer.record.state == WorkerState.DRAINING:
        raise ConflictError(f"worker {peer.id} is draining already", param="worker", code="already_draining")
    if role is peer.record.role:
        raise ConflictError(f"worker {peer.id} is a {role.value} worker already", param="role", code="same_role")
    if not peer.send(Drain(role=role)):
        raise UnavailableError(f"worker {peer.id} cannot be reached: {peer.problem}", param="worker", code="unreachable")
    # The registry will say so too, but not before the next requests are planned.
    peer.update(msgspec.structs.replace(peer.record, state=WorkerState.DRAINING))
    return DrainOrder(worker=peer.id, role=peer.record.role, next_role=role, warning=_warning(peers, peer, role))


def _warning(peers: Mapping[WorkerId, Peer], gone: Peer, role: Role | None) -> str:
    left = {peer.record.role for peer in peers.values() if peer.usable and peer is not gone}
    if gone.record.role in left:
        return ""
    last = f"it is the last {gone.record.role.value} worker"
    if not left & {Role.WHOLE, Role.DECODE}:
        return f"{last}: no request can be served until it is back" if role else f"{last}: no request can be served without it"
    match gone.record.role:
        case Role.PREFILL:
            return f"{last}: decode workers compute every prompt themselves"
        case Role.ENCODE if Role.WHOLE not in left:
            return f"{last}: no request with images can be served"
        case _:
            return last
