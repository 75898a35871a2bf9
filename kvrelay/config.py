"""Every option, once: its name, type, limits and help. The command line and the YAML config file are made from this.

Options come in groups, one frozen struct each; a command takes the groups it needs (`cli.py`). An unknown option is an
error. This is the only file that reads the environment.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvrelay.errors import ConfigError
from kvrelay.states import Role

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]

_BUDGETS = {"cpu": (64, 512), "cuda": (256, 8192)}  # sequences that run at once, tokens per step


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all option groups."""


class ModelOptions(Options, frozen=True, kw_only=True):
    """Which model, and how its weights are held."""

    model: Annotated[str, Meta(description="smollm2, a folder, a .gguf file or a hub id")] = "smollm2"
    load: Annotated[
        Literal["auto", "dummy"],
        Meta(description="where weights come from: the checkpoint, or random (dummy) for benchmarks"),
    ] = "auto"
    device: Annotated[Literal["cpu", "cuda"], Meta(description="where the model runs")] = "cpu"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"], Meta(description="precision; auto is float32 on cpu, bfloat16 on cuda")
    ] = "auto"
    threads: Annotated[Count, Meta(description="CPU threads per worker; 0 shares the cores among the workers")] = 0
    tp: Annotated[Positive, Meta(description="tensor-parallel degree")] = 1
    gpu_memory: Annotated[float, Meta(gt=0.0, le=1.0, description="share of GPU memory a worker may use")] = 0.9
    attention: Annotated[
        Literal["auto", "triton", "torch"],
        Meta(description="attention on cuda: auto takes the fastest of Triton and cuDNN for each shape; the others force one"),
    ] = "auto"
    linears: Annotated[
        Literal["auto", "triton", "cublas"],
        Meta(description="linear layers on cuda: auto takes Triton for few rows and cuBLAS for many; the others force one"),
    ] = "auto"


class EngineOptions(Options, frozen=True, kw_only=True):
    """How a worker batches and caches."""

    block_size: Annotated[int, Meta(ge=1, le=1024, description="tokens per KV block")] = 16
    kv_blocks: Annotated[Count, Meta(description="KV blocks per worker; 0 sizes the pool from memory")] = 0
    swap_blocks: Annotated[
        Count,
        Meta(description="host KV blocks, for requests that make room and for blocks evicted on the device; 0 computes anew"),
    ] = 0
    swap_timeout_s: Annotated[
        float, Meta(gt=0.0, description="a copy to or from the host that takes longer is given up, and the KV computed anew")
    ] = 5.0
    preempt: Annotated[
        Literal["latest", "oldest"],
        Meta(description="who makes room when KV blocks run out: of those with the lowest priority, who came last or first"),
    ] = "latest"
    kept_kv_share: Annotated[float, Meta(ge=0.0, le=1.0, description="largest share of the KV blocks that kept KV may pin")] = (
        0.5
    )
    feature_cache_mib: Annotated[
        Count,
        Meta(description="memory for what vision towers made of images, in MiB; what running requests need may take more"),
    ] = 512
    embedding_timeout_s: Annotated[
        float, Meta(gt=0.0, description="a request whose images' embeddings do not come for so long is sent again")
    ] = 120.0
    max_batch: Annotated[Count, Meta(description="sequences that run at once; 0 is 64 on cpu, 256 on cuda")] = 0
    token_budget: Annotated[
        Count, Meta(description="tokens computed per step, prompts and decodes together; 0 is 512 on cpu, 8192 on cuda")
    ] = 0
    max_model_len: Annotated[Count, Meta(description="longest prompt plus output; 0 takes the model's own limit")] = 0
    max_queue: Annotated[Positive, Meta(description="requests waiting per worker before new ones get 429")] = 512
    max_running_prefills: Annotated[Count, Meta(description="prompts computed at once; 0 is no limit but the budget")] = 0
    prefix_cache: Annotated[bool, Meta(description="reuse the KV of prompts that begin alike")] = True
    kv_events: Annotated[bool, Meta(description="tell routers what the prefix cache holds, so that they route by it")] = True
    check_invariants: Annotated[bool, Meta(description="verify every block count after every step (slow; for tests)")] = False

    def for_device(self, device: Literal["cpu", "cuda"]) -> EngineOptions:
        """With the device's values in place of those left open."""
        max_batch, token_budget = _BUDGETS[device]
        return msgspec.structs.replace(
            self, max_batch=self.max_batch or max_batch, token_budget=self.token_budget or token_budget
        )


