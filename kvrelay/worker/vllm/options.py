"""kvrelay's options as vLLM's. An option that vLLM has no equal of is refused if it was changed."""

from __future__ import annotations

from typing import Any

import msgspec
import yaml

from kvrelay.config import EngineOptions, ModelOptions
from kvrelay.errors import ConfigError
from kvrelay.states import Role
from kvrelay.worker.stage import Setup, publishes_events
from kvrelay.worker.vllm.memory import Shared

_OURS_ALONE = {
    ModelOptions: ("lora", "weights", "kv_dtype", "attention", "linears"),
    EngineOptions: (
        "swap_blocks", "swap_timeout_s", "preempt", "kept_kv_share", "feature_cache_mib", "embedding_timeout_s",
        "max_running_prefills", "check_invariants",
    ),
}  # fmt: skip
_SET_HERE = ("model", "kv_transfer_config", "kv_events_config", "async_scheduling", "worker_cls", "worker_extension_cls")


def read_arguments(text: str) -> dict[str, Any]:
    """--engine-args: a mapping, in JSON or YAML."""
    try:
        loaded = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--engine-args is neither JSON nor YAML: {' '.join(str(error).split())}") from error
    if not isinstance(loaded, dict):
        raise ConfigError("--engine-args must be a mapping, such as {max_num_seqs: 64}")
    return {str(name).replace("-", "_"): value for name, value in loaded.items()}


def engine_arguments(setup: Setup, role: Role, shared: Shared) -> dict[str, Any]:
    """Fields of vLLM's EngineArgs. Raises ConfigError."""
    _check(setup, role)
    model, engine = setup.model, setup.engine
    asked = read_arguments(engine.engine_args) if engine.engine_args else {}
    if taken := sorted(set(asked) & set(_SET_HERE)):
        raise ConfigError(f"--engine-args: {taken[0]} is set by kvrelay")
    chosen: dict[str, Any] = {
        "model": str(setup.folder),
        "load_format": "dummy" if model.load == "dummy" else "auto",
        "dtype": "float32" if model.dtype == "auto" and model.device == "cpu" else model.dtype,
        "tensor_parallel_size": model.tp,
        "max_num_seqs": engine.max_batch,
        "max_num_batched_tokens": max(engine.token_budget, engine.max_batch),
        "enable_prefix_caching": engine.prefix_cache,
        "scheduling_policy": "priority",
        "async_scheduling": False,
        "disable_log_stats": True,
        "worker_extension_cls": "kvrelay.worker.vllm.forced.ForcedOutput",
        "kv_events_config": {"enable_kv_cache_events": publishes_events(engine), "publisher": "null"},
    }
    if model.device == "cuda":
        chosen["gpu_memory_utilization"] = model.gpu_memory
    if engine.max_model_len:
        chosen["max_model_len"] = engine.max_model_len
    if engine.kv_blocks:
        chosen["num_gpu_blocks_override"] = engine.kv_blocks
    if engine.block_size != EngineOptions().block_size:
        chosen["block_size"] = engine.block_size
    chosen |= asked
    if role is not Role.WHOLE:
        is_split = chosen["tensor_parallel_size"] != 1 or chosen.get("pipeline_parallel_size", 1) != 1
        if is_split and model.device == "cuda":
            raise ConfigError("--engine vllm: on cards prefill and decode workers have one each; whole workers can be split")
        for name in ("data_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"):
            if chosen.get(name, 1) != 1:
                raise ConfigError(f"--engine-args: {name}: prefill and decode workers are split into ranks and stages only")
        chosen |= _transfer(setup, role, {"memory": shared.open_file()} if is_split else {})
    return chosen


def _transfer(setup: Setup, role: Role, memory: dict[str, str]) -> dict[str, Any]:
    return {
        "kv_transfer_config": {
            "kv_connector": "KVRelayConnector",
            "kv_connector_module_path": "kvrelay.worker.vllm.connector",
            "kv_role": "kv_producer" if role is Role.PREFILL else "kv_consumer",
            "kv_connector_extra_config": {"worker_id": setup.worker_id, **memory},
        },
        "disable_hybrid_kv_cache_manager": True,
    }


def _check(setup: Setup, role: Role) -> None:
    if role is Role.ENCODE:
        raise ConfigError("--role encode: workers with --engine vllm do not encode images")
    for options in (setup.model, setup.engine):
        defaults, given = msgspec.structs.asdict(type(options)()), msgspec.structs.asdict(options)
        for name in _OURS_ALONE[type(options)]:
            if given[name] != defaults[name]:
                raise ConfigError(f"--{name.replace('_', '-')}: --engine vllm does not have it (docs/vllm.md)")
