"""Images go through encode workers: the same tokens as one worker makes and as transformers makes; nothing twice or lost."""

from __future__ import annotations

import asyncio
import contextlib
from random import Random

import msgspec
import pytest
from cluster import Answer, collect
from image_cluster import Shape, ask, images
from vision_models import Kind, Prompt, make_prompt, reference_output

from kvrelay.errors import InvalidRequestError, UnavailableError
from kvrelay.router.backend import GenerateRequest
from kvrelay.sampling import SamplingParams
from kvrelay.states import Role

TWO = [(70, 50), (40, 90)]


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_5_vl", pytest.param("qwen2_vl", marks=pytest.mark.long)])
async def test_three_workers_say_what_one_says_and_what_transformers_says(kind: Kind) -> None:
    prompts = [make_prompt(kind, TWO, "What differs?"), make_prompt(kind, [(50, 50)], "What is it?", seed=7)]
    expected = [reference_output(kind, prompt, 6)[0] for prompt in prompts]
    async with images(Shape(encode=1, prefill=1, decode=1, kind=kind, engine={"token_budget": 16})) as cluster:
        said = [answer.tokens[0] for answer in await cluster.answers([ask(prompt) for prompt in prompts])]
        assert said == expected
        assert cluster.encode.images.encoded == 3
        assert cluster.prefill.images.relayed == 3
        assert cluster.decode.engine.load().prompt_tokens == 0
    async with images(Shape(whole=1, kind=kind)) as cluster:
        assert [await cluster.answer(ask(prompt)) for prompt in prompts] == expected
        assert cluster.whole.images.encoded == 3


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_5_vl"])
async def test_ranks_that_compute_prompts_with_images_say_what_transformers_says(kind: Kind) -> None:
    """Rank 0 has the embeddings, whether an encode worker made them or its own tower; the others get them with the pass."""
    prompts = [make_prompt(kind, TWO, "What differs?"), make_prompt(kind, [(50, 50)], "What is it?", seed=7)]
    expected = [reference_output(kind, prompt, 6)[0] for prompt in prompts]
    shape = Shape(encode=1, prefill=1, decode=1, kind=kind, engine={"token_budget": 16}, tp={Role.PREFILL: 2})
    async with images(shape) as cluster:
        said = [answer.tokens[0] for answer in await cluster.answers([ask(prompt) for prompt in prompts])]
        assert said == expected
        assert cluster.prefill.images.relayed == 3
        assert cluster.decode.engine.load().prompt_tokens == 0
    async with images(Shape(whole=1, kind=kind, tp={Role.WHOLE: 2})) as cluster:
        assert [await cluster.answer(ask(prompt)) for prompt in prompts] == expected
        assert cluster.whole.images.encoded == 3


async def test_a_image_is_encoded_and_transferred_once() -> None:
    async with images(Shape(encode=1, prefill=1, decode=1)) as cluster:
        first = make_prompt("qwen3_vl", [(70, 50)], "What is it?")
        expected = reference_output("qwen3_vl", first, 6)[0]
        assert await cluster.answer(ask(first)) == expected
        assert cluster.prefill.images.bytes > 0
        before = cluster.prefill.images
        assert await cluster.answer(ask(first)) == expected  # its KV is cached
        again = msgspec.structs.replace(ask(first), cache_salt="another")  # its KV is not
        assert await cluster.answer(again) == expected
        after = cluster.prefill.images
        assert (after.relayed, after.bytes) == (before.relayed, before.bytes) == (1, before.bytes)
        assert after.hits == 1
        await cluster.idle()
        assert cluster.encode.images.encoded == 1
        assert cluster.prefill.images.failed == cluster.encode.images.failed == 0, "what is not needed does not fail"


async def test_an_image_that_a_prompt_shows_twice_moves_once() -> None:
    once = make_prompt("qwen3_vl", [(70, 50)], "What is it?")
    twice = doubled(once)
    async with images(Shape(encode=1, prefill=1, decode=1)) as cluster:
        assert await cluster.answer(ask(twice)) == reference_output("qwen3_vl", twice, 6)[0]
        assert cluster.prefill.images.relayed == cluster.encode.images.encoded == 1


async def test_images_of_one_size_are_not_taken_for_each_other() -> None:
    prompts = [make_prompt("qwen3_vl", [(50, 50)], "What is it?", seed=seed) for seed in range(4)]
    expected = [reference_output("qwen3_vl", prompt, 6)[0] for prompt in prompts]
    assert len({tuple(tokens) for tokens in expected}) > 1
    async with images(Shape(encode=1, prefill=1, decode=1, policy="prefix_aware")) as cluster:
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert await cluster.answer(ask(prompt)) == tokens
        assert cluster.encode.images.encoded == 4


