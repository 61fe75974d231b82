"""Rows that are bit by bit the same: of another replica (a lazy copy), or the replica's own of an earlier step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

SAMPLES = 4096
BITS = 40
REMEMBERED = 512

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def row_digests(rows_ND: Tensor) -> Tensor:
    """A checksum of some words of each row; equal for equal rows, and 0 if all these words are 0.

    It finds equality that nobody tries to hide. Checksums of the chunks of a gradient may be added.

    Args:
        rows_ND: [n, D], floating.

    Returns:
        [n] int64, from 0 to 2^40 - 1.

    Example:
        >>> a, b, c = row_digests(torch.tensor([[1.0, 2.0], [1.0, 2.5], [1.0, 2.0]])).tolist()
        >>> a == c, a == b
        (True, False)
    """
    stride = max(1, rows_ND.shape[1] // SAMPLES)
    words = rows_ND[:, ::stride][:, :SAMPLES].contiguous().view(_INTEGERS[rows_ND.element_size()]).to(torch.int64)
    keys = (torch.arange(words.shape[1], device=words.device) * 0x9E3779B1 + 0x7F4A7C15) % (1 << 31) * 2 + 1
    return (words * keys).sum(1) & ((1 << BITS) - 1)


class Repeats:
    """Which replicas send a row that has been sent before.

    Args:
        n: replicas.

    Example:
        >>> repeats = Repeats(3)
        >>> repeats.observe([11, 12, 13]), repeats.observe([21, 12, 21])
        ((frozenset(), []), (frozenset({0, 1, 2}), [[0, 2]]))
    """

    def __init__(self, n: int) -> None:
        self._sent = [deque[int](maxlen=REMEMBERED) for _ in range(n)]

    def observe(self, digests: Sequence[int]) -> tuple[frozenset[int], list[list[int]]]:
        """Take the digests of a step into account; 0 stands for nothing but zeros, and is nobody's copy.

        Returns:
            The replicas concerned, and the pairs that sent the same row in this step.
        """
        pairs = [
            [i, j] for i, own in enumerate(digests) for j in range(i + 1, len(digests)) if own and own == digests[j]
        ]
        again = [i for i, own in enumerate(digests) if own and own in self._sent[i]]
        for sent, own in zip(self._sent, digests, strict=True):
            sent.append(own)
        return frozenset(again) | {i for pair in pairs for i in pair}, pairs