class RouterOptions(Options, frozen=True, kw_only=True):
    """How clients reach the server and what they may send."""

    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="HTTP port; 0 picks a free one")] = 8000
    api_key: Annotated[str, Meta(description="key that clients must send; several are separated by commas")] = ""
    api_key_file: Annotated[str, Meta(description="file of keys, one a line, read again whenever it changes")] = ""
    max_connections: Annotated[Positive, Meta(description="HTTP connections open at once; more are answered 503")] = 16384
    request_timeout_s: Annotated[
        float, Meta(ge=0.0, description="a request that takes longer ends with 504, unless it says another time; 0 is no limit")
    ] = 0.0
    max_retries: Annotated[Count, Meta(description="how often a request whose worker was lost is sent again")] = 5
    failover_wait_s: Annotated[
        float, Meta(ge=0.0, description="how long a request that lost its worker waits for another to come up")
    ] = 10.0
    shutdown_wait_s: Annotated[
        Count, Meta(description="after SIGTERM, running responses may end by themselves for so many seconds")
    ] = 5
    served_model_name: Annotated[str, Meta(description="name clients use for the model; default is MODEL")] = ""
    max_body_bytes: Annotated[Positive, Meta(description="largest request body")] = 32 * 1024 * 1024
    policy: Annotated[
        Literal["round_robin", "least_loaded", "prefix_aware"],
        Meta(description="how a worker is chosen: in turn, by tokens in flight, or by what its cache holds against its load"),
    ] = "prefix_aware"
    tool_parser: Annotated[Literal["auto", "hermes", "none"], Meta(description="how tool calls are read from the output")] = (
        "auto"
    )
    reasoning_parser: Annotated[
        Literal["none", "think"], Meta(description="think: text inside <think> tags becomes reasoning_content")
    ] = "none"
    mode: Annotated[
        Literal["write", "read"],
        Meta(
            description="hand-over: write sends KV while the prompt is computed; read lets decode workers fetch it afterwards"
        ),
    ] = "write"
    local_prefill_tokens: Annotated[
        Count, Meta(description="a prompt of which the decode worker lacks at most so many tokens is computed by it alone")
    ] = 64
    keep_kv_s: Annotated[
        float, Meta(ge=0.0, description="keep the KV of every request for so long, unless it says otherwise; 0 keeps none")
    ] = 0.0
    keep_kv_default_s: Annotated[float, Meta(gt=0.0, description="how long `keep_kv: true` keeps KV")] = 60.0
    max_keep_kv_s: Annotated[float, Meta(gt=0.0, description="longest time that a request may ask to keep its KV")] = 3600.0
    max_kept_per_key: Annotated[Count, Meta(description="leases that the holder of one API key may have at once")] = 64
    continuation_cache: Annotated[
        Count, Meta(description="finished requests whose tokens are remembered, to be continued from")
    ] = 1024
    context_index: Annotated[
        str,
        Meta(
            description="URL of a ContextPilot server, which is told when a request's KV is gone; of several routers, only one"
            " needs it"
        ),
    ] = ""
    eviction_sync: Annotated[
        Literal["evicted", "terminal", "off"],
        Meta(description="when it is told: once no worker has a block of the request cached, as soon as it ends, or never"),
    ] = "evicted"
    log_requests: Annotated[bool, Meta(description="log one line per request")] = False
    allowed_media_hosts: Annotated[
        str, Meta(description="hosts that images are fetched from, NAME or NAME:PORT, separated by commas; default is none")
    ] = ""
    max_images: Annotated[Count, Meta(description="images that one request may have")] = 32
    max_image_bytes: Annotated[Positive, Meta(description="largest file of an image")] = 20 * 1024 * 1024
    max_image_pixels: Annotated[
        int, Meta(ge=1, le=80_000_000, description="largest image that is decoded, width times height")
    ] = 40_000_000
    media_timeout_s: Annotated[float, Meta(gt=0.0, description="longest time that fetching an image may take")] = 10.0


class ClusterOptions(Options, frozen=True, kw_only=True):
    """Which workers there are and how they find each other."""

    whole: Annotated[Count, Meta(description="workers that prefill and decode")] = 0
    prefill: Annotated[Count, Meta(description="prefill workers")] = 0
    decode: Annotated[Count, Meta(description="decode workers")] = 0
    encode: Annotated[Count, Meta(description="encode workers")] = 0
    registry: Annotated[
        str,
        Meta(
            description="embedded, etcd://HOST:PORT (needed for several routers), or static:tcp://HOST:PORT,... to name workers"
            " that are already there"
        ),
    ] = "embedded"
    registry_listen: Annotated[
        str,
        Meta(description="where workers of other hosts register (tcp://HOST:PORT); default is a free local port"),
    ] = ""
    registration_s: Annotated[
        float,
        Meta(
            gt=0.0,
            le=600.0,
            description="a worker that has not renewed its registration for this many seconds is considered dead",
        ),
    ] = 4.0
    cluster_key: Annotated[
        str, Meta(description="file with the key that routers and workers share; without it their planes are open")
    ] = ""


