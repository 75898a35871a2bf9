"""A client's JSON schema made ready for llguidance.

    closed      an object with `properties` has no others, unless `additionalProperties` says so; otherwise a model may add
                properties until it reaches its length limit. Objects without `properties` stay free
    rewritten   keywords that llguidance does not know and that can be said in other words (`propertyNames`), or say nothing
                (`uniqueItems: false`; unknown values of `format`, which JSON Schema ignores)
    refused     all other keywords that it does not know, with their place: SchemaError

Where several schemas describe one object (`allOf`, `$ref` beside `properties`, ...), closing each of them would forbid the
properties of the others. Such an object is closed once, over the properties of all of them (`_Combined`), and its parts stay
open: a definition that is such a part is copied, since it may be used elsewhere by itself.

`oneOf` is read as `anyOf`: what a model writes fits at least one of the schemas.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

# A space, or a new line with its indentation. Unbounded white space is valid JSON too, but a model that begins with it may
# never end.
_OPTIONS = {"whitespace_pattern": r"\x20|\x0A\x20{0,24}", "coerce_one_of": True}
_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
_REFUSED = (
    "not", "if", "contains", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems", "$dynamicRef",
    "$recursiveRef",
)  # fmt: skip
# Keywords without effect alone, and the keyword that they belong to.
_DEPENDENT = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains", "$dynamicAnchor": "$dynamicRef"}
_IN_PLACE = ("allOf", "anyOf", "oneOf")  # further schemas of the same value
_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # schemas by name
_SINGLE = ("additionalProperties", "items", "additionalItems")
_LISTED = ("prefixItems", "items")
_ABOUT_NAMES = {"type", "pattern", "enum", "const", "minLength", "maxLength", "format", "title", "description"}
_MOST_FAULTS = 256  # schemas looked at to find the place of an error


class SchemaError(Exception):
    """A schema that cannot be used. `path` is the place inside it, such as `.properties.tags`."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path.removeprefix('.')}: {problem}" if path else problem)
        self.path = path
        self.problem = problem


def prepare_schema(schema: Schema) -> Schema:
    """Raises SchemaError."""
    try:
        return {**_Preparation(schema).whole(), "x-guidance": _OPTIONS}
    except RecursionError:
        raise SchemaError("", "it is nested too deeply") from None


def parts_of(schema: Schema) -> list[tuple[str, Schema]]:
    """Every schema inside a prepared one, with its path, the innermost first. Each can be used alone."""
    definitions: Schema = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    found: list[tuple[str, Schema]] = []

    def visit(node: Schema, path: str) -> None:
        for name, part in _children(node):
            visit(part, f"{path}{name}")
        if path and len(found) < _MOST_FAULTS:
            found.append((path, {**definitions, **node, "x-guidance": _OPTIONS}))

    visit(schema, "")
    return found


def _children(node: Schema) -> list[tuple[str, Schema]]:
    named = [(f".{key}.{name}", part) for key in _NAMED for name, part in _as_dict(node.get(key)).items()]
    single = [(f".{key}", node[key]) for key in _SINGLE if key in node]
    listed = [
        (f".{key}[{place}]", part) for key in (*_LISTED, *_IN_PLACE) for place, part in enumerate(_as_list(node.get(key)))
    ]
    return [(path, part) for path, part in (*named, *single, *listed) if isinstance(part, dict)]


def _as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


class _Combined:
    """The properties that several schemas of one object name."""

    def __init__(self) -> None:
        self.properties: dict[str, Any] = {}  # without their schemas, which stay where they are
        self.patterns: dict[str, Any] = {}
        self.required: list[str] = []
        self.closable = True  # no part says by itself what else may be there


