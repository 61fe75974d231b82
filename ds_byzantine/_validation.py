"""From pydantic's errors to one readable refusal. No torch.

Every problem of a section is reported at once, each with its dotted path: what was given, why it cannot be, what to do.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from ds_byzantine.errors import ConfigError

_EXPECTED = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a text in quotes",
    "string_too_short": "a text that is not empty",
    "tuple_type": "a list",
    "dict_type": "an object {{...}}",
    "model_type": "an object {{...}}",
    "literal_error": "one of {expected}",
    "greater_than_equal": ">= {ge}",
    "greater_than": "> {gt}",
    "less_than": "< {lt}",
}
_AUTO = (
    'got "auto", but this section has no "auto": accelerate and the HF Trainer refuse it for keys that they do not '
    "know. Leave the key out to have it derived."
)


class Strict(BaseModel):
    """Base of the section's models: no unknown keys, no conversions, no later changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Problem(NamedTuple):
    """One thing that is wrong: the dotted path and the rest of the sentence."""

    path: str
    text: str


class Problems(ValueError):
    """Several problems found inside one pydantic validator."""

    def __init__(self, found: Sequence[Problem]) -> None:
        super().__init__("; ".join(f"{p.path}: {p.text}" for p in found))
        self.found = tuple(found)


Model = TypeVar("Model", bound=BaseModel)


def validate(model: type[Model], raw: Mapping[str, Any], path: str) -> Model:
    """The checked model. `path` is also handed to the model's validators as `info.context["path"]`.

    Raises:
        ConfigError: lists every problem.
    """
    try:
        return checked(model, raw, path)
    except Problems as problems:
        refuse(problems.found, path)


def checked(model: type[Model], raw: Mapping[str, Any], path: str) -> Model:
    """As `validate`, for use inside a validator of a larger model. Raises Problems."""
    pruned, autos = without_auto(dict(raw), path)
    try:
        valid = model.model_validate(pruned, context={"path": path})
    except ValidationError as error:
        found = [p for e in error.errors() for p in explain(e, model, path)]
        raise Problems(autos + [p for p in found if not any(_inside(a.path, p.path) for a in autos)]) from None
    if autos:
        raise Problems(autos)
    return valid


def refuse(found: Sequence[Problem], path: str) -> NoReturn:
    """Raise one ConfigError for all problems."""
    lines = list(dict.fromkeys(f"{p.path}: {p.text}" for p in found))
    if len(lines) == 1:
        raise ConfigError(lines[0])
    raise ConfigError(f"{path}: {len(lines)} problems:\n" + "\n".join(f"  - {line}" for line in lines))


def without_auto(value: Any, path: str) -> tuple[Any, list[Problem]]:
    """The value without its "auto" entries, and a problem for each of them. Keys become strings."""
    found: list[Problem] = []
    items: list[tuple[Any, Any, str]]
    if isinstance(value, Mapping):
        items = [(str(k), v, f"{path}.{k}") for k, v in value.items()]
    elif isinstance(value, (list, tuple)):
        items = [(i, v, f"{path}[{i}]") for i, v in enumerate(value)]
    else:
        return value, found
    kept = {}
    for key, item, where in items:
        if isinstance(item, str) and item == "auto":
            found.append(Problem(where, _AUTO))
            continue
        kept[key], inner = without_auto(item, where)
        found += inner
    return (kept if isinstance(value, Mapping) else list(kept.values())), found


def explain(error: Any, model: type[BaseModel], path: str) -> list[Problem]:
    """Problems behind one entry of `ValidationError.errors()`."""
    where = path + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"])
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, Problems):
        return list(cause.found)
    if isinstance(cause, ConfigError):
        return problems_of(cause, where)
    if cause is not None:
        return [Problem(where, str(cause))]
    if error["type"] == "extra_forbidden":
        known = _model_at(model, error["loc"][:-1]).model_fields
        return [Problem(where, unknown("key", str(error["loc"][-1]), known))]
    return [Problem(where, _mismatch(error, model))]


def problems_of(error: ConfigError, path: str) -> list[Problem]:
    """A ConfigError whose text starts with a dotted path, taken apart; `path` if it does not."""
    where, colon, text = str(error).partition(": ")
    return [Problem(where, text)] if colon and " " not in where else [Problem(path, str(error))]


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """'no such key "trst". Did you mean "trust"? Known: ...'"""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f' Did you mean "{near[0]}"?' if near else ""
    return f'no such {what} "{name}".{hint} Known: {", ".join(names)}.'


def shown(value: Any) -> str:
    """A value as the user wrote it in JSON, cut to a readable length."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _mismatch(error: Any, model: type[BaseModel]) -> str:
    given = error["input"]
    if error["type"] == "missing":
        return "this key is missing. " + _description(model, error["loc"])
    expected = _EXPECTED.get(error["type"])
    why = f"this has to be {expected.format(**error.get('ctx', {}))}" if expected else error["msg"]
    return f"got {shown(given)}, but {why}.{_unquote(given, error['type'])} {_description(model, error['loc'])}".strip()


def _unquote(given: Any, kind: str) -> str:
    if kind == "bool_type" and (given in (0, 1) or str(given).lower() in ("true", "false", "yes", "no", "on", "off")):
        return f" Write {'true' if str(given).lower() in ('1', '1.0', 'true', 'yes', 'on') else 'false'}."
    if kind in ("int_type", "float_type") and isinstance(given, str) and _number(given):
        return f" Write {given.strip()} without quotes."
    if kind == "int_type" and isinstance(given, float) and given.is_integer():
        return f" Write {int(given)}."
    return ""


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _model_at(model: type[BaseModel], loc: Sequence[Any]) -> type[BaseModel]:
    for part in loc:
        inner = model.model_fields[part].annotation
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            break
        model = inner
    return model


def _description(model: type[BaseModel], loc: Sequence[Any]) -> str:
    names = [part for part in loc if isinstance(part, str)]
    if not names:
        return ""
    field = _model_at(model, names[:-1]).model_fields.get(names[-1])
    return (field.description or "") if field else ""


def _inside(inner: str, outer: str) -> bool:
    return inner == outer or inner.startswith((outer + ".", outer + "["))
