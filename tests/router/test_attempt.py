"""One try of a request: legs by name, what each worker is told, and all of them or none."""

from __future__ import annotations

from typing import Any

import pytest
from router.test_failover import StubOwner
from test_plan import PROMPT, Worker

from kvrelay.ids import new_kept_id, new_request_id
from kvrelay.router.attempt import Attempt, OpenRequest, Plan
from kvrelay.router.backend import GenerateRequest
from kvrelay.router.peer import Leg
from kvrelay.router.stream import RequestStream
from kvrelay.sampling import SamplingParams
from kvrelay.states import FinishReason, HandleState, Role
from kvrelay.wire.serving import Abort, Keep, SequenceOutput, Submit


class Reached(Worker):
    """Takes messages, or none of them."""

    def __init__(self, role: Role, *, answers: bool = True) -> None:
        super().__init__(role)
        self.answers = answers
        self.told: list[Any] = []
        self.open: dict[Any, Leg] = {}

    def send(self, message: Any) -> bool:
        if self.answers:
            self.told.append(message)
        return self.answers

    def add(self, leg: Leg) -> None:
        self.open[leg.request_id] = leg


def entry(**fields: Any) -> OpenRequest:
    params = fields.pop("params", SamplingParams(max_tokens=50))
    request = GenerateRequest(external_id="x", prompt=PROMPT, params=params, **fields)
    return OpenRequest(request, RequestStream(new_request_id(), params.n, StubOwner(), prefill="", decode=""))


def test_the_decode_leg_has_the_streams_id_once_and_every_other_leg_its_own() -> None:
    asked, prefill, decode = entry(), Reached(Role.PREFILL), Reached(Role.DECODE)
    first = Attempt(asked, Plan(decode, prefill, 7), "write")  # type: ignore[arg-type]
    assert first.legs.decode.request_id == asked.stream.request_id
    assert first.legs.prefill is not None
    assert (first.legs.prefill.peer, first.legs.prefill.num_tokens) == (prefill, 7)
    assert list(first.legs) == [first.legs.prefill, first.legs.decode]
    assert not first.legs.is_one
    asked.num_attempts = 1
    again = Attempt(asked, Plan(decode), "write")  # type: ignore[arg-type]
    assert again.legs.is_one
    ids = {leg.request_id for attempt in (first, again) for leg in attempt.legs}
    assert len(ids) == 3


@pytest.mark.parametrize("mode", ["write", "read"])
def test_both_workers_are_told_of_the_same_transfer_and_only_decode_keeps(mode: Any) -> None:
    keep = Keep([new_kept_id()], 9.0)
    asked, prefill, decode = entry(keep=keep), Reached(Role.PREFILL), Reached(Role.DECODE)
    attempt = Attempt(asked, Plan(decode, prefill), mode)  # type: ignore[arg-type]
    assert attempt.send(asked, keep) is None
    (to_prefill,), (to_decode,) = prefill.told, decode.told
    assert to_prefill.transfer == to_decode.transfer == attempt.transfer
    assert attempt.transfer is not None
    assert (attempt.transfer.mode, attempt.transfer.producer, attempt.transfer.consumer) == (mode, prefill.id, decode.id)
    assert (to_prefill.keep, to_decode.keep) == (None, keep)
    assert all(leg.is_open for leg in attempt.legs)


def test_if_one_worker_cannot_be_reached_none_keeps_the_request() -> None:
    asked, prefill, decode = entry(), Reached(Role.PREFILL), Reached(Role.DECODE, answers=False)
    attempt = Attempt(asked, Plan(decode, prefill), "write")  # type: ignore[arg-type]
    assert attempt.send(asked, None) is decode
    submit, abort = prefill.told
    assert isinstance(submit, Submit)
    assert abort == Abort(request_ids=[submit.request_id])
    assert not prefill.open
    assert not decode.open


def test_an_attempt_after_the_first_brings_the_tokens_that_the_client_has() -> None:
    asked, whole = entry(params=SamplingParams(max_tokens=50, n=2)), Reached(Role.WHOLE)
    asked.stream.deliver(SequenceOutput(asked.stream.request_id, 0, 0, [5, 6], FinishReason.STOP))
    asked.stream.deliver(SequenceOutput(asked.stream.request_id, 1, 0, [7]))
    assert asked.has_diverged
    for number in range(2):
        asked.num_attempts = number
        Attempt(asked, Plan(whole), "write").send(asked, None)  # type: ignore[arg-type]
    first, again = whole.told
    assert (first.resume, first.attempt) == ([], 0)
    assert [(sample.sample, sample.tokens) for sample in again.resume] == [(1, [7])]
    assert again.attempt == 1


def test_kept_kv_is_inherited_by_the_first_attempt_where_it_is_kept() -> None:
    holder, other, prefill = Reached(Role.DECODE), Reached(Role.DECODE), Reached(Role.PREFILL)
    (parent,) = entry(keep=Keep([new_kept_id()], 9.0)).request.as_parents()
    parent.worker_id = holder.id
    parent.become(HandleState.HELD)
    asked = entry(parent=parent)

    def inherit(plan: Plan) -> Any:
        return dict(Attempt(asked, plan, "write").messages(asked, None)).popitem()[1].inherit  # type: ignore[union-attr]

    assert inherit(Plan(holder)) == parent.kept_id  # type: ignore[arg-type]
    assert inherit(Plan(other)) is None  # type: ignore[arg-type]
    assert inherit(Plan(holder, prefill)) is None  # type: ignore[arg-type]
    asked.num_attempts = 1
    assert inherit(Plan(holder)) is None  # type: ignore[arg-type]
