"""Writes README's tables of figures from the result files: `python tools/figures.py` (`--check`: says whether they are so).

A machine is a folder of bench/results whose files come from one commit (`kvrelay bench all`) and has a column; `mixed` holds
older files of several commits and has one until its machine is measured anew. A row names the figures of one
scenario that it shows. Its target, and whether it is missed, come from the scenario's own targets;
what the files lack is "not measured".
"""

from __future__ import annotations

import pathlib
import re
import string
import sys
from dataclasses import dataclass

import msgspec

from kvrelay.bench.harness.report import BenchResult, Target
from kvrelay.bench.main import find_scenario

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
MIXED = "mixed"


@dataclass(frozen=True)
class Row:
    """`shown` is a format string over the figures' names; `unit` follows the target's number."""

    what: str
    scenario: str
    shown: str
    unit: str = ""

    def figures(self) -> list[str]:
        return [name for _, name, _, _ in string.Formatter().parse(self.shown) if name]

    def targets(self) -> dict[str, Target]:
        known = find_scenario(self.scenario).targets
        return {name: known[name] for name in self.figures() if name in known}

    def target(self) -> str:
        bounds = list(self.targets().values())
        bounds = bounds if len(set(bounds)) > 1 else bounds[:1]
        if len({bound.comparison for bound in bounds}) > 1:
            return ", ".join(f"{bound}{self.unit}" for bound in bounds)
        return f"{bounds[0].comparison} {' / '.join(f'{bound.value:g}' for bound in bounds)}{self.unit}" if bounds else ""

    def cell(self, results: dict[str, float]) -> str:
        if not all(name in results for name in self.figures()):
            return "not measured"
        missed = [name for name, bound in self.targets().items() if not bound.met(results[name])]
        note = "" if not missed else " (missed)" if len(missed) == 1 or len(missed) < len(self.targets()) else " (all missed)"
        return self.shown.format(**results) + note


