"""The one loop behind chats, completions, responses and messages, streamed or not.

    Generation.next() -> [Step]      new tokens with their text, of any sample
    Shape.take(step)  -> bytes       the events that tell of the step; none where the answer is only collected
    Shape.end()       -> bytes       the last events, or the whole body

The status of a stream is sent with its first token, so that an error before it has its proper status. A later error reaches
`Endpoint`, which ends the stream with an error event.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Protocol

from kvrelay.frontend.answer.generation import Generation, Step
from kvrelay.frontend.http.call import Call
from kvrelay.frontend.http.errors import JSON_TYPE
from kvrelay.frontend.prompt.work import Work
from kvrelay.frontend.service import Service


class Delivery(enum.Enum):
    """How the client gets its answer."""

    BODY = "one JSON object"
    EVENTS = "events, as tokens come"
    RESULTS = "events, once every sample has ended: a beam search has no results before"


def delivery_of(stream: bool | None, use_beam_search: bool | None = None) -> Delivery:
    if not stream:
        return Delivery.BODY
    return Delivery.RESULTS if use_beam_search else Delivery.EVENTS


class Shape(Protocol):
    """Turns the steps of one request into the bytes of its answer."""

    shows_kept: bool  # whether the answer says which KV is kept, and therefore waits for the workers to say so

    def take(self, step: Step) -> bytes: ...

    def end(self) -> bytes:
        """Every sample has ended."""


async def answer(
    service: Service, call: Call, work: Work, delivery: Delivery, new_shape: Callable[[Generation], Shape]
) -> None:
    generation = Generation(service, call, work)
    try:
        await _answer(call, generation, delivery, new_shape(generation))
    finally:
        generation.close()


async def _answer(call: Call, generation: Generation, delivery: Delivery, shape: Shape) -> None:
    live, ended, written = delivery is Delivery.EVENTS, False, b""
    waits = shape.shows_kept and generation.says_more
    while not ended:
        steps = await generation.next()
        ended = generation.done
        if live and not call.started:
            await call.start_stream(generation.headers())
        if waits and (ended or (live and any(step.finish for step in steps))):
            await generation.settle()
        written = b"".join([shape.take(step) for step in steps])
        if live and not ended:
            await call.write(written)
    written += shape.end()
    if delivery is Delivery.BODY:
        await call.answer(200, written, [JSON_TYPE, *generation.headers()])
        return
    if not live:
        await call.start_stream(generation.headers())
    await call.end_stream(written)
