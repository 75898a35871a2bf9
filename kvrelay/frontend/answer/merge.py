"""Several request streams as one: a task per stream, one queue for all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvrelay.errors import RequestError
from kvrelay.router.stream import RequestStream
from kvrelay.wire.serving import SequenceOutput


class Merge:
    def __init__(self, streams: Sequence[RequestStream]) -> None:
        self._queue: asyncio.Queue[tuple[int, list[SequenceOutput] | RequestError]] = asyncio.Queue()
        self._open = len(streams)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._pump(place, stream)) for place, stream in enumerate(streams)]

    async def _pump(self, place: int, stream: RequestStream) -> None:
        try:
            while outputs := await stream.next():
                self._queue.put_nowait((place, outputs))
        except RequestError as error:
            self._queue.put_nowait((place, error))
        else:
            self._queue.put_nowait((place, []))

    async def next(self) -> tuple[int, list[SequenceOutput]]:
        """Outputs of one stream; none when all have ended."""
        while self._open:
            place, outputs = await self._queue.get()
            if isinstance(outputs, RequestError):
                raise outputs
            if outputs:
                return place, outputs
            self._open -= 1
        return 0, []

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
