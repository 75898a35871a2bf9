"""A scenario: options, and parts that measure. Those of several parts can be run in part (`--only`).

The options are a struct, as those of all commands are (`kvrelay/options.py`): flags, defaults and help are made from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Generic, Literal, TypeVar

from msgspec import Meta
from rich.console import Console

from kvrelay.bench.harness.report import Target
from kvrelay.checkpoint.fetch import resolve
from kvrelay.config import ModelOptions, Options, read_environment
from kvrelay.errors import ConfigError
from kvrelay.launch.console import console_progress
from kvrelay.options import suggest

Results = dict[str, float]


class BenchOptions(Options, frozen=True, kw_only=True):
    """What every scenario takes."""

    json: Annotated[str, Meta(description="write the result to this file")] = ""
    only: Annotated[str, Meta(description="parts to run, separated by commas; default is every part that needs no GPU")] = ""


class ModelBench(BenchOptions, frozen=True, kw_only=True):
    """What every scenario with a text model takes."""

    model: Annotated[str, Meta(description="smollm2, a folder, a .gguf file or a hub id")] = "smollm2"
    load: Annotated[
        Literal["auto", "dummy"], Meta(description="where weights come from: the checkpoint, or random (dummy)")
    ] = "auto"

    def local_model(self, threads: int = 0) -> ModelOptions:
        return local_model(self.model, self.load, threads)


def local_model(model: str, load: Literal["auto", "dummy"] = "auto", threads: int = 0) -> ModelOptions:
    """For workers: a folder, which none of them fetches again."""
    folder = resolve(model, read_environment(), console_progress())
    return ModelOptions(model=str(folder), load=load, dtype="float32", threads=threads)


O = TypeVar("O", bound=BenchOptions)
O_contra = TypeVar("O_contra", bound=BenchOptions, contravariant=True)


@dataclass(frozen=True)
class Part(Generic[O_contra]):
    title: str
    measure: Callable[[O_contra, Console], Results]
    targets: Mapping[str, Target]
    by_default: bool = True


@dataclass(frozen=True)
class Scenario(Generic[O]):
    options: type[O]
    parts: Mapping[str, Part[O]]
    positional: str = ""  # the option that is given without its name

    @property
    def targets(self) -> dict[str, Target]:
        return {name: target for part in self.parts.values() for name, target in part.targets.items()}

    def chosen_parts(self, only: str) -> list[str]:
        """In the scenario's own order. Raises ConfigError."""
        names = (
            [name.strip() for name in only.split(",")]
            if only
            else [name for name, part in self.parts.items() if part.by_default]
        )
        for name in names:
            if name not in self.parts:
                known = ", ".join(self.parts)
                raise ConfigError(f"--only: unknown part {name!r}{suggest(name, self.parts)} (there are {known})")
        return [name for name in self.parts if name in names]

    def measure(self, options: O, console: Console) -> Results:
        results: Results = {}
        names = self.chosen_parts(options.only)
        for number, name in enumerate(names, 1):
            if len(self.parts) > 1:
                console.print(f"{number} of {len(names)}: {name}: {self.parts[name].title}", highlight=False)
            results |= self.parts[name].measure(options, console)
        return results
