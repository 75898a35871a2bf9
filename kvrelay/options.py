"""Command-line options and config files, made from the structs in `config.py`; and which of them go together.

Every field `max_batch: Annotated[int, Meta(..., description=...)] = 64` becomes `--max-batch N`, and a key `max_batch` of the
YAML file; a bool becomes `--name` and `--no-name`; a tuple becomes an option that may be given several times, and a list in the
file. Flags win over the file, the file over the defaults. What is unknown is an error that names the nearest thing there is.

An option of a group that is taken per role has one more flag a role, `--decode-max-batch`, a key of the file too; in the file
all that is said of a role may stand together: `decode: {workers: 2, max_batch: 64}`. It wins over what is said of all roles.
"""

from __future__ import annotations

import argparse
import difflib
import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import msgspec
from msgspec import inspect

from kvrelay.config import EngineOptions, ModelOptions, Options
from kvrelay.errors import ConfigError
from kvrelay.states import Role

_NUM_WORKERS = "workers"  # in a role's block of a config file; elsewhere the role's name stands for it
_NEVER_EMPTY = ("api_key", "api_key_file", "admin_key_file")  # such as "$KEY" of an unset variable: none would be needed
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


def add_role_options(parser: Parser, groups: Sequence[type[Options]]) -> None:
    """The same options again for each role. --help does not list them: the rule that makes them is short."""
    for role in Role:
        for group in groups:
            for field in _fields(group):
                _add_option(parser, field, role)


def _add_option(section: argparse._ActionsContainer, field: inspect.Field, role: Role | None = None) -> None:
    kind, description = _unwrap(field.type)
    flag = flag_of(field.name, role)
    text = argparse.SUPPRESS if role else description.replace("%", "%%") + _default_note(field.default, kind)
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


def flag_of(name: str, role: Role | None = None) -> str:
    return "--" + (name if role is None else f"{role.value}_{name}").replace("_", "-")


def _default_note(default: Any, kind: inspect.Type) -> str:
    if default in ("", ()) or default is msgspec.NODEFAULT:
        return ""
    return f" (default {('on' if default else 'off') if isinstance(kind, inspect.BoolType) else default})"


@dataclass(frozen=True, slots=True)
class Given:
    """What the user has said, flags over file, before it is checked. Names of a role's options begin with the role."""

    options: dict[str, Any]

    def value(self, group: type[O], role: Role | None = None) -> O:
        """With the defaults; for a role, with what is said of it. Raises ConfigError, which names the flag."""
        chosen: dict[str, Any] = {}
        for field in _fields(group):
            for owner in (None, role):
                flag = flag_of(field.name, owner)
                if _key(flag) in self.options:
                    chosen[field.name] = _checked(group, field.name, self.options[_key(flag)], flag)
        return msgspec.convert(chosen, group, strict=False)

    def of_role(self, group: type[Options], role: Role) -> list[str]:
        """The flags of what is said of this role alone."""
        flags = [flag_of(field.name, role) for field in _fields(group)]
        return [flag for flag in flags if _key(flag) in self.options]


def given(
    namespace: argparse.Namespace,
    groups: Sequence[type[Options]],
    config: pathlib.Path | None,
    per_role: Sequence[type[Options]] = (),
) -> Given:
    """`per_role` are those of the groups that each role may have of its own."""
    known = _names(groups) | {_key(flag_of(name, role)) for name in _names(per_role) for role in Role}
    from_file = _read_config(config, known) if config is not None else {}
    return Given(from_file | {name: value for name, value in vars(namespace).items() if name in known})


def collect(
    namespace: argparse.Namespace, groups: Sequence[type[Options]], config: pathlib.Path | None
) -> dict[type[Options], Options]:
    """The value of each group: defaults, then the file, then the flags."""
    said = given(namespace, groups, config)
    return {group: said.value(group) for group in groups}


def _key(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _checked(group: type[Options], name: str, value: Any, flag: str) -> Any:
    if value == "" and name in _NEVER_EMPTY:
        raise ConfigError(f"{flag} is empty: without a key, leave the option out")
    try:
        msgspec.convert({name: value}, group, strict=False)
    except msgspec.ValidationError as error:
        reason = str(error).split(" - at ")[0].replace("`", "")
        raise ConfigError(f"{flag} {value}: {reason[0].lower()}{reason[1:]}") from error
    return value


def _read_config(path: pathlib.Path, known: set[str]) -> dict[str, Any]:
    """A YAML mapping, flat but for a block per role. Keys are option names, with underscores or dashes."""
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
    options: dict[str, Any] = {}
    for shown, name, value in _flattened(loaded):
        if name not in known:
            raise ConfigError(f"{path}: unknown option {shown!r}{suggest(name, known)}")
        if name in options:
            raise ConfigError(f"{path}: {name} is given twice")
        options[name] = json.dumps(value) if isinstance(value, dict) else value  # what a flag would say
    return options


def _flattened(loaded: dict[Any, Any]) -> Iterator[tuple[str, str, Any]]:
    """Of each option its key as it stands in the file, its name, its value."""
    for key, value in loaded.items():
        name = str(key).replace("-", "_")
        if isinstance(value, dict) and name in list(Role):
            for inner, its in value.items():
                yield f"{key}: {inner}", name if inner == _NUM_WORKERS else f"{name}_{inner}".replace("-", "_"), its
        else:
            yield str(key), name, value


def to_flags(options: Options) -> list[str]:
    """The command line that gives these options again."""
    flags: list[str] = []
    for field in _fields(type(options)):
        value = getattr(options, field.name)
        flag = flag_of(field.name)
        if value == "" and field.name in _NEVER_EMPTY:
            continue
        if isinstance(value, tuple):
            flags += [f"{flag}={each}" for each in value]
        elif isinstance(value, bool):
            flags.append(flag if value else f"--no-{_key(flag).replace('_', '-')}")
        else:
            flags.append(f"{flag}={value}")
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


class RoleOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the workers of one role are told of their model and engine."""

    model: ModelOptions
    engine: EngineOptions


def check_roles(options: Mapping[Role, RoleOptions]) -> None:
    """Refuses roles whose workers could not work together."""
    # Block sizes, pools, batches, threads and degrees may differ.
    for name in ("load", "dtype", "weights", "kv_dtype"):
        values = {role: msgspec.structs.asdict(its.model)[name] for role, its in options.items()}
        if len(set(values.values())) > 1:
            said = ", ".join(f"{value} for {role.value}" for role, value in values.items())
            raise ConfigError(f"{flag_of(name)}: {said}: workers that hand over to each other need the same")
    engines = {role: its.engine.engine for role, its in options.items()}
    if len(set(engines.values())) > 1:
        said = ", ".join(f"{engine} for {role.value}" for role, engine in engines.items())
        raise ConfigError(f"--engine: {said}: KV of one engine is of no use to another")
    devices = {role: options[role].model.device for role in (Role.PREFILL, Role.DECODE) if role in options}
    if len(set(devices.values())) > 1:
        said = ", ".join(f"{device} for {role.value}" for role, device in devices.items())
        raise ConfigError(f"--device: {said}: one command starts both on cards or both on the host")
