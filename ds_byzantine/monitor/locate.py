"""Where in a replica the trouble is: a bad rank shows in the reductions in which it takes part."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

CONCENTRATION = 0.9

Key = tuple[int, int]


def concentrated(
    signs: Mapping[Key, Tensor], suspect: int, ranks: Mapping[Key, tuple[tuple[int, ...], ...]]
) -> list[int]:
    """The ranks of a replica that carry most of what speaks against it.

    In each reduction the replica's sign of trouble (a squared distance, a count of non-finite rows) is compared with
    the median of the other replicas', because large layers have large distances in healthy replicas too. The fewest
    reductions that hold 90% of the excess are taken.

    Args:
        signs: for each reduction, one number per replica, [n].
        suspect: index of the replica.
        ranks: for each reduction and replica, the global ranks that take part.

    Returns:
        Global ranks, ascending; all ranks of the replica if there is no excess anywhere.

    Example:
        >>> signs = {(0, 0): torch.tensor([1.0, 1.0, 1.2]), (0, 1): torch.tensor([1.0, 9.0, 1.0])}
        >>> concentrated(signs, 1, {(0, 0): ((0,), (2,), (4,)), (0, 1): ((1,), (3,), (5,))})
        [3]
    """
    excess = {key: _excess(one, suspect) for key, one in signs.items()}
    total = sum(excess.values())
    chosen, held = set[int](), 0.0
    for key in sorted(excess, key=lambda k: (-excess[k], k)):
        if total > 0 and held >= CONCENTRATION * total:
            break
        chosen.update(ranks[key][suspect])
        held += excess[key]
    return sorted(chosen)


def _excess(one: Tensor, suspect: int) -> float:
    others = torch.cat([one[:suspect], one[suspect + 1 :]])
    return max(float(one[suspect] - others.median()), 0.0) if others.numel() else 0.0
