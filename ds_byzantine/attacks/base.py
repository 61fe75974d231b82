"""What an attack is, and where to find it.

`fn(own_D, honest_HD, info, **params) -> row_D`: from the gradient that the bad replica would have sent (and, for
colluding attacks, the rows of all honest replicas; None for the others) to the row that it sends. The output is a new
tensor with the dtype, device and shape of `own_D`; inputs are never modified; the arithmetic is float32 for narrower
rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_byzantine.attacks.catalog import ATTACKS, AttackSpec

AttackFunction = Callable[..., Tensor]


@dataclass(frozen=True)
class AttackInfo:
    """What an attacker knows besides the gradients.

    Args:
        n: replicas in the job.
        f: colluding replicas among them.
        step: optimizer step, from 0.
        generator: source of all randomness, so that a drill can be repeated.
    """

    n: int
    f: int
    step: int
    generator: torch.Generator


@dataclass(frozen=True)
class Attack:
    """A catalog entry with its function."""

    spec: AttackSpec
    function: AttackFunction


_FUNCTIONS: dict[str, Attack] = {}


def implements(name: str) -> Callable[[AttackFunction], AttackFunction]:
    """Decorator: the function below is the attack `name` of the catalog."""

    def bind(function: AttackFunction) -> AttackFunction:
        _FUNCTIONS[name] = Attack(ATTACKS[name], function)
        return function

    return bind


def find(name: str) -> Attack:
    """The attack called `name`; names are checked where the section is read.

    Raises:
        KeyError: there is none.

    Example:
        >>> find("ipm").spec.needs_honest
        True
    """
    from ds_byzantine.attacks import alone, collusion  # noqa: F401  (they fill the table)

    return _FUNCTIONS[name]


def widened(rows: Tensor) -> Tensor:
    """The rows in the dtype of the arithmetic: float64 stays, everything else becomes float32."""
    return rows if rows.dtype == torch.float64 else rows.float()
