"""What every context index does, whichever it is: one suite over the recording fake and a real ContextPilot."""

from __future__ import annotations

import pathlib
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from contextpilot_server import ContextPilotServer, contextpilot

from kvrelay.errors import ConfigError, ContextIndexError, IndexNotReadyError, IndexRefusedError
from kvrelay.events.context_index import ContextIndex, Removal
from kvrelay.events.contextpilot import ContextPilotIndex
from tests.recording_index import RecordingIndex


class World:
    """An index, and a second way to see what it lists. `fill` puts so many requests into it and gives their ids."""

    def __init__(self, index: ContextIndex, fill: Callable[[int], list[str]], listed: Callable[[], set[str]]) -> None:
        self.index = index
        self.fill = fill
        self.listed = listed


@pytest.fixture(scope="module")
def server(contextpilot_python: pathlib.Path) -> Iterator[ContextPilotServer]:
    with contextpilot(contextpilot_python) as made:
        yield made


@pytest.fixture(params=["recording", "contextpilot"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    if request.param == "recording":
        fake = RecordingIndex()
        yield World(fake, lambda count: _fill_fake(fake, count), lambda: set(fake.listed))
        return
    real: ContextPilotServer = request.getfixturevalue("server")
    real.call("POST", "/reset")
    real.reorder([[-1]])  # so that there is an index
    index = ContextPilotIndex(real.url)
    always = real.listed()
    yield World(index, lambda count: real.reorder([[10 * n, 10 * n + 1] for n in range(count)]), lambda: real.listed() - always)
    await index.close()


def _fill_fake(fake: RecordingIndex, count: int) -> list[str]:
    request_ids = [f"req-{number:012x}" for number in range(count)]
    fake.listed.update(request_ids)
    return request_ids


async def test_what_is_removed_is_not_listed_any_more(world: World) -> None:
    first, second, third = world.fill(3)
    assert await world.index.remove_requests([first, third]) == Removal(num_removed=2, num_not_found=0)
    assert world.listed() == {second}


async def test_removing_twice_and_removing_strangers_is_no_error(world: World) -> None:
    first, second = world.fill(2)
    await world.index.remove_requests([first])
    again = await world.index.remove_requests([first, "nobody-1", second, "nobody-2"])
    assert again == Removal(num_removed=1, num_not_found=3)
    assert world.listed() == set()


async def test_a_full_batch_goes_in_one_call(world: World) -> None:
    request_ids = world.fill(100)
    assert await world.index.remove_requests(request_ids) == Removal(num_removed=100, num_not_found=0)
    assert world.listed() == set()


async def test_an_empty_batch_changes_nothing(world: World) -> None:
    world.fill(2)
    assert await world.index.remove_requests([]) == Removal(num_removed=0, num_not_found=0)
    assert len(world.listed()) == 2


async def test_ids_of_any_spelling_are_taken(world: World) -> None:
    world.fill(1)
    strange = ["ü", "a b", '"', "\\", "x" * 256, "req-1", "/../", "{}"]
    removal = await world.index.remove_requests(strange)
    assert (removal.num_removed, len(world.listed())) == (0, 1)


# The real one alone


async def test_an_index_that_is_not_there_yet_is_not_ready(contextpilot_python: pathlib.Path) -> None:
    with contextpilot(contextpilot_python) as fresh:
        index = ContextPilotIndex(fresh.url)
        with pytest.raises(IndexNotReadyError, match="503"):
            await index.remove_requests(["req-1"])
        fresh.stop()
        with pytest.raises(ContextIndexError, match="ConnectError"):
            await index.remove_requests(["req-1"])
        await index.close()


async def test_what_it_will_never_take_is_refused(server: ContextPilotServer) -> None:
    index = ContextPilotIndex(server.url)
    with pytest.raises(IndexRefusedError, match="422"):
        await index.remove_requests([7])  # type: ignore[list-item]
    await index.close()


async def test_a_server_that_is_something_else_is_said_so(server: ContextPilotServer) -> None:
    index = ContextPilotIndex(f"{server.url}/elsewhere")
    with pytest.raises(ContextIndexError, match="404"):
        await index.remove_requests(["req-1"])
    await index.close()


async def test_one_that_is_stopped_is_not_waited_for(server: ContextPilotServer) -> None:
    index = ContextPilotIndex(server.url, timeout_s=0.2)
    server.pause()
    try:
        with pytest.raises(ContextIndexError, match="Timeout"):
            await index.remove_requests(["req-1"])
    finally:
        server.resume()
    await index.close()


@pytest.mark.parametrize("url", ["nonsense", "ftp://host", "http://", "tcp://127.0.0.1:1", "http://[::1"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--context-index"):
        ContextPilotIndex(url)
