"""What an attack is, and where to find it.

`fn(own_D, honest_HD, info, **params) -> row_D`: from the gradient that the bad replica would have sent (and, for
colluding attacks, the rows of all honest replicas; None for the others) to the row that it sends. The output is a new
tensor with the dtype, device and shape of `own_D`; inputs are never modified; the arithmetic is float32 for narrower
rows. `own_D` is one bucket of gradients (colluding attacks get it in blocks), so what an attack draws or measures over
its row depends on how the host cuts gradients into buckets, unless its docstring says otherwise.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b

import torch
from torch import Tensor

from ds_byzantine.attacks.catalog import ATTACKS, AttackSpec

AttackFunction = Callable[..., Tensor]
Memory = dict[int, dict[int, Tensor]]


@dataclass(frozen=True)
class AttackInfo:
    """What an attacker knows besides the gradients.

    Args:
        n: replicas in the job.
        f: colluding replicas among them.
        step: optimizer step, from 0.
        generator: source of the randomness that is fresh in every call; seeded, so that a drill can be repeated.
        seed: of the drill; what stays over the steps is drawn from `seeded(seed, ...)`.
        replica: index of this attacker in the job.
        member: its index among the f colluding ones.
        call: which bucket of the step this is, from 0.
        honest: replica indices of the rows of `honest_HD`; empty: 0, 1, ...
        aggregate: the rule in use, [n, D] -> [D]: the honest rows first, then those of the f attackers. None: unknown.
        memory: what this attacker keeps over the steps, [call][step]; the one thing that an attack may change.
    """

    n: int
    f: int
    step: int
    generator: torch.Generator
    seed: int = 0
    replica: int = 0
    member: int = 0
    call: int = 0
    honest: tuple[int, ...] = ()
    aggregate: Callable[[Tensor], Tensor] | None = None
    memory: Memory = field(default_factory=dict)


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
    from ds_byzantine.attacks import alone, collusion, hardware, search  # noqa: F401  (they fill the table)

    return _FUNCTIONS[name]


def widened(rows: Tensor) -> Tensor:
    """The rows in the dtype of the arithmetic: float64 stays, everything else becomes float32."""
    return rows if rows.dtype == torch.float64 else rows.float()


def known(honest_HD: Tensor | None) -> Tensor:
    """The honest rows, widened. Raises ValueError if there are none."""
    if honest_HD is None or honest_HD.shape[0] < 1:
        raise ValueError("honest_HD: a colluding attack is computed from the honest rows; pass at least one of them.")
    return widened(honest_HD)


def seeded(*numbers: int, purpose: str = "") -> torch.Generator:
    """A generator on the CPU whose stream depends on the numbers and the purpose alone.

    Example:
        >>> a, b = (torch.rand(2, generator=seeded(7, 1, purpose="lane")) for _ in range(2))
        >>> bool((a == b).all())
        True
    """
    key = struct.pack(f"<{len(numbers)}q", *numbers) + purpose.encode()
    seed = int.from_bytes(blake2b(key, digest_size=8).digest(), "little") >> 1
    return torch.Generator().manual_seed(seed)
