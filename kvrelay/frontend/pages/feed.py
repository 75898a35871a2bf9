"""GET /feed: server-sent events for the dashboard. First `hello`, then `tick` every second and `requests` when these change."""

from __future__ import annotations

import asyncio
import contextlib

from kvrelay.frontend.feed.feed import EVERY_S, LONGEST_S, event
from kvrelay.frontend.http.auth import owner_of
from kvrelay.frontend.http.call import Call, Watch
from kvrelay.frontend.service import Service
from kvrelay.version import version


async def feed(service: Service, call: Call) -> None:
    """Until the page is closed, or it is time to check its key again."""
    if call.scope["method"] == "HEAD":
        await call.start_stream()
        await call.end_stream()
        return
    viewer = service.feed.open(owner_of(call, service.options))
    watch = Watch(call, viewer.close)
    try:
        await call.start_stream()
        await call.write(event("hello", _about(service)))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LONGEST_S):
                while events := await viewer.next():
                    await call.write(events)
        await call.end_stream()
    finally:
        watch.cancel()
        service.feed.leave(viewer)


def _about(service: Service) -> dict[str, object]:
    return {
        "version": version(),
        "models": [*service.models, *service.backend.adapters],
        "takes_images": service.images.takes_images,
        "every_s": EVERY_S,
    }
