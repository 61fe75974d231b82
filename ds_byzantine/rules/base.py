"""What a rule is, and the registry of their functions.

* coordinate rule: `fn(rows_ND, f, **params) -> out_D`; rows are finite, float32 or float64, at least
  `least_replicas(f)` of them; the output has the same dtype; inputs are never mutated or aliased.
* Gram rule: `fn(geometry, f, **params) -> point_TE`, one point per block over (x_1, ..., x_n, median).
* Gram-then-coordinate rule: `fn(geometry, f, **params) -> Geometry` with the K points, and
  `finish(rows_KD, f, **params) -> out_D` over them.
* pre-aggregation: `fn(geometry, f, **params) -> Geometry`.

`params` are the keyword-only arguments listed in the rule's catalog entry; a stochastic rule also gets `generator`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ds_byzantine.errors import ConfigError
from ds_byzantine.rules import catalog
from ds_byzantine.rules.catalog import Kind, Param, RuleInfo
from ds_byzantine.rules.network import Ranks

RuleFunction = Callable[..., Any]
Function = TypeVar("Function", bound=RuleFunction)

# Modules that hold the built-in functions; imported by the first `find`, since they need this one.
_MODULES = ("coordinate", "krum", "bulyan", "subsets", "spectral", "norms", "geometric", "pre")


@dataclass(frozen=True)
class Rule:
    """A catalog entry with its function(s).

    Args:
        ranks: (n, f) -> what the rule is per coordinate, if it is a mean of order statistics of the n rows.
    """

    info: RuleInfo
    function: RuleFunction
    finish: RuleFunction | None = None
    ranks: Callable[[int, int], Ranks] | None = None


_FUNCTIONS: dict[tuple[str, bool], Rule] = {}


def implements(
    name: str,
    *,
    pre: bool = False,
    finish: RuleFunction | None = None,
    ranks: Callable[[int, int], Ranks] | None = None,
) -> Callable[[Function], Function]:
    """Decorator: the function below is the built-in rule `name` of the catalog."""

    def bind(function: Function) -> Function:
        _FUNCTIONS[name, pre] = Rule(catalog.lookup(name, pre=pre), function, finish, ranks)
        return function

    return bind


def find(name: str, *, pre: bool = False, path: str = "byzantine.rule") -> Rule:
    """The rule (or pre-aggregation) called `name`. Raises ConfigError, with the nearest name, if there is none."""
    info = catalog.lookup(name, path, pre=pre)
    if (info.name, pre) not in _FUNCTIONS:
        for module in _MODULES:
            importlib.import_module(f"ds_byzantine.rules.{module}")
    return _FUNCTIONS[info.name, pre]


def register_rule(
    name: str,
    function: RuleFunction,
    *,
    kind: str = "coordinate",
    needs: tuple[int, int] = (2, 1),
    finish: RuleFunction | None = None,
    reference: str = "user-defined",
) -> None:
    """Add a rule of your own, usable as `"rule": name` in the section and in `aggregate`.

    Args:
        name: a new name.
        function: see the module docstring; its keyword-only arguments (with defaults) become parameters.
        kind: "coordinate", "gram", "gram_coordinate" (give `finish` too) or "pre".
        needs: (a, b): the rule holds for n >= a f + b replicas.
        finish: for "gram_coordinate", the coordinate-wise part.
        reference: where the rule is described.

    Raises:
        ConfigError: the name is taken, the kind is unknown, or a keyword-only argument has no plain default.

    Example:
        >>> register_rule("first_row", lambda rows_ND, f: rows_ND[0].clone(), needs=(0, 1))
        >>> import torch
        >>> from ds_byzantine.rules.aggregate import aggregate
        >>> aggregate(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), rule="first_row", f=0)
        tensor([1., 2.])
    """
    try:
        chosen = Kind(kind)
    except ValueError:
        kinds = ", ".join(k.value for k in Kind)
        raise ConfigError(f'register_rule("{name}"): no such kind "{kind}". Use one of: {kinds}.') from None
    if (chosen is Kind.GRAM_COORDINATE) != (finish is not None):
        raise ConfigError(f'register_rule("{name}"): "finish" goes with kind "gram_coordinate", and only with it.')
    summary = (inspect.getdoc(function) or name).splitlines()[0]
    info = RuleInfo(name, chosen, needs, summary, reference, _params_of(name, function))
    catalog.add(info)
    _FUNCTIONS[name, chosen is Kind.PRE] = Rule(info, function, finish)


def _params_of(name: str, function: RuleFunction) -> tuple[Param, ...]:
    found = []
    for p in inspect.signature(function).parameters.values():
        if p.kind is not inspect.Parameter.KEYWORD_ONLY:
            continue
        if type(p.default) not in (int, float, str, bool):
            raise ConfigError(f'register_rule("{name}"): give the keyword-only argument "{p.name}" a plain default.')
        found.append(Param(p.name, type(p.default), p.default, f"Parameter of {name}."))
    return tuple(found)
