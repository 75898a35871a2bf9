"""Continuation of a request with images: its child has their KV from the lease, and computes its suffix only."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from cluster import collect
from image_cluster import Shape, ask, images
from patience import PATIENCE_S
from vision_models import Prompt, make_prompt, reference_output

from kvrelay.ids import new_kept_id
from kvrelay.metrics import Metrics
from kvrelay.router import shelf
from kvrelay.router.backend import GenerateRequest
from kvrelay.router.continuations import Continuations
from kvrelay.states import HandleState
from kvrelay.wire.serving import Keep

SUFFIX = [70, 71, 72]


def kept(request: GenerateRequest) -> GenerateRequest:
    return msgspec.structs.replace(request, keep=Keep([new_kept_id()], 60.0), external_id="parent")


async def test_a_child_of_a_request_with_images_encodes_nothing() -> None:
    prompt = make_prompt("qwen3_vl", [(70, 50), (50, 70)], "What differs?")
    async with images(Shape(encode=1, prefill=1, decode=1)) as cluster:
        stream = cluster.submit(kept(ask(prompt)))
        said = (await collect(stream)).tokens[0]
        parent = stream.parents[0]
        async with asyncio.timeout(PATIENCE_S):
            await cluster.router.continuations.until_ended(parent, "", 20.0)
        assert parent.state is HandleState.HELD, parent.reason
        whole = Prompt([*prompt.tokens, *said, *SUFFIX], list(parent.images), prompt.pixels)
        expected = reference_output("qwen3_vl", whole, 6)[0]
        before = cluster.decode.engine.load()
        child = msgspec.structs.replace(ask(whole), parent=parent, external_id="child")
        assert await cluster.answer(child) == expected
        assert cluster.decode.engine.load().prompt_tokens - before.prompt_tokens == len(SUFFIX) + 1
        assert cluster.encode.images.encoded == 2
        await cluster.router.delete_parents(str(parent.kept_id), "")
        assert await cluster.answer(ask(whole, cache_salt="none")) == expected  # the tokens and files are enough


def test_files_of_images_are_remembered_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [make_prompt("qwen3_vl", [(50, 50)], "What?", seed=seed) for seed in range(3)]
    sizes = [len(prompt.images[0].data) for prompt in prompts]
    monkeypatch.setattr(shelf, "MAX_SHELF_BYTES", sizes[1] + sizes[2])
    table = Continuations(Metrics())
    parents = []
    for prompt in prompts:
        (parent,) = table.begun(ask(prompt).as_parents())
        table.ended(parent, prompt.tokens, [1])
        parents.append(parent)
    assert [parent.state for parent in parents] == [HandleState.GONE, HandleState.KNOWN, HandleState.KNOWN]
    assert len(table) == 2