CPU_ROWS = (
    Row("decode, batch 1: time over reading the weights once", "engine", "{decode_b1_over_weights_read:.2f}"),
    Row(
        "decode, batch 4 / 16 / 64: share of the roofline",
        "engine",
        "{roofline_share_b4:.2f} / {roofline_share_b16:.2f} / {roofline_share_b64:.2f}",
    ),
    Row("prefill of 512 tokens: share of the GEMM rate", "engine", "{prefill_512_gemm_share:.2f}"),
    Row("prefill of 2048 tokens: the same", "engine", "{prefill_2048_gemm_share:.2f}"),
    Row(
        "vLLM's time over ours in the same run, float32: decode, batch 1 / 4 / 16 / 64",
        "engine",
        "{faster_than_vllm_b1:.2f} / {faster_than_vllm_b4:.2f} / {faster_than_vllm_b16:.2f} / {faster_than_vllm_b64:.2f}",
    ),
    Row(
        "the same: prefill of 512 / 2048 tokens",
        "engine",
        "{faster_than_vllm_prefill_512:.2f} / {faster_than_vllm_prefill_2048:.2f}",
    ),
    Row(
        "llama.cpp's time over ours in the same run, both with the GGUF file's Q4_1 blocks: decode, batch 1 / 4 / 16 / 64",
        "engine",
        "{faster_than_llama_cpp_b1:.2f} / {faster_than_llama_cpp_b4:.2f} / "
        "{faster_than_llama_cpp_b16:.2f} / {faster_than_llama_cpp_b64:.2f}",
    ),
    Row(
        "the same: prefill of 512 / 2048 tokens",
        "engine",
        "{faster_than_llama_cpp_prefill_512:.2f} / {faster_than_llama_cpp_prefill_2048:.2f}",
    ),
    Row(
        "quantised weights over float32: decode, batch 1 / 64 (target: the former)",
        "engine",
        "{quantised_over_float32_b1:.2f} / {quantised_over_float32_b64:.2f}",
    ),
    Row(
        "memory of 4 workers on one host, weights of each its own / shared: float32; quantised",
        "engine",
        "{memory_mib_4_float32_own:.0f} / {memory_mib_4_float32_shared:.0f}; "
        "{memory_mib_4_quantised_own:.0f} / {memory_mib_4_quantised_shared:.0f} MiB",
    ),
    Row("router: added time to first token, 1 connection, p50, `whole`", "router", "{added_ttft_ms_p50:.2f} ms", " ms"),
    Row(
        "router: streamed requests of 16 tokens per second, 32 connections; a step every 0.5 ms / instant steps",
        "router",
        "{streamed_rps:.0f} / {streamed_rps_instant_steps:.0f}",
    ),
    Row("router: share of the ideal token rate, 512 streams of 20 tokens/s", "router", "{ideal_token_share_512:.2f}"),
    Row("router: lost of 512 simultaneous connections", "router", "{lost_512:.0f}"),
    Row(
        "router: a decision among 64 workers and 1,000,000 blocks, hashing 2048 tokens included, p50 / p99 (target: p99)",
        "router",
        "{decision_us_p50:.0f} / {decision_us_p99:.0f} us",
        " us",
    ),
    Row(
        "cluster: conversations on 2P2D, time to first token p50, `round_robin` over `prefix_aware`",
        "router",
        "{multiturn_ttft_p50_ratio:.1f}",
    ),
    Row(
        "cluster: these, p50; p99: `round_robin` / `prefix_aware`",
        "router",
        "{multiturn_ttft_ms_p50_round_robin:.0f} / {multiturn_ttft_ms_p50_prefix_aware:.0f}; "
        "{multiturn_ttft_ms_p99_round_robin:.0f} / {multiturn_ttft_ms_p99_prefix_aware:.0f} ms",
    ),
    Row(
        "cluster: kill -9 of the busiest decode worker to the next token of its streams, prompts cached, p50 / max",
        "router",
        "{failover_next_token_ms_p50:.0f} / {failover_next_token_ms_max:.0f} ms",
    ),
    Row("cluster: the p50 of cached prompts over detection plus one prefill", "router", "{failover_over_bound:.2f}"),
    Row(
        "router: processor time of a request with a dashboard open over without, the middle one of 20 ratios; requests/s with "
        "/ without; time to first token",
        "router",
        "{feed_cpu_ratio:.3f}; {feed_rps_with:.0f} / {feed_rps_without:.0f}; "
        "{feed_ttft_ms_p50_with:.1f} / {feed_ttft_ms_p50_without:.1f} ms",
    ),
    Row(
        "router: requests/s of two over one, on two cores that load and workers share / with a core each, by processor time",
        "router",
        "{routers_2_over_1:.2f} / {routers_2_over_1_on_cores_of_their_own:.2f}",
    ),
    Row("cluster: processor time of an idle 2P2D cluster", "router", "{idle_cpu_percent:.1f} % of a core", " %"),
    Row(
        "swap: KV to the host and back over memcpy, blocks in order / scattered",
        "kv",
        "{swap_round_trip_over_memcpy:.2f} / {swap_round_trip_scattered_over_memcpy:.2f}",
    ),
    Row(
        "swap: next token after preemption, computed again / brought back: 256 tokens; 1024 tokens; 4096 tokens",
        "kv",
        "{resume_by_recompute_ms_256:.0f} / {resume_by_swap_ms_256:.0f}; "
        "{resume_by_recompute_ms_1024:.0f} / {resume_by_swap_ms_1024:.0f}; "
        "{resume_by_recompute_ms_4096:.0f} / {resume_by_swap_ms_4096:.0f} ms",
    ),
    Row("engine: a step of pure Python, 256 running sequences, 100,000 blocks", "kv", "{scheduler_step_ms:.2f} ms", " ms"),
    Row("engine: step time with the context index stopped over running", "kv", "{stopped_index_step_ratio:.2f}"),
    Row(
        "continuation: time to first token of stage 2, prompt computed again over tokens added to kept KV",
        "two-stage",
        "{ttft_reprefill_over_continuation:.0f}",
    ),
    Row(
        "continuation: the same after a burst of other traffic over before",
        "two-stage",
        "{ttft_continuation_pressure_over_calm:.2f}",
    ),
    Row(
        "continuation: that of the prefix cache alone",
        "two-stage",
        "{ttft_prefix_cache_pressure_over_calm:.0f}",
    ),
    Row(
        "continuation: wall time of both stages, `sequential` / `pipelined` / `prefix_cache` / `continuation`",
        "two-stage",
        "{wall_s_sequential:.1f} / {wall_s_pipelined:.1f} / {wall_s_prefix_cache:.1f} / {wall_s_continuation:.1f} s",
    ),
    Row("beam search 32 x 3: the beams as single requests over the search", "two-stage", "{separate_requests_over_beam:.1f}"),
    Row(
        "images: text time to first token p99 while images are encoded, encode + prefill + decode over `whole`",
        "encode",
        "{text_ttft_p99_split_over_whole:.2f}",
    ),
    Row(
        "images: 10,000 tokens of embeddings with room for 1024 at first over room for all",
        "encode",
        "{shm_resumed_over_once:.2f}",
    ),
    Row("images: the same with room for 1024 throughout (nine resumes)", "encode", "{shm_many_over_once:.2f}"),
    Row("images: embeddings over shared memory, share of the transport's raw rate", "encode", "{shm_rate_of_raw:.2f}"),
    Row(
        "relay: inter-token p99 while long prompts arrive, 1P1D over `whole` on the same cores", "relay", "{itl_p99_ratio:.3f}"
    ),
    Row("relay: these two, 1P1D / `whole`", "relay", "{itl_p99_ms_1p1d:.0f} / {itl_p99_ms_whole:.0f} ms"),
    Row(
        "relay: what that costs: long prompts served per minute, 1P1D / `whole`",
        "relay",
        "{long_prompts_per_min_1p1d:.0f} / {long_prompts_per_min_whole:.0f}",
    ),
    Row(
        "relay: hand-over, token 1 to token 2 / a decode step, p50",
        "relay",
        "{handover_ms_p50:.1f} / {decode_step_ms_p50:.1f} ms",
    ),
    Row("relay: share of the bytes still to send when a 2048-token prefill ends", "relay", "{unsent_share_2048:.2f}"),
    Row(
        "relay: shared memory over one-thread memcpy, blocks fully scattered / in order (target: the former)",
        "relay",
        "{shm_over_memcpy:.2f} / {shm_in_order_over_memcpy:.2f}",
    ),
    Row("relay: NIXL / Mooncake over the library called directly", "relay", "{nixl_over_raw:.2f} / {mooncake_over_raw:.2f}"),
    Row(
        "vLLM's engine as 1P1D behind kvrelay over vLLM's own servers with its NIXL connector: time to the first / second "
        "token; requests/s",
        "vllm",
        "{ttft_ms_over_nixl_connector:.2f} / {second_token_ms_over_nixl_connector:.2f}; "
        "{requests_per_s_over_nixl_connector:.2f}",
    ),
)
CARD_ROWS = (
    Row(
        "decode step, 1 x 128 / 8 x 1024 / 64 x 1024 / 256 x 512 (batch x prompt tokens)",
        "gpu",
        "{b1_in128_itl_ms:.2f} / {b8_in1024_itl_ms:.2f} / {b64_in1024_itl_ms:.2f} / {b256_in512_itl_ms:.2f} ms",
        " ms",
    ),
    Row(
        "prefill, 512 / 2048 / 8192 tokens",
        "gpu",
        "{prefill_512_ms:.1f} / {prefill_2048_ms:.1f} / {prefill_8192_ms:.1f} ms",
        " ms",
    ),
    Row("prefill, 16 x 2048 tokens", "gpu", "{prefill_16x2048_tok_s:.0f} tokens/s", " tokens/s"),
    Row("share of the time that the device is idle between decode steps, batch 64", "gpu", "{gpu_idle_share_b64:.3f}"),
    Row(
        "decode step with `--weights fp8`, the same four batches (target: the first)",
        "gpu",
        "{fp8_b1_in128_itl_ms:.2f} / {fp8_b8_in1024_itl_ms:.2f} / {fp8_b64_in1024_itl_ms:.2f} / {fp8_b256_in512_itl_ms:.2f} ms",
        " ms",
    ),
    Row(
        "HTTP, `whole`: time to first token, 128 / 512 / 2048 / 8192 tokens",
        "gpu",
        "{ttft_whole_128_ms:.1f} / {ttft_whole_512_ms:.1f} / {ttft_whole_2048_ms:.1f} / {ttft_whole_8192_ms:.1f} ms",
        " ms",
    ),
    Row(
        "HTTP, 1P1D on the same card: the same, prefill with the card to itself",
        "gpu",
        "{ttft_1p1d_128_ms:.1f} / {ttft_1p1d_512_ms:.1f} / {ttft_1p1d_2048_ms:.1f} / {ttft_1p1d_8192_ms:.1f} ms",
    ),
    Row(
        "1P1D beyond `whole`, 128 / 512 / 2048 tokens",
        "gpu",
        "{ttft_excess_128_ms:z.1f} / {ttft_excess_512_ms:z.1f} / {ttft_excess_2048_ms:z.1f} ms",
        " ms",
    ),
    Row("hand-over: token 1 to token 2 beyond one step, p50", "gpu", "{handover_ms_p50:.2f} ms", " ms"),
    Row("share of the KV's bytes that leave after token 1 was sampled", "gpu", "{late_bytes_share:.3f}"),
    Row(
        "between tokens of 16 streams while 8192-token prompts arrive, p99 / max: 1P1D, prefill on half a card, behind decode",
        "gpu",
        "{itl_p99_ms_1p1d:.1f} / {itl_max_ms_1p1d:.1f} ms",
        " ms",
    ),
    Row(
        "the same: 1P1D, prefill on all of the card; `whole`",
        "gpu",
        "{itl_p99_ms_1p1d_all_sms:.1f} / {itl_max_ms_1p1d_all_sms:.1f}; {itl_p99_ms_whole:.1f} / {itl_max_ms_whole:.1f} ms",
    ),
    Row(
        "such prompts served in a minute: half of the card / all of it / `whole`",
        "gpu",
        "{prompts_per_min_1p1d:.0f} / {prompts_per_min_1p1d_all_sms:.0f} / {prompts_per_min_whole:.0f}",
    ),
    Row("`cuda_ipc` in bulk, 2048 tokens, over a copy on the device", "gpu", "{ipc_over_device_copy_2048:.2f}"),
    Row("requests per second of two router processes over one, on the host's cores", "router", "{routers_2_over_1:.2f}"),
)


