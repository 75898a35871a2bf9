"""One contract for every runner: what an engine may rely on, whoever computes."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from free_sequences import FreeSequence, last, plan, whole
from tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, tiny_model

from kvrelay.checkpoint.spec import read_spec
from kvrelay.engine.fence import Fence
from kvrelay.engine.interfaces import Row, RowResult, Runner, StepPlan
from kvrelay.kernels.base import Kernels
from kvrelay.kernels.fp8 import FP8
from kvrelay.kernels.torch_kernels import TorchKernels
from kvrelay.progress import Silent
from kvrelay.runner.fake import FakeRunner
from kvrelay.runner.host_pool import make_host_pool
from kvrelay.runner.kv_pool import KVPool
from kvrelay.runner.loader import load_model
from kvrelay.runner.runner import Model, TorchRunner
from kvrelay.sampling import SamplingParams

BLOCK_SIZE = 4
NUM_BLOCKS = 40
NUM_HOST_BLOCKS = 12
CPU = torch.device("cpu")
TORCH = TorchKernels()
GREEDY = SamplingParams(temperature=0.0)


@functools.cache
def tiny_llama(device: torch.device, kernels: Kernels) -> Model:
    folder = pathlib.Path(tiny_model("llama"))
    return load_model(
        folder, read_spec(folder), kernels=kernels, device=device, dtype=torch.float32, load="auto", progress=Silent()
    )


def make_torch_runner(
    device: torch.device = CPU,
    graph_sizes: Sequence[int] = (),
    prompt_sizes: Sequence[int] = (),
    kernels: Kernels = TORCH,
    kv_dtype: torch.dtype = torch.float32,
) -> TorchRunner:
    folder = pathlib.Path(tiny_model("llama"))
    spec = read_spec(folder)
    num_blocks = NUM_BLOCKS + bool(graph_sizes)
    pool = KVPool(spec, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=kv_dtype, device=device)
    return TorchRunner(
        tiny_llama(device, kernels),
        pool,
        spec,
        block_size=BLOCK_SIZE,
        max_batch=8,
        token_budget=32,
        max_model_len=NUM_BLOCKS * BLOCK_SIZE,
        fingerprint="tiny",
        folder=folder,
        host_pool=make_host_pool(pool, NUM_HOST_BLOCKS),
        graph_sizes=graph_sizes,
        prompt_sizes=prompt_sizes,
    )


def make_replaying_runner() -> TorchRunner:
    """Decode steps and short prompts by the code that graphs are captured from."""
    return make_torch_runner(graph_sizes=[1, 2, 4, 8], prompt_sizes=[4, 16])


def make_fp8_runner() -> TorchRunner:
    """KV in fp8, the rest in float32."""
    return make_torch_runner(graph_sizes=[1, 2, 4, 8], prompt_sizes=[4, 16], kv_dtype=FP8)


def make_cuda_runner(graph_sizes: Sequence[int] = ()) -> TorchRunner:
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA card")
    return make_torch_runner(torch.device("cuda"), graph_sizes)


def make_cuda_graph_runner() -> TorchRunner:
    return make_cuda_runner([1, 2, 4, 8])


def make_triton_runner() -> TorchRunner:
    """Prompts, too, by graphs: PyTorch's kernels for them cannot be captured."""
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA card")
    from kvrelay.kernels.cuda.kernels import CudaKernels

    return make_torch_runner(torch.device("cuda"), [1, 2, 4, 8], [4, 16], CudaKernels())


def make_fake_runner() -> Runner:
    return FakeRunner(
        num_blocks=NUM_BLOCKS,
        vocab_size=VOCAB_SIZE,
        block_size=BLOCK_SIZE,
        eos_token_ids=[EOS_TOKEN_ID],
        eos_one_in=4,
        num_host_blocks=NUM_HOST_BLOCKS,
        copy_delay=lambda: 3,
        runs_ahead=True,
    )


@pytest.fixture(
    params=[
        pytest.param(make_torch_runner, id="torch"),
        pytest.param(make_fake_runner, id="fake"),
        pytest.param(make_replaying_runner, id="replaying"),
        pytest.param(make_fp8_runner, id="kv-fp8"),
        pytest.param(make_cuda_runner, id="cuda", marks=pytest.mark.cuda),
        pytest.param(make_cuda_graph_runner, id="cuda-graphs", marks=pytest.mark.cuda),
        pytest.param(make_triton_runner, id="triton-graphs", marks=pytest.mark.cuda),
    ]
)
def make_runner(request: pytest.FixtureRequest) -> Callable[[], Runner]:
    maker: Callable[[], Runner] = request.param
    return maker


