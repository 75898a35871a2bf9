"""Command-line options and config files, made from the structs in `config.py`.

Every field `max_batch: Annotated[int, Meta(..., description=...)] = 64` becomes `--max-batch N`, and a key `max_batch` of the
YAML file; a bool becomes `--name` and `--no-name`; a tuple becomes an option that may be given several times, and a list in the
file. Flags win over the file, the file over the defaults. What is unknown is an error that names the nearest thing there is.
"""

from __future__ import annotations

import argparse
import difflib
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, TypeVar

import msgspec
from msgspec import inspect

from kvrelay.config import Options
from kvrelay.errors import ConfigError

_NEVER_EMPTY = ("api_key", "api_key_file")  # such as "$KEY" of a variable that is not set: the server would need no key
O = TypeVar("O", bound=Options)
_METAVARS: dict[type[inspect.Type], str] = {inspect.IntType: "N", inspect.FloatType: "X", inspect.StrType: "TEXT"}
# What short options mean elsewhere; there are none here.
_USUAL = {
    "-p": "--port",
    "-m": "--model",
    "-c": "--config",
    "-H": "--host",
    "-k": "--api-key",
    "-t": "--threads",
    "-u": "--url",
}


class Parser(argparse.ArgumentParser):
    """Raises ConfigError instead of exiting, and suggests what a misspelt option may have meant."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")

    def parse_strictly(self, argv: Sequence[str]) -> argparse.Namespace:
        namespace, unknown = self.parse_known_args(argv)
        for word in unknown:
            if word.startswith("-"):
                name = _name_of(word)
                raise ConfigError(f"unknown option {name}{self._meant(name)} (see {self.prog} --help)")
        if unknown:
            raise ConfigError(f"unexpected argument {unknown[0]!r} (see {self.prog} --help)")
        return namespace

    def _meant(self, name: str) -> str:
        usual = _USUAL.get(name)
        return f"; did you mean {usual}?" if usual in self.options() else suggest(name, self.options())

    def options(self) -> list[str]:
        return [option for action in self._actions for option in action.option_strings]


def _name_of(word: str) -> str:
    """`--port` of `--port=80`, `-p` of `-p80`."""
    name = word.partition("=")[0]
    return name[:2] if name[:2] in _USUAL and name[2:].isdigit() else name


def suggest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def add_options(parser: Parser, groups: Sequence[type[Options]], *, skip: frozenset[str] = frozenset()) -> None:
    """One titled group of flags per struct. An option that is not given is absent from the namespace."""
    seen = set(skip)
    for group in groups:
        title = (group.__doc__ or "").strip().splitlines()[0].rstrip(".")
        section = parser.add_argument_group(title)
        for field in _fields(group):
            if field.name not in seen:
                seen.add(field.name)
                _add_option(section, field)


def _add_option(section: argparse._ArgumentGroup, field: inspect.Field) -> None:
    kind, description = _unwrap(field.type)
    flag = "--" + field.name.replace("_", "-")
    text = description.replace("%", "%%") + _default_note(field.default, kind)
    if isinstance(kind, inspect.BoolType):
        section.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
    elif isinstance(kind, inspect.LiteralType):
        choices = [str(value) for value in kind.values]
        section.add_argument(flag, choices=choices, default=argparse.SUPPRESS, help=text, metavar=_metavar(kind))
    elif isinstance(kind, inspect.VarTupleType):
        section.add_argument(flag, action="append", default=argparse.SUPPRESS, help=text, metavar="TEXT")
    else:
        section.add_argument(flag, default=argparse.SUPPRESS, help=text, metavar=_metavar(kind))


def _metavar(kind: inspect.Type) -> str:
    if isinstance(kind, inspect.UnionType):
        return "|".join(_metavar(_unwrap(one)[0]) for one in kind.types)
    if isinstance(kind, inspect.LiteralType):
        return "|".join(str(value) for value in kind.values)
    return _METAVARS[type(kind)]


def _default_note(default: Any, kind: inspect.Type) -> str:
    if default in ("", ()) or default is msgspec.NODEFAULT:
        return ""
    return f" (default {('on' if default else 'off') if isinstance(kind, inspect.BoolType) else default})"


def collect(
    namespace: argparse.Namespace, groups: Sequence[type[Options]], config: pathlib.Path | None
) -> dict[type[Options], Options]:
    """The value of each group: defaults, then the file, then the flags."""
    from_file = _read_config(config, groups) if config is not None else {}
    flags = {name: value for name, value in vars(namespace).items() if name in _names(groups)}
    values: dict[type[Options], Options] = {}
    for group in groups:
        chosen = {
            field.name: (flags if field.name in flags else from_file)[field.name]
            for field in _fields(group)
            if field.name in flags or field.name in from_file
        }
        values[group] = _convert(group, chosen)
    return values


def _convert(group: type[O], chosen: dict[str, Any]) -> O:
    for field in _fields(group):
        if field.name in chosen:
            flag = "--" + field.name.replace("_", "-")
            if chosen[field.name] == "" and field.name in _NEVER_EMPTY:
                raise ConfigError(f"{flag} is empty: without a key, leave the option out")
            try:
                msgspec.convert({field.name: chosen[field.name]}, group, strict=False)
            except msgspec.ValidationError as error:
                reason = str(error).split(" - at ")[0].replace("`", "")
                raise ConfigError(f"{flag} {chosen[field.name]}: {reason[0].lower()}{reason[1:]}") from error
    return msgspec.convert(chosen, group, strict=False)


def _read_config(path: pathlib.Path, groups: Sequence[type[Options]]) -> dict[str, Any]:
    """A flat YAML mapping. Keys are option names, with underscores or dashes."""
    import yaml

    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read --config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} must hold options as `name: value` lines")
    known = _names(groups)
    options: dict[str, Any] = {}
    for key, value in loaded.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ConfigError(f"{path}: unknown option {str(key)!r}{suggest(name, known)}")
        if name in options:
            raise ConfigError(f"{path}: {name} is given twice")
        options[name] = value
    return options


def to_flags(options: Options) -> list[str]:
    """The command line that gives these options again."""
    flags: list[str] = []
    for field in _fields(type(options)):
        value = getattr(options, field.name)
        flag = field.name.replace("_", "-")
        if value == "" and field.name in _NEVER_EMPTY:
            continue
        if isinstance(value, tuple):
            flags += [f"--{flag}={each}" for each in value]
        elif isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags.append(f"--{flag}={value}")
    return flags


def _names(groups: Sequence[type[Options]]) -> set[str]:
    return {field.name for group in groups for field in _fields(group)}


def _fields(group: type[Options]) -> tuple[inspect.Field, ...]:
    described = inspect.type_info(group)
    assert isinstance(described, inspect.StructType)
    return described.fields


def _unwrap(kind: inspect.Type) -> tuple[inspect.Type, str]:
    """The type inside its annotations, and the description among them."""
    description = ""
    while isinstance(kind, inspect.Metadata):
        description = str((kind.extra_json_schema or {}).get("description", description))
        kind = kind.type
    return kind, description
