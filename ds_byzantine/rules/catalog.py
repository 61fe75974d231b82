"""What every rule and pre-aggregation is called, needs and accepts. Plain data: importing it does not import torch.

The functions themselves live beside this file and are looked up by name (`base.py`); the config models, the plan and the
documentation read this table, so that a rule is described in one place only.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ds_byzantine.errors import ConfigError


class Kind(Enum):
    """How a rule meets the data (rules.md calls them S, G and G->S)."""

    COORDINATE = "coordinate"  # rows_ND -> D, each coordinate on its own
    GRAM = "gram"  # Geometry -> one point: weights from inner products alone
    GRAM_COORDINATE = "gram_coordinate"  # Geometry -> K points, then coordinate-wise over them
    PRE = "pre"  # Geometry -> Geometry, before a rule


@dataclass(frozen=True)
class Param:
    """One parameter of a rule: the keyword-only argument of its function with the same name."""

    name: str
    type: type
    default: Any
    doc: str
    minimum: float | None = None
    maximum: float | None = None
    exclusive_minimum: bool = False
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class RuleInfo:
    """Facts about a rule: `needs = (a, b)` means that it holds for n >= a f + b rows."""

    name: str
    kind: Kind
    needs: tuple[int, int]
    summary: str
    reference: str
    params: tuple[Param, ...] = ()
    searches_subsets: bool = False  # enumerates all (n-f)-subsets
    stochastic: bool = False  # takes `generator`, a torch.Generator seeded alike on every rank
    tolerates_faults: bool = True  # False: only for f = 0
    _extra: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def least_replicas(self, f: int) -> int:
        """Fewest rows with which the rule tolerates f bad ones."""
        return max(1, self.needs[0] * f + self.needs[1])

    @property
    def bound(self) -> str:
        """The bound as text, for messages: "2f+3"."""
        a, b = self.needs
        return (f"{a}f" if a > 1 else "f") + (f"+{b}" if b else "") if a else str(b)

    def most_faulty(self, n: int) -> int:
        """Largest f that the rule tolerates with n rows; -1 if it cannot run with n rows at all."""
        if n < self.least_replicas(0):
            return -1
        if not self.tolerates_faults or self.needs[0] == 0:
            return 0
        return (n - self.needs[1]) // self.needs[0]

    def check_params(self, given: Mapping[str, Any], path: str) -> dict[str, Any]:
        """Validated parameters, defaults filled in.

        Raises:
            ConfigError: an unknown name (the nearest known one is suggested), a wrong type or a value out of range.
        """
        known = {p.name: p for p in self.params}
        for name in given:
            if name not in known:
                raise ConfigError(_unknown(f"{path}.{name}", name, list(known), f"parameter of {self.name}"))
        return {name: _checked(p, given.get(name, p.default), f"{path}.{name}") for name, p in known.items()}


def _unknown(path: str, name: str, known: list[str], what: str) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f' Did you mean "{near[0]}"?' if near else ""
    listed = ", ".join(known) if known else "none"
    return f"{path}: no such {what}.{hint} Known: {listed}."


def _checked(param: Param, value: Any, path: str) -> Any:
    if value is None and param.default is None:
        return None
    if param.type is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, param.type) or (isinstance(value, bool) and param.type is not bool):
        raise ConfigError(f"{path}: got {value!r}, but this is a {param.type.__name__}. {param.doc}")
    if param.choices and value not in param.choices:
        raise ConfigError(f"{path}: got {value!r}. Use one of: {', '.join(param.choices)}.")
    low, high = param.minimum, param.maximum
    too_low = low is not None and (value <= low if param.exclusive_minimum else value < low)
    if too_low or (high is not None and value > high) or value != value:
        span = f"{'>' if param.exclusive_minimum else '>='} {low}" if high is None else f"between {low} and {high}"
        raise ConfigError(f"{path}: got {value!r}, but it has to be {span}. {param.doc}")
    return value


RULES: dict[str, RuleInfo] = {}
PRES: dict[str, RuleInfo] = {}


def lookup(name: str, path: str = "byzantine.rule", *, pre: bool = False) -> RuleInfo:
    """The entry called `name`.

    Raises:
        ConfigError: there is none; the message suggests the nearest name.
    """
    table = PRES if pre else RULES
    if name not in table:
        raise ConfigError(_unknown(path, name, sorted(table), "pre-aggregation" if pre else "rule"))
    return table[name]


def add(info: RuleInfo) -> RuleInfo:
    """Enter a rule into the table. Raises ConfigError if the name is taken."""
    table = PRES if info.kind is Kind.PRE else RULES
    if info.name in table:
        raise ConfigError(f'rule "{info.name}": the name is taken. Choose another one, e.g. "my_{info.name}".')
    table[info.name] = info
    return info


# --- the built-in rules ------------------------------------------------------------------------------------------
