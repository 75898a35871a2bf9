"""A client that leaves at any point: the blocks come back on both sides, and nobody else notices."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
from cluster import Answer, Cluster, Shape, ask, collect, random_prompts, relay, solo

from kvrelay.ids import WorkerId
from kvrelay.router.stream import RequestStream
from kvrelay.states import RequestState
from kvrelay.transfer.engines.base import Completion, MoveId, Mover, Ranges, TransferEngine

POINTS = ["queued", "reserving", "prefilling", "writing", "first token sent", "decoding"]
PROMPT = list(range(1, 100))
LONG = {"max_tokens": 120}


class HeldBack:
    """A transport whose moves are carried out, and reported only while `flows`."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self._finished: list[Completion] = []
        self.flows = True
        self.num_begun = 0
        self.name = engine.name
        self.mover: Mover = engine.mover
        self.register = engine.register
        self.local_info = engine.local_info
        self.add_peer = engine.add_peer
        self.remove_peer = engine.remove_peer
        self.cancel = engine.cancel
        self.close = engine.close

    def write(self, peer: str, ranges: Ranges) -> MoveId:
        self.num_begun += 1
        return self._engine.write(peer, ranges)  # type: ignore[arg-type]

    def read(self, peer: str, ranges: Ranges) -> MoveId:
        self.num_begun += 1
        return self._engine.read(peer, ranges)  # type: ignore[arg-type]

    def poll(self) -> list[Completion]:
        self._finished += self._engine.poll()
        if not self.flows:
            return []
        finished, self._finished = self._finished, []
        return finished


class Brakes:
    """Stop a pair of workers at a given point of a request's life: those that served an earlier request."""

    def __init__(self, cluster: Cluster, transports: list[HeldBack], earlier: RequestStream) -> None:
        self.cluster = cluster
        parts = {worker.id: (worker, transport) for worker, transport in zip(cluster.workers, transports, strict=True)}
        (self.prefill, sends), (self.decode, receives) = parts[WorkerId(earlier.prefill)], parts[WorkerId(earlier.decode)]
        self.transports = [sends, receives]

    def release(self) -> None:
        for transport in self.transports:
            transport.flows = True
        for worker in (self.prefill, self.decode):
            worker.allow(None)

    async def abort(self, stream: RequestStream, point: str) -> None:
        await self.bring(stream, point)
        assert (stream.prefill, stream.decode) == (self.prefill.id, self.decode.id)
        stream.abort()
        self.release()

    async def bring(self, stream: RequestStream, point: str) -> Answer:
        """Until the request is at that point, and stays there."""
        answer = Answer()
        match point:
            case "queued":
                await self._until(lambda: len(self.decode.engine.requests) == len(self.prefill.engine.requests) == 1)
            case "prefilling":
                await self._prefill(64)
            case "reserving":
                await self._prefill(32)
                self.decode.allow(None)
                await self._until(self._is_reserved)
                self.decode.allow(0)
            case "writing":
                self.hold_moves()
                self.prefill.allow(None)
                self.decode.allow(None)
                await self._until(lambda: sum(transport.num_begun for transport in self.transports) > 0)
            case "first token sent":
                self.prefill.allow(None)
                answer.take(await stream.next())
            case "decoding":
                self.release()
                while len(answer.tokens.get(0, [])) < 3:
                    answer.take(await stream.next())
        return answer

    def hold_moves(self) -> None:
        for transport in self.transports:
            transport.flows = False
            transport.num_begun = 0

    def stop(self) -> None:
        for worker in (self.prefill, self.decode):
            worker.allow(0)

    async def _prefill(self, num_tokens: int) -> None:
        """Step by step. Some steps only take news of earlier requests."""
        while not any(sequence.num_computed >= num_tokens for sequence in self.prefill.engine.scheduler.running):
            self.prefill.allow(1)
            await self._until(lambda: self.prefill.gate.permits == 0 and not self.prefill.gate.steps)

    async def _until(self, condition: Callable[[], bool]) -> None:
        await self.cluster.until(condition)

    def _is_reserved(self) -> bool:
        return any(
            sequence.state is RequestState.TRANSFERRING
            for request in list(self.decode.engine.requests.values())
            for sequence in request.sequences
        )


def shape(transfer: str, mode: str, transports: list[HeldBack], pairs: int = 1) -> Shape:
    def wrap(engine: TransferEngine) -> TransferEngine:
        transports.append(HeldBack(engine))
        return transports[-1]  # type: ignore[return-value]

    return Shape(
        prefill=pairs, decode=pairs, transfer=transfer, mode=mode, token_budget=32, prefix_cache=False, wrap=wrap  # type: ignore[arg-type]
    )  # fmt: skip


def reachable(point: str, mode: str) -> bool:
    """In read mode nothing is reserved before the prompt is computed."""
    return mode == "write" or point != "reserving"


@pytest.mark.parametrize("mode", ["write", "read"])
@pytest.mark.parametrize("transfer", ["shm", "nixl", "memory"])
async def test_abort_at_every_point(transfer: str, mode: str) -> None:
    transports: list[HeldBack] = []
    async with relay(shape(transfer, mode, transports)) as cluster:
        first = cluster.submit(ask(PROMPT))
        await collect(first)  # the two know each other
        await cluster.idle()
        brakes = Brakes(cluster, transports, first)
        for point in POINTS:
            if reachable(point, mode):
                brakes.stop()
                await brakes.abort(cluster.submit(ask(PROMPT, **LONG)), point)
                await cluster.idle()


