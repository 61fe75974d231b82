"""JSON schema of the places where a name or an object with that name's own parameters may stand. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ds_byzantine.rules.catalog import Param

Schema = dict[str, Any]
_TYPES = {float: "number", int: "integer", str: "string", bool: "boolean"}


class Entry(Protocol):
    """What rules and attacks have in common in their catalogs."""

    @property
    def name(self) -> str: ...
    @property
    def summary(self) -> str: ...
    @property
    def params(self) -> tuple[Param, ...]: ...


def name_or_object(table: Mapping[str, Entry], shared: Mapping[str, Schema] | None = None) -> list[Schema]:
    """Alternatives: one of the names, or an object for each name with its parameters and the shared keys."""
    objects = [_object(entry, shared or {}) for _, entry in sorted(table.items())]
    return [{"type": "string", "enum": sorted(table)}, *objects]


def param_schema(param: Param) -> Schema:
    """One parameter as a JSON schema property."""
    kind = _TYPES[param.type]
    if param.whole is not None:
        number = {"type": "integer", "minimum": param.whole[0], "maximum": param.whole[1]}
        named = {"type": kind, "enum": list(param.choices)}
        return {"anyOf": [named, number], "description": param.doc, "default": param.default}
    out: Schema = {"type": kind if param.default is not None else [kind, "null"], "description": param.doc}
    out["default"] = param.default
    if param.choices:
        out["enum"] = list(param.choices)
    if param.minimum is not None:
        out["exclusiveMinimum" if param.exclusive_minimum else "minimum"] = param.minimum
    if param.maximum is not None:
        out["maximum"] = param.maximum
    return out


def param_table(params: Sequence[Param]) -> str:
    """Parameters as one cell of a Markdown table: name, default, what it is."""
    return "<br>".join(f"`{p.name}` = {_literal(p)}: {p.doc}" for p in params) or "-"


def _literal(param: Param) -> str:
    return "derived" if param.default is None else f"`{param.default}`"


def _object(entry: Entry, shared: Mapping[str, Schema]) -> Schema:
    own = {p.name: param_schema(p) for p in entry.params}
    return {
        "type": "object",
        "description": entry.summary,
        "properties": {"name": {"const": entry.name}, **own, **shared},
        "required": ["name"],
        "additionalProperties": False,
    }
