"""Costs from the result files of `kvrelay bench engine`, `bench gpu` and `bench relay`.

    prompts     of three lengths: what grows with the square of the length is attention, the rest is the curve `prefill`
    steps       of sequences of a known length: reading their KV at the memory's rate, and the rest is the curve `decode`
    transfers   the rate of one transport; a hand-over beyond a step is what a message between workers takes
    the model   KV bytes of a token, and layers

So passes like those that were measured take what they took.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from kvrelay.errors import ConfigError
from kvrelay.simulate.costs import Costs, Point, attended, interpolate

Figures = Mapping[str, float]

_PREFILL = re.compile(r"prefill_(\d+)_ms")
_ENGINE_DECODE = re.compile(r"decode_ms_b(\d+)")
_GPU_DECODE = re.compile(r"b(\d+)_in(\d+)_itl_ms")
_ENGINE_HELD = 136  # tokens of a sequence in the middle of the steps that `bench engine` measures: 129 and what came since
_GPU_OUTPUT_HELD = 64  # likewise of the output, in `bench gpu`
_RATES = ("shm_gb_per_s", "ipc_gb_s_2048", "nixl_gb_per_s", "nixl_gb_s_2048", "mooncake_gb_per_s")  # the first that a file has
_MODEL = {"kv_bytes_per_token": 131_072.0, "num_layers": 32.0}  # Llama-3.1-8B in bfloat16
_SAID = {"kv_bytes_per_token": "KV bytes per token", "num_layers": "layers"}
_MEMORY_GB_PER_S = 4251.0  # of an H200: a copy within it, reads and writes counted


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    costs: Costs
    assumed: tuple[str, ...] = ()  # what no file told, though files were given


def fit(paths: Iterable[pathlib.Path], kv_bytes_per_token: int = 0, num_layers: int = 0) -> Fit:
    """What no file has is that of `H200_8B`; a model that is given wins over files. Raises ConfigError."""
    figures: dict[str, float] = {}
    for path in paths:
        figures |= _read(path)
    has_files = bool(figures)
    if has_files and not _measured(figures):
        raise ConfigError("--costs: none of these files has figures of `bench engine`, `bench gpu` or `bench relay`")
    by_hand = {"kv_bytes_per_token": kv_bytes_per_token, "num_layers": num_layers}
    figures |= {name: float(value) for name, value in by_hand.items() if value}
    return Fit(costs=msgspec.structs.replace(H200_8B, **fitted(figures)), assumed=_assumed(figures) if has_files else ())


def fitted(figures: Figures) -> dict[str, object]:
    """The costs that these figures tell, for a model that has Llama-3.1-8B's KV if they do not say otherwise."""
    model = {name: int(figures.get(name, usual)) for name, usual in _MODEL.items()}
    kv_read_ms = 1000 * model["kv_bytes_per_token"] / (_memory_gb_per_s(figures) or _MEMORY_GB_PER_S) / 1e6
    return model | {"kv_read_ms_per_1000_tokens": kv_read_ms} | _measured(figures, kv_read_ms)


def _measured(figures: Figures, kv_read_ms: float = 0.0) -> dict[str, object]:
    found: dict[str, object] = {}
    decode = _decode(figures, kv_read_ms)
    if decode:
        found["decode"] = decode
    if prefill := _points(_PREFILL, figures):
        attention_ms = attention_ms_of(prefill)
        prefill = beside_attention(prefill, attention_ms)
        found |= {"prefill": _from_one_token(prefill, decode), "attention_ms_per_million_pairs": attention_ms}
    rates = [figures[name] for name in _RATES if name in figures]
    if rates:
        found["gb_per_s"] = rates[0]
    if "handover_beyond_step_ms_p50" in figures:
        found["latency_ms"] = figures["handover_beyond_step_ms_p50"]
    return found