async def test_the_last_byte_crosses_the_abort() -> None:
    """It arrives while the decode worker's engine is busy, which then hears of the abort first."""
    async with relay(Shape()) as cluster:
        decode = cluster.decode[0]
        decode.allow(0)
        stream = cluster.submit(ask(PROMPT, **LONG))
        await cluster.until(lambda: decode.engine.core.incoming.consumer.has_news)
        decode.allow(1)  # takes the news that it may reserve, and reserves
        await cluster.until(lambda: decode.gate.permits == 0)
        await cluster.until(lambda: decode.engine.load().transfers.done == 1)
        stream.abort()
        await cluster.until(lambda: not decode.engine.requests)
        assert decode.engine.load().blocks.quarantined > 0
        decode.allow(None)
        await cluster.idle()


@pytest.mark.parametrize("mode", ["write", "read"])
async def test_an_abort_while_set_aside_is_forgotten(mode: str) -> None:
    async with relay(Shape(mode=mode, max_batch=1)) as cluster:  # type: ignore[arg-type]
        prefill, decode = cluster.prefill[0], cluster.decode[0]
        decode.allow(0)
        first = cluster.submit(ask(PROMPT, **LONG))
        assert await first.next()
        second = cluster.submit(ask([5, 6, 7], **LONG))  # needs the one place there is: the first one is set aside
        answer = Answer()
        answer.take(await second.next())
        first.abort()
        await cluster.until(lambda: len(decode.engine.requests) == 1)
        decode.allow(None)
        assert (await collect(second, answer)).error is None
        await cluster.idle()
        assert prefill.engine.load().blocks.sending == 0


async def test_an_abort_crosses_the_word_that_it_was_set_aside() -> None:
    """The prefill worker's engine is busy: it hears of the abort before it polls."""
    async with relay(Shape(max_batch=1)) as cluster:
        prefill, decode = cluster.prefill[0], cluster.decode[0]
        decode.allow(0)
        first = cluster.submit(ask(PROMPT, **LONG))
        assert await first.next()
        prefill.allow(0)
        second = cluster.submit(ask([5, 6, 7], **LONG))
        await cluster.until(lambda: len(prefill.engine.requests) == 1)
        prefill.allow(1)  # finds no place for the second one, and asks for the first to be set aside
        await cluster.until(lambda: prefill.engine.core.outgoing.producer.has_news)
        assert prefill.gate.permits == 0
        first.abort()
        await cluster.until(lambda: prefill.loop.num_open == 1)
        for worker in cluster.workers:
            worker.allow(None)
        assert (await collect(second)).error is None


async def abort_under_load(seed: int, count: int, shape: Shape) -> None:
    """Half of the clients leave at a random moment; the others get what they would get alone."""
    rng = random.Random(seed)
    requests = [ask(prompt, max_tokens=rng.randint(2, 30)) for prompt in random_prompts(2 * count, seed)]
    expected = solo(requests, shape)

    async def client(index: int) -> None:
        await asyncio.sleep(rng.random() * count / 100)
        stream = cluster.submit(requests[index])
        if index % 2:
            assert (await collect(stream)).said == expected[index].said
            return
        answer, enough = Answer(), rng.choice([0, 0, 1, 2, 5])
        if not enough:
            await asyncio.sleep(rng.random() * 0.1)
        while sum(map(len, answer.tokens.values())) < enough and (outputs := await stream.next()):
            answer.take(outputs)
        stream.abort()
        assert expected[index].tokens[0][: len(answer.tokens.get(0, []))] == answer.tokens.get(0, [])

    async with relay(shape) as cluster:
        await asyncio.gather(*(client(index) for index in range(2 * count)))


@pytest.mark.parametrize("mode", ["write", "read"])
async def test_500_aborts_in_all_at_every_point(mode: str) -> None:
    """48 x 6 and 48 x 5, for in read mode nothing is reserved before the prompt is computed. Four at a time, each on a pair of
    workers of its own, which requests take in turn."""
    transports: list[HeldBack] = []
    points = [point for point in POINTS if reachable(point, mode)]
    async with relay(shape("shm", mode, transports, pairs=4)) as cluster:
        first = [cluster.submit(ask(PROMPT)) for _ in range(4)]
        expected = [(await collect(stream)).said for stream in first]
        await cluster.idle()
        pairs = [Brakes(cluster, transports, stream) for stream in first]
        for _ in range(12):
            for point in points:
                for brakes in pairs:
                    brakes.stop()
                streams = [cluster.submit(ask(PROMPT, **LONG)) for _ in pairs]
                await asyncio.gather(*(brakes.abort(stream, point) for brakes, stream in zip(pairs, streams, strict=True)))
                await cluster.idle()
        assert [answer.said for answer in await cluster.answers([ask(PROMPT)] * 4)] == expected


@pytest.mark.parametrize("mode", ["write", "read"])
async def test_aborts_at_random_moments_under_load(mode: str) -> None:
    await abort_under_load(3, 40, Shape(prefill=2, decode=2, mode=mode, num_blocks=(64, 48), token_budget=64))  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize("transfer", ["shm", "nixl", "mooncake"])
@pytest.mark.parametrize("mode", ["write", "read"])
async def test_500_aborts_at_random_moments_under_load(transfer: str, mode: str) -> None:
    settings = {"prefill": 2, "decode": 2, "num_blocks": (64, 48), "token_budget": 64}
    await abort_under_load(4, 500, Shape(transfer=transfer, mode=mode, **settings))  # type: ignore[arg-type]