def read_machine(folder: pathlib.Path) -> dict[str, dict[str, float]]:
    """Scenario -> its figures."""
    found: dict[str, dict[str, float]] = {}
    for path in sorted(folder.glob("*.json"), key=lambda path: path.stem):
        result = msgspec.json.decode(path.read_bytes(), type=BenchResult)
        found.setdefault(result.scenario, {}).update(result.results)
    return found


def title(folder: pathlib.Path) -> str:
    """What the machine calls itself, and the commit."""
    results = [msgspec.json.decode(path.read_bytes(), type=BenchResult) for path in sorted(folder.glob("*.json"))]
    hardware = re.sub(r" Processor| CPU|\s*\([^)]*\)", "", ", ".join(results[0].hardware.split(", ")[:2]))
    if "gpu" in {result.scenario for result in results}:
        hardware = results[0].hardware.split(", ")[-1]
    return f"{hardware} ({'older files of several commits' if folder.name == MIXED else results[0].commit[:7]})"


def table(rows: tuple[Row, ...]) -> str:
    """Of the machines with a card, or of those without."""
    measured = {folder: set(read_machine(folder)) for folder in sorted(RESULTS.iterdir())}
    machines = [folder for folder, found in measured.items() if found and ("gpu" in found) == (rows is CARD_ROWS)]
    figures = [read_machine(folder) for folder in machines]
    lines = [["what", "target", *map(title, machines)], ["---"] * (2 + len(machines))]
    lines += [[row.what, row.target(), *(row.cell(found.get(row.scenario, {})) for found in figures)] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def written(readme: str) -> str:
    for name, rows in (("cpu", CPU_ROWS), ("card", CARD_ROWS)):
        pattern = rf"(<!-- figures:{name} .*?-->\n).*?(<!-- figures:end -->)"
        readme, count = re.subn(
            pattern, lambda match, rows=rows: f"{match[1]}{table(rows)}\n{match[2]}", readme, flags=re.DOTALL
        )  # type: ignore[misc]
        assert count == 1, f"README has no place for figures:{name}"
    return readme


def main(arguments: list[str]) -> int:
    readme = ROOT / "README.md"
    before = readme.read_text(encoding="utf-8")
    after = written(before)
    if "--check" not in arguments:
        readme.write_text(after, encoding="utf-8")
        return 0
    if before != after:
        print("README's figures are not those of bench/results: run python tools/figures.py", file=sys.stderr)
    return int(before != after)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
