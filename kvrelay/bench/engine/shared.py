"""What sharing weights among a host's workers is worth: memory of one worker and of four, with `--share-weights` and without;
and what it costs: decode steps with weights of a shared file and of one's own memory, in turns."""

from __future__ import annotations

import contextlib
import pathlib
import re
from statistics import median

import msgspec
from rich.console import Console

from kvrelay.bench.engine.own import build_subject
from kvrelay.bench.engine.work import STEPS
from kvrelay.bench.harness.child import Child
from kvrelay.bench.harness.engine import build_engine
from kvrelay.bench.harness.report import Target
from kvrelay.bench.harness.scenario import Results
from kvrelay.config import EngineOptions, ModelOptions, WeightsOption

WORKERS = 4
TARGETS = {"shared_over_own_b1": Target("<=", 1.05)}
_LOAD_S = 600.0
_KV = EngineOptions(kv_blocks=64, swap_blocks=0, max_model_len=512)  # little, so that weights are what is seen
_CHOICES: dict[str, WeightsOption] = {"quantised": "auto", "float32": "float32"}


class Holder:
    """An engine in a process of its own."""

    def __init__(self, model: ModelOptions) -> None:
        self._engine, _ = build_engine(model, _KV)

    def pss_mib(self) -> float:
        """What is this process's alone, and its share of what several have."""
        text = pathlib.Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
        found = re.search(r"^Pss:\s+(\d+) kB$", text, re.MULTILINE)
        assert found is not None
        return int(found[1]) / 1024


def measure(model: ModelOptions, prompts: list[list[int]], rounds: int, console: Console) -> Results:
    results: Results = {}
    for name, weights in _CHOICES.items():
        for kind, is_shared in (("own", False), ("shared", True)):
            with console.status(f"{WORKERS} workers, {name} weights, {kind}"):
                one, all_of_them = memory(msgspec.structs.replace(model, weights=weights, share_weights=is_shared, threads=1))
            results |= {f"memory_mib_1_{name}_{kind}": one, f"memory_mib_{WORKERS}_{name}_{kind}": all_of_them}
    return results | _steps(model, prompts, rounds, console)


def memory(model: ModelOptions) -> tuple[float, float]:
    """MiB of one worker, and of all of them."""
    with contextlib.ExitStack() as children:
        workers = [children.enter_context(Child(answer_s=_LOAD_S)) for _ in range(WORKERS)]
        workers[0].keep(Holder, model)
        one = workers[0].ask(Holder.pss_mib)
        for worker in workers[1:]:
            worker.keep(Holder, model)
        return one, sum(worker.ask(Holder.pss_mib) for worker in workers)


def _steps(model: ModelOptions, prompts: list[list[int]], rounds: int, console: Console) -> Results:
    own, shared = (
        build_subject(msgspec.structs.replace(model, weights="float32", share_weights=is_shared), prompts)[1]
        for is_shared in (False, True)
    )
    try:
        with console.status("decoding with weights of one's own and with shared ones"):
            pairs = [(median(own.decode(1, STEPS[1])), median(shared.decode(1, STEPS[1]))) for _ in range(rounds + 1)][1:]
    finally:
        own.close()
        shared.close()
    return {
        "shared_samples": float(rounds),
        "own_ms_b1": median(mine for mine, _ in pairs) * 1e3,
        "shared_ms_b1": median(theirs for _, theirs in pairs) * 1e3,
        "shared_over_own_b1": median(theirs / mine for mine, theirs in pairs),
    }