def _decode(figures: Figures, kv_read_ms: float) -> tuple[Point, ...]:
    """Less what reading the KV took that the sequences held."""
    steps = {count: (count * _ENGINE_HELD, ms) for count, ms in _points(_ENGINE_DECODE, figures)}
    for name, ms in figures.items():
        if match := _GPU_DECODE.fullmatch(name):
            count, num_prompt_tokens = map(int, match.groups())
            steps[count] = count * (num_prompt_tokens + _GPU_OUTPUT_HELD), ms
    return tuple((count, max(0.0, ms - kv_read_ms * held / 1000)) for count, (held, ms) in sorted(steps.items()))


def attention_ms_of(prefill: Sequence[Point]) -> float:
    """Of a million pairs: by how much the curve through the first, a middle and the last point bends. Two do not tell."""
    if len(prefill) < 3:
        return 0.0
    (short, short_ms), (middle, middle_ms), (long, long_ms) = prefill[0], prefill[len(prefill) // 2], prefill[-1]
    bend = (long_ms - middle_ms) / (long - middle) - (middle_ms - short_ms) / (middle - short)
    return max(0.0, 2e6 * bend / (long - short))


def beside_attention(prefill: Sequence[Point], attention_ms: float) -> tuple[Point, ...]:
    return tuple((count, max(0.0, ms - attention_ms * attended(0, count) / 1e6)) for count, ms in prefill)


def _from_one_token(prefill: tuple[Point, ...], decode: Sequence[Point]) -> tuple[Point, ...]:
    """A pass of one token costs the same, whatever it is."""
    if not decode or prefill[0][0] == 1:
        return prefill
    return ((1, min(interpolate(decode, 1), prefill[0][1])), *prefill)


def _memory_gb_per_s(figures: Figures) -> float | None:
    """What decides how fast KV is read: as fast as weights are on a processor, or as a card reads and writes in a copy."""
    if "device_copy_gb_s" in figures:
        return 2 * figures["device_copy_gb_s"]
    return figures.get("memory_gb_per_s", figures.get("gemv_gb_per_s"))


def _assumed(figures: Figures) -> tuple[str, ...]:
    """What costs depend on and no file has."""
    missing = [said for name, said in _SAID.items() if name not in figures]
    model = [f"{' and '.join(missing)} are those of Llama-3.1-8B"] if missing else []
    memory = [] if _memory_gb_per_s(figures) else ["KV is read as on an H200"]
    return (*model, *memory)


def _points(pattern: re.Pattern[str], figures: Figures) -> tuple[Point, ...]:
    matches = [(pattern.fullmatch(name), figure) for name, figure in figures.items()]
    return tuple(sorted((int(match[1]), figure) for match, figure in matches if match))


class _File(msgspec.Struct):
    results: dict[str, float]
    scenario: str = ""


def _read(path: pathlib.Path) -> dict[str, float]:
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
    except OSError as error:
        raise ConfigError(f"--costs: cannot read {path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--costs: {path} is no result file of kvrelay bench: {error}") from error
    return _of_gpu(file.results) if file.scenario == "gpu" else file.results


def _of_gpu(results: Figures) -> dict[str, float]:
    """`bench gpu` measures the shape of Llama-3.1-8B, and calls a hand-over what is beyond a step."""
    figures: dict[str, float] = {**_MODEL, **results}
    if "handover_ms_p50" in results:
        figures["handover_beyond_step_ms_p50"] = results["handover_ms_p50"]
    return figures


# bench/results/nvidia-h200, gpu.json and gpu_relay.json: the shape of Llama-3.1-8B in bfloat16; two workers on one card
H200_8B = msgspec.convert(
    fitted(
        {
            "b1_in128_itl_ms": 3.6531,
            "b8_in1024_itl_ms": 4.4232,
            "b64_in1024_itl_ms": 6.7371,
            "b256_in512_itl_ms": 11.9107,
            "prefill_512_ms": 11.7537,
            "prefill_2048_ms": 46.0506,
            "prefill_8192_ms": 203.7993,
            "ipc_gb_s_2048": 1772.15,
            "handover_beyond_step_ms_p50": 1.2411,
            "device_copy_gb_s": 2125.38,
        }
    ),
    Costs,
)
