"""The leak check of an engine, with which its tests end."""

from __future__ import annotations

from kvrelay.engine import invariants
from kvrelay.engine.core import Core


def check_idle(core: Core) -> None:
    """Nothing is going on, and nothing is held."""
    invariants.check(core)
    counts = core.kv.pool.counts()
    assert not core.requests, f"requests left behind: {list(core.requests)}"
    assert counts.in_use == counts.reserved == counts.sending == counts.quarantined == 0, f"leaked blocks: {counts}"
    assert not core.scheduler.running
    assert not core.scheduler.swapped
    assert not core.scheduler.loading
    entries, copies = core.swap.on_host.values(), core.swap.copies.values()
    assert all(one.is_kept for one in entries), f"sequences left on the host: {[one.sequence.request_id for one in entries]}"
    host_blocks = {block for entry in entries for block in entry.host_blocks}
    host_blocks |= {block for copy in copies for block in copy.host_blocks}
    assert core.swap.host.pool.counts().in_use == len(host_blocks)
    assert not core.kept.heirs, "children left behind"
    assert not core.scheduler.queue.sequences
    assert core.images.num_held == 0, "images are held for requests that are over"