@pytest.fixture
def runner(make_runner: Callable[[], Runner]) -> Iterator[Runner]:
    runner = make_runner()
    yield runner
    runner.close()


def run(runner: Runner, step: StepPlan) -> list[RowResult]:
    runner.launch(step)
    rows = runner.collect().rows
    assert len(rows) == len(step.rows)
    return rows


def prompt(length: int, seed: int = 1) -> list[int]:
    return [(seed * 7919 + position * 104729) % (VOCAB_SIZE - 3) + 3 for position in range(length)]


def generate(runner: Runner, sequence: FreeSequence, count: int) -> list[int]:
    """The next `count` tokens; the sequence's table must have room."""
    for step in range(count):
        (result,) = run(runner, plan(whole(sequence) if step == 0 else last(sequence)))
        sequence.tokens += result.tokens
    return sequence.tokens[-count:]


def test_blocks_are_counted(runner: Runner) -> None:
    assert runner.num_blocks == NUM_BLOCKS


def test_a_row_that_samples_gives_one_token_and_one_that_does_not_gives_none(runner: Runner) -> None:
    first = FreeSequence(tokens=prompt(6), block_table=[3, 4])
    second = FreeSequence(tokens=prompt(6, 2), block_table=[5, 6])
    sampled, silent = run(runner, plan(whole(first), Row(second, 0, 3, 0)))
    assert len(sampled.tokens) == 1
    assert 0 <= sampled.tokens[0] < VOCAB_SIZE
    assert silent == RowResult(tokens=[])


def test_a_plan_of_silent_rows_or_of_none_is_answered(runner: Runner) -> None:
    sequence = FreeSequence(tokens=prompt(6), block_table=[3, 4])
    assert run(runner, plan(Row(sequence, 0, 3, 0))) == [RowResult(tokens=[])]
    assert run(runner, plan(released=[sequence.key, 12345])) == []


def test_chunks_blocks_and_neighbours_do_not_change_tokens(make_runner: Callable[[], Runner]) -> None:
    alone = generate(make_runner(), FreeSequence(tokens=prompt(11), block_table=[0, 1, 2, 3, 4]), 6)
    runner = make_runner()
    sequence = FreeSequence(tokens=prompt(11), block_table=[17, 5, 30, 2, 9])
    other = FreeSequence(tokens=prompt(5, 3), block_table=[8, 7, 6, 4])
    run(runner, plan(Row(sequence, 0, 3, 0), whole(other)))
    run(runner, plan(Row(sequence, 3, 1, 0)))
    (result, _) = run(runner, plan(Row(sequence, 4, 7, 1), Row(other, 0, 2, 0)))
    sequence.tokens += result.tokens
    for _ in range(5):
        (_, result) = run(runner, plan(whole(other), last(sequence)))
        sequence.tokens += result.tokens
    assert sequence.tokens[-6:] == alone


def test_two_plans_may_be_under_way_and_are_collected_in_order(make_runner: Callable[[], Runner]) -> None:
    sequences = [FreeSequence(tokens=prompt(5, seed), block_table=[2 * seed, 2 * seed + 1]) for seed in (1, 2)]
    expected = [run(make_runner(), plan(whole(sequence)))[0].tokens for sequence in sequences]
    runner = make_runner()
    for sequence in sequences:
        runner.launch(plan(whole(sequence)))
    assert [runner.collect().rows[0].tokens for _ in sequences] == expected
    for sequence in sequences:
        runner.launch(plan(whole(sequence)))
    with pytest.raises(AssertionError):
        runner.launch(plan())


def test_what_was_launched_does_not_follow_the_sequence(make_runner: Callable[[], Runner]) -> None:
    params = SamplingParams(temperature=1.0, seed=5, logprobs=2, frequency_penalty=0.5)
    make = lambda: FreeSequence(tokens=prompt(7), num_prompt_tokens=5, block_table=[1, 2], params=params)  # noqa: E731
    (expected,) = run(make_runner(), plan(whole(make())))
    runner, sequence = make_runner(), make()
    runner.launch(plan(whole(sequence)))
    runner.launch(plan(released=[sequence.key]))
    sequence.tokens += [9, 9, 9]
    sequence.block_table.clear()
    assert runner.collect().rows == [expected]