class TransferOptions(Options, frozen=True, kw_only=True):
    """How KV and embeddings move between workers."""

    transfer: Annotated[
        Literal["auto", "shm", "nixl", "mooncake"],
        Meta(description="transport; auto is shared memory on one host, else the best that both workers have"),
    ] = "auto"
    transfer_lease_s: Annotated[
        float, Meta(gt=0.0, le=600.0, description="KV kept for a peer that has been silent for so long is given up")
    ] = 30.0
    embedding_buffer_tokens: Annotated[
        Positive, Meta(description="room that is made for an embedding before its length is known; longer ones are resumed")
    ] = 8192
    embedding_buffer: Annotated[
        Literal["fixed", "adaptive"],
        Meta(description="whether that room stays as it is, or follows the lengths of recent embeddings"),
    ] = "fixed"
    embedding_pool_tokens: Annotated[
        Positive, Meta(description="embedding tokens that a worker has room for, of all requests together")
    ] = 32768
    embedding_block_size: Annotated[int, Meta(ge=1, le=8192, description="tokens per block of that room")] = 128
    embedding_full: Annotated[
        Literal["wait", "shrink", "fail"],
        Meta(
            description="when there is no room for an embedding: wait, then take what there is; take what there is at once; or"
            " fail at once"
        ),
    ] = "wait"
    embedding_wait_s: Annotated[
        float, Meta(ge=0.0, le=600.0, description="how long an embedding waits for room; without any it fails then")
    ] = 10.0


class WorkerOptions(Options, frozen=True, kw_only=True):
    """Where one worker process belongs."""

    role: Annotated[Literal["whole", "prefill", "decode", "encode"], Meta(description="what the worker does")] = "whole"
    registry: Annotated[
        str,
        Meta(
            description="registry address, such as tcp://127.0.0.1:5600 or etcd://127.0.0.1:2379; static where routers name"
            " this worker themselves"
        ),
    ] = "tcp://127.0.0.1:5600"
    worker_host: Annotated[str, Meta(description="address on which the worker listens for routers")] = "127.0.0.1"
    worker_port: Annotated[int, Meta(ge=0, le=65535, description="port on which it listens; 0 picks a free one")] = 0
    signal_port: Annotated[
        int, Meta(ge=0, le=65535, description="port on which a prefill or encode worker hands on; 0 picks a free one")
    ] = 0
    events_port: Annotated[
        int, Meta(ge=0, le=65535, description="port on which it publishes what its cache holds; 0 picks a free one")
    ] = 0
    replay_port: Annotated[
        int, Meta(ge=0, le=65535, description="port on which missed events are asked for; 0 picks a free one")
    ] = 0
    registration_s: Annotated[
        float,
        Meta(
            gt=0.0,
            le=600.0,
            description="a worker that has not renewed its registration for this many seconds is considered dead",
        ),
    ] = 4.0
    cluster_key: Annotated[
        str, Meta(description="file with the key that routers and workers share; without it their planes are open")
    ] = ""
    watchdog_s: Annotated[
        float, Meta(gt=0.0, description="a worker whose engine is inside one step for so long is taken for stuck")
    ] = 120.0


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """What the surroundings say."""

    cache_dir: pathlib.Path  # fetched and converted models, compiled kernels
    log_level: str
    offline: bool  # never ask a registry or hub
    native_kernels: bool  # compile and use the C kernels where a compiler is found
    cluster_key: str = ""  # file of the cluster key, where no option names one
    context_index: str = ""  # URL of the context index, where no option names one


def check_device(model: ModelOptions, roles: Iterable[Role]) -> None:
    """Refuses roles that would hand over memory of a GPU: a layer's listener is told when its kernels are enqueued, not when
    they have ended, so bytes could leave before they are computed."""
    relaying = [role.value for role in dict.fromkeys(roles) if role is not Role.WHOLE]
    if model.device != "cpu" and relaying:
        raise ConfigError(
            f"--device {model.device}: {' and '.join(relaying)} workers run on the CPU only, since nothing is handed over"
            " between GPUs yet; on a GPU, use workers that do everything: --whole 1 (serve) or --role whole (worker)"
        )


def read_environment() -> Environment:
    base = os.environ.get("XDG_CACHE_HOME") or str(pathlib.Path.home() / ".cache")
    return Environment(
        cache_dir=pathlib.Path(os.environ.get("KVRELAY_CACHE") or pathlib.Path(base) / "kvrelay"),
        log_level=os.environ.get("KVRELAY_LOG", "info").lower(),
        offline=os.environ.get("KVRELAY_OFFLINE", os.environ.get("HF_HUB_OFFLINE", "")) not in ("", "0"),
        native_kernels=os.environ.get("KVRELAY_NATIVE", "1") != "0",
        cluster_key=os.environ.get("KVRELAY_CLUSTER_KEY", ""),
        context_index=os.environ.get("CONTEXTPILOT_INDEX_URL", ""),
    )
