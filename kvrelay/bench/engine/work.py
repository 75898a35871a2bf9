"""What the engine is asked to do, and how much of the machine that takes: bytes and FLOPs, from the model's shape."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.checkpoint.spec import ModelSpec

BATCHES = (1, 4, 16, 64)
STEPS = {1: 24, 4: 16, 16: 10, 64: 6}  # timed decode steps a round
WARM_STEPS = 2
CONTEXT = 128  # tokens a sequence holds when its timed steps begin, and one more
PREFILL_TOKENS = 512
PREFILLS = (PREFILL_TOKENS, 2048, 4096)
PEER_PREFILLS = PREFILLS[:2]  # some peers take minutes for the last


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the machine reached in this run (`machine.py`)."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """One forward pass."""

    weight_bytes: int
    kv_bytes: int
    flops: int

    def roofline_s(self, limits: Limits) -> float:
        """No implementation can be faster: memory traffic and arithmetic overlap at best completely."""
        return max((self.weight_bytes + self.kv_bytes) / limits.bytes_per_s, self.flops / limits.flops_per_s)


def layer_weights(spec: ModelSpec) -> int:
    """Elements of the matrices of all layers. Norms and biases are too small to matter."""
    attention = spec.hidden_size * spec.head_dim * (2 * spec.num_heads + 2 * spec.num_kv_heads)
    return spec.num_layers * (attention + 3 * spec.hidden_size * spec.intermediate_size)


def head_weights(spec: ModelSpec) -> int:
    return spec.hidden_size * spec.vocab_size


def decode_work(spec: ModelSpec, batch: int, context: int, element_bytes: int) -> StepWork:
    """One new token for each of `batch` sequences that hold `context` tokens."""
    weights = layer_weights(spec) + head_weights(spec)
    attention = 4 * spec.num_layers * spec.num_heads * spec.head_dim * context
    return StepWork(
        weight_bytes=weights * element_bytes,
        kv_bytes=batch * context * spec.kv_bytes_per_token(element_bytes),
        flops=batch * (2 * weights + attention),
    )


def attention_flops(spec: ModelSpec, tokens: int) -> int:
    """Of a whole prompt: every token sees itself and those before it."""
    return 4 * spec.num_layers * spec.num_heads * spec.head_dim * tokens * (tokens + 1) // 2


def prefill_work(spec: ModelSpec, tokens: int, element_bytes: int) -> StepWork:
    """A whole prompt in one step; the head runs for its last token only. Attention's own products are not counted as work, so
    the time they take lowers the share."""
    return StepWork(
        weight_bytes=(layer_weights(spec) + head_weights(spec)) * element_bytes,
        kv_bytes=tokens * spec.kv_bytes_per_token(element_bytes),
        flops=2 * tokens * layer_weights(spec) + 2 * head_weights(spec),
    )
