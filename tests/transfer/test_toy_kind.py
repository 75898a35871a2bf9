"""A third kind of memory is added without touching `transfer/relay/`: it brings messages, a Kind and a transfer for each side,
and gets connections, heartbeats, leases, quarantine and repairs. (`test_relay_machine.py` drives it through every fault.)"""

from __future__ import annotations

import pytest
from relay_world import Frame
from toy_world import TOY, Got, Here, ToyWorld, Want

from kvrelay.transfer.engines.base import Mover
from kvrelay.wire.codec import encode
from kvrelay.wire.relay import Hello, Message, Refused

MOVERS = pytest.mark.parametrize("mover", list(Mover), ids=lambda mover: f"{mover.value}_moves")


@MOVERS
def test_a_note_arrives_byte_by_byte(mover: Mover) -> None:
    world = ToyWorld(mover)
    plan = world.plan(producer := world.add_producer(), consumer := world.add_consumer())
    producer.expect(plan)
    consumer.expect(plan)
    world.settle()
    assert (producer.outcomes, consumer.outcomes) == ({plan.transfer_id: ["sent"]}, {plan.transfer_id: ["arrived"]})
    world.check_idle()


@MOVERS
@pytest.mark.parametrize("kind", [Want, Here, Got])
def test_what_gets_lost_is_repaired_by_the_relay(mover: Mover, kind: type[Message]) -> None:
    world = ToyWorld(mover)
    plan = world.plan(producer := world.add_producer(), consumer := world.add_consumer())
    producer.expect(plan)
    consumer.expect(plan)
    world.deliver_until(kind)
    assert world.drop(kind)
    world.run(5)
    assert consumer.outcomes == {plan.transfer_id: ["arrived"]}
    world.check_idle()


def test_another_version_is_refused_by_name_with_both_numbers() -> None:
    world = ToyWorld()
    producer, consumer = world.add_producer(), world.add_consumer()
    hello = Hello(version=6, worker_id=consumer.id, fingerprint=world.fingerprint)
    world.network.append(Frame(consumer.id, producer.id, encode(hello)))
    world.settle()
    refusals = [message.reason for message in world.said if isinstance(message, Refused)]
    [reason] = refusals
    assert f"the consumer speaks toy relay protocol 6, this process toy relay protocol {TOY.version}" in reason
