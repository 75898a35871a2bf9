"""Every option, once: its name, type, limits and help. The command line and the YAML config file are made from this.

Options come in groups, one frozen struct each; a command takes the groups it needs (`cli/`). An unknown option is an
error. This is the only file that reads options from the environment.
"""

from __future__ import annotations

import os
import pathlib
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
WeightsOption = Literal["auto", "float32", "int8", "fp8"]
KVDtypeOption = Literal["auto", "fp8"]
RegistrationTime = Annotated[
    float,
    Meta(
        gt=0.0, le=600.0, description="a worker that has not renewed its registration for this many seconds is considered dead"
    ),
]
KeyFile = Annotated[
    str, Meta(description="file with the key that routers and workers share; without it any process can connect to them")
]

_BUDGETS = {"cpu": (64, 512), "cuda": (256, 8192)}  # sequences that run at once, tokens per step


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all option groups."""


class ModelOptions(Options, frozen=True, kw_only=True):
    """Which model, and how its weights are held."""

    model: Annotated[str, Meta(description="smollm2, a folder, a .gguf file or a hub id")] = "smollm2"
    load: Annotated[
        Literal["auto", "dummy"],
        Meta(description="where the weights come from: the checkpoint, or random numbers (dummy) for benchmarks"),
    ] = "auto"
    device: Annotated[Literal["cpu", "cuda"], Meta(description="where the model runs")] = "cpu"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"], Meta(description="precision; auto is float32 on cpu, bfloat16 on cuda")
    ] = "auto"
    weights: Annotated[
        WeightsOption,
        Meta(
            description="weights of linear layers: as the checkpoint has them (auto; a GGUF file's blocks stay quantised on a"
            " CPU, which changes no token), float32 or int8 (on a CPU), or fp8 (on cuda)"
        ),
    ] = "auto"
    kv_dtype: Annotated[KVDtypeOption, Meta(description="precision of KV: the model's (auto), or fp8")] = "auto"
    share_weights: Annotated[bool, Meta(description="a host's workers hold the weights on a CPU once, in one memory")] = True
    threads: Annotated[Count, Meta(description="CPU threads per worker; 0 shares the cores among the workers")] = 0
    tp: Annotated[Positive, Meta(description="tensor parallelism: processes among which a worker's model is split")] = 1
    lora: Annotated[
        tuple[str, ...], Meta(description="LoRA adapter as PEFT saves it, NAME=FOLDER; clients ask for NAME; can be repeated")
    ] = ()
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
        Count | Literal["auto"],
        Meta(
            description="KV blocks in host memory, for preempted requests, kept KV and evicted blocks; auto sizes them from"
            " free memory; 0 recomputes their KV"
        ),
    ] = "auto"
    swap_timeout_s: Annotated[
        float, Meta(gt=0.0, description="seconds after which a copy to or from host memory is given up and the KV recomputed")
    ] = 5.0
    preempt: Annotated[
        Literal["latest", "oldest"],
        Meta(description="which request of the lowest priority is preempted when KV blocks run out: the latest or the oldest"),
    ] = "latest"
    kept_kv_share: Annotated[
        float, Meta(ge=0.0, le=1.0, description="largest share of the KV blocks that kept KV may occupy")
    ] = 0.5
    feature_cache_mib: Annotated[
        Count,
        Meta(description="MiB of memory for image features that are cached; features of running requests may exceed it"),
    ] = 512
    embedding_timeout_s: Annotated[
        float, Meta(gt=0.0, description="seconds after which a request whose image embeddings have not arrived is sent again")
    ] = 120.0
    max_batch: Annotated[Count, Meta(description="sequences that run at once; 0 is 64 on cpu, 256 on cuda")] = 0
    token_budget: Annotated[
        Count, Meta(description="tokens computed per step, prompts and decodes together; 0 is 512 on cpu, 8192 on cuda")
    ] = 0
    max_model_len: Annotated[Count, Meta(description="longest prompt plus output; 0 takes the model's own limit")] = 0
    max_queue: Annotated[Positive, Meta(description="requests that may wait per worker; further ones are answered 429")] = 512
    max_running_prefills: Annotated[Count, Meta(description="prompts computed at once; 0 leaves it to the token budget")] = 0
    prefix_cache: Annotated[bool, Meta(description="reuse the KV of prompts with a common prefix")] = True
    kv_events: Annotated[bool, Meta(description="publish what the prefix cache holds, so that routers can route by it")] = True
    engine: Annotated[Literal["kvrelay", "vllm"], Meta(description="what computes: kvrelay's own engine, or vLLM's")] = (
        "kvrelay"
    )
    engine_args: Annotated[
        str, Meta(description="options of vLLM's engine, as a mapping in JSON or YAML, such as '{max_num_seqs: 64}'")
    ] = ""
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
    port: Annotated[Port, Meta(description="HTTP port; 0 picks a free one")] = 8000
    reuse_port: Annotated[bool, Meta(description="share the HTTP port with other routers of this host (SO_REUSEPORT)")] = False
    own_port: Annotated[
        int,
        Meta(
            ge=0,
            le=65535,
            description="second HTTP port, at which this router alone answers, such as for its metrics; of several (--routers)"
            " each takes the next one; 0 is none",
        ),
    ] = 0
    api_key: Annotated[str, Meta(description="key that clients must send; separate several keys by commas")] = ""
    api_key_file: Annotated[str, Meta(description="file of API keys, one per line; it is read again when it changes")] = ""
    admin_key_file: Annotated[str, Meta(description="file of keys that an operator's orders need, as --api-key-file")] = ""
    allowed_origins: Annotated[
        str, Meta(description="origins whose pages may call the server from a browser, separated by commas; * is every origin")
    ] = ""
    max_connections: Annotated[Positive, Meta(description="HTTP connections open at once; others are answered 503")] = 16384
    request_timeout_s: Annotated[
        float,
        Meta(
            ge=0.0, description="seconds after which a request ends with 504, unless it sets a limit of its own; 0 is no limit"
        ),
    ] = 0.0
    max_retries: Annotated[Count, Meta(description="how often a request is sent again without a new token in between")] = 5
    failover_wait_s: Annotated[
        float, Meta(ge=0.0, description="seconds that a request whose worker was lost waits for another worker")
    ] = 10.0
    start_wait_s: Annotated[
        float, Meta(ge=0.0, description="seconds that a request without a worker waits while one that it needs is starting")
    ] = 120.0
    shutdown_wait_s: Annotated[Count, Meta(description="seconds that running responses have to end after SIGTERM")] = 5
    served_model_name: Annotated[
        str,
        Meta(
            description="model name that clients use; of several, separated by commas, answers have the first; default is MODEL"
        ),
    ] = ""
    root_path: Annotated[
        str, Meta(description="path under which a proxy serves this server, such as /llm; requests may come with it or without")
    ] = ""
    chat_template: Annotated[str, Meta(description="file with a Jinja chat template, instead of the model's own")] = ""
    max_body_bytes: Annotated[Positive, Meta(description="largest request body in bytes")] = 32 * 1024 * 1024
    policy: Annotated[
        Literal["round_robin", "least_loaded", "prefix_aware"],
        Meta(description="how a worker is chosen: in turn, by its tokens in flight, or by its cached prefix and its load"),
    ] = "prefix_aware"
    rebalance: Annotated[
        Literal["off", "dry_run", "on"],
        Meta(
            description="on: workers move between prefill, decode and whole by what each role has to do; dry_run only logs what"
            " it would move"
        ),
    ] = "off"
    rebalance_patience_s: Annotated[
        float, Meta(ge=0.0, description="seconds for which a role must lack a worker that another can spare before one moves")
    ] = 20.0
    rebalance_pause_s: Annotated[float, Meta(ge=0.0, description="least seconds between two such moves")] = 60.0
    tool_parser: Annotated[
        Literal["auto", "hermes", "llama", "mistral", "none"],
        Meta(description="how the model writes tool calls; auto finds out from its chat template"),
    ] = "auto"
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
        Count, Meta(description="a decode worker computes a prompt itself if it lacks at most this many of the prompt's tokens")
    ] = 64
    keep_kv_s: Annotated[
        float,
        Meta(
            ge=0.0,
            description="seconds for which the KV of every request is kept, unless the request says otherwise; 0 keeps none",
        ),
    ] = 0.0
    keep_kv_default_s: Annotated[float, Meta(gt=0.0, description="seconds for which `keep_kv: true` keeps KV")] = 60.0
    max_keep_kv_s: Annotated[float, Meta(gt=0.0, description="most seconds for which a request may ask to keep its KV")] = (
        3600.0
    )
    max_kept_per_key: Annotated[Count, Meta(description="samples whose KV may be kept at once per API key")] = 64
    continuation_cache: Annotated[
        Count, Meta(description="finished requests whose tokens are remembered, so that they can be continued from")
    ] = 1024
    max_stored_responses: Annotated[
        Count, Meta(description="responses that are stored (`store`), so that they can be had again")
    ] = 1024
    stored_response_s: Annotated[float, Meta(gt=0.0, description="seconds for which a response is stored")] = 3600.0
    context_index: Annotated[
        str,
        Meta(
            description="URL of a ContextPilot server to be told when a request's KV is gone; of several routers, one needs it"
        ),
    ] = ""
    eviction_sync: Annotated[
        Literal["evicted", "terminal", "off"],
        Meta(description="when it is told: once no worker caches a block of the request, when the request ends, or never"),
    ] = "evicted"
    log_requests: Annotated[bool, Meta(description="log one line per request")] = False
    otlp_endpoint: Annotated[
        str,
        Meta(
            description="URL of an OpenTelemetry collector (OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces) that gets"
            " the stages of requests as spans; needs kvrelay[otel]"
        ),
    ] = ""
    allowed_media_hosts: Annotated[
        str, Meta(description="hosts from which images may be fetched, NAME or NAME:PORT, separated by commas; default is none")
    ] = ""
    max_images: Annotated[Count, Meta(description="images per request")] = 32
    max_image_bytes: Annotated[Positive, Meta(description="largest image file in bytes")] = 20 * 1024 * 1024
    max_image_pixels: Annotated[
        int, Meta(ge=1, le=80_000_000, description="largest image that is decoded, width times height in pixels")
    ] = 40_000_000
    media_timeout_s: Annotated[float, Meta(gt=0.0, description="seconds that fetching an image may take")] = 10.0


class ClusterOptions(Options, frozen=True, kw_only=True):
    """Which workers there are and how they find each other."""

    whole: Annotated[Count, Meta(description="workers to start that both prefill and decode")] = 0
    prefill: Annotated[Count, Meta(description="prefill workers to start")] = 0
    decode: Annotated[Count, Meta(description="decode workers to start")] = 0
    encode: Annotated[Count, Meta(description="encode workers to start")] = 0
    routers: Annotated[Positive, Meta(description="router processes to start, which share the HTTP port")] = 1
    registry: Annotated[
        str,
        Meta(
            description="embedded, tcp://HOST:PORT (another router's), etcd://HOST:PORT, or static:tcp://HOST:PORT,..."
            " (addresses of workers)"
        ),
    ] = "embedded"
    registry_listen: Annotated[
        str,
        Meta(description="address at which workers of other hosts register (tcp://HOST:PORT); default is a free local port"),
    ] = ""
    registration_s: RegistrationTime = 4.0
    cluster_key: KeyFile = ""


class CardOptions(Options, frozen=True, kw_only=True):
    """How workers share NVIDIA cards."""

    devices: Annotated[
        str,
        Meta(
            description="cards of the workers, such as 0,1: each takes the next, or one per rank; default: all take the first"
        ),
    ] = ""
    mps: Annotated[
        Literal["auto", "off"],
        Meta(description="auto starts NVIDIA's MPS where workers share a card, so that they compute at the same time"),
    ] = "auto"
    prefill_sms: Annotated[
        int, Meta(ge=1, le=100, description="percent of a card's multiprocessors that a prefill worker may use under MPS")
    ] = 50
    prefill_priority: Annotated[
        Literal["low", "normal"],
        Meta(description="low: under MPS a card prefers the kernels of its other workers to those of a prefill worker"),
    ] = "low"


class TransferOptions(Options, frozen=True, kw_only=True):
    """How KV and embeddings move between workers."""

    transfer: Annotated[
        Literal["auto", "shm", "cuda_ipc", "nixl", "mooncake"],
        Meta(
            description="transport; auto is shared memory (cuda_ipc on NVIDIA cards) on one host, otherwise the best that both"
            " workers have"
        ),
    ] = "auto"
    transfer_lease_s: Annotated[
        float,
        Meta(
            gt=0.0,
            le=600.0,
            description="seconds without a message from a decode worker after which the KV that it may still read is freed",
        ),
    ] = 30.0
    embedding_buffer_tokens: Annotated[
        Positive,
        Meta(description="tokens reserved for an embedding before its length is known; a longer one is sent in several rounds"),
    ] = 8192
    embedding_buffer: Annotated[
        Literal["fixed", "adaptive"],
        Meta(description="whether this reservation is fixed or follows the lengths of recent embeddings"),
    ] = "fixed"
    embedding_pool_tokens: Annotated[
        Positive, Meta(description="embedding tokens that a worker can hold at once, of all requests together")
    ] = 32768
    embedding_block_size: Annotated[int, Meta(ge=1, le=8192, description="tokens per block of the embedding pool")] = 128
    embedding_full: Annotated[
        Literal["wait", "shrink", "fail"],
        Meta(description="when the embedding pool is full: wait, then take what is free; take what is free at once; or fail"),
    ] = "wait"
    embedding_wait_s: Annotated[
        float,
        Meta(ge=0.0, le=600.0, description="seconds that an embedding waits for space; if there is none by then, it fails"),
    ] = 10.0


class WorkerOptions(Options, frozen=True, kw_only=True):
    """Where one worker process belongs."""

    role: Annotated[Literal["whole", "prefill", "decode", "encode"], Meta(description="what the worker does")] = "whole"
    registry: Annotated[
        str,
        Meta(description="registry, such as tcp://127.0.0.1:5600 or etcd://127.0.0.1:2379; static if routers know this worker"),
    ] = "tcp://127.0.0.1:5600"
    worker_host: Annotated[str, Meta(description="address on which the worker listens for routers")] = "127.0.0.1"
    worker_port: Annotated[Port, Meta(description="port on which the worker listens for routers; 0 picks a free one")] = 0
    signal_port: Annotated[
        Port, Meta(description="port on which a prefill or encode worker listens for other workers; 0 picks a free one")
    ] = 0
    events_port: Annotated[
        Port, Meta(description="port on which the worker publishes what its cache holds; 0 picks a free one")
    ] = 0
    replay_port: Annotated[Port, Meta(description="port on which missed events are requested again; 0 picks a free one")] = 0
    registration_s: RegistrationTime = 4.0
    cluster_key: KeyFile = ""
    data_parallel_rank: Annotated[
        Count, Meta(description="number by which requests address this worker among those of its role; several may share one")
    ] = 0
    watchdog_s: Annotated[
        float, Meta(gt=0.0, description="seconds inside one engine step after which a worker is considered stuck")
    ] = 120.0


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """What the environment variables say."""

    cache_dir: pathlib.Path  # fetched and converted models, compiled kernels
    log_level: str
    offline: bool  # never ask a registry or hub
    native_kernels: bool  # compile and use the C kernels where a compiler is found
    cluster_key: str = ""  # file of the cluster key, where no option names one
    context_index: str = ""  # URL of the context index, where no option names one
    visible_cards: str = ""  # CUDA_VISIBLE_DEVICES
    mps_folder: str = ""  # where NVIDIA's MPS listens, if it runs already


def read_environment() -> Environment:
    base = os.environ.get("XDG_CACHE_HOME") or str(pathlib.Path.home() / ".cache")
    return Environment(
        cache_dir=pathlib.Path(os.environ.get("KVRELAY_CACHE") or pathlib.Path(base) / "kvrelay"),
        log_level=os.environ.get("KVRELAY_LOG", "info").lower(),
        offline=os.environ.get("KVRELAY_OFFLINE", os.environ.get("HF_HUB_OFFLINE", "")) not in ("", "0"),
        native_kernels=os.environ.get("KVRELAY_NATIVE", "1") != "0",
        cluster_key=os.environ.get("KVRELAY_CLUSTER_KEY", ""),
        context_index=os.environ.get("CONTEXTPILOT_INDEX_URL", ""),
        visible_cards=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        mps_folder=os.environ.get("CUDA_MPS_PIPE_DIRECTORY", ""),
    )
