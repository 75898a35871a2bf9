"""Who asks what, and when: from a seed, or from a trace. The same seed gives the same traffic.

A session is a conversation: its first question comes at a given time, each further one some time after the answer to the last.
Only lengths are drawn. The tokens of a prompt are numbers of no meaning: equal where prompts share a beginning, else different
from their first block on, so that caches find in them what they would find in real ones.

    fixed          prompts and answers of one length, in a Poisson process
    mixed          from an eighth to four times the length, evenly in the logarithm
    bursty         as fixed, but eight come at a time
    long-prefix    one of some long texts, and a short question behind it
    conversation   four turns: the whole conversation is sent again with every question
    daily          as fixed, but the rate rises from a fifth to all of it and falls again, once in the whole time

In any of them a share of the questions may have an image, before their words.
"""

from __future__ import annotations

import math
import pathlib
import random
from collections.abc import Iterator
from typing import Literal

import msgspec

from kvrelay.errors import ConfigError
from kvrelay.media.placeholders import placeholder_ids
from kvrelay.simulate.runner import TOKEN
from kvrelay.wire.serving import Image

Kind = Literal["fixed", "mixed", "bursty", "long-prefix", "conversation", "daily"]

_BURST = 8
_TURNS = 4
_OWN_TOKENS = 32  # behind a shared prefix, and of each further turn
_BASE = 30_000  # numbers that tell prompts apart
_FILLER = list(range(1, _BASE)) * 8
_FILE = b"an image"


class Shown(msgspec.Struct, frozen=True):
    """An image of a question. Those of one name are the same."""

    tokens: int
    name: str = ""  # none: an image of its own


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int  # words that the conversation so far does not have
    output_tokens: int
    pause_s: float = 0.0  # after the last answer
    images: tuple[Shown, ...] = ()


class Prompt(msgspec.Struct, frozen=True):
    tokens: list[int] = []
    images: list[Image] = []