def test_a_prefix_computed_by_another_sequence_is_used(make_runner: Callable[[], Runner]) -> None:
    expected = generate(make_runner(), FreeSequence(tokens=prompt(10), block_table=[1, 2, 3, 4]), 1)
    runner = make_runner()
    run(runner, plan(whole(FreeSequence(tokens=prompt(10)[:9], block_table=[1, 2, 3]))))
    second = FreeSequence(tokens=prompt(10), block_table=[1, 2, 9])
    (result,) = run(runner, plan(Row(second, 8, 2, 1)))
    assert result.tokens == expected


def test_copies_come_first_and_in_order(make_runner: Callable[[], Runner]) -> None:
    """A fork's partial block is copied, and the copy is copied on: each goes on with its own token."""
    tokens = prompt(10)
    futures = []
    for extra in (4, 5, 6):
        sequence = FreeSequence(tokens=[*tokens, extra], block_table=[1, 2, 3])
        futures.append(run(make_runner(), plan(whole(sequence)))[0].tokens)
    runner = make_runner()
    run(runner, plan(whole(FreeSequence(tokens=tokens, block_table=[1, 2, 3]))))
    forks = [FreeSequence(tokens=[*tokens, extra], block_table=[1, 2, block]) for extra, block in ((4, 3), (5, 20), (6, 21))]
    results = run(runner, plan(*(last(fork) for fork in forks), copies=[(3, 20), (20, 21)]))
    assert [result.tokens for result in results] == futures


def test_greedy_samples_are_alike_and_drawn_ones_are_not(runner: Runner) -> None:
    greedy = FreeSequence(tokens=prompt(6), block_table=[1, 2])
    drawn = FreeSequence(tokens=prompt(6), block_table=[3, 4], params=SamplingParams(temperature=2.0, seed=9))
    same, different = run(runner, plan(whole(greedy, samples=8), whole(drawn, samples=8)))
    assert len(same.tokens) == len(different.tokens) == 8
    assert len(set(same.tokens)) == 1
    assert len(set(different.tokens)) > 1


def test_sample_i_of_a_row_is_what_a_sequence_with_that_sample_draws(make_runner: Callable[[], Runner]) -> None:
    params = SamplingParams(temperature=1.5, seed=-3)
    sequence = FreeSequence(tokens=prompt(6), block_table=[1, 2], params=params)
    (together,) = run(make_runner(), plan(whole(sequence, samples=5)))
    for sample in range(5):
        alone = FreeSequence(tokens=prompt(6), block_table=[1, 2], params=params, sample=sample)
        assert run(make_runner(), plan(whole(alone)))[0].tokens == [together.tokens[sample]]


def test_drawn_tokens_do_not_depend_on_the_batch_and_follow_the_seed(make_runner: Callable[[], Runner]) -> None:
    def draw(seed: int, neighbours: int) -> list[int]:
        runner = make_runner()
        params = SamplingParams(temperature=1.2, seed=seed, top_p=0.95)
        sequence = FreeSequence(tokens=prompt(5), block_table=[0, 1, 2], params=params)
        others = [FreeSequence(tokens=prompt(3, n), block_table=[10 + n], params=params) for n in range(neighbours)]
        tokens = []
        for step in range(6):
            results = run(runner, plan(*(whole(other) for other in others), whole(sequence) if step == 0 else last(sequence)))
            tokens += results[-1].tokens
            sequence.tokens += results[-1].tokens
        return tokens

    assert draw(1, 0) == draw(1, 3)
    assert len({tuple(draw(seed, 0)) for seed in range(4)}) > 1


def test_output_computed_elsewhere_is_gone_on_with(make_runner: Callable[[], Runner]) -> None:
    params = SamplingParams(temperature=1.0, seed=4)
    sequence = FreeSequence(tokens=prompt(5), block_table=[0, 1, 2, 3], params=params)
    tokens = generate(make_runner(), sequence, 8)
    moved = FreeSequence(tokens=prompt(5) + tokens[:4], num_prompt_tokens=5, block_table=[5, 6, 7, 8], params=params)
    assert generate(make_runner(), moved, 4) == tokens[4:]


def test_min_tokens_keeps_the_end_away(runner: Runner) -> None:
    ends = {EOS_TOKEN_ID, *range(100, 300)}
    params = SamplingParams(temperature=2.0, seed=1, min_tokens=20, max_tokens=40, stop_token_ids=sorted(ends - {EOS_TOKEN_ID}))
    tokens = generate(runner, FreeSequence(tokens=prompt(4), block_table=list(range(10)), params=params), 20)
    assert not ends & set(tokens)


