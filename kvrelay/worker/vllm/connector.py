"""vLLM's door to the relay (`kv_connector_module_path`). vLLM makes one for its scheduler and one for its model; both are in
this process, and pass everything on to the same hooks. Where a model is split, each rank has one in a process of its own, which
only says where its KV lies: what a pass has written is told when it is over (`VllmCore.step`)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)

from kvrelay.engine.fence import PASSED, Fence
from kvrelay.errors import ConfigError
from kvrelay.runner.cuda_fence import CudaFence
from kvrelay.transfer.kv.layout import KVLayout
from kvrelay.worker.vllm.memory import SHARED, InRegion, Shared, block_layout, map_share, memory_of
from kvrelay.worker.vllm.seam import Hooks, Pass


@dataclass
class RankMemory(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    layout: KVLayout


class KVRelayConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """The signatures are vLLM's."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        told, parallel = vllm_config.kv_transfer_config.kv_connector_extra_config, vllm_config.parallel_config
        self._num_ranks, self._num_stages = parallel.world_size, parallel.pipeline_parallel_size
        self._is_apart = self._num_ranks > 1 and role is KVConnectorRole.WORKER
        self._shared = Shared(Hooks()) if self._is_apart else SHARED[told["worker_id"]]
        self._allocate = self._shared.allocate
        if self._is_apart:
            self._allocate = functools.partial(map_share, told["memory"], parallel.rank, self._num_ranks)
        self._is_cpu = vllm_config.device_config.device_type == "cpu"
        self._prompts: dict[str, int] = {}  # their lengths
        self._manager: Any = None
        self._index: dict[str, int] = {}

    # The model's side

    def get_mem_pool_context(self) -> Any:
        return InRegion(self._allocate) if self._is_cpu else None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        config = self._kv_cache_config
        if len(config.kv_cache_groups) != 1 or len(config.kv_cache_tensors) != 1:
            raise ConfigError("--engine vllm: models with several kinds of KV cache are served by whole workers only")
        placement, spec = config.kv_cache_tensors[0], config.kv_cache_groups[0].kv_cache_spec
        contents = f"{spec.dtype} in blocks of {spec.block_size} tokens, {config.kv_cache_layout}"
        if self._num_ranks > 1:
            contents += f", split among {self._num_ranks} ranks in {self._num_stages} stages"
        shared = self._shared
        shared.layout = block_layout(placement, config.num_blocks, contents, self._num_ranks)
        shared.layers = tuple(placement.layers)
        if shared.region is None and not self._is_apart:
            shared.region = memory_of(next(iter(kv_caches.values())))
        is_by_layer = shared.layout.num_layers > 1
        self._index = {name: index for index, name in enumerate(shared.layers)} if is_by_layer else {}

    def get_handshake_metadata(self) -> RankMemory | None:
        assert self._shared.layout is not None
        return RankMemory(self._shared.layout) if self._is_apart else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """The relay's thread loads."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A sequence runs only when all its KV is there."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        index = self._index.get(layer_name)
        if index is not None:
            self._shared.hooks.layer_done(index, self._fence())

    def wait_for_save(self) -> None:
        self._shared.hooks.passed(self._fence())

    # The scheduler's side

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], RankMemory]) -> None:
        if metadata:  # of a model in one process there is none
            self._shared.join([each.layout for each in metadata.values()])

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self._manager = kv_cache_manager

    def on_new_request(self, request: Any) -> None:
        self._prompts[request.request_id] = request.num_tokens

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        count = self._shared.hooks.wanted(request.request_id, num_computed_tokens)
        return count, count > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            num_cached = request.num_tokens - num_external_tokens
            self._shared.hooks.allocated(request.request_id, blocks.get_block_ids()[0], num_cached, self._fence())

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        cached = scheduler_output.scheduled_cached_reqs
        rows = [(new.req_id, new.num_computed_tokens) for new in scheduler_output.scheduled_new_reqs]
        rows += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        counts = scheduler_output.num_scheduled_tokens
        ending = [
            Pass(id=id_, blocks=self._manager.get_block_ids(id_)[0], num_computed=start)
            for id_, start in rows
            if start < self._prompts[id_] <= start + counts[id_]
        ]
        self._shared.hooks.passes(ending, self._fence())
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        self._prompts.pop(request.request_id, None)
        return self._shared.hooks.holds(request.request_id), None

    def _fence(self) -> Fence:
        return PASSED if self._is_cpu else CudaFence(torch.device("cuda"))
