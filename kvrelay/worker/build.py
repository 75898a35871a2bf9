"""Which stage a worker of each role has. Only what the role needs is loaded."""

from __future__ import annotations

from typing import Literal, assert_never

from kvrelay.config import TransferOptions
from kvrelay.states import Role
from kvrelay.worker.stage import BuildStage


def stage_of(
    role: Role, options: TransferOptions, host: str, signal_port: int = 0, engine: Literal["kvrelay", "vllm"] = "kvrelay"
) -> BuildStage:
    """For a worker that its peers reach at `host`."""
    if engine == "vllm":
        from kvrelay.worker.vllm.stage import vllm_stage

        return vllm_stage(role, options, host, signal_port)
    match role:
        case Role.WHOLE:
            from kvrelay.worker.whole import whole_stage

            return whole_stage(options, host)
        case Role.PREFILL | Role.DECODE:
            from kvrelay.worker.relay import relay_stage

            return relay_stage(role, options, host, signal_port)
        case Role.ENCODE:
            from kvrelay.worker.encode_stage import encode_stage

            return encode_stage(options, host, signal_port)
        case _:
            assert_never(role)
