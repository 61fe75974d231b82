"""Changes to an engine between its construction and its first step, by name; and a meter on DeepSpeed's collectives."""

from __future__ import annotations

from typing import Any

REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter_tensor", "reduce_scatter", "all_to_all_single")


def uninstall(engine: Any) -> None:
    """Undo everything."""
    import ds_byzantine

    ds_byzantine.uninstall()


def count_collectives() -> dict[str, int]:
    """Count the elements that DeepSpeed's own collectives carry; every call is passed through."""
    import deepspeed.comm.comm as comm

    seen: dict[str, int] = {}
    for name in REDUCTIONS:
        _count(comm.cdb, name, seen)
    return seen


def count_no_more() -> None:
    """Take the meter off."""
    import deepspeed.comm.comm as comm

    for name in REDUCTIONS:
        vars(comm.cdb).pop(name, None)


def _count(backend: Any, name: str, seen: dict[str, int]) -> None:
    original = getattr(backend, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        tensors = [a.numel() for a in [*args, *kwargs.values()] if hasattr(a, "numel")]
        seen[name] = seen.get(name, 0) + max(tensors, default=0)
        return original(*args, **kwargs)

    setattr(backend, name, counted)
