"""Requests that share one transfer of an image, and whose fault it is when it does not come."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

from kvrelay.errors import MissingEmbeddingError
from kvrelay.ids import RequestId, TransferId, WorkerId, new_request_id, new_transfer_id
from kvrelay.runner.vision.features import FeatureStore
from kvrelay.transfer.embedding.arrival import EmbeddingArrival
from kvrelay.transfer.embedding.mover import EmbeddingConsumer
from kvrelay.transfer.embedding.pieces import Piece
from kvrelay.transfer.relay.desk import RelayCounts
from kvrelay.wire.serving import EmbeddingTransfer, Image
from kvrelay.worker.embedding import describe
from kvrelay.worker.embedding_intake import EmbeddingIntake

IMAGE = Image(digest="00" * 20, start=0, num_tokens=4, grid=(1, 4, 4))


class Relay:
    """A consumer to which nothing comes but what a test puts there."""

    def __init__(self) -> None:
        self.live: list[TransferId] = []
        self.arrivals: list[EmbeddingArrival] = []
        self.has_news = True

    @property
    def num_live(self) -> int:
        return len(self.live)

    def expect(self, transfer_id: TransferId, producer: WorkerId, address: str, *, request_id: str, trace_id: str) -> None:
        self.live.append(transfer_id)

    def refuse(self, transfer_id: TransferId, producer: WorkerId, address: str) -> None: ...

    def abort(self, transfer_id: TransferId) -> None:
        self.live.remove(transfer_id)

    def poll(self) -> list[EmbeddingArrival]:
        arrivals, self.arrivals = self.arrivals, []
        return arrivals

    def release(self, transfer_id: TransferId) -> None: ...

    def counts(self) -> RelayCounts:
        return RelayCounts(failed=7, repeats=5, malformed=3)  # `failed` are ended transfers, whoever ended them


@pytest.fixture
def relay() -> Relay:
    return Relay()


@pytest.fixture
def intake(relay: Relay) -> EmbeddingIntake:
    store = FeatureStore(1 << 20, device=torch.device("cpu"), dtype=torch.float32)
    return EmbeddingIntake(cast(EmbeddingConsumer, relay), store, torch.float32, merge_size=2)


def fetch(intake: EmbeddingIntake) -> tuple[RequestId, TransferId]:
    request_id, transfer_id = new_request_id(), new_transfer_id()
    transfer = EmbeddingTransfer(
        transfer_id=transfer_id,
        digest=IMAGE.digest,
        producer=WorkerId("encode-000000000000"),
        consumer=WorkerId("prefill-000000000000"),
        signal_address="",
    )
    intake.fetch(request_id, IMAGE, transfer)
    return request_id, transfer_id


@pytest.mark.parametrize("leaves", [False, True])
def test_nobody_is_blamed_for_a_transfer_whose_own_request_has_left(
    intake: EmbeddingIntake, relay: Relay, leaves: bool
) -> None:
    owner, transfer_id = fetch(intake)
    guest, _ = fetch(intake)
    assert relay.live == [transfer_id]
    if leaves:
        intake.drop(owner)
    relay.arrivals.append(EmbeddingArrival(transfer_id=transfer_id, error="the producer ended it"))
    failures = {one.request_id: one.error.digest for one in intake.poll() if isinstance(one.error, MissingEmbeddingError)}
    assert failures == ({guest: None} if leaves else {owner: IMAGE.digest, guest: IMAGE.digest})


def test_only_images_that_somebody_waits_for_can_fail(intake: EmbeddingIntake, relay: Relay) -> None:
    _, transfer_id = fetch(intake)
    fetch(intake)  # its transfer is refused
    assert (intake.counts().failed, intake.counts().hits) == (0, 1)
    relay.arrivals.append(EmbeddingArrival(transfer_id=transfer_id, error="the producer was lost"))
    intake.poll()
    assert intake.counts().failed == 1
    assert (intake.counts().repeats, intake.counts().malformed) == (5, 3)


WIDTH = 8  # bytes of a row


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, ""),
        ({"fill_ids": np.arange(4, dtype=np.int32)}, "what came is another image"),
        ({"positions": np.zeros((4, 3), dtype=np.int32)}, "what came has other positions"),
        ({"aux": (1, 2, 8, 0)}, "what came has a grid of (1, 2, 8) patches, not of (1, 4, 4)"),
    ],
)
def test_what_came_is_compared_with_what_the_image_must_be(
    intake: EmbeddingIntake, relay: Relay, change: dict[str, Any], why: str
) -> None:
    _, transfer_id = fetch(intake)
    said = {**describe(IMAGE, 2)._asdict(), **change}
    rows = torch.zeros((4, WIDTH), dtype=torch.uint8)
    halves = [
        Piece(start, rows[:2], said["fill_ids"][start : start + 2], said["positions"][start : start + 2]) for start in (0, 2)
    ]
    for piece in halves:
        arrival = EmbeddingArrival(
            transfer_id=transfer_id, pieces=(piece,), total_tokens=4, aux=(*said["aux"], 0), is_complete=piece.stop == 4
        )
        relay.arrivals.append(arrival)
    failures = intake.poll()
    assert [failure.error.message for failure in failures] == (
        [f"the embeddings of image {IMAGE.digest} did not arrive: {why}"] if why else []
    )
    assert intake._store.is_ready(IMAGE.digest) == (not why)