class _Preparation:
    """Of one schema."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._copies: dict[tuple[str, str], str] = {}  # definitions that are parts, by their keyword and name: the copy's name

    def whole(self) -> Schema:
        prepared: Schema = self._value(self._root, "")
        done: set[tuple[str, str]] = set()
        while pending := [key for key in self._copies if key not in done]:
            for keyword, name in pending:
                done.add((keyword, name))
                copy = self._part(self._root[keyword][name], f".{keyword}.{name}")
                prepared[keyword] = {**prepared[keyword], self._copies[keyword, name]: copy}
        return prepared

    def _value(self, node: Any, path: str) -> Any:
        """A schema that alone describes a value."""
        if not isinstance(node, dict):
            return node
        own = "properties" in node or "patternProperties" in node
        others = [key for key in (*_IN_PLACE, "$ref") if key in node]
        is_combined = len(others) + own > 1 or len(_as_list(node.get("allOf"))) > 1
        prepared = self._rewritten(node, path, parts=is_combined)
        unevaluated = prepared.pop("unevaluatedProperties", False)
        if unevaluated is True:
            prepared.setdefault("additionalProperties", True)
        elif unevaluated is not False:
            raise SchemaError(path, "unevaluatedProperties with a schema is not supported")
        if (own or is_combined) and "additionalProperties" not in prepared:
            self._close(node, prepared)
        return prepared

    def _part(self, node: Any, path: str) -> Any:
        """One of several schemas of the same value: it stays open."""
        if not isinstance(node, dict):
            return node
        prepared = self._rewritten(node, path, parts=True)
        prepared.pop("unevaluatedProperties", None)
        return prepared

    def _close(self, node: Schema, prepared: Schema) -> None:
        combined = _Combined()
        self._gather(node, combined, frozenset())
        if not combined.closable or not (combined.properties or combined.patterns or "properties" in node):
            return
        if not combined.patterns:
            combined.properties.update((name, {}) for name in combined.required if name not in combined.properties)
        prepared["properties"] = {**prepared.get("properties", {}), **_without(combined.properties, prepared.get("properties"))}
        if combined.patterns:
            own = prepared.get("patternProperties")
            prepared["patternProperties"] = {**(own or {}), **_without(combined.patterns, own)}
        prepared["additionalProperties"] = False

    def _gather(self, node: Any, combined: _Combined, seen: frozenset[str]) -> None:
        if not isinstance(node, dict):
            return
        if "additionalProperties" in node or node.get("unevaluatedProperties") is True or "propertyNames" in node:
            combined.closable = False
        combined.properties.update((name, {}) for name in _as_dict(node.get("properties")))
        combined.patterns.update((name, {}) for name in _as_dict(node.get("patternProperties")))
        combined.required += [name for name in _as_list(node.get("required")) if isinstance(name, str)]
        for key in _IN_PLACE:
            for part in _as_list(node.get(key)):
                self._gather(part, combined, seen)
        reference = node.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            found = self._definition(reference)
            if found is None:
                combined.closable = False
            else:
                self._gather(self._root[found[0]][found[1]], combined, seen | {reference})

    def _definition(self, reference: str) -> tuple[str, str] | None:
        """The keyword and the name of a definition of this schema."""
        for keyword in ("$defs", "definitions"):
            prefix = f"#/{keyword}/"
            name = reference.removeprefix(prefix).replace("~1", "/").replace("~0", "~")
            if reference.startswith(prefix) and name in _as_dict(self._root.get(keyword)):
                return keyword, name
        return None

    def _rewritten(self, node: Schema, path: str, *, parts: bool) -> Schema:
        """With what is inside prepared. `parts`: further schemas of the same value stay open."""
        prepared = dict(node)
        self._drop_idle(prepared, path)
        if "propertyNames" in prepared:
            self._limit_names(prepared, path)
        for key in _NAMED:
            if isinstance(prepared.get(key), dict):
                prepared[key] = {name: self._value(part, f"{path}.{key}.{name}") for name, part in prepared[key].items()}
        for key in _SINGLE:
            if isinstance(prepared.get(key), dict):
                prepared[key] = self._value(prepared[key], f"{path}.{key}")
        for key in _LISTED:
            if isinstance(prepared.get(key), list):
                prepared[key] = [self._value(part, f"{path}.{key}[{place}]") for place, part in enumerate(prepared[key])]
        prepare = self._part if parts else self._value
        for key in _IN_PLACE:
            if isinstance(prepared.get(key), list):
                prepared[key] = [prepare(part, f"{path}.{key}[{place}]") for place, part in enumerate(prepared[key])]
        if parts and isinstance(prepared.get("$ref"), str):
            prepared["$ref"] = self._open_copy(prepared["$ref"])
        return prepared

    def _open_copy(self, reference: str) -> str:
        found = self._definition(reference)
        if found is None:
            return reference
        name = self._copies.setdefault(found, f"{found[1]}.part")
        return f"#/{found[0]}/{name.replace('~', '~0').replace('/', '~1')}"

    def _drop_idle(self, prepared: Schema, path: str) -> None:
        """Keywords that say nothing. Refuses those that cannot be followed."""
        for key in _REFUSED:
            if prepared.get(key) == {} and key.startswith("depend"):
                del prepared[key]
            elif key in prepared:
                raise SchemaError(path, f"the keyword {key} is not supported")
        for key, belongs_to in _DEPENDENT.items():
            if belongs_to not in prepared:
                prepared.pop(key, None)
        if prepared.get("format") not in _FORMATS:
            prepared.pop("format", None)
        unique = prepared.pop("uniqueItems", False)
        most = prepared.get("maxItems")
        if unique is not False and not (isinstance(most, int) and most <= 1):
            raise SchemaError(path, "the keyword uniqueItems is not supported")

    def _limit_names(self, prepared: Schema, path: str) -> None:
        """`propertyNames` in other words: properties with these names, or of this pattern, and no others."""
        names, values = prepared.pop("propertyNames"), prepared.get("additionalProperties", {})
        found = self._definition(names["$ref"]) if isinstance(names, dict) and isinstance(names.get("$ref"), str) else None
        if found is not None:
            names = self._root[found[0]][found[1]]
        if names is True or (isinstance(names, dict) and not names.keys() - {"type", "title", "description"}):
            return
        if not isinstance(names, dict) or names.keys() - _ABOUT_NAMES:
            raise SchemaError(path, "this propertyNames is not supported")
        own = _as_dict(prepared.get("properties"))
        listed = [names["const"]] if "const" in names else names.get("enum")
        if listed is not None:
            if set(own) - set(listed) or "patternProperties" in prepared:
                raise SchemaError(path, "propertyNames without some of the properties is not supported")
            prepared["properties"] = {**own, **{name: values for name in listed if name not in own}}
        else:
            if own or "patternProperties" in prepared:
                raise SchemaError(path, "propertyNames beside properties is not supported")
            if "pattern" in names and names.keys() & {"minLength", "maxLength"}:
                raise SchemaError(path, "propertyNames with a pattern and a length is not supported")
            lengths = f"{names.get('minLength', 0)},{names.get('maxLength', '')}"
            prepared["patternProperties"] = {names.get("pattern", f"^.{{{lengths}}}$"): values}
        prepared["additionalProperties"] = False


def _without(names: dict[str, Any], known: dict[str, Any] | None) -> dict[str, Any]:
    return {name: part for name, part in names.items() if name not in (known or {})}
