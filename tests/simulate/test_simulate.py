"""A cluster in virtual time: the same seed gives the same result, every request ends once, every block comes back."""

from __future__ import annotations

import msgspec
import pytest

from kvrelay.config import EngineOptions
from kvrelay.router.attempt import Mode
from kvrelay.router.policy import PolicyName
from kvrelay.router.rebalance import Rules
from kvrelay.simulate import worker as simulated_worker
from kvrelay.simulate.cluster import Layout, SimulatedCluster
from kvrelay.simulate.costs import ALONE, Costs, HandOvers, line
from kvrelay.simulate.figures import figures
from kvrelay.simulate.fit import H200_8B
from kvrelay.simulate.host import Host, Pass, sharing_of
from kvrelay.simulate.loop import VirtualLoop
from kvrelay.simulate.run import Failure, Outcome, Targets, simulate
from kvrelay.simulate.traffic import Kind, Session, Turn, Wanted, draw
from kvrelay.states import Role

COSTS = Costs(prefill=line(2.0, 0.02), decode=line(4.0, 0.1), gb_per_s=10.0, latency_ms=0.5, router_ms=1.0)
CHECKED = EngineOptions(check_invariants=True)
TARGETS = Targets(ttft_ms=200.0, itl_ms=20.0)
KINDS: tuple[Kind, ...] = ("fixed", "mixed", "bursty", "long-prefix", "conversation", "daily")


def wanted(kind: Kind = "fixed", seed: int = 1) -> Wanted:
    return Wanted(kind=kind, rate=6.0, duration_s=5.0, input_tokens=200, output_tokens=20, pause_s=0.5, seed=seed)


def run(layout: Layout, traffic: Wanted, failures: tuple[Failure, ...] = (), costs: Costs = COSTS) -> Outcome:
    """It checks itself: `simulate` raises if a request did not end once or a block did not come back."""
    pool = {"num_blocks": min(layout.num_blocks, 512), "max_model_len": min(layout.max_model_len, 4096)}
    return simulate(msgspec.structs.replace(layout, **pool), costs, draw(traffic), failures=failures)


