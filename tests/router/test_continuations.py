"""The table of what can be continued from: names, owners, order of forgetting, time, reasons."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from kvrelay.errors import InvalidRequestError, NotFoundError
from kvrelay.ids import WorkerId, new_kept_id, new_request_id
from kvrelay.metrics import Metrics
from kvrelay.router.backend import GenerateRequest
from kvrelay.router.continuations import NEWS_WAIT_S, Continuations
from kvrelay.router.parent import Parent
from kvrelay.sampling import SamplingParams
from kvrelay.states import HANDLE_EDGES, KEPT_EDGES, HandleState, KeptState
from kvrelay.wire.serving import Keep, KeptInfo, KeptNews

WORKER = WorkerId("whole-000000000000")
PROMPT = [1, 2, 3]


class Table(Continuations):
    """With a clock that a test sets."""

    def __init__(self, capacity: int = 3, quota: int = 64) -> None:
        self.now = 100.0
        super().__init__(Metrics(), capacity=capacity, max_kept_per_owner=quota, clock=lambda: self.now)

    def begin(self, name: str, owner: str = "", *, keep: bool = False, n: int = 1, answer_id: str = "") -> list[Parent]:
        keep_it = Keep([new_kept_id() for _ in range(n)], 10.0, owner) if keep else None
        params = SamplingParams(n=n)
        request = GenerateRequest(
            external_id=name, prompt=PROMPT, params=params, owner=owner, keep=keep_it, answer_id=answer_id
        )
        parents = self.begun(request.as_parents())
        for parent in parents:
            self.sent(parent, WORKER, "model", new_request_id())
        return parents

    def finish(self, name: str, owner: str = "", *, keep: bool = False) -> Parent:
        (parent,) = self.begin(name, owner, keep=keep)
        self.ended(parent, PROMPT, [7])
        if keep:
            assert self.told(WORKER, news(parent))
        return parent


def news(parent: Parent, *, kept: bool = True, num_tokens: int = 4) -> KeptNews:
    assert parent.kept_id is not None
    return KeptNews(parent.request_id or new_request_id(), parent.choice, parent.kept_id, kept, 10.0, num_tokens, 1)


def test_who_was_used_least_lately_is_forgotten_first() -> None:
    table = Table(capacity=3)
    for name in "abc":
        table.finish(name)
    table.find("a", "")  # somebody continues from it
    table.finish("d")
    assert [name for name in "abcd" if not table.is_unheard_of(name, "") and _is_known(table, name)] == ["a", "c", "d"]
    assert len(table) == 3
    with pytest.raises(NotFoundError, match="forgotten: others have ended since"):
        table.find("b", "")


def _is_known(table: Continuations, name: str) -> bool:
    try:
        return table.find_all(name, "")[0].state is HandleState.KNOWN
    except NotFoundError:
        return False


def test_what_is_held_is_not_forgotten_before_its_time() -> None:
    table = Table(capacity=0)
    parent = table.finish("held", keep=True)
    for number in range(20):
        table.finish(str(number))
    assert table.find("held", "") is parent
    assert (table.remaining_s(parent), list(parent.tokens)) == (10.0, [1, 2, 3, 7])
    table.now += 10.0
    with pytest.raises(NotFoundError, match="forgotten"):
        table.find("held", "")


def test_kept_kv_whose_time_is_over_leaves_its_tokens() -> None:
    table = Table()
    parent = table.finish("held", keep=True)
    table.now += 9.9
    assert table.find("held", "").state is HandleState.HELD
    table.now += 0.1
    assert table.find("held", "").state is HandleState.KNOWN
    assert (parent.kept, parent.reason, parent.num_blocks) == (
        False,
        "its KV is not kept any longer: the time asked for is over",
        0,
    )


def test_a_name_that_is_used_again_means_the_latest() -> None:
    table = Table()
    first, second = table.finish("name", keep=True), table.finish("name", keep=True)
    assert table.find("name", "") is second
    assert table.find(str(first.kept_id), "") is first


def test_prompts_of_one_answer_share_their_names() -> None:
    table = Table()
    parents = [table.begin("name", answer_id="cmpl-1")[0] for _ in range(2)]
    assert table.find_all("name", "") == table.find_all("cmpl-1", "") == parents
    with pytest.raises(InvalidRequestError, match="2 choices"):
        table.find("name", "")
    (later,) = table.begin("name", answer_id="cmpl-2")
    assert table.find_all("name", "") == [later]
    assert table.find_all("cmpl-1", "") == parents


def test_owners_do_not_see_each_other() -> None:
    table = Table()
    mine = table.finish("name", "me", keep=True)
    yours = table.finish("name", "you")
    assert table.find("name", "me") is mine
    assert table.find("name", "you") is yours
    with pytest.raises(NotFoundError, match="nothing is known"):
        table.find(str(mine.kept_id), "you")
    assert table.of_owner("you") == []
    assert table.of_owner("me") == [mine]


@pytest.mark.parametrize("late", [False, True])
def test_the_news_may_come_before_and_after_the_end(late: bool) -> None:
    table = Table()
    (parent,) = table.begin("name", keep=True)
    if late:
        table.ended(parent, PROMPT, [7])
    assert parent.state is HandleState.RUNNING
    assert table.told(WORKER, news(parent))
    if not late:
        assert parent.kept
        table.ended(parent, PROMPT, [7])
    assert parent.state is HandleState.HELD


def test_news_that_nobody_waits_for_are_turned_away() -> None:
    table = Table()
    parent = table.finish("name", keep=True)
    assert not table.told(WorkerId("whole-111111111111"), news(parent)), "of another attempt"
    assert table.told(WORKER, news(parent)), "said twice"
    (short,) = table.begin("short", keep=True)
    table.ended(short, PROMPT, [7, 8])
    assert not table.told(WORKER, news(short, num_tokens=4)), "less than the client saw"
    assert short.state is HandleState.KNOWN
    (stranger,) = Table().begin("never", keep=True)
    assert not table.told(WORKER, news(stranger))
    assert table.told(WORKER, news(stranger, kept=False))


def test_a_worker_that_never_says_does_not_keep_its_parent_waiting() -> None:
    table = Table()
    (parent,) = table.begin("name", keep=True)
    table.ended(parent, PROMPT, [7])
    table.now += NEWS_WAIT_S
    assert table.find("name", "").state is HandleState.KNOWN
    assert "did not say" in parent.reason


def test_the_quota_counts_what_is_held_and_what_is_asked_for() -> None:
    table = Table(quota=2)
    table.finish("one", keep=True)
    (running,) = table.begin("two", keep=True)
    (over,) = table.begin("three", keep=True)
    assert (running.asked, over.asked) == (True, False)
    assert "quota of 2" in over.reason
    table.failed(running, "broken")
    assert table.begin("four", keep=True)[0].asked
    table.now += 10.0  # the first one is over
    assert table.begin("five", keep=True)[0].asked


def test_what_another_router_kept_is_adopted_once() -> None:
    table = Table()
    info = KeptInfo(
        kept_id=new_kept_id(),
        external_id="name",
        owner="me",
        cache_salt="salt",
        tokens=[1, 2, 3, 4],
        num_prompt_tokens=3,
        num_blocks=2,
        on_host=True,
        ttl_s=5.0,
    )
    for _ in range(2):
        table.adopt(WORKER, "model", [info])
    parent = table.find("name", "me")
    assert (parent.state, list(parent.tokens), parent.num_blocks) == (HandleState.HELD, [1, 2, 3, 4], 2)
    assert table.is_unheard_of("name", "me"), "what its router had remembered may be on its way to the worker"
    known = Parent.of_known(msgspec.structs.replace(parent.info(100.0), answer_id="answer", record=b"stored"))
    table.adopt_known(known, 50.0)
    assert not table.is_unheard_of("name", "me")
    assert table.find("answer", "me") is parent
    assert parent.record == b"stored"
    table.lost(WORKER, "its worker was lost")
    assert (table.find("name", "me").state, parent.reason) == (HandleState.KNOWN, "its worker was lost")


def test_reasons_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.router.names._MAX_REASONS", 2)
    table = Table()
    for name in "abc":
        table.finish(name)
        table.delete(name, "")
    with pytest.raises(NotFoundError, match="nothing is known"):
        table.find("a", "")
    with pytest.raises(NotFoundError, match="deleted"):
        table.find("c", "")


@pytest.mark.parametrize(("machine", "edges"), [(HandleState, HANDLE_EDGES), (KeptState, KEPT_EDGES)])
def test_the_page_draws_every_edge(machine: type[HandleState | KeptState], edges: dict[HandleState, set[HandleState]]) -> None:
    page = (Path(__file__).parents[2] / "docs/continuation.md").read_text(encoding="utf-8")
    assert [state.name for state in machine if state.name not in page] == []
    drawn = [line.split(":")[0].split() for line in page.splitlines() if "-->" in line and "[*]" not in line]
    names = {state.name for state in machine}
    expected = {(before.name, after.name) for before, afters in edges.items() for after in afters}
    assert {(words[0], words[2]) for words in drawn if words[0] in names} == expected


async def test_who_waits_for_a_parent_can_leave_when_there_is_news() -> None:
    parent = Parent(external_id="a", answer_id="", choice=0, owner="r", cache_salt="", num_prompt_tokens=1)
    waiting = asyncio.create_task(parent.change(60.0))
    await asyncio.sleep(0)
    parent.wake()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
