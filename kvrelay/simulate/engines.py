"""The real engines, over parts that only cost time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.config import EngineOptions, TransferOptions
from kvrelay.engine.encode import EncodeEngine
from kvrelay.engine.engine import Engine
from kvrelay.engine.requests.images import Images
from kvrelay.engine.requests.local_encoder import LocalEncoder
from kvrelay.simulate.embedding import CostFeatures, CostTower, SimulatedIntake, SimulatedSender
from kvrelay.simulate.relay import Network, SimulatedConsumer, SimulatedProducer
from kvrelay.simulate.runner import CostRunner
from kvrelay.states import Role
from kvrelay.wire.registry import WorkerRecord

VOCAB_SIZE = 32_768
FINGERPRINT = "simulated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """What an engine's parts have of their worker."""

    network: Network
    clock: Callable[[], float]  # during a step: the moment at which that will have ended
    wake: Callable[[], None]
    spend: Callable[[float, bool], None]  # seconds, and whether they are of a prompt or an image
    prefill_began: Callable[[], None]  # of a prompt that is handed over
    at_end: Callable[..., None]  # calls a function when the step under way has ended


def text_engine(
    record: WorkerRecord, options: EngineOptions, hooks: Hooks, *, num_blocks: int, takes_images: bool
) -> tuple[Engine, CostRunner]:
    network, clock, wake, role = hooks.network, hooks.clock, hooks.wake, record.role
    runner = CostRunner(network.costs, num_blocks, hooks.spend)
    producer = SimulatedProducer(network, clock, wake, hooks.at_end) if role is Role.PREFILL else None
    engine = Engine(
        options=options,
        runner=runner,
        worker_id=record.id,
        eos_token_ids=frozenset(),
        max_model_len=record.max_model_len,
        vocab_size=VOCAB_SIZE,
        cache_seed=FINGERPRINT,
        producer=producer,
        consumer=SimulatedConsumer(network, clock, wake, hooks.prefill_began) if role is Role.DECODE else None,
        images=_images(role, options, hooks) if takes_images else None,
        clock=clock,
    )
    return engine, runner


def _images(role: Role, options: EngineOptions, hooks: Hooks) -> Images:
    features = _features(options, hooks)
    encoders = [LocalEncoder(_tower(features, hooks))] if role is Role.WHOLE else []
    intake = SimulatedIntake(hooks.network.moves, features, hooks.wake)
    return Images(features, [intake, *encoders], timeout_s=options.embedding_timeout_s, clock=hooks.clock)


def encode_engine(record: WorkerRecord, options: EngineOptions, hooks: Hooks) -> EncodeEngine:
    pool_tokens = TransferOptions().embedding_pool_tokens
    sender = SimulatedSender(hooks.network.moves, pool_tokens, hooks.at_end, hooks.wake)
    return EncodeEngine(
        worker_id=record.id,
        encoder=_tower(_features(options, hooks), hooks),
        producer=sender,
        offer=sender.offer,
        max_queue=options.max_queue,
        clock=hooks.clock,
    )


def _features(options: EngineOptions, hooks: Hooks) -> CostFeatures:
    return CostFeatures((options.feature_cache_mib << 20) // hooks.network.costs.embedding_bytes_per_token)


def _tower(features: CostFeatures, hooks: Hooks) -> CostTower:
    return CostTower(hooks.network.costs, features, lambda seconds: hooks.spend(seconds, True))
