"""What `serve`, `router` and `worker` have in common: MODEL, --config, and the groups of options of `config.py`."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from kvrelay.config import Environment, Options, read_environment
from kvrelay.errors import ConfigError, KVRelayError
from kvrelay.options import Given, Parser, add_options, given

if TYPE_CHECKING:
    from kvrelay.worker.launcher import LauncherTie

O = TypeVar("O", bound=Options)


@dataclass(frozen=True, slots=True)
class Chosen:
    """The options of one run."""

    values: dict[type[Options], Options]
    given: Given
    namespace: argparse.Namespace
    environment: Environment

    def of(self, group: type[O]) -> O:
        value = self.values[group]
        assert isinstance(value, group)
        return value


def add_model_options(parser: Parser, groups: Sequence[type[Options]], skip: frozenset[str] = frozenset()) -> Parser:
    """MODEL, --config, and the options of the groups, less those in `skip`."""
    parser.add_argument(
        "positional_model", nargs="?", metavar="MODEL", help="smollm2 (default), a folder, a .gguf file, a hub id"
    )
    parser.add_argument("--config", type=pathlib.Path, metavar="FILE.yaml", help="a file of options; flags win over it")
    add_options(parser, groups, skip=skip)
    return parser


def parse(
    parser: Parser, argv: Sequence[str], groups: Sequence[type[Options]], per_role: Sequence[type[Options]] = ()
) -> Chosen:
    namespace = parser.parse_strictly(argv)
    if namespace.positional_model is not None:
        if "model" in namespace:
            raise ConfigError("the model is given twice: as MODEL and with --model")
        namespace.model = namespace.positional_model
    said = given(namespace, groups, namespace.config, per_role)
    return Chosen({group: said.value(group) for group in groups}, said, namespace, read_environment())


def run_tied(chosen: Chosen, run: Callable[[LauncherTie | None], int]) -> int:
    """The process that launched this one by --launcher-fd, if one did, hears why it ends."""
    if chosen.namespace.launcher_fd is None:
        return run(None)
    from kvrelay.worker.launcher import LauncherTie

    tie = LauncherTie(chosen.namespace.launcher_fd)
    try:
        return run(tie)
    except KVRelayError as error:
        tie.report(str(error))
        return 2
