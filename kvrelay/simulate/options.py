"""The options of `kvrelay simulate`, and what they stand for."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvrelay.config import Count, EngineOptions, Options, Positive
from kvrelay.errors import ConfigError
from kvrelay.router.rebalance import Rules
from kvrelay.simulate.cluster import Layout
from kvrelay.simulate.costs import line
from kvrelay.simulate.fit import Fit, fit
from kvrelay.simulate.run import Failure, Targets
from kvrelay.simulate.traffic import Kind, Session, Wanted, draw, read_trace
from kvrelay.states import Role


class ClusterOptions(Options, frozen=True, kw_only=True):
    """The cluster."""

    prefill: Annotated[Count, Meta(description="prefill workers")] = 1
    decode: Annotated[Count, Meta(description="decode workers")] = 1
    whole: Annotated[Count, Meta(description="workers that both prefill and decode")] = 0
    encode: Annotated[Count, Meta(description="workers that make embeddings of images")] = 0
    routers: Annotated[Positive, Meta(description="among which requests are spread by chance")] = 1
    policy: Annotated[
        Literal["round_robin", "least_loaded", "prefix_aware"], Meta(description="how routers choose workers")
    ] = "prefix_aware"
    mode: Annotated[Literal["write", "read"], Meta(description="hand-over, as in `kvrelay serve`")] = "write"
    local_prefill_tokens: Annotated[Count, Meta(description="as in `kvrelay serve`")] = 64
    block_size: Annotated[int, Meta(ge=1, le=1024, description="tokens per KV block")] = 16
    kv_blocks: Annotated[Positive, Meta(description="KV blocks per worker")] = 8192
    max_batch: Annotated[Positive, Meta(description="sequences that run at once on a worker")] = 256
    token_budget: Annotated[Positive, Meta(description="tokens computed per step")] = 8192
    max_queue: Annotated[Positive, Meta(description="requests that may wait per worker")] = 512
    max_model_len: Annotated[Positive, Meta(description="longest prompt plus output")] = 16_384
    registration_s: Annotated[float, Meta(gt=0.0, description="as in `kvrelay serve`")] = 4.0
    restart_s: Annotated[
        float, Meta(ge=0.0, description="seconds until a worker that was killed, or changes its role, is back, as a new one")
    ] = 20.0
    cores: Annotated[Count, Meta(description="all workers share one host with so many cores; 0: each has its own")] = 0
    rebalance: Annotated[Literal["off", "on"], Meta(description="workers change their roles, as in `kvrelay serve`")] = "off"
    rebalance_patience_s: Annotated[float, Meta(ge=0.0, description="as in `kvrelay serve`")] = 20.0
    rebalance_pause_s: Annotated[float, Meta(ge=0.0, description="as in `kvrelay serve`")] = 60.0
    fail: Annotated[
        tuple[str, ...],
        Meta(description="kill a worker: SECONDS:ROLE, such as 30:decode; with :gone it does not come back; can be repeated"),
    ] = ()

    def layout(self, *, takes_images: bool = False) -> Layout:
        """Raises ConfigError."""
        if not (self.decode or self.whole):
            raise ConfigError("a cluster needs --decode or --whole workers")
        if takes_images and not (self.encode or self.whole):
            raise ConfigError("traffic with images needs --encode or --whole workers")
        if self.max_model_len > self.kv_blocks * self.block_size:
            raise ConfigError(f"--kv-blocks {self.kv_blocks}: one request of --max-model-len {self.max_model_len} does not fit")
        return Layout(
            prefill=self.prefill,
            decode=self.decode,
            whole=self.whole,
            encode=self.encode,
            routers=self.routers,
            takes_images=takes_images,
            policy=self.policy,
            mode=self.mode,
            local_prefill_tokens=self.local_prefill_tokens,
            engine=EngineOptions(
                block_size=self.block_size,
                max_batch=self.max_batch,
                token_budget=self.token_budget,
                max_queue=self.max_queue,
            ),
            num_blocks=self.kv_blocks,
            max_model_len=self.max_model_len,
            registration_s=self.registration_s,
            restart_s=self.restart_s,
            cores=self.cores,
            rebalance=self._rules() if self.rebalance == "on" else None,
        )

    def _rules(self) -> Rules:
        return Rules(patience_s=self.rebalance_patience_s, pause_s=self.rebalance_pause_s)

    def failures(self) -> list[Failure]:
        """Raises ConfigError."""
        return [_failure(text) for text in self.fail]


def _failure(text: str) -> Failure:
    at_s, _, rest = text.partition(":")
    role, _, gone = rest.partition(":")
    try:
        if gone not in ("", "gone"):
            raise ValueError
        return Failure(at_s=float(at_s), role=Role(role), comes_back=not gone)
    except ValueError as error:
        raise ConfigError(f"--fail {text}: it should be SECONDS:ROLE or SECONDS:ROLE:gone, such as 30:decode") from error


class TrafficOptions(Options, frozen=True, kw_only=True):
    """The traffic."""

    traffic: Annotated[Kind, Meta(description="what comes")] = "fixed"
    rate: Annotated[float, Meta(gt=0.0, description="sessions per second")] = 4.0
    seconds: Annotated[float, Meta(gt=0.0, description="for which new sessions come")] = 60.0
    input_tokens: Annotated[Positive, Meta(description="of a prompt, or of the prefix that prompts share")] = 512
    output_tokens: Annotated[Positive, Meta(description="of an answer")] = 128
    prefixes: Annotated[Positive, Meta(description="different prefixes of long-prefix traffic")] = 4
    pause_s: Annotated[float, Meta(gt=0.0, description="mean pause before a further question of a conversation")] = 2.0
    image_share: Annotated[float, Meta(ge=0.0, le=1.0, description="share of the questions that have an image")] = 0.0
    image_tokens: Annotated[Positive, Meta(description="tokens of an image, besides the words of its question")] = 1024
    images: Annotated[Count, Meta(description="different images that are drawn from; 0: each is its own")] = 0
    seed: Annotated[Count, Meta(description="the same seed gives the same traffic and the same result")] = 0
    trace: Annotated[str, Meta(description="file of requests (JSON lines) instead of traffic from a seed")] = ""
    ttft_ms: Annotated[float, Meta(gt=0.0, description="an answer is good if its first token comes within this")] = 1000.0
    itl_ms: Annotated[float, Meta(gt=0.0, description="and its further tokens within this of each other on average")] = 50.0

    def sessions(self) -> Iterable[Session]:
        """Raises ConfigError."""
        if self.trace:
            return read_trace(pathlib.Path(self.trace))
        return draw(
            Wanted(
                kind=self.traffic,
                rate=self.rate,
                duration_s=self.seconds,
                input_tokens=self.input_tokens,
                output_tokens=self.output_tokens,
                num_prefixes=self.prefixes,
                pause_s=self.pause_s,
                image_share=self.image_share,
                image_tokens=self.image_tokens,
                num_images=self.images,
                seed=self.seed,
            )
        )

    @property
    def targets(self) -> Targets:
        return Targets(ttft_ms=self.ttft_ms, itl_ms=self.itl_ms)


class CostOptions(Options, frozen=True, kw_only=True):
    """What things take."""

    costs: Annotated[
        tuple[str, ...],
        Meta(description="result file of `kvrelay bench engine`, `gpu` or `relay` to take costs from; can be repeated"),
    ] = ()
    prefill_ms: Annotated[float, Meta(ge=0.0, description="by hand: milliseconds per prompt token; 0 leaves it as it is")] = 0.0
    step_ms: Annotated[float, Meta(ge=0.0, description="by hand: milliseconds of a step; 0 leaves it as it is")] = 0.0
    sequence_ms: Annotated[
        float, Meta(ge=0.0, description="by hand: milliseconds that each further sequence adds to a step")
    ] = 0.0
    encode_ms: Annotated[
        float, Meta(ge=0.0, description="by hand: milliseconds per token of an image in the vision tower; 0 leaves it as it is")
    ] = 0.0
    gb_per_s: Annotated[float, Meta(ge=0.0, description="by hand: transfers between workers; 0 leaves it as it is")] = 0.0
    latency_ms: Annotated[float, Meta(ge=0.0, description="by hand: a message between workers; 0 leaves it as it is")] = 0.0
    kv_read_ms: Annotated[
        float,
        Meta(
            ge=0.0, description="by hand: milliseconds that 1,000 tokens held by sequences add to a step; 0 leaves it as it is"
        ),
    ] = 0.0
    attention_ms: Annotated[
        float,
        Meta(
            ge=0.0,
            description="by hand: milliseconds per million pairs of a prompt token and one before it; 0 leaves it as it is",
        ),
    ] = 0.0
    router_ms: Annotated[float, Meta(ge=0.0, description="from a client to the workers")] = 1.0
    kv_bytes_per_token: Annotated[
        Count,
        Meta(description="2 x layers x KV heads x head size x bytes of a number; 0: as files say, or Llama-3.1-8B's 131,072"),
    ] = 0
    embedding_bytes_per_token: Annotated[Positive, Meta(description="hidden size x bytes of a number")] = 8192
    layers: Annotated[
        Count,
        Meta(
            description="of the model; the transfer of all but the last overlaps with computing; 0: as files say, or"
            " Llama-3.1-8B's 32"
        ),
    ] = 0

    def fit(self) -> Fit:
        """Raises ConfigError."""
        found = fit(map(pathlib.Path, self.costs), self.kv_bytes_per_token, self.layers)
        step_ms = self.step_ms or found.costs.weights_ms
        by_hand: dict[str, object] = {
            "router_ms": self.router_ms,
            "embedding_bytes_per_token": self.embedding_bytes_per_token,
        }
        if self.prefill_ms:
            by_hand |= {"prefill": line(step_ms, self.prefill_ms), "attention_ms_per_million_pairs": 0.0}
        if self.step_ms or self.sequence_ms:
            by_hand |= {"decode": line(step_ms, self.sequence_ms), "kv_read_ms_per_1000_tokens": 0.0}
        if self.encode_ms:
            by_hand["encode"] = line(0.0, self.encode_ms)
        others = {
            "gb_per_s": self.gb_per_s,
            "latency_ms": self.latency_ms,
            "kv_read_ms_per_1000_tokens": self.kv_read_ms,
            "attention_ms_per_million_pairs": self.attention_ms,
        }
        by_hand |= {name: value for name, value in others.items() if value}
        return Fit(costs=msgspec.structs.replace(found.costs, **by_hand), assumed=found.assumed)