@pytest.mark.parametrize("number", [0, 1, 5])
def test_logprobs_come_when_asked_for(runner: Runner, number: int) -> None:
    asking = FreeSequence(tokens=prompt(6), block_table=[1, 2], params=SamplingParams(temperature=1.0, logprobs=number))
    plain = FreeSequence(tokens=prompt(6), block_table=[3, 4], params=SamplingParams(temperature=1.0))
    told, silent = run(runner, plan(whole(asking, samples=3), whole(plain)))
    assert silent.logprobs is None
    assert told.logprobs is not None
    assert len(told.logprobs) == 3
    for entry in told.logprobs:
        assert entry.logprob < 0.0
        assert len(entry.top) == number
        values = [value for _, value in entry.top]
        assert values == sorted(values, reverse=True)
        assert all(0 <= token < VOCAB_SIZE for token, _ in entry.top)


@pytest.mark.parametrize("chunks", [[9], [4, 5], [1, 7, 1], [8, 1]])
def test_prompt_logprobs_cover_every_token_but_the_first_whatever_the_chunks(
    make_runner: Callable[[], Runner], chunks: list[int]
) -> None:
    def collect(chunks: list[int]) -> list[tuple[float, list[int]]]:
        runner, start, found = make_runner(), 0, []
        params = SamplingParams(temperature=0.0, prompt_logprobs=2)
        sequence = FreeSequence(tokens=prompt(9), block_table=[1, 2, 3], params=params)
        for count in chunks:
            samples = int(start + count == 9)
            (result,) = run(runner, plan(Row(sequence, start, count, samples, prompt_logprobs=True)))
            assert len(result.tokens) == samples
            found += result.prompt_logprobs or []
            start += count
        return [(round(entry.logprob, 4), [token for token, _ in entry.top]) for entry in found]

    found = collect(chunks)
    assert len(found) == 8
    assert found == collect([9])


def ended(runner: Runner, *tickets: int) -> None:
    """Waits until exactly these copies have ended."""
    waited: list[int] = []
    for _ in range(10_000):
        waited += runner.finished_copies(0.01)
        if len(waited) >= len(tickets):
            break
    assert sorted(waited) == sorted(tickets)
    assert runner.finished_copies() == []


def test_host_blocks_are_counted_and_no_copy_ends_that_did_not_begin(runner: Runner) -> None:
    assert runner.num_host_blocks == NUM_HOST_BLOCKS
    assert runner.finished_copies() == []


def test_kv_goes_to_the_host_and_comes_back_to_other_blocks(make_runner: Callable[[], Runner]) -> None:
    expected = generate(make_runner(), FreeSequence(tokens=prompt(11), block_table=[0, 1, 2, 3]), 3)
    runner = make_runner()
    sequence = FreeSequence(tokens=prompt(11), block_table=[5, 30, 2])
    (result,) = run(runner, plan(whole(sequence)))
    sequence.tokens += result.tokens
    ended(runner, runner.begin_copies([(5, 7), (30, 1), (2, 11)], []))
    for block in (5, 30, 2):  # somebody else has them now
        run(runner, plan(whole(FreeSequence(tokens=prompt(4, 9), block_table=[block]))))
    ended(runner, runner.begin_copies([], [(7, 12), (1, 13), (11, 4)]))
    sequence.block_table = [12, 13, 4]
    for _ in range(2):
        (result,) = run(runner, plan(last(sequence)))
        sequence.tokens += result.tokens
        sequence.block_table = [12, 13, 4, 20]
    assert sequence.tokens[-3:] == expected
    runner.close()


def test_copies_run_beside_a_step_and_each_ticket_is_told_once(runner: Runner) -> None:
    sequence = FreeSequence(tokens=prompt(8), block_table=[1, 2])
    run(runner, plan(whole(sequence)))
    tickets = [runner.begin_copies([(1, 0)], []), runner.begin_copies([(2, 1)], [(0, 9)]), runner.begin_copies([], [(1, 10)])]
    assert len(set(tickets)) == 3
    run(runner, plan(whole(FreeSequence(tokens=prompt(6, 5), block_table=[20, 21]))))
    ended(runner, *tickets)
    moved = FreeSequence(tokens=[*sequence.tokens, 5], block_table=[9, 10, 30])
    stayed = FreeSequence(tokens=[*sequence.tokens, 5], block_table=[1, 2, 31])
    results = run(runner, plan(last(moved), last(stayed)))
    assert results[0].tokens == results[1].tokens


