"""`"aggregate_at": "boundary"` for ZeRO stages 2 and 3, which by themselves reduce every micro-step.

Local gradients accumulate on each rank until the gradient-accumulation boundary, as in stage 1, and one reduction pass
runs there. It costs memory for the full local gradients. The pass itself is DeepSpeed's own (the second half of
`engine.coalesce_grad_reduction`, since 0.19.2).
"""

from __future__ import annotations

from typing import Any

import torch

from ds_byzantine.adapters._patch import Bindings
from ds_byzantine.errors import UnsupportedHostError


def bind(engine: Any, bindings: Bindings) -> None:
    """Suppress the reductions between boundaries on this engine.

    Raises:
        UnsupportedHostError: this DeepSpeed cannot postpone its reductions, or the caller owns the boundary.
    """
    optimizer = engine.optimizer
    if not hasattr(optimizer, "_coalesce_grad_reduction"):
        raise UnsupportedHostError(
            'byzantine.aggregate_at: "boundary" needs ZeRO stage 0 or 1, or a DeepSpeed that can postpone reductions '
            "(0.19.2 and later). Use stage 1, which aggregates at the boundary anyway, or upgrade."
        )
    if getattr(engine, "managed_gradient_accumulation", lambda: True)() is False:
        raise UnsupportedHostError(
            'byzantine.aggregate_at: "boundary" with managed_gradient_accumulation false: the boundary is not known '
            "during backward. Set managed_gradient_accumulation to true, or use stage 1."
        )
    flush = engine._flush_coalesced_reduction_zero3 if _stage3(engine) else engine._flush_coalesced_reduction_zero12

    @torch.no_grad()
    def allreduce_gradients(*args: Any, **kwargs: Any) -> None:
        """In place of the host's: nothing between boundaries, one pass over all gradients there."""
        boundary = engine.is_gradient_accumulation_boundary()
        optimizer.set_gradient_accumulation_boundary(boundary)
        if not boundary:
            return
        optimizer._coalesce_grad_reduction = False
        try:
            flush(optimizer)
        finally:
            optimizer._coalesce_grad_reduction = True

    bindings.bind(optimizer, "_coalesce_grad_reduction", True)
    bindings.bind(engine, "allreduce_gradients", allreduce_gradients)


def _stage3(engine: Any) -> bool:
    return int(engine.zero_optimization_stage()) == 3
