"""Sorting networks: which rows to compare with which, in which order, for the ranks that are wanted. No torch."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple


class Comparator(NamedTuple):
    """Puts the smaller value on wire `low` and the larger one on wire `high`, as far as they are `wanted`."""

    low: int
    high: int
    wants_low: bool
    wants_high: bool


class Ranks(NamedTuple):
    """What is wanted of n sorted values: the mean of some of them.

    Args:
        lo, hi: the mean of the ranks lo..hi-1, 0 is the smallest.
        halves: of two ranks take half of each, which cannot overflow, instead of half their sum.
        keep: if not 0, the mean of that many values nearest to that mean instead. The nearest values are neighbours in
            rank: a window of `keep` ranks starts at the lowest and moves up one rank as long as the value that it gains
            is strictly nearer than the value that it loses (so a tie stays with the lower window).
    """

    lo: int
    hi: int
    halves: bool = False
    keep: int = 0

    @classmethod
    def middle(cls, n: int, keep: int = 0) -> Ranks:
        """The median of n values; of an even number the mean of the two in the middle."""
        return cls((n - 1) // 2, n // 2 + 1, n % 2 == 0, keep)

    def network(self, n: int) -> tuple[Comparator, ...]:
        """The comparators on n wires that these ranks need."""
        return network(n, 0, n) if self.keep else network(n, self.lo, self.hi, ordered=False)


@lru_cache(maxsize=256)
def network(n: int, lo: int, hi: int, ordered: bool = True) -> tuple[Comparator, ...]:
    """Merge-exchange sorting network on n wires, pruned to what the ranks lo..hi-1 need.

    Args:
        n: wires, 1 to 64 in practice.
        lo: first rank wanted, 0 is the smallest.
        hi: one past the last rank wanted.
        ordered: False if the wanted ranks may come out in any order among themselves (enough for their sum).

    Returns:
        The comparators in the order in which they run.

    Reference:
        Batcher 1968; Knuth, The Art of Computer Programming 3, algorithm 5.2.2M.

    Example:
        >>> [(c.low, c.high) for c in network(3, 0, 3)]
        [(0, 2), (0, 1), (1, 2)]
    """
    unused, loose, exact = range(3)  # what becomes of a wire after the comparator at hand
    state = [(exact if ordered else loose) if lo <= rank < hi else unused for rank in range(n)]
    kept = []
    for i, j in reversed(_merge_exchange(n)):
        if state[i] == state[j] != exact:
            continue  # both unused, or both summed whichever is larger
        kept.append(Comparator(i, j, state[i] != unused, state[j] != unused))
        state[i] = state[j] = exact
    return tuple(reversed(kept))


def _merge_exchange(n: int) -> list[tuple[int, int]]:
    pairs = []
    top = 1 << max((n - 1).bit_length() - 1, 0)
    p = top
    while p > 0:
        q, r, d = top, 0, p
        while d > 0:
            pairs += [(i, i + d) for i in range(n - d) if i & p == r]
            d, q, r = q - p, q // 2, p
        p //= 2
    return pairs
