"""The order statistics of sorting.py as one kernel on an accelerator, by `torch.compile` (Triton): rows are read once.

The same interface as `native`, which serves the CPU. What cannot be compiled runs in PyTorch, with one line in the log.
`DS_BYZANTINE_NATIVE=0`, or PyTorch's own TORCH_COMPILE_DISABLE=1, forbids it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import lru_cache
from types import FunctionType

import torch
from torch import Tensor

from ds_byzantine.rules.network import Ranks

logger = logging.getLogger("ds_byzantine")

MOST_ROWS = 32  # the compiler's time grows with the network: 2 s for 8 rows, 15 s for 32
LEAST_COLUMNS = 1 << 14  # below, a launch costs more than the passes that it saves
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Key = tuple[int, Ranks]

_failed: set[Key] = set()


def ready(rows_ND: Tensor) -> bool:
    """Whether these rows are worth a kernel of their own: [n, D] of n <= 32 on an accelerator, each row contiguous."""
    return (
        rows_ND.device.type != "cpu"
        and rows_ND.dtype in DTYPES
        and 1 < rows_ND.shape[0] <= MOST_ROWS
        and rows_ND.shape[1] >= LEAST_COLUMNS
        and rows_ND.stride(1) == 1
        and _allowed()
    )


def mean_of_ranks(rows_ND: Tensor, ranks: Ranks) -> Tensor:
    """As `native.mean_of_ranks`: [n, D] -> [D] float32."""
    key = rows_ND.shape[0], ranks
    rows = rows_ND.unbind(0)
    if key not in _failed:
        try:
            with torch.no_grad():
                out: Tensor = _kernel(key)(*rows)
            return out
        except Exception as error:  # the compiler's errors have no common class
            _failed.add(key)
            said = str(error).strip().splitlines()
            logger.warning(
                "order statistics of %d rows run in PyTorch, slower: torch.compile failed (%s: %s).",
                len(rows), type(error).__name__, said[0][:200] if said else "",
            )  # fmt: skip
    return traced(key)(*rows)


def traced(key: Key) -> Callable[..., Tensor]:
    """The network as plain operations on n rows [D], for the compiler to fuse.

    Args:
        key: n, and what is wanted of the n values.
    """
    n, wanted = key
    lo, hi, halves, keep = wanted
    comparators = wanted.network(n)

    def ranks(*rows: Tensor) -> Tensor:
        """N rows [D] -> [D] float32."""
        w = [row.float() for row in rows]
        for i, j, wants_low, wants_high in comparators:
            a, b = w[i], w[j]
            if wants_low:
                w[i] = torch.minimum(a, b)
            if wants_high:
                w[j] = torch.maximum(a, b)
        centre = w[lo] * 0.5 + w[lo + 1] * 0.5 if halves and hi - lo == 2 else _mean(w[lo:hi])
        if not keep:
            return centre
        kept = w[:keep]
        for lost in range(n - keep):
            gained = w[lost + keep]
            kept[lost % keep] = torch.where(centre - w[lost] > gained - centre, gained, kept[lost % keep])
        return _mean(kept)

    return ranks


def _mean(rows: list[Tensor]) -> Tensor:
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return total / len(rows) if len(rows) > 1 else total


@lru_cache(maxsize=256)
def _kernel(key: Key) -> Callable[..., Tensor]:
    function = traced(key)
    assert isinstance(function, FunctionType)
    # A code object of its own: the compiler counts its versions by code object and gives up after eight.
    code = function.__code__.replace(co_name="ranks_" + "_".join(str(int(part)) for part in (key[0], *key[1])))
    own = FunctionType(code, function.__globals__, code.co_name, None, function.__closure__)
    return torch.compile(own, fullgraph=True, dynamic=True)


@lru_cache(maxsize=1)
def _allowed() -> bool:
    switches = {"DS_BYZANTINE_NATIVE": "0", "TORCH_COMPILE_DISABLE": "1", "TORCHDYNAMO_DISABLE": "1"}
    return all(os.environ.get(name) != value for name, value in switches.items())