class Session(msgspec.Struct, frozen=True, kw_only=True):
    at_s: float
    turns: tuple[Turn, ...]
    number: int
    prefix: int = 0  # which shared beginning
    prefix_tokens: int = 0

    def first_prompt(self) -> Prompt:
        mark = [_BASE + self.prefix % 2000, self.prefix // 2000]
        shared = (mark + _FILLER[: max(0, self.prefix_tokens - len(mark))])[: self.prefix_tokens]
        return self._asked(shared, [], 0)

    def next_prompt(self, prompt: Prompt, turn: int) -> Prompt:
        """After an answer to the last one."""
        return self._asked(prompt.tokens + [TOKEN] * self.turns[turn - 1].output_tokens, prompt.images, turn)

    def _asked(self, tokens: list[int], images: list[Image], turn: int) -> Prompt:
        """The question of this turn behind what was said."""
        for place, shown in enumerate(self.turns[turn].images):
            digest = shown.name or f"{self.number} {turn} {place}"
            grid = 1, 2, 2 * shown.tokens  # four patches make a token
            images = [*images, Image(digest=digest, start=len(tokens), num_tokens=shown.tokens, grid=grid, data=_FILE)]
            tokens = tokens + placeholder_ids(digest, shown.tokens)
        return Prompt(tokens + self._words(turn), images)

    def _words(self, turn: int) -> list[int]:
        count = self.turns[turn].prompt_tokens
        mark = [self.number % _BASE, self.number // _BASE, turn]
        return (mark + _FILLER[: max(0, count - len(mark))])[:count]


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Traffic from a seed. `rate` counts sessions per second."""

    kind: Kind = "fixed"
    rate: float = 1.0
    duration_s: float = 60.0
    input_tokens: int = 512
    output_tokens: int = 128
    num_prefixes: int = 4
    pause_s: float = 2.0
    image_share: float = 0.0  # of questions that have one
    image_tokens: int = 1024
    num_images: int = 0  # different ones; 0: each is its own
    seed: int = 0


def draw(wanted: Wanted) -> Iterator[Session]:
    source = random.Random(f"{wanted.kind} {wanted.seed}")
    images = random.Random(f"images {wanted.seed}")  # of its own, so that the rest is the same with and without them
    for number, at_s in enumerate(_times(wanted, source)):
        session = _session(wanted, source, number, at_s)
        yield _illustrated(wanted, images, session) if wanted.image_share else session


def _times(wanted: Wanted, source: random.Random) -> Iterator[float]:
    together = _BURST if wanted.kind == "bursty" else 1
    at_s = source.expovariate(wanted.rate / together)
    while at_s < wanted.duration_s:
        if wanted.kind != "daily" or source.random() < _share_of_day(at_s / wanted.duration_s):
            for _ in range(together):
                yield at_s
        at_s += source.expovariate(wanted.rate / together)


def _share_of_day(passed: float) -> float:
    return 0.2 + 0.8 * math.sin(math.pi * passed) ** 2


def _session(wanted: Wanted, source: random.Random, number: int, at_s: float) -> Session:
    asked, answered = wanted.input_tokens, wanted.output_tokens
    turns: tuple[Turn, ...]
    match wanted.kind:
        case "fixed" | "bursty" | "daily":
            turns = (Turn(prompt_tokens=asked, output_tokens=answered),)
        case "mixed":
            turns = (Turn(prompt_tokens=_between(source, asked), output_tokens=_between(source, answered)),)
        case "long-prefix":
            turn = Turn(prompt_tokens=_OWN_TOKENS, output_tokens=answered)
            prefix = source.randrange(wanted.num_prefixes)
            return Session(at_s=at_s, turns=(turn,), number=number, prefix=prefix, prefix_tokens=asked)
        case "conversation":
            further = [
                Turn(prompt_tokens=_OWN_TOKENS, output_tokens=answered, pause_s=source.expovariate(1 / wanted.pause_s))
                for _ in range(_TURNS - 1)
            ]
            turns = (Turn(prompt_tokens=asked, output_tokens=answered), *further)
    return Session(at_s=at_s, turns=turns, number=number)


def _illustrated(wanted: Wanted, source: random.Random, session: Session) -> Session:
    turns = tuple(
        msgspec.structs.replace(turn, images=(_shown(wanted, source),)) if source.random() < wanted.image_share else turn
        for turn in session.turns
    )
    return msgspec.structs.replace(session, turns=turns)


def _shown(wanted: Wanted, source: random.Random) -> Shown:
    return Shown(wanted.image_tokens, f"image {source.randrange(wanted.num_images)}" if wanted.num_images else "")


def _between(source: random.Random, usual: int) -> int:
    return max(1, round(usual * math.exp(source.uniform(math.log(1 / 8), math.log(4)))))


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request of a trace."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    session: str = ""
    prefix: str = ""
    prefix_tokens: int = 0
    images: tuple[Shown, ...] = ()


def read_trace(path: pathlib.Path) -> list[Session]:
    """JSON lines, in any order. Those of one session are its turns, in order of time: of each further one, `prompt_tokens` is
    what it adds, and it comes as long after the answer to the one before as the file has between them. Raises ConfigError."""
    try:
        content = path.read_bytes().splitlines()
        lines = [msgspec.json.decode(line, type=_Line) for line in content if line.strip()]
    except OSError as error:
        raise ConfigError(f"--trace: cannot read {path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--trace: {path}: {error}") from error
    return _sessions_of(sorted(lines, key=lambda line: line.at_s))


def _sessions_of(lines: list[_Line]) -> list[Session]:
    prefixes: dict[str, int] = {}
    together: dict[str, list[_Line]] = {}
    for number, line in enumerate(lines):
        together.setdefault(line.session or f"\0{number}", []).append(line)
    sessions = []
    for number, turns in enumerate(together.values()):
        first = turns[0]
        starts = [first.at_s, *(turn.at_s for turn in turns)]
        sessions.append(
            Session(
                at_s=first.at_s,
                number=number,
                prefix=prefixes.setdefault(first.prefix, len(prefixes)),
                prefix_tokens=first.prefix_tokens,
                turns=tuple(
                    Turn(
                        prompt_tokens=max(1, turn.prompt_tokens - (turn.prefix_tokens if turn is first else 0)),
                        output_tokens=turn.output_tokens,
                        pause_s=turn.at_s - before,
                        images=turn.images,
                    )
                    for turn, before in zip(turns, starts, strict=False)
                ),
            )
        )
    return sessions