async def test_the_text_before_a_image_is_computed_while_it_is_encoded_and_others_are_served() -> None:
    prompt = late_image("qwen3_vl", num_text_tokens=40)
    text = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    async with images(Shape(encode=1, prefill=1, decode=1)) as cluster:
        cluster.encode.allow(0)
        stream = cluster.submit(ask(prompt))
        start = prompt.images[0].start
        await cluster.until(lambda: cluster.prefill.engine.load().prompt_tokens == start)
        stuck = cluster.submit(ask(make_prompt("qwen3_vl", [(50, 50)], "What?")))  # nothing to speak of before its image
        await cluster.answer(GenerateRequest(external_id="text", prompt=list(range(10, 40)), params=text))
        await asyncio.sleep(0.2)
        load = cluster.prefill.engine.load()
        num_steps = load.steps
        assert load.running + load.waiting == 2
        await asyncio.sleep(0.1)
        assert cluster.prefill.engine.load().steps == num_steps, "it waits without work"
        cluster.encode.allow(None)
        assert (await collect(stream)).tokens[0] == reference_output("qwen3_vl", prompt, 6)[0]
        assert (await collect(stuck)).error is None


async def test_the_first_image_of_a_prompt_is_used_before_the_second_has_arrived() -> None:
    prompt = make_prompt("qwen3_vl", TWO, "What differs?")
    first, second = prompt.images
    async with images(Shape(encode=2, prefill=1, decode=1)) as cluster:
        for worker in cluster.of(Role.ENCODE):
            worker.allow(0)
        stream = cluster.submit(ask(prompt))
        await cluster.until(lambda: all(w.engine.load().waiting == 1 for w in cluster.of(Role.ENCODE)))
        early, late = sorted(cluster.of(Role.ENCODE), key=lambda w: w.engine._waiting[0].image.digest != first.digest)
        early.allow(None)
        await cluster.until(lambda: cluster.prefill.engine.load().prompt_tokens == second.start)
        assert second.start >= first.start + first.num_tokens
        assert cluster.prefill.images.relayed == 1
        late.allow(None)
        assert (await collect(stream)).tokens[0] == reference_output("qwen3_vl", prompt, 6)[0]


async def test_an_encode_worker_that_dies_is_replaced_by_another() -> None:
    prompt = make_prompt("qwen3_vl", TWO, "What differs?")
    async with images(Shape(encode=2, prefill=1, decode=1)) as cluster:
        for worker in cluster.of(Role.ENCODE):
            worker.allow(0)
        stream = cluster.submit(ask(prompt))
        assert len(stream.encode.split(",")) == 2, "two workers share two images"
        victim, other = cluster.of(Role.ENCODE)
        await cluster.until(lambda: all(w.engine.load().waiting == 1 for w in (victim, other)))
        other.allow(None)
        await cluster.until(lambda: cluster.prefill.images.relayed == 1)
        victim.kill()
        assert (await collect(stream)).tokens[0] == reference_output("qwen3_vl", prompt, 6)[0]
        assert stream.encode == other.id


async def test_an_encode_worker_whose_transfer_thread_fails_ends_and_another_takes_over() -> None:
    prompt = make_prompt("qwen3_vl", [(70, 50)], "What is it?")
    async with images(Shape(encode=2, prefill=1, decode=1)) as cluster:
        for worker in cluster.of(Role.ENCODE):
            worker.allow(0)
        stream = cluster.submit(ask(prompt))
        victim, other = sorted(cluster.of(Role.ENCODE), key=lambda worker: worker.id != stream.encode)
        await cluster.until(lambda: victim.engine.load().waiting == 1)
        victim.engine._producer._turns.machine.pump = _out_of_order
        for worker in (victim, other):
            worker.allow(None)
        assert (await collect(stream)).tokens[0] == reference_output("qwen3_vl", prompt, 6)[0]
        assert stream.encode == other.id
        await asyncio.to_thread(victim.halt)
        assert "out of order" in str(victim.failure)
        victim.failure = None  # as it should be
        victim.kill()


def _out_of_order(now: float) -> None:
    raise RuntimeError("out of order")