def test_layers_are_told_in_order_with_fences_that_pass(runner: Runner) -> None:
    told: list[tuple[int, Fence]] = []
    runner.on_layer(lambda layer, fence: told.append((layer, fence)))
    assert not runner.runs_ahead
    sequence = FreeSequence(tokens=prompt(4), block_table=[0])
    runner.launch(StepPlan(rows=[Row(sequence, 0, 3, 0)]))  # no token comes of it: it may be collected while it runs
    runner.collect()
    behind = runner.fence()
    runner.launch(StepPlan(rows=[Row(sequence, 3, 1, 1)]))
    runner.collect()
    layers = [layer for layer, _ in told]
    once = layers[: len(told) // 2]
    assert layers == once * 2
    assert once == sorted(set(once))
    run(runner, plan(whole(FreeSequence(tokens=prompt(6, 5), block_table=[1, 2]))))
    replayed = [layer for layer, _ in told[len(layers) :]]
    assert replayed in (once, once[-1:]), "the layers one by one, or all at once"
    assert behind.passed()  # a token is here that was computed later
    assert all(fence.passed() for _, fence in told)


def test_a_sequence_that_was_expected_runs_as_any_other_and_can_be_released_before(make_runner: Callable[[], Runner]) -> None:
    tokens = prompt(8)
    expected = generate(make_runner(), FreeSequence(tokens=list(tokens), block_table=[1, 2, 3]), 2)
    runner = make_runner()
    assert isinstance(runner, TorchRunner | FakeRunner)
    computed = FreeSequence(tokens=list(tokens), block_table=[1, 2])
    run(runner, plan(Row(computed, 0, 7, 0)))
    taken_over, given_up = (FreeSequence(tokens=list(tokens), block_table=list(blocks)) for blocks in ([1, 2], [5, 6]))
    runner.expect([taken_over, given_up])
    taken_over.block_table.append(3)  # its second token is stored there
    run(runner, plan(released=[given_up.key, computed.key]))
    for token in expected:
        (result,) = run(runner, plan(last(taken_over)))
        assert result.tokens == [token]
        taken_over.tokens.append(token)
    run(runner, plan(released=[taken_over.key]))
    assert runner.num_known_sequences == 0
    runner.close()


def test_closing_drops_what_is_under_way(runner: Runner) -> None:
    runner.launch(plan(whole(FreeSequence(tokens=prompt(3), block_table=[0]))))
    runner.close()
    with pytest.raises(AssertionError):
        runner.collect()


def candidates(sequence: FreeSequence, count: int, *, whole_prompt: bool = True) -> Row:
    start = 0 if whole_prompt else len(sequence.tokens) - 1
    return Row(sequence, start, len(sequence.tokens) - start, 0, candidates=count)


def test_candidates_are_the_likeliest_tokens_in_falling_order(runner: Runner) -> None:
    sequence = FreeSequence(tokens=prompt(9), block_table=[3, 4, 5])
    other = FreeSequence(tokens=prompt(6, 2), block_table=[6, 7])
    third = FreeSequence(tokens=prompt(4, 3), block_table=[8])
    many, few, plain = run(runner, plan(candidates(sequence, 12), candidates(other, 3), whole(third)))
    assert (many.tokens, few.tokens, many.logprobs) == ([], [], None)
    assert many.candidates is not None
    assert few.candidates is not None
    assert plain.candidates is None
    assert len(plain.tokens) == 1
    assert (len(many.candidates), len(few.candidates)) == (12, 3)
    for found in (many.candidates, few.candidates):
        assert len({token for token, _ in found}) == len(found)
        assert [logprob for _, logprob in found] == sorted((logprob for _, logprob in found), reverse=True)
        assert all(0 <= token < VOCAB_SIZE and logprob < 0.0 for token, logprob in found)
    (again,) = run(runner, plan(candidates(sequence, 12, whole_prompt=False)))
    assert again.candidates is not None
    assert [token for token, _ in again.candidates] == [token for token, _ in many.candidates]


def test_no_more_candidates_than_there_are_tokens(runner: Runner) -> None:
    sequence = FreeSequence(tokens=prompt(5), block_table=[3, 4])
    (result,) = run(runner, plan(candidates(sequence, VOCAB_SIZE + 7)))
    assert result.candidates is not None
    assert sorted(token for token, _ in result.candidates) == list(range(VOCAB_SIZE))


def ahead(sequence: FreeSequence) -> Row:
    """The token that the plan launched before will choose."""
    return Row(sequence, len(sequence.tokens), 1, 1)


SAMPLED = [
    GREEDY,
    SamplingParams(temperature=0.8, seed=5),
    SamplingParams(temperature=0.8, seed=6, top_p=0.9, top_k=20),
    SamplingParams(temperature=0.9, seed=7, min_p=0.02, logprobs=2),
]


@pytest.mark.parametrize("others", [[], [0], [1, 3], [2, 2, 0, 1]])
@pytest.mark.parametrize("params", range(len(SAMPLED)))
def test_steps_launched_ahead_give_the_tokens_of_steps_that_are_not(
    make_runner: Callable[[], Runner], params: int, others: list[int]
) -> None:
    def sequences() -> list[FreeSequence]:
        return [
            FreeSequence(
                tokens=prompt(5, 30 + index), block_table=[4 * index, 4 * index + 1, 4 * index + 2], params=SAMPLED[one]
            )
            for index, one in enumerate([params, *others])
        ]

    runner, plain = make_runner(), sequences()
    for step in range(6):
        for one, result in zip(plain, run(runner, plan(*map(whole if step == 0 else last, plain))), strict=True):
            one.tokens += result.tokens
    runner.close()
    runner = make_runner()
    if not runner.runs_ahead:
        pytest.skip("this runner does not run ahead")
    early = sequences()
    runner.launch(plan(*map(whole, early)))
    for step in range(6):
        if step < 5:
            runner.launch(plan(*map(ahead, early)))
        for one, result in zip(early, runner.collect().rows, strict=True):
            one.tokens += result.tokens
    assert [one.tokens for one in early] == [one.tokens for one in plain]
    runner.close()


def test_a_step_launched_ahead_may_leave_out_and_reorder_sequences(make_runner: Callable[[], Runner]) -> None:
    runner = make_runner()
    if not runner.runs_ahead:
        pytest.skip("this runner does not run ahead")
    kept = [FreeSequence(tokens=prompt(6, seed), block_table=[3 * seed, 3 * seed + 1]) for seed in (1, 2, 3)]
    alone = [FreeSequence(tokens=prompt(6, seed), block_table=[3 * seed, 3 * seed + 1]) for seed in (1, 2, 3)]
    expected = [generate(runner, one, 2) for one in alone]
    newcomer = FreeSequence(tokens=[*prompt(6, 1), 7], block_table=[20, 21])
    runner.launch(plan(*map(whole, kept)))
    runner.launch(plan(ahead(kept[2]), ahead(kept[0])))
    first = runner.collect().rows
    second = runner.collect().rows
    assert [first[0].tokens + second[1].tokens, first[2].tokens + second[0].tokens] == [expected[0], expected[2]]
    assert len(run(runner, plan(whole(newcomer)))[0].tokens) == 1
    runner.close()


def test_prompts_may_be_part_of_a_step_launched_ahead(make_runner: Callable[[], Runner]) -> None:
    """Beside sequences whose tokens the host does not know yet; a chunk is launched behind the one before it."""
    runner = make_runner()
    if not runner.runs_ahead:
        pytest.skip("this runner does not run ahead")

    def sequences() -> tuple[FreeSequence, FreeSequence, FreeSequence]:
        params = SAMPLED[1]
        one, other = (FreeSequence(tokens=prompt(6, seed), block_table=[3 * seed, 3 * seed + 1]) for seed in (1, 2))
        return one, other, FreeSequence(tokens=prompt(11, 4), block_table=[12, 13, 14, 15], params=params)

    expected = [generate(runner, sequence, 3 - index) for index, sequence in enumerate(sequences())]
    runner.close()
    runner = make_runner()
    one, other, late = sequences()
    runner.launch(plan(whole(one)))
    runner.launch(plan(ahead(one), whole(other), Row(late, 0, 5, 0)))
    one.tokens += runner.collect().rows[0].tokens
    runner.launch(plan(ahead(one), Row(late, 5, 6, 1), ahead(other)))
    for sequence, result in zip((one, other, late), runner.collect().rows, strict=True):
        sequence.tokens += result.tokens
    for sequence, result in zip((one, late, other), runner.collect().rows, strict=True):
        sequence.tokens += result.tokens
    assert [
        sequence.tokens[len(fresh.tokens) :] for sequence, fresh in zip((one, other, late), sequences(), strict=True)
    ] == expected
    runner.close()
