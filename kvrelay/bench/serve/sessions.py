"""Traffic from a seed: who asks what, and when. The same seed gives the same traffic, whatever server it meets.

A session is a conversation: its first question comes at a given time, each further one when the last was answered. All
kinds of traffic but `conversation` have one question a session. Prompts are plain English words, about a token each; how many
tokens they really were is for the server's `usage` to say.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

_TEXT = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one you "
    "were her all she there would their we him been has when who will more no if out so said what up its about into than them "
    "can only other new some could time these two may then do first any my now such like our over man me even most made after "
    "also did many before must through back years where much your way well down should because each just those people how too "
    "little state good very make world still own see men work long get here between both life being under never day same "
    "another know while last might us great old year off come since against go came right used take three"
)
WORDS = _TEXT.split()
_BURST = 8
_NUM_PREFIXES = 4
_OWN_WORDS = 32  # behind a shared prefix, and of each turn of a conversation
_TURNS = 4


@dataclass(frozen=True)
class Question:
    text: str
    max_tokens: int


@dataclass(frozen=True)
class Session:
    at_s: float
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Wanted:
    """A rate of 0 means that all sessions are there from the beginning."""

    num_sessions: int
    rate: float
    input_tokens: int
    output_tokens: int
    seed: int


def fixed(wanted: Wanted, source: random.Random) -> list[Session]:
    """Prompts and answers of one length, in a Poisson process."""
    return [_single(at, _words(source, wanted.input_tokens), wanted.output_tokens) for at in _poisson(wanted, source)]


def conversation(wanted: Wanted, source: random.Random) -> list[Session]:
    """Four turns each: the whole conversation is sent again with every question."""
    return [
        Session(at, tuple(Question(_words(source, count), wanted.output_tokens) for count in _turns(wanted)))
        for at in _poisson(wanted, source)
    ]


def long_prefix(wanted: Wanted, source: random.Random) -> list[Session]:
    """One of four long texts, and a short question behind it."""
    texts = [_words(source, wanted.input_tokens) for _ in range(_NUM_PREFIXES)]
    return [
        _single(at, f"{source.choice(texts)} {_words(source, _OWN_WORDS)}", wanted.output_tokens)
        for at in _poisson(wanted, source)
    ]


def bursty(wanted: Wanted, source: random.Random) -> list[Session]:
    """As `fixed`, but eight come at a time."""
    starts = _poisson(Wanted(-(-wanted.num_sessions // _BURST), wanted.rate / _BURST, 0, 0, 0), source)
    times = [at for at in starts for _ in range(_BURST)][: wanted.num_sessions]
    return [_single(at, _words(source, wanted.input_tokens), wanted.output_tokens) for at in times]


def mixed(wanted: Wanted, source: random.Random) -> list[Session]:
    """Prompts and answers from an eighth to four times the length, evenly in the logarithm."""
    return [
        _single(at, _words(source, _between(source, wanted.input_tokens)), _between(source, wanted.output_tokens))
        for at in _poisson(wanted, source)
    ]


KINDS: dict[str, Callable[[Wanted, random.Random], list[Session]]] = {
    "fixed": fixed,
    "conversation": conversation,
    "long-prefix": long_prefix,
    "bursty": bursty,
    "mixed": mixed,
}


def make_sessions(kind: str, wanted: Wanted) -> list[Session]:
    return KINDS[kind](wanted, random.Random(f"{kind} {wanted.seed}"))


def _single(at_s: float, text: str, max_tokens: int) -> Session:
    return Session(at_s, (Question(text, max_tokens),))


def _poisson(wanted: Wanted, source: random.Random) -> list[float]:
    now, times = 0.0, []
    for _ in range(wanted.num_sessions):
        times.append(now)
        now += source.expovariate(wanted.rate) if wanted.rate else 0.0
    return times


def _turns(wanted: Wanted) -> list[int]:
    return [wanted.input_tokens, *[_OWN_WORDS] * (_TURNS - 1)]


def _between(source: random.Random, usual: int) -> int:
    return max(1, round(usual * math.exp(source.uniform(math.log(1 / 8), math.log(4)))))


def _words(source: random.Random, count: int) -> str:
    return " ".join(source.choices(WORDS, k=count))
