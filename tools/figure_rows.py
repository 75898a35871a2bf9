"""Rows of the tables of README and docs/scale.md, in their order: figures of a scenario, with what each is a median or a best
of."""

from __future__ import annotations

from table_row import Row

_ROUNDS = "median of {rounds:.0f} rounds"
_WEIGHTS = "median of {weights_samples:.0f} rounds"
_ONCE = "once"

CPU_ROWS = (
    Row(
        "decode, batch 1: time over reading the weights once",
        "engine",
        "{decode_b1_over_weights_read:.2f}",
        statistic=_ROUNDS,
    ),
    Row(
        "decode, batch 4 / 16 / 64: share of the roofline",
        "engine",
        "{roofline_share_b4:.2f} / {roofline_share_b16:.2f} / {roofline_share_b64:.2f}",
        statistic=_ROUNDS,
    ),
    Row(
        "prefill of 512 / 2048 / 4096 tokens: share of the GEMM rate (target: the first two)",
        "engine",
        "{prefill_512_gemm_share:.2f} / {prefill_2048_gemm_share:.2f} / {prefill_4096_gemm_share:.2f}",
        statistic=_ROUNDS,
    ),
    Row(
        "vLLM's time over ours in the same run, float32: decode, batch 1 / 4 / 16 / 64",
        "engine",
        "{faster_than_vllm_b1:.2f} / {faster_than_vllm_b4:.2f} / {faster_than_vllm_b16:.2f} / {faster_than_vllm_b64:.2f}",
        statistic=_ROUNDS,
    ),
    Row(
        "the same: prefill of 512 / 2048 tokens",
        "engine",
        "{faster_than_vllm_prefill_512:.2f} / {faster_than_vllm_prefill_2048:.2f}",
        statistic=_ROUNDS,
    ),
    Row(
        "llama.cpp's time over ours in the same run, both with the GGUF file's Q4_1 blocks: decode, batch 1 / 4 / 16 / 64",
        "engine",
        "{faster_than_llama_cpp_b1:.2f} / {faster_than_llama_cpp_b4:.2f} / "
        "{faster_than_llama_cpp_b16:.2f} / {faster_than_llama_cpp_b64:.2f}",
        statistic=_ROUNDS,
    ),
    Row(
        "the same: prefill of 512 / 2048 tokens",
        "engine",
        "{faster_than_llama_cpp_prefill_512:.2f} / {faster_than_llama_cpp_prefill_2048:.2f}",
        statistic=_ROUNDS,
    ),
    Row(
        "quantised weights' time over float32's: decode, batch 1 / 4 / 16 / 64; prefill of 512 tokens (target: the first)",
        "engine",
        "{quantised_over_float32_b1:.2f} / {quantised_over_float32_b4:.2f} / {quantised_over_float32_b16:.2f} / "
        "{quantised_over_float32_b64:.2f}; {quantised_over_float32_prefill_512:.2f}",
        statistic=_WEIGHTS,
    ),
    Row(
        "memory of 4 workers on one host, weights of each its own / shared: float32; quantised",
        "engine",
        "{memory_mib_4_float32_own:.0f} / {memory_mib_4_float32_shared:.0f}; "
        "{memory_mib_4_quantised_own:.0f} / {memory_mib_4_quantised_shared:.0f} MiB",
        statistic=_ONCE,
    ),
    Row(
        "decode in two ranks of a thread each (`--tp 2`), batch 1 / 16: plans and sums of a step (target: the former); a step "
        "of one rank over one of two",
        "engine",
        "{ranks_cost_ms_b1:.2f} / {ranks_cost_ms_b16:.2f} ms; {ranks_speedup_b1:.2f} / {ranks_speedup_b16:.2f}",
        " ms",
        statistic="median of {ranks_samples:.0f} rounds",
    ),
    Row(
        "router: added time to first token, 1 connection, `whole` / 1P1D (target: the former)",
        "router",
        "{added_ttft_ms_p50:.2f} / {added_ttft_ms_p50_1p1d:.2f} ms",
        " ms",
        statistic="p50 of {ttft_samples:.0f} / {ttft_samples_1p1d:.0f} requests",
    ),
    Row(
        "router: streamed requests of 16 tokens per second, 32 connections, a step every 0.5 ms / instant steps: `whole`; 1P1D "
        "(target: `whole`)",
        "router",
        "{streamed_rps:.0f} / {streamed_rps_instant_steps:.0f}; "
        "{streamed_rps_1p1d:.0f} / {streamed_rps_instant_steps_1p1d:.0f}",
        statistic="one run of 10 s each, {streamed_samples:.0f} requests in the first",
    ),
    Row(
        "router: share of the ideal token rate, 512 streams of 20 tokens/s",
        "router",
        "{ideal_token_share_512:.2f}",
        statistic=_ONCE,
    ),
    Row("router: lost of 512 simultaneous connections", "router", "{lost_512:.0f}", statistic=_ONCE),
    Row(
        "router: a decision among 64 workers and 1,000,000 blocks, hashing 2048 tokens included, p50 / p99 (target: p99)",
        "router",
        "{decision_us_p50:.0f} / {decision_us_p99:.0f} us",
        " us",
        statistic="median of {decision_samples:.0f} rounds of 512 prompts",
    ),
    Row(
        "cluster: conversations on 2P2D, time to first token p50, `round_robin` over `prefix_aware`",
        "router",
        "{multiturn_ttft_p50_ratio:.1f}",
        statistic="{multiturn_samples:.0f} requests each",
    ),
    Row(
        "cluster: these, p50; p99: `round_robin` / `prefix_aware`",
        "router",
        "{multiturn_ttft_ms_p50_round_robin:.0f} / {multiturn_ttft_ms_p50_prefix_aware:.0f}; "
        "{multiturn_ttft_ms_p99_round_robin:.0f} / {multiturn_ttft_ms_p99_prefix_aware:.0f} ms",
        statistic="{multiturn_samples:.0f} requests each",
    ),
    Row(
        "cluster: kill -9 of the busiest decode worker to the next token of its streams, p50 / max: prompts cached; not cached",
        "router",
        "{failover_next_token_ms_p50:.0f} / {failover_next_token_ms_max:.0f}; "
        "{failover_uncached_next_token_ms_p50:.0f} / {failover_uncached_next_token_ms_max:.0f} ms",
        statistic="{failover_struck_streams:.0f}; {failover_uncached_struck_streams:.0f} streams, 2 kills each",
    ),
    Row(
        "cluster: these p50 over detection plus one prefill: cached / not cached (target: the former)",
        "router",
        "{failover_over_bound:.2f} / {failover_uncached_over_bound:.2f}",
        statistic="the same",
    ),
    Row(
        "router: processor time of a request with a dashboard open over without (target: this); requests/s with / without; "
        "time to first token",
        "router",
        "{feed_cpu_ratio:.3f}; {feed_rps_with:.0f} / {feed_rps_without:.0f}; "
        "{feed_ttft_ms_p50_with:.1f} / {feed_ttft_ms_p50_without:.1f} ms",
        statistic="median of {feed_samples:.0f} ratios",
    ),
    Row(
        "router: requests/s of two over one, on two cores that load and workers share / with a core each, by processor time",
        "router",
        "{routers_2_over_1:.2f} / {routers_2_over_1_on_cores_of_their_own:.2f}",
        statistic="median of {routers_samples:.0f} rounds",
    ),
    Row(
        "cluster: processor time of an idle 2P2D cluster",
        "router",
        "{idle_cpu_percent:.1f} % of a core",
        " %",
        statistic="15 s, once",
    ),
    Row(
        "swap: KV to the host and back over memcpy, blocks in order / scattered (target: the former)",
        "kv",
        "{swap_round_trip_over_memcpy:.2f} / {swap_round_trip_scattered_over_memcpy:.2f}",
        statistic="median of {swap_samples:.0f} rounds",
    ),
    Row(
        "swap: next token after preemption, computed again / brought back: 256 tokens; 1024 tokens; 4096 tokens",
        "kv",
        "{resume_by_recompute_ms_256:.0f} / {resume_by_swap_ms_256:.0f}; "
        "{resume_by_recompute_ms_1024:.0f} / {resume_by_swap_ms_1024:.0f}; "
        "{resume_by_recompute_ms_4096:.0f} / {resume_by_swap_ms_4096:.0f} ms",
        statistic="median of {preempt_samples:.0f}",
    ),
    Row(
        "engine: a step of pure Python, 256 running sequences, 100,000 blocks",
        "kv",
        "{scheduler_step_ms:.2f} ms",
        " ms",
        statistic="median of {scheduler_samples:.0f} rounds of 100 steps",
    ),
    Row(
        "engine: with ContextPilot stopped over running: time between tokens / the decode worker's own steps",
        "kv",
        "{stopped_index_step_ratio:.2f} / {stopped_index_engine_step_ratio:.2f}",
        statistic="median of {index_samples:.0f} rounds",
        provided="index_is_contextpilot",
    ),
    Row(
        "continuation: time to first token of stage 2, prompt computed again over tokens added to kept KV",
        "two-stage",
        "{ttft_reprefill_over_continuation:.0f}",
        statistic="medians of {ttft_samples:.0f}",
    ),
    Row(
        "continuation: the same after other traffic and a rest over before, kept KV (target: this) / the prefix cache alone",
        "two-stage",
        "{ttft_continuation_pressure_over_calm:.2f} / {ttft_prefix_cache_pressure_over_calm:.2f}",
        statistic="medians of {ttft_samples:.0f}",
    ),
    Row(
        "continuation: these times, computed again / the prefix cache / kept KV: before; after the burst",
        "two-stage",
        "{ttft_ms_sequential:.0f} / {ttft_ms_prefix_cache:.0f} / {ttft_ms_continuation:.0f}; "
        "{ttft_ms_sequential_pressure:.0f} / {ttft_ms_prefix_cache_pressure:.0f} / {ttft_ms_continuation_pressure:.0f} ms",
        statistic="medians of {ttft_samples:.0f}",
    ),
    Row(
        "continuation: wall time of both stages, `sequential` / `pipelined` / `prefix_cache` / `continuation`",
        "two-stage",
        "{wall_s_sequential:.1f} / {wall_s_pipelined:.1f} / {wall_s_prefix_cache:.1f} / {wall_s_continuation:.1f} s",
        statistic=_ONCE,
    ),
    Row(
        "beam search 32 x 3: the beams as single requests over the search",
        "two-stage",
        "{separate_requests_over_beam:.1f}",
        statistic="median of {beam_samples:.0f}",
    ),
    Row(
        "images: text time to first token p99 while images are encoded, encode + prefill + decode over `whole`",
        "encode",
        "{text_ttft_p99_split_over_whole:.2f}",
        statistic="{text_ttft_samples:.0f} requests each",
    ),
    Row(
        "images: what that costs: images answered per second, encode + prefill + decode / `whole`",
        "encode",
        "{text_ttft_images_per_s_split:.1f} / {text_ttft_images_per_s_whole:.1f}",
        statistic="the same run",
    ),
    Row(
        "images: 10,000 tokens of embeddings with room for 1024 at first over room for all",
        "encode",
        "{shm_resumed_over_once:.2f}",
        statistic="median of {shm_samples:.0f} rounds",
    ),
    Row(
        "images: the same with room for 1024 throughout (nine resumes)",
        "encode",
        "{shm_many_over_once:.2f}",
        statistic="median of {shm_samples:.0f} rounds",
    ),
    Row(
        "images: embeddings over shared memory, share of the transport's raw rate",
        "encode",
        "{shm_rate_of_raw:.2f}",
        statistic="median of {shm_samples:.0f} rounds",
    ),
    Row(
        "relay: inter-token p99 while long prompts arrive, 1P1D over `whole` on the same cores",
        "relay",
        "{itl_p99_ratio:.3f}",
        statistic="{itl_samples_1p1d:.0f} / {itl_samples_whole:.0f} gaps",
    ),
    Row(
        "relay: these two and `whole` with chunks of 64 tokens: 1P1D / `whole` / small chunks",
        "relay",
        "{itl_p99_ms_1p1d:.0f} / {itl_p99_ms_whole:.0f} / {itl_p99_ms_whole_small_chunks:.0f} ms",
        statistic="p99 of {itl_samples_1p1d:.0f} / {itl_samples_whole:.0f} / {itl_samples_whole_small_chunks:.0f} gaps",
    ),
    Row(
        "relay: what that costs: long prompts served per minute, the same three",
        "relay",
        "{long_prompts_per_min_1p1d:.0f} / {long_prompts_per_min_whole:.0f} / {long_prompts_per_min_whole_small_chunks:.0f}",
        statistic="the same runs of 25 s",
    ),
    Row(
        "relay: hand-over, token 1 to token 2 beyond a decode step, p50 / p90 (target: p50); the step",
        "relay",
        "{handover_beyond_step_ms_p50:.1f} / {handover_beyond_step_ms_p90:.1f}; {decode_step_ms_p50:.1f} ms",
        " ms",
        statistic="{handover_samples:.0f} requests",
    ),
    Row(
        "relay: share of the bytes still to send when a 2048-token prefill ends",
        "relay",
        "{unsent_share_2048:.2f}",
        statistic="{unsent_samples:.0f} prompts",
    ),
    Row(
        "relay: shared memory over one-thread memcpy, blocks fully scattered / in order (target: the former)",
        "relay",
        "{shm_over_memcpy:.2f} / {shm_in_order_over_memcpy:.2f}",
        statistic="median of {shm_samples:.0f} rounds",
    ),
    Row(
        "relay: NIXL / Mooncake over the library called directly",
        "relay",
        "{nixl_over_raw:.2f} / {mooncake_over_raw:.2f}",
        statistic="medians of {nixl_samples:.0f} rounds",
    ),
    Row(
        "vLLM's engine as 1P1D behind kvrelay over vLLM's own servers with its NIXL connector and a proxy like its toy proxy: "
        "time to the first / second token; requests/s",
        "vllm",
        "{ttft_ms_over_nixl_connector:.2f} / {second_token_ms_over_nixl_connector:.2f}; "
        "{requests_per_s_over_nixl_connector:.2f}",
        statistic="median of {turns:.0f} turns",
    ),
)
SCALE_ROWS = (
    Row(
        "R, streamed requests of 16 tokens per second: 1P1D; with steps that take no time; `whole` (target: this)",
        "router",
        "{streamed_rps_1p1d:.0f}; {streamed_rps_instant_steps_1p1d:.0f}; {streamed_rps:.0f}",
        statistic="one run of 10 s each",
    ),
    Row(
        "processor time of such a request, 1P1D",
        "router",
        "{router_cpu_ms_per_request_1p1d:.2f} ms",
        statistic="the first of these runs",
    ),
    Row(
        "share that it carried of the 10,240 tokens per second that 512 streams ask for",
        "router",
        "{ideal_token_share_512:.2f}",
        statistic=_ONCE,
    ),
    Row("share of the time that it was busy with them", "router", "{router_cpu_share_512:.2f}", statistic="the same run"),
    Row(
        "time added to a first token, one connection",
        "router",
        "{added_ttft_ms_p50:.2f} ms",
        " ms",
        statistic="p50 of {ttft_samples:.0f} requests",
    ),
    Row(
        "choosing workers among 64, a million blocks in the index, prompts of 2,048 tokens, p50 / p99 (target: p99)",
        "router",
        "{decision_us_p50:.0f} / {decision_us_p99:.0f} us",
        " us",
        statistic="median of {decision_samples:.0f} rounds",
    ),
    Row("index of these 64 workers", "router", "{index_bytes_per_block:.0f} bytes a block", statistic=_ONCE),
    Row(
        "KV between workers of one host, shared memory / NIXL over TCP",
        "relay",
        "{shm_gb_per_s:.1f} / {nixl_gb_per_s:.1f} GB/s",
        statistic="medians of {nixl_samples:.0f} rounds",
    ),
)
_BEST = "best of 3"
_HTTP = "median of 6"
CARD_ROWS = (
    Row(
        "decode step, 1 x 128 / 8 x 1024 / 64 x 1024 / 256 x 512 (batch x prompt tokens)",
        "gpu",
        "{b1_in128_itl_ms:.2f} / {b8_in1024_itl_ms:.2f} / {b64_in1024_itl_ms:.2f} / {b256_in512_itl_ms:.2f} ms",
        " ms",
        statistic=_BEST,
    ),
    Row(
        "prefill, 512 / 2048 / 8192 tokens",
        "gpu",
        "{prefill_512_ms:.1f} / {prefill_2048_ms:.1f} / {prefill_8192_ms:.1f} ms",
        " ms",
        statistic=_BEST,
    ),
    Row("prefill, 16 x 2048 tokens", "gpu", "{prefill_16x2048_tok_s:.0f} tokens/s", " tokens/s", statistic=_BEST),
    Row(
        "share of the time that the device is idle between decode steps, batch 64",
        "gpu",
        "{gpu_idle_share_b64:.3f}",
        statistic="best of 3, and 20 replays",
    ),
    Row(
        "decode step with `--weights fp8`, the same four batches (target: the first)",
        "gpu",
        "{fp8_b1_in128_itl_ms:.2f} / {fp8_b8_in1024_itl_ms:.2f} / {fp8_b64_in1024_itl_ms:.2f} / {fp8_b256_in512_itl_ms:.2f} ms",
        " ms",
        statistic=_BEST,
    ),
    Row(
        "what fp8 costs: perplexity over that of bfloat16, weights / KV in fp8",
        "gpu",
        "{fp8_perplexity_over_bf16:.3f} / {kv_fp8_perplexity_over_bf16:.3f}",
        statistic="text that each family's model draws",
    ),
    Row(
        "HTTP, `whole`: time to first token, 128 / 512 / 2048 / 8192 tokens",
        "gpu",
        "{ttft_whole_128_ms:.1f} / {ttft_whole_512_ms:.1f} / {ttft_whole_2048_ms:.1f} / {ttft_whole_8192_ms:.1f} ms",
        " ms",
        statistic=_HTTP,
    ),
    Row(
        "HTTP, 1P1D on the same card: the same, prefill with the card to itself; with half of it",
        "gpu",
        "{ttft_1p1d_128_ms:.1f} / {ttft_1p1d_512_ms:.1f} / {ttft_1p1d_2048_ms:.1f} / {ttft_1p1d_8192_ms:.1f}; "
        "{ttft_1p1d_part_128_ms:.1f} / {ttft_1p1d_part_512_ms:.1f} / {ttft_1p1d_part_2048_ms:.1f} / "
        "{ttft_1p1d_part_8192_ms:.1f} ms",
        statistic=_HTTP,
    ),
    Row(
        "1P1D beyond `whole`, 128 / 512 / 2048 tokens, prefill with the card to itself",
        "gpu",
        "{ttft_excess_128_ms:z.1f} / {ttft_excess_512_ms:z.1f} / {ttft_excess_2048_ms:z.1f} ms",
        " ms",
        statistic="difference of the medians",
    ),
    Row("hand-over: token 1 to token 2 beyond one step", "gpu", "{handover_ms_p50:.2f} ms", " ms", statistic="median of 24"),
    Row(
        "share of the KV's bytes that leave after token 1 was sampled, 2048 tokens",
        "gpu",
        "{late_bytes_share:.3f}",
        statistic="6 prompts",
    ),
    Row(
        "between tokens of 16 streams while 8192-token prompts arrive, p99 / max: 1P1D, prefill on half a card, behind decode",
        "gpu",
        "{itl_p99_ms_1p1d:.1f} / {itl_max_ms_1p1d:.1f} ms",
        " ms",
        statistic="one run of 6 s",
    ),
    Row(
        "the same: 1P1D, prefill on all of the card; `whole`",
        "gpu",
        "{itl_p99_ms_1p1d_all_sms:.1f} / {itl_max_ms_1p1d_all_sms:.1f}; {itl_p99_ms_whole:.1f} / {itl_max_ms_whole:.1f} ms",
        statistic="one run of 6 s each",
    ),
    Row(
        "such prompts served in a minute: half of the card / all of it / `whole`",
        "gpu",
        "{prompts_per_min_1p1d:.0f} / {prompts_per_min_1p1d_all_sms:.0f} / {prompts_per_min_whole:.0f}",
        statistic="the same runs",
    ),
    Row(
        "`cuda_ipc` in bulk, 2048 tokens, over a copy on the device",
        "gpu",
        "{ipc_over_device_copy_2048:.2f}",
        statistic="median of 3 times 32 moves",
    ),
    Row(
        "requests per second of two router processes over one, on the host's cores",
        "router",
        "{routers_2_over_1:.2f}",
        statistic="median of 3 rounds",
    ),
)