async def test_a_prefill_worker_that_dies_with_embeddings_on_their_way_leaves_none_at_the_encode_worker() -> None:
    prompt = make_prompt("qwen3_vl", TWO, "What differs?")
    async with images(Shape(encode=1, prefill=2, decode=1)) as cluster:
        for worker in cluster.of(Role.PREFILL):
            worker.allow(0)
        stream = cluster.submit(ask(prompt))
        victim, other = sorted(cluster.of(Role.PREFILL), key=lambda worker: worker.id != stream.prefill)
        await cluster.until(lambda: cluster.encode.images.encoded == 2)
        other.allow(None)
        victim.kill()
        assert (await collect(stream)).tokens[0] == reference_output("qwen3_vl", prompt, 6)[0]
        assert cluster.encode.images.encoded == 2, "what was made is not made again"


async def test_a_decode_worker_that_dies_costs_the_client_nothing() -> None:
    prompt = make_prompt("qwen3_vl", TWO, "What differs?")
    expected = reference_output("qwen3_vl", prompt, 24)[0]
    async with images(Shape(encode=1, prefill=1, decode=2)) as cluster:
        for worker in cluster.of(Role.DECODE):
            worker.allow(6)
        stream = cluster.submit(ask(prompt, max_tokens=24))
        answer = Answer()
        while len(answer.tokens.get(0, [])) < 3:
            answer.take(await stream.next())
        victim, other = sorted(cluster.of(Role.DECODE), key=lambda worker: worker.id != stream.decode)
        other.allow(None)
        victim.kill()
        assert (await collect(stream, answer)).tokens[0] == expected


@pytest.mark.parametrize("state", ["waiting for the tower", "waiting for embeddings", "in prefill", "in decode"])
async def test_an_abort_leaves_nothing_behind(state: str) -> None:
    prompt = make_prompt("qwen3_vl", TWO, "What differs?")
    async with images(Shape(encode=1, prefill=1, decode=1, engine={"token_budget": 8})) as cluster:
        encode, prefill = cluster.encode, cluster.prefill
        if state == "waiting for the tower":
            encode.allow(0)
        elif state == "waiting for embeddings":
            prefill.allow(0)
        elif state == "in prefill":
            prefill.allow(3)
        stream = cluster.submit(ask(prompt, max_tokens=200))
        match state:
            case "waiting for the tower":
                await cluster.until(lambda: encode.engine.load().waiting == 2)
            case "waiting for embeddings":
                await cluster.until(lambda: encode.images.encoded == 2)
            case "in prefill":
                await cluster.until(lambda: prefill.gate.permits == 0)
            case _:
                await stream.next()
        stream.abort()
        for worker in (encode, prefill):
            worker.allow(None)
        await cluster.idle()


async def test_without_encode_workers_the_client_is_told() -> None:
    async with images(Shape(prefill=1, decode=1)) as cluster:
        with pytest.raises(UnavailableError, match="no encode worker is up") as caught:
            await cluster.answer(ask(make_prompt("qwen3_vl", [(50, 50)], "What?")))
        assert caught.value.code == "no_encode_worker"


async def test_an_image_that_cannot_be_read_is_the_clients_mistake() -> None:
    prompt = make_prompt("qwen3_vl", [(50, 50)], "What?")
    broken = msgspec.structs.replace(ask(prompt), images=[msgspec.structs.replace(prompt.images[0], data=b"\x89PNG no")])
    async with images(Shape(encode=1, prefill=1, decode=1)) as cluster:
        with pytest.raises(InvalidRequestError):
            await cluster.answer(broken)
    async with images(Shape(whole=1)) as cluster:
        with pytest.raises(InvalidRequestError):
            await cluster.answer(broken)


async def test_others_than_prefill_workers_take_embeddings_too() -> None:
    prompt = make_prompt("qwen3_vl", [(70, 50)], "What is it?")
    expected = reference_output("qwen3_vl", prompt, 6)[0]
    async with images(Shape(encode=1, prefill=1, decode=1, local_prefill_tokens=1000)) as cluster:
        stream = cluster.submit(ask(prompt))
        assert (stream.prefill, stream.encode) == ("local", cluster.encode.id)
        assert (await collect(stream)).tokens[0] == expected
        assert cluster.decode.images.relayed == 1
    async with images(Shape(encode=1, whole=1)) as cluster:
        assert await cluster.answer(ask(prompt)) == expected
        assert cluster.whole.images.relayed == 1
        assert cluster.whole.images.encoded == 0


