"""Images where encode and prefill workers have their pools on a card, which is host memory here: `tests/fake_card.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from image_cluster import Shape, ask, images
from vision_models import make_prompt, reference_output

from kvrelay.transfer.embedding.layout import EmbeddingLayout
from kvrelay.transfer.embedding.memory import PoolMemory, host_memory
from kvrelay.transfer.embedding.pool import EmbeddingPool
from kvrelay.transfer.engines.base import TransferEngine
from kvrelay.transfer.engines.cuda.ipc import CudaIpcEngine
from kvrelay.transfer.engines.shm import ShmEngine
from kvrelay.worker import images as worker_images
from kvrelay.worker.images import Reach
from kvrelay.worker.stage import Setup
from tests.fake_card import FakeCard, card_bytes, card_region

TWO = [(70, 50), (40, 90)]


@pytest.fixture(autouse=True)
def fake_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_pool(
        setup: Setup, reach: Reach, layout: EmbeddingLayout, device: torch.device
    ) -> tuple[EmbeddingPool, list[TransferEngine]]:
        on_host = ShmEngine(setup.worker_id)
        if not reach.on_card:
            return EmbeddingPool(host_memory(layout)), [on_host]
        region = card_region(layout.size_bytes)
        card = PoolMemory(layout, region, torch.from_numpy(card_bytes(region)))
        engines = [CudaIpcEngine(setup.worker_id, lambda device: FakeCard(device, copy_delay_s=0.005)), on_host]
        return EmbeddingPool(host_memory(layout), card, ["cuda_ipc"]), engines

    monkeypatch.setattr(worker_images, "open_pool", open_pool)


def transports(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Of the embeddings that came."""
    told = ("embedding taken over", "an embedding came in several rounds")
    fields: list[dict[str, Any]] = [record.__dict__["fields"] for record in caplog.records if record.message in told]
    return [each["transport"] for each in fields]


def num_copied(caplog: pytest.LogCaptureFixture) -> int:
    return sum(record.message == "embedding copied to the host" for record in caplog.records)


@pytest.mark.parametrize("room", [256, 3], ids=["at_once", "in_rounds"])
async def test_features_go_from_card_to_card_and_the_tokens_are_those_of_transformers(
    caplog: pytest.LogCaptureFixture, room: int
) -> None:
    caplog.set_level("INFO", "kvrelay")
    prompts = [make_prompt("qwen3_vl", TWO, "What differs?"), make_prompt("qwen3_vl", [(50, 50)], "What is it?", seed=7)]
    expected = [reference_output("qwen3_vl", prompt, 6)[0] for prompt in prompts]
    shape = Shape(encode=1, prefill=1, decode=1, engine={"token_budget": 16}, transfer={"embedding_buffer_tokens": room})
    async with images(shape) as cluster:
        answers = await cluster.answers([ask(prompt) for prompt in prompts])
        assert [answer.tokens[0] for answer in answers] == expected
        assert (cluster.prefill.images.relayed, cluster.prefill.images.failed) == (3, 0)
        assert (cluster.prefill.images.resumes > 0) == (room == 3)
    assert transports(caplog) == ["cuda_ipc"] * 3
    assert num_copied(caplog) == 0


@pytest.mark.parametrize("shape", [Shape(encode=1, prefill=1, decode=1, local_prefill_tokens=1000), Shape(encode=1, whole=1)])
async def test_a_worker_whose_pool_is_on_its_host_gets_them_there(caplog: pytest.LogCaptureFixture, shape: Shape) -> None:
    caplog.set_level("INFO", "kvrelay")
    prompt = make_prompt("qwen3_vl", TWO, "What differs?")
    async with images(shape) as cluster:
        assert await cluster.answer(ask(prompt)) == reference_output("qwen3_vl", prompt, 6)[0]
    assert transports(caplog) == ["shm"] * 2
    assert num_copied(caplog) == 2
