"""docs/config.md, written from the models and the catalogs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel

from ds_byzantine._schema import param_table
from ds_byzantine.attacks.catalog import ATTACKS
from ds_byzantine.config import ByzantineConfig, MonitorConfig, TrustConfig, json_schema
from ds_byzantine.drills.scenario import DrillConfig
from ds_byzantine.rules.catalog import PRES, RULES, RuleInfo

_HEAD = """\
<!-- Written by `python -m ds_byzantine.config --markdown`; change the models, not this file. -->
# The "byzantine" section

Add it to the DeepSpeed JSON config. Every key may be left out; an empty object `{}` is a complete section. There is no
`"auto"`: leave a key out to have it derived. Unknown keys and values that cannot hold are refused before the first
step.
"""
_RULES = """\
## Rules

A rule holds for n >= its bound, n replicas of which at most f are bad. `rule` is a name or an object with that name and
the rule's own parameters, e.g. `{"name": "centered_clip", "iterations": 5}`. Left out, `f` is 0 for 1 or 2 replicas,
1 for 3 to 15 and n/8 (rounded down) from 16 on, but never more than the rule holds for.
"""
_PRES = """\
## Pre-aggregations

`pre` is a list of names or objects, applied in this order before the rule.
"""
_DRILLS = """\
## Drills

`drill` makes some replicas send wrong gradients on purpose. It is the name of an attack, the path of a `.json` file
with an object, or the object itself: these keys and the attack's own parameters side by side.
"""


def markdown() -> str:
    """The whole page."""
    parts = [
        _HEAD,
        _table(("key", "type", "default", "meaning"), _keys(ByzantineConfig, "")),
        _RULES,
        _table(("rule", "needs", "what it is", "parameters", "reference"), map(_rule, _sorted(RULES))),
        _PRES,
        _table(("pre", "needs", "what it is", "parameters", "reference"), map(_rule, _sorted(PRES))),
        _DRILLS,
        _table(("key", "type", "default", "meaning"), _keys(DrillConfig, "", skip=("params",))),
        _table(("attack", "what it is", "parameters", "reference"), map(_attack, sorted(ATTACKS))),
    ]
    return "\n".join(parts).rstrip()


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [tuple(head)]
    lines += [("---",) * len(lines[0])]
    lines += [tuple(cell.replace("|", "\\|") for cell in row) for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _keys(model: type[BaseModel], prefix: str, skip: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, field in model.model_fields.items():
        inner = field.annotation
        if name in skip:
            continue
        if isinstance(inner, type) and issubclass(inner, (TrustConfig, MonitorConfig)):
            yield from _keys(inner, f"{prefix}{name}.")
            continue
        default = "required" if field.is_required() else _literal(field.default)
        yield f"`{prefix}{name}`", _type(model, name), default, field.description or ""


def _literal(value: Any) -> str:
    return "left out" if value is None else f"`{json.dumps(value)}`"


def _type(model: type[BaseModel], name: str) -> str:
    if model is ByzantineConfig and name in _NAMED:
        return _NAMED[name]
    schema = json_schema() if model is ByzantineConfig else _plain_schema(model)
    return _type_text(schema["properties"][name])


def _plain_schema(model: type[BaseModel]) -> dict[str, Any]:
    if model is DrillConfig:
        shared = json_schema()["$defs"]["DrillConfig"]["anyOf"][1]["properties"]
        return {"properties": {**shared, "name": {"type": "string"}}}
    return model.model_json_schema()


def _type_text(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(f'`"{choice}"`' for choice in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(_type_text(s) for s in schema["anyOf"] if s.get("type") != "null")
    if schema.get("type") == "array":
        return "list of " + _type_text(schema["items"])
    limits = " and ".join(f"{sign} {schema[key]:g}" for key, sign in _LIMITS.items() if key in schema)
    return f"{schema['type']} {limits}".strip()


_NAMED = {"rule": "name or object", "pre": "list of names or objects", "drill": "name, file or object"}
_LIMITS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def _sorted(table: dict[str, RuleInfo]) -> list[RuleInfo]:
    return [table[name] for name in sorted(table)]


def _rule(info: RuleInfo) -> tuple[str, ...]:
    bound = f"n >= {info.bound}" if info.tolerates_faults else "f = 0"
    if info.needs_when:
        parameter, value, _ = info.needs_when
        bound += f"; n >= {info.variant({parameter: value}).bound} if `{parameter}` is `{json.dumps(value)}`"
    return f"`{info.name}`", bound, info.summary, param_table(info.params), info.reference


def _attack(name: str) -> tuple[str, ...]:
    spec = ATTACKS[name]
    return f"`{name}`", spec.summary, param_table(spec.params), spec.reference