@pytest.mark.parametrize("transfer", ["nixl", pytest.param("mooncake", marks=pytest.mark.long)])
async def test_embeddings_go_over_other_transports_in_many_rounds(transfer: str) -> None:
    prompt = make_prompt("qwen3_vl", [(200, 150)], "What is it?")
    expected = reference_output("qwen3_vl", prompt, 6)[0]
    options = {"transfer": transfer, "embedding_buffer_tokens": 3}
    async with images(Shape(encode=1, prefill=1, decode=1, transfer=options)) as cluster:
        assert await cluster.answer(ask(prompt)) == expected
        await cluster.idle()
        assert cluster.encode.images.resumes > 0
        moved = cluster.encode.images.bytes + cluster.prefill.images.bytes
        layout = cluster.encode.engine._producer._pool.layout
        assert moved == prompt.images[0].num_tokens * layout.token_bytes + layout.aux_bytes, "every byte moves once"
        took = cluster.router._metrics.embedding_resume_seconds._sum
        await cluster.until(lambda: took.get() > 0.0)


@pytest.mark.long
async def test_many_images_at_once_on_several_workers_of_each_kind() -> None:
    prompts = [make_prompt("qwen3_vl", [(50 + 16 * (n % 3), 50)], "What?", seed=n % 5) for n in range(12)]
    expected = [reference_output("qwen3_vl", prompt, 6)[0] for prompt in prompts]
    async with images(Shape(encode=2, prefill=2, decode=2)) as cluster:
        answers = await cluster.answers([ask(prompt) for prompt in prompts])
        assert [answer.tokens[0] for answer in answers] == expected


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 9))])
async def test_clients_that_leave_at_any_time_leave_nothing_behind(seed: int) -> None:
    random = Random(seed)
    prompts = [make_prompt("qwen3_vl", [(50, 50)] * random.randint(1, 3), "What?", seed=10 * n) for n in range(6)]
    small = {"kv_blocks": 160, "token_budget": 16}
    pool = {"embedding_pool_tokens": 64, "embedding_buffer_tokens": 8, "embedding_block_size": 4}
    async with images(Shape(encode=2, prefill=2, decode=1, engine=small, transfer=pool)) as cluster:

        async def leave() -> None:
            prompt = random.choice(prompts)
            stream = cluster.submit(ask(prompt, cache_salt=str(random.randrange(2))))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(random.choice([0.0, 0.01, 0.05, 0.2])):
                    await stream.next()
            stream.abort()

        await asyncio.gather(*(leave() for _ in range(24)))
        assert await cluster.answer(ask(prompts[0])) == reference_output("qwen3_vl", prompts[0], 6)[0]


@pytest.mark.long
async def test_images_whose_kv_was_given_up_are_encoded_and_relayed_again() -> None:
    """Any two of three requests outgrow the decode worker's pool. Nothing is kept that nobody holds."""
    prompts = [make_prompt("qwen3_vl", [(70, 50)], "What?", seed=seed) for seed in range(3)]
    small = {"kv_blocks": 33, "swap_blocks": 0, "max_model_len": 256, "feature_cache_mib": 0, "prefix_cache": False}
    async with images(Shape(encode=1, prefill=1, decode=1, engine=small)) as cluster:
        answers = await cluster.answers([ask(prompt, max_tokens=120) for prompt in prompts])
        assert cluster.decode.engine.load().preemptions > 0
        assert cluster.encode.images.encoded > 3
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.error is None
        assert answer.tokens[0] == reference_output("qwen3_vl", prompt, 120)[0]


@pytest.mark.long
async def test_twenty_images_fifty_requests_and_a_large_one() -> None:
    twenty = make_prompt("qwen3_vl", [(40 + 8 * n, 60) for n in range(20)], "Which is the largest?")
    large = make_prompt("qwen3_vl", [(3840, 2160)], "What is it?")
    fifty = [make_prompt("qwen3_vl", [(50, 50)], "What?", seed=n) for n in range(50)]
    shape = Shape(encode=2, prefill=2, decode=2, engine={"max_model_len": 4096, "kv_blocks": 2048})
    async with images(shape) as cluster:
        for prompt in (twenty, large):
            assert await cluster.answer(ask(prompt)) == reference_output("qwen3_vl", prompt, 6)[0]
        answers = await cluster.answers([ask(prompt) for prompt in fifty])
        assert [answer.tokens[0] for answer in answers] == [reference_output("qwen3_vl", prompt, 6)[0] for prompt in fifty]


def late_image(kind: Kind, num_text_tokens: int) -> Prompt:
    """Text comes first."""
    prompt = make_prompt(kind, [(70, 50)], "What is it?")
    images = [msgspec.structs.replace(image, start=image.start + num_text_tokens) for image in prompt.images]
    return Prompt([*range(20, 20 + num_text_tokens), *prompt.tokens], images, prompt.pixels)


def doubled(prompt: Prompt) -> Prompt:
    (image,) = prompt.images
    second = msgspec.structs.replace(image, start=image.start + len(prompt.tokens))
    return Prompt(prompt.tokens * 2, [image, second], prompt.pixels * 2)
