"""Changes to an engine between its construction and its first step, by name."""

from __future__ import annotations

from typing import Any


def uninstall(engine: Any) -> None:
    """Undo everything."""
    import ds_byzantine

    ds_byzantine.uninstall()


def count_collectives(engine: Any) -> None:
    """Count the elements that DeepSpeed's own collectives carry, passing every call through."""
    import deepspeed.comm.comm as comm

    engine.module.collectives = seen = {}
    for name in ("all_reduce", "reduce", "reduce_scatter_tensor", "reduce_scatter", "all_to_all_single"):
        _count(comm.cdb, name, seen)


def _count(backend: Any, name: str, seen: dict[str, int]) -> None:
    original = getattr(type(backend), name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        tensors = [a.numel() for a in [*args, *kwargs.values()] if hasattr(a, "numel")]
        seen[name] = seen.get(name, 0) + max(tensors, default=0)
        return original(backend, *args, **kwargs)

    setattr(backend, name, counted)
