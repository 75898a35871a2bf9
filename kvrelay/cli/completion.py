"""`kvrelay completion SHELL`: prints a script that completes commands, options and their values. It is made from the parsers,
which are made from the structs of options: what a command takes is completed, and nothing else."""

from __future__ import annotations

import argparse
import importlib
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvrelay.options import Parser

_EPILOG = """\
examples:
  kvrelay completion bash > ~/.local/share/bash-completion/completions/kvrelay
  kvrelay completion zsh > ~/.zfunc/_kvrelay            with `fpath+=~/.zfunc` before `compinit` in ~/.zshrc
  kvrelay completion fish > ~/.config/fish/completions/kvrelay.fish
"""
SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True, slots=True)
class Choice:
    """An option of a command. `values`: all that it takes; empty: any text, such as a file; None: it takes none."""

    names: tuple[str, ...]
    help: str
    values: tuple[str, ...] | None


def build_parser() -> Parser:
    parser = Parser(prog="kvrelay completion", description="Prints a script by which a shell completes.", epilog=_EPILOG)
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash, zsh or fish")
    return parser


def run(argv: list[str]) -> int:
    print(script_for(build_parser().parse_strictly(argv).shell), end="")
    return 0


def script_for(shell: str) -> str:
    from kvrelay.bench.main import SCENARIOS
    from kvrelay.cli.main import COMMANDS

    commands = {name: choices_of(_parser(name)) for name in COMMANDS if name != "bench"}
    scenarios = {name: choices_of(_scenario_parser(name)) for name in SCENARIOS}
    about = dict(COMMANDS)
    match shell:
        case "bash":
            return _bash(commands, scenarios)
        case "zsh":
            return _zsh(commands, scenarios, about)
        case _:
            return _fish(commands, scenarios, about)


def choices_of(parser: Parser) -> list[Choice]:
    """What --help shows."""
    return [
        Choice(
            tuple(action.option_strings),
            " ".join((action.help or "").replace("%%", "%").split()),
            None if action.nargs == 0 else tuple(map(str, action.choices or ())),
        )
        for action in parser._actions
        if action.option_strings and action.help != argparse.SUPPRESS
    ]


def _parser(command: str) -> Parser:
    parser: Parser = importlib.import_module(f"kvrelay.cli.{command}").build_parser()
    return parser


def _scenario_parser(name: str) -> Parser:
    from kvrelay.bench.main import build_parser, find_scenario

    return build_parser(name, find_scenario(name))


Table = Mapping[str, list[Choice]]


def _bash(commands: Table, scenarios: Table) -> str:
    every = dict(commands) | {f"bench {name}": choices for name, choices in scenarios.items()}
    values = [
        f"    {shlex.quote(f'{command} {name}')}) COMPREPLY=($(compgen -W {shlex.quote(' '.join(choice.values))}"
        ' -- "$current")); return ;;'
        for command, choices in every.items()
        for choice in choices
        if choice.values
        for name in choice.names
    ]
    options = [f"    {shlex.quote(command)}) options={shlex.quote(_names(choices))} ;;" for command, choices in every.items()]
    return f"""\
# bash completion of kvrelay
_kvrelay() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} command=${{COMP_WORDS[1]}} options=
  if [[ $COMP_CWORD == 1 ]]; then
    COMPREPLY=($(compgen -W {shlex.quote(" ".join([*commands, "bench"]))} -- "$current")); return
  fi
  if [[ $command == bench ]]; then
    if [[ $COMP_CWORD == 2 ]]; then
      COMPREPLY=($(compgen -W {shlex.quote(" ".join([*scenarios, "compare"]))} -- "$current")); return
    fi
    command="bench ${{COMP_WORDS[2]}}"
  fi
  case "$command $previous" in
{_lines(values)}
  esac
  case "$command" in
{_lines(options)}
  esac
  if [[ $current == -* ]]; then
    COMPREPLY=($(compgen -W "$options" -- "$current"))
  else
    COMPREPLY=($(compgen -f -- "$current"))
  fi
}}
complete -o filenames -F _kvrelay kvrelay
"""


def _zsh(commands: Table, scenarios: Table, about: Mapping[str, str]) -> str:
    cases = [f"    {command}) _arguments {_zsh_options(choices)} '*:file:_files' ;;" for command, choices in commands.items()]
    of_bench = [f"        {name}) _arguments {_zsh_options(choices)} '*:file:_files' ;;" for name, choices in scenarios.items()]
    described = " ".join(shlex.quote(f"{name}:{text}") for name, text in about.items())
    return f"""\
#compdef kvrelay
_kvrelay() {{
  local -a commands=({described})
  if (( CURRENT == 2 )); then _describe command commands; return; fi
  local command=$words[2]
  shift words; (( CURRENT-- ))
  case $command in
{_lines(cases)}
    bench)
      if (( CURRENT == 2 )); then compadd {" ".join([*scenarios, "compare"])}; return; fi
      local scenario=$words[2]
      shift words; (( CURRENT-- ))
      case $scenario in
{_lines(of_bench)}
      esac ;;
  esac
}}
if [[ $funcstack[1] == _kvrelay ]]; then _kvrelay "$@"; else compdef _kvrelay kvrelay; fi
"""


def _zsh_options(choices: Iterable[Choice]) -> str:
    words: list[str] = []
    for choice in choices:
        help_text = choice.help.replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]").replace(":", "\\:")
        takes = "" if choice.values is None else f":value:({' '.join(choice.values)})" if choice.values else ":value:_files"
        words += [shlex.quote(f"{name}[{help_text}]{takes}") for name in choice.names]
    return " ".join(words)


def _fish(commands: Table, scenarios: Table, about: Mapping[str, str]) -> str:
    lines = ["# fish completion of kvrelay", "complete -c kvrelay -n __fish_use_subcommand -f"]
    lines += [f"complete -c kvrelay -n __fish_use_subcommand -a {name} -d {_fish_quoted(text)}" for name, text in about.items()]
    for command, choices in commands.items():
        lines += _fish_options(f"__fish_seen_subcommand_from {command}", choices)
    chosen = "__fish_seen_subcommand_from bench; and not __fish_seen_subcommand_from"
    lines.append(f"complete -c kvrelay -n '{chosen} {' '.join(scenarios)}' -f -a '{' '.join([*scenarios, 'compare'])}'")
    for name, choices in scenarios.items():
        lines += _fish_options(f"__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from {name}", choices)
    return "\n".join(lines) + "\n"


def _fish_options(condition: str, choices: Iterable[Choice]) -> list[str]:
    lines: list[str] = []
    for choice in choices:
        names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in choice.names)
        takes = "" if choice.values is None else f" -x -a '{' '.join(choice.values)}'" if choice.values else " -r"
        lines.append(f"complete -c kvrelay -n '{condition}' {names} -d {_fish_quoted(choice.help)}{takes}")
    return lines


def _fish_quoted(text: str) -> str:
    """In fish, a backslash inside single quotes escapes itself and the quote, and nothing else."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _names(choices: Iterable[Choice]) -> str:
    return " ".join(name for choice in choices for name in choice.names)


def _lines(lines: Iterable[str]) -> str:
    return "\n".join(lines)