def test_one_request_takes_what_its_parts_take() -> None:
    """A prompt of one pass, its bytes, and a token a step: on an idle cluster nothing else."""
    costs = msgspec.structs.replace(COSTS, kv_bytes_per_token=1_000_000, num_layers=10)
    traffic = Wanted(rate=0.5, duration_s=1000.0, input_tokens=500, output_tokens=11, seed=3)
    outcome = simulate(Layout(), costs, [next(draw(traffic))])
    (answer,) = outcome.answers
    prefill_s, decode_s = costs.pass_s(500, 0), costs.pass_s(0, 1)
    assert answer.ttft_s == pytest.approx(costs.router_ms / 1000 + prefill_s)
    left_s = costs.transfer_s(500) - prefill_s  # the rest of the bytes moved while the prompt was computed
    assert left_s < answer.longest_s - decode_s < left_s + 4 * costs.latency_ms / 1000
    assert answer.last_at - answer.first_at == pytest.approx(answer.longest_s + 9 * decode_s)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_result(kind: Kind) -> None:
    layout = Layout(prefill=2, decode=2, local_prefill_tokens=16)
    first, again, other = (figures(run(layout, wanted(kind, seed)), TARGETS) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert first["requests"] == first["finished"] > 0
    assert (first["cache_hit_share"] > 0) == (kind in ("long-prefix", "conversation"))


@pytest.mark.parametrize("mode", ["write", "read"])
@pytest.mark.parametrize("policy", ["round_robin", "least_loaded", "prefix_aware"])
def test_no_request_is_lost_with_its_worker(mode: str, policy: str) -> None:
    layout = Layout(prefill=2, decode=2, restart_s=1.0, engine=CHECKED)
    layout = msgspec.convert(msgspec.to_builtins(layout) | {"mode": mode, "policy": policy}, Layout)
    failures = tuple(
        Failure(at_s=at_s, role=role) for at_s, role in ((1.003, Role.DECODE), (2.01, Role.PREFILL), (3.5, Role.DECODE))
    )
    outcome = run(layout, wanted("mixed"), failures)
    assert {answer.outcome for answer in outcome.answers} == {"finished"}
    for answer in outcome.answers:
        assert answer.num_tokens == answer.session.turns[answer.turn].output_tokens


@pytest.mark.parametrize("mode", ["write", "read"])
def test_routers_beside_each_other_lose_no_request_and_the_same_seed_gives_the_same_result(mode: Mode) -> None:
    """Each hears of its own requests only, and of all workers."""
    layout = Layout(prefill=2, decode=2, routers=3, mode=mode, restart_s=1.0, engine=CHECKED)
    failures = (Failure(at_s=1.003, role=Role.DECODE), Failure(at_s=2.01, role=Role.PREFILL))
    first, again = (figures(run(layout, wanted("mixed"), failures), TARGETS) for _ in range(2))
    alone = figures(run(msgspec.structs.replace(layout, routers=1), wanted("mixed"), failures), TARGETS)
    assert first == again
    assert first["finished"] == first["requests"] == alone["requests"]
    assert 0 < first["router_messages_per_s"] < alone["router_messages_per_s"]
    assert first["told_blocks_per_s"] > 0 < first["index_mib"]


@pytest.mark.parametrize("policy", ["least_loaded", "prefix_aware"])
def test_first_tokens_come_about_as_soon_with_several_routers_as_with_one(policy: PolicyName) -> None:
    """Though none knows in time what the others have sent to a worker. Prefill workers are busy two thirds of the time."""
    traffic = Wanted(rate=1200.0, duration_s=1.0, input_tokens=1000, output_tokens=2, seed=1)
    costs = msgspec.structs.replace(COSTS, gb_per_s=100.0)

    def waits(num_routers: int) -> list[float]:
        outcome = simulate(Layout(prefill=40, decode=20, routers=num_routers, policy=policy), costs, draw(traffic))
        return sorted(answer.ttft_s for answer in outcome.answers)

    alone, beside = waits(1), waits(4)
    assert sum(beside) < 1.1 * sum(alone)
    assert beside[len(beside) * 9 // 10] < 1.2 * alone[len(alone) * 9 // 10]


def test_a_router_learns_what_others_have_sent_to_its_workers() -> None:
    seen: list[int] = []

    def drive(cluster: SimulatedCluster) -> None:
        for tenth in range(10, 40):
            cluster.loop.at(tenth / 10, look, cluster)

    def look(cluster: SimulatedCluster) -> None:
        seen.extend(worker["running"] - worker["in_flight"] for worker in cluster.routers[0].cluster()["workers"])

    simulate(Layout(routers=2), COSTS, draw(wanted()), drive=drive)
    assert max(seen) > 0


def test_requests_without_a_worker_fail_and_none_is_forgotten() -> None:
    failures = (Failure(at_s=2.0, role=Role.DECODE, comes_back=False),)
    outcome = run(Layout(), wanted(), failures)
    found = figures(outcome, TARGETS)
    assert found["failed"] > 0
    assert found["finished"] + found["failed"] + found["refused"] == found["requests"]


def test_a_small_pool_preempts_and_sets_aside_and_still_answers_all() -> None:
    layout = Layout(num_blocks=64, max_model_len=512, engine=CHECKED)
    traffic = Wanted(rate=200.0, duration_s=0.5, input_tokens=300, output_tokens=60, seed=5)
    found = figures(run(layout, traffic), TARGETS)
    assert found["finished"] + found["refused"] == found["requests"]
    assert found["finished"] > 0


@pytest.mark.parametrize(("kv_read_ms", "tolerance"), [(0.0, 1e-3), (2.0, 0.03)])
def test_steps_taken_together_change_nothing(kv_read_ms: float, tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """If each takes longer than the one before, they are only taken together while that hardly shows."""
    layout = Layout(prefill=2, decode=2)
    failures = (Failure(at_s=2.0, role=Role.DECODE),)
    costs = msgspec.structs.replace(COSTS, kv_read_ms_per_1000_tokens=kv_read_ms)
    together = figures(run(layout, wanted("mixed"), failures, costs), TARGETS)
    monkeypatch.setattr(simulated_worker, "possible_steps", lambda core: 0)
    one_by_one = figures(run(layout, wanted("mixed"), failures, costs), TARGETS)
    assert together == pytest.approx(one_by_one, rel=tolerance)


def test_whole_workers_stall_their_streams_and_disaggregation_does_not() -> None:
    """The shape that the product is about, without a measured second."""
    traffic = Wanted(rate=12.0, duration_s=5.0, input_tokens=4000, output_tokens=100, seed=2)
    whole, split = (
        figures(simulate(layout, H200_8B, draw(traffic)), TARGETS)
        for layout in (Layout(prefill=0, decode=0, whole=2), Layout(prefill=1, decode=1))
    )
    assert split["longest_gap_ms_p90"] < whole["longest_gap_ms_p90"]


def test_a_worker_changes_its_role_when_the_router_says_so() -> None:
    """Which is how a policy that moves workers is tried: it is given the cluster, with its real router."""
    clusters: list[SimulatedCluster] = []

    def drive(cluster: SimulatedCluster) -> None:
        clusters.append(cluster)
        cluster.loop.at(2.0, change_role)

    def change_role() -> None:
        workers = clusters[0].routers[0].cluster()["workers"]
        moved = next(worker["id"] for worker in workers if worker["role"] == "prefill")
        assert clusters[0].routers[0].drain(moved, Role.DECODE).next_role is Role.DECODE

    layout = Layout(prefill=3, decode=1, restart_s=1.0, num_blocks=512, max_model_len=4096, engine=CHECKED)
    outcome = simulate(layout, COSTS, draw(wanted()), drive=drive)
    assert {answer.outcome for answer in outcome.answers} == {"finished"}
    roles = [worker.record.role for worker in clusters[0].workers.values()]
    assert (roles.count(Role.PREFILL), roles.count(Role.DECODE)) == (2, 2)
    assert all(worker.busy_s > 0 for worker in clusters[0].workers.values())


@pytest.mark.parametrize("num_routers", [1, 2])
def test_over_a_day_workers_follow_the_load_and_no_request_is_lost_with_those_that_fail(num_routers: int) -> None:
    """At noon one prefill worker is not enough, and of three decode workers one can be spared. Of two routers, one decides."""
    costs = msgspec.structs.replace(COSTS, prefill=line(1.0, 0.5))  # a prompt takes 101 ms
    traffic = Wanted(kind="daily", rate=14.0, duration_s=150.0, input_tokens=200, output_tokens=4, seed=4)
    failures = (Failure(at_s=50.0, role=Role.DECODE), Failure(at_s=120.0, role=Role.PREFILL))
    layout = Layout(prefill=1, decode=3, restart_s=4.0, routers=num_routers)
    fixed, moved = (
        figures(run(msgspec.structs.replace(layout, rebalance=rules), traffic, failures, costs), TARGETS)
        for rules in (None, Rules(patience_s=5.0, pause_s=15.0))
    )
    assert (fixed["role_changes"], moved["role_changes"] > 0) == (0, True)
    assert moved["requests"] == moved["finished"]
    assert moved["good_share"] > fixed["good_share"]


def test_workers_of_one_host_share_its_cores() -> None:
    """Of two prompts at once on one core, the one that begins second takes twice its time; so do steps beside others."""
    traffic = Wanted(kind="bursty", rate=4.0, duration_s=4.0, input_tokens=1000, output_tokens=40, seed=1)
    layout = Layout(prefill=2, decode=2)
    apart, ample, scarce = (figures(run(msgspec.structs.replace(layout, cores=cores), traffic), TARGETS) for cores in (0, 4, 1))
    assert ample == pytest.approx(apart, rel=1e-3)
    assert scarce["ttft_ms_p90"] > 1.5 * ample["ttft_ms_p90"]
    assert scarce["itl_ms_p50"] > 1.5 * ample["itl_ms_p50"]


def test_a_pass_is_slowed_by_those_that_begin_after_it_and_only_while_they_run() -> None:
    """Alone it takes a second; for half a second another one ran beside it, and both got on at half their speed."""
    loop, ends = VirtualLoop(), dict[str, float]()
    host = Host(loop, lambda has_prompts, state: float(sum(state)))
    begun: dict[str, Pass] = {}

    def begin(name: str, seconds: float) -> None:
        begun[name] = host.begin(seconds, lambda when: ends.__setitem__(name, when), has_prompts=False)

    def end(name: str) -> None:
        if loop.now == ends[name]:
            host.end(begun.pop(name))

    loop.at(0.0, begin, "long", 1.0)
    loop.at(0.5, begin, "short", 0.25)
    loop.at(1.0, end, "short")
    loop.run(lambda: False)
    assert ends == {"long": pytest.approx(1.25), "short": pytest.approx(1.0)}


def test_steps_that_vary_are_the_same_with_the_same_seed() -> None:
    costs = msgspec.structs.replace(COSTS, jitter={ALONE: (0.5, 1.0, 3.0)}, hand_over_ms=HandOvers((0.0, 40.0)))
    first, again, even = (figures(run(Layout(), wanted(), costs=each), TARGETS) for each in (costs, costs, COSTS))
    assert first == again
    assert first["itl_ms_p99"] > 2 * even["itl_ms_p99"]
    assert first["longest_gap_ms_p90"] > 40.0


def test_kv_does_not_wait_for_the_end_that_its_pass_was_foretold() -> None:
    """A long prompt begins beside a short stream, at a tenth of its speed, and ends soon after that has ended."""
    sharing = {"prefill_sharing": {(1, 0): 1.0, (1, 1): 10.0}, "decode_sharing": {(0, 1): 1.0}}
    costs = msgspec.structs.replace(COSTS, prefill=line(0.0, 1.0), **sharing)
    stream = Session(at_s=0.0, number=0, turns=(Turn(prompt_tokens=100, output_tokens=20),))
    prompt = Session(at_s=0.15, number=1, turns=(Turn(prompt_tokens=1000, output_tokens=2),))
    outcome = simulate(Layout(local_prefill_tokens=0), costs, [stream, prompt])
    answer = outcome.answers[1]
    assert 1.0 < answer.ttft_s < 1.2
    assert answer.longest_s < 0.02


def test_passes_are_slowed_by_what_was_measured_beside_those_under_way() -> None:
    """By a table of states; a state that was not measured is as the one most like it."""
    prompts, steps = {(1, 0): 1.0, (1, 1): 1.5, (2, 2): 4.0}, {(0, 1): 1.0, (1, 1): 3.0, (0, 2): 0.9}
    slower = sharing_of(msgspec.structs.replace(COSTS, prefill_sharing=prompts, decode_sharing=steps), cores=0)
    assert slower is not None
    assert [slower(True, state) for state in ((1, 0), (1, 1), (2, 2), (2, 3))] == [1.0, 1.5, 4.0, 4.0]
    assert [slower(False, state) for state in ((0, 1), (1, 1), (0, 2))] == [1.0, 3.0, 1.0]
    assert sharing_of(COSTS, cores=0) is None


def test_blocks_come_back_also_if_the_word_of_it_is_later_than_the_answer() -> None:
    """The prefill worker hears 100 ms after the hand-over that it may have its blocks again."""
    costs = msgspec.structs.replace(COSTS, latency_ms=100.0, hand_over_ms=HandOvers((0.0,)))
    prompt = Session(at_s=0.0, number=0, turns=(Turn(prompt_tokens=100, output_tokens=2),))
    (answer,) = simulate(Layout(local_prefill_tokens=0), costs, [prompt]).answers
    assert answer.outcome == "finished"


def test_steps_and_hand_overs_vary_as_those_beside_such_passes_did() -> None:
    """Steps beside a prompt take ten times as long, and hand-overs to a worker that has a step under way 50 ms."""
    sharing = {"prefill_sharing": {(1, 0): 1.0}, "decode_sharing": {ALONE: 1.0}}
    even = msgspec.structs.replace(COSTS, prefill=line(0.0, 1.0), **sharing)
    uneven = msgspec.structs.replace(even, jitter={ALONE: (1.0,), (1, 1): (10.0,)}, hand_over_ms=HandOvers((0.0,), (50.0,)))
    stream = Session(at_s=0.0, number=0, turns=(Turn(prompt_tokens=10, output_tokens=100),))
    prompt = Session(at_s=0.1, number=1, turns=(Turn(prompt_tokens=100, output_tokens=2),))
    alone, beside = (simulate(Layout(local_prefill_tokens=0), uneven, each).answers for each in ([stream], [stream, prompt]))
    assert alone[0].longest_s < 0.01
    assert beside[0].longest_s == pytest.approx(10 * even.pass_s(0, 1))
    assert 0.05 < beside[1].longest_s < 0.06


def test_a_day_is_busiest_at_noon() -> None:
    times = [session.at_s for session in draw(Wanted(kind="daily", rate=20.0, duration_s=100.0))]
    morning, noon, night = (sum(begin <= at < begin + 20 for at in times) for begin in (0, 40, 80))
    assert noon > 2 * morning
    assert noon > 2 * night
