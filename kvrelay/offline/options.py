"""What an LLM may be asked for: the options of `kvrelay serve` that mean something without HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from kvrelay.config import ClusterOptions, EngineOptions, ModelOptions, Options, RouterOptions, TransferOptions
from kvrelay.errors import ConfigError

O = TypeVar("O", bound=Options)

# All of these are about worker processes.
_COUNTS = ("prefill", "decode", "whole")
_RELAY_NAMES = (
    *_COUNTS,
    "registration_s",
    "cluster_key",
    "mode",
    "local_prefill_tokens",
    "policy",
    *TransferOptions.__struct_fields__,
)
_KEEP_NAMES = ("keep_kv_default_s", "max_keep_kv_s", "continuation_cache")  # of RouterOptions; with and without workers
_NO_QUOTA = 2**31 - 1  # of kept KV per API key: there are no keys here


@dataclass(frozen=True, kw_only=True, slots=True)
class OfflineOptions:
    """Everything an LLM was asked for. `relay`: with worker processes."""

    model: ModelOptions
    engine: EngineOptions
    transfer: TransferOptions
    router: RouterOptions
    cluster: ClusterOptions
    relay: bool


def split_options(model: str, options: dict[str, Any]) -> OfflineOptions:
    """Raises ConfigError for an option that is unknown, or means nothing without worker processes."""
    known = {*ModelOptions.__struct_fields__, *EngineOptions.__struct_fields__, *_RELAY_NAMES, *_KEEP_NAMES}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]!r}; there are {', '.join(sorted(known))}")
    relay = any(options.get(name) for name in _COUNTS)
    misplaced = [name for name in options if name in _RELAY_NAMES and name not in _COUNTS]
    if misplaced and not relay:
        raise ConfigError(f"{misplaced[0]} is about worker processes: give prefill=1, decode=1 (or whole=N) too")
    values = {"model": model, **options}
    if isinstance(lora := values.get("lora"), dict):
        values["lora"] = [f"{name}={folder}" for name, folder in lora.items()]
    return OfflineOptions(
        model=_group(ModelOptions, values),
        engine=_group(EngineOptions, values),
        transfer=_group(TransferOptions, values),
        router=_group(RouterOptions, {**values, "max_kept_per_key": _NO_QUOTA}),
        cluster=_group(ClusterOptions, values),
        relay=relay,
    )


def _group(group: type[O], values: dict[str, Any]) -> O:
    chosen = {name: value for name, value in values.items() if name in group.__struct_fields__}
    try:
        return msgspec.convert(chosen, group)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from error
