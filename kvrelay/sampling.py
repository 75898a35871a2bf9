"""How to choose the next token: the parameters, and the random numbers.

A random number is a pure function of (seed, sample, position), so a request gives the same tokens alone, in any batch,
on any worker, and after it moved from one worker to another.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import struct
import typing
from typing import Any, Literal

import msgspec

from kvrelay.errors import InvalidRequestError

MAX_LOGPROBS = 20
MAX_SAMPLES = 128
MAX_STOP_STRINGS = 16
MAX_BEAM_WIDTH = 128
MAX_LOGPROB_TOKENS = 1024
MAX_BAD_WORDS = 1024
MAX_BIAS = 100
MAX_TOKENS = 2**31 - 1  # more than any model's context holds: every output ends before, with the context


class GrammarKind(enum.StrEnum):
    JSON_OBJECT = "json_object"  # any JSON object
    JSON_SCHEMA = "json_schema"  # JSON that a schema allows
    REGEX = "regex"  # text that a regular expression matches
    CHOICE = "choice"  # one of a list of strings (source: a JSON list)
    LARK = "lark"  # text that a Lark grammar derives


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """What the output must look like. `source` is the schema, expression, list or grammar as text."""

    kind: GrammarKind
    source: str = ""


class BeamSearch(msgspec.Struct, frozen=True, kw_only=True):
    """Beam search instead of sampling: the `width` likeliest continuations grow side by side; the best `n` are the result.

    A finished one scores its total logprob / length ** length_penalty. The search ends with `width` finished ones
    (`early_stopping` true), when no running one is likely to beat the worst of them (false), or when none can ("never").
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything that decides the tokens of one request. Text-level fields (`stop`, `bad_words`) are used by the router only.

    `stop` may be one string. None stands for no stop strings, stop tokens or biases, for a seed that is drawn, and as
    `max_tokens` for all the room behind the prompt.
    """

    n: int = 1  # sequences generated (the router asks for best_of of them)
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop: list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    allowed_token_ids: list[int] = []  # no others are chosen; empty: all are allowed
    bad_words: list[str] = []  # not to be written
    bad_tokens: list[list[int]] = []  # the same as tokens; filled in where the tokenizer is
    logprobs: int | None = None  # alternatives reported beside each sampled token; None reports nothing
    logprob_token_ids: list[int] = []  # the alternatives to report, instead of the likeliest
    prompt_logprobs: int | None = None  # the same for each prompt token
    grammar: Grammar | None = None
    beam: BeamSearch | None = None

    def __post_init__(self) -> None:
        stop: object = self.stop
        if isinstance(stop, str):
            msgspec.structs.force_setattr(self, "stop", [stop])
        for name, default in _FOR_NONE:
            if getattr(self, name) is None:
                msgspec.structs.force_setattr(self, name, default)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def check_types(self) -> None:
        """For parameters that a caller made: a struct does not look at what it is made of. Raises InvalidRequestError."""
        for field, kind in _field_types():
            value = getattr(self, field)
            try:
                msgspec.convert(value, kind)
            except msgspec.ValidationError as error:
                reason = str(error).replace("`", "")
                raise InvalidRequestError(f"{field}: {reason[0].lower()}{reason[1:]}", param=field) from error

    def validate(self) -> None:
        """Refuses what cannot be served, naming the field."""
        _require(1 <= self.n <= MAX_SAMPLES, "n", f"must be between 1 and {MAX_SAMPLES}")
        _require(0.0 <= self.temperature <= 2.0, "temperature", "must be between 0 and 2")
        _require(0.0 < self.top_p <= 1.0, "top_p", "must be above 0 and at most 1")
        _require(self.top_k >= 0, "top_k", "must be 0 (off) or a positive count")
        _require(0.0 <= self.min_p <= 1.0, "min_p", "must be between 0 and 1")
        _require(0.0 < self.repetition_penalty <= 10.0, "repetition_penalty", "must be above 0 and at most 10")
        _require(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "must be between -2 and 2")
        _require(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "must be between -2 and 2")
        for token, bias in self.logit_bias.items():
            _require(-MAX_BIAS <= bias <= MAX_BIAS, "logit_bias", f"of {token} must be between -{MAX_BIAS} and {MAX_BIAS}")
        _require(-(2**63) <= self.seed < 2**63, "seed", "must fit 64 bits")
        _require(self.max_tokens >= 1, "max_tokens", "must be at least 1")
        _require(0 <= self.min_tokens <= self.max_tokens, "min_tokens", "must be between 0 and max_tokens")
        _require(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"takes at most {MAX_STOP_STRINGS} strings")
        _require(all(self.stop), "stop", "must not hold an empty string")
        _require(len(self.bad_words) <= MAX_BAD_WORDS, "bad_words", f"takes at most {MAX_BAD_WORDS} words")
        _require(all(self.bad_words), "bad_words", "must not hold an empty string")
        few_ids = len(self.logprob_token_ids) <= MAX_LOGPROB_TOKENS
        _require(few_ids, "logprob_token_ids", f"takes at most {MAX_LOGPROB_TOKENS} token ids")
        _require(self.logprobs is not None or not self.logprob_token_ids, "logprob_token_ids", "needs logprobs")
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            _require(count is None or 0 <= count <= MAX_LOGPROBS, name, f"must be between 0 and {MAX_LOGPROBS}")
        if self.beam is not None:
            _validate_beam(self, self.beam)


# What None stands for, in fields that have no None of their own.
_FOR_NONE: tuple[tuple[str, object], ...] = (
    ("stop", []),
    ("stop_token_ids", []),
    ("logit_bias", {}),
    ("allowed_token_ids", []),
    ("bad_words", []),
    ("logprob_token_ids", []),
    ("seed", 0),
    ("max_tokens", MAX_TOKENS),
)


@functools.cache
def _field_types() -> tuple[tuple[str, Any], ...]:
    return tuple(typing.get_type_hints(SamplingParams).items())


def _validate_beam(params: SamplingParams, beam: BeamSearch) -> None:
    """A search takes the model's probabilities as they are, and sees no text."""
    _require(1 <= beam.width <= MAX_BEAM_WIDTH, "beam_width", f"must be between 1 and {MAX_BEAM_WIDTH}")
    _require(params.n <= beam.width, "n", "must be at most beam_width")
    _require(-10.0 <= beam.length_penalty <= 10.0, "length_penalty", "must be between -10 and 10")
    given = {
        "temperature": params.temperature > 0.0,
        "top_p": params.top_p < 1.0,
        "top_k": params.top_k > 0,
        "min_p": params.min_p > 0.0,
        "repetition_penalty": params.repetition_penalty != 1.0,
        "presence_penalty": params.presence_penalty != 0.0,
        "frequency_penalty": params.frequency_penalty != 0.0,
        "logit_bias": bool(params.logit_bias),
        "allowed_token_ids": bool(params.allowed_token_ids),
        "bad_words": bool(params.bad_words),
        "logprob_token_ids": bool(params.logprob_token_ids),
        "response_format": params.grammar is not None,
        "prompt_logprobs": params.prompt_logprobs is not None,
        "stop": bool(params.stop),
    }
    for name, is_given in given.items():
        _require(not is_given, name, "cannot be combined with beam search")


def _require(condition: bool, param: str, rule: str) -> None:
    if not condition:
        raise InvalidRequestError(f"{param} {rule}", param=param)


def uniform(seed: int, sample: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments. `position` counts output tokens from 0."""
    key = struct.pack("<qqq", seed, sample, position)
    (bits,) = struct.unpack("<Q", hashlib.blake2b(key, digest_size=8).digest())
    return float(bits >> 11) * 2.0**-53
