"""Evidence survives restarts: it travels in the client state of DeepSpeed's checkpoints."""

from __future__ import annotations

import logging
from functools import wraps
from typing import Any

from ds_byzantine.adapters._patch import Bindings
from ds_byzantine.guard import Guard

logger = logging.getLogger("ds_byzantine")

KEY = "ds_byzantine"


def bind(engine: Any, guard: Guard, bindings: Bindings, speaks: bool) -> None:
    """Add the guard's state to what `save_checkpoint` saves, and take it from what `load_checkpoint` finds.

    Args:
        speaks: whether this rank logs.
    """
    save, load = engine.save_checkpoint, engine.load_checkpoint

    @wraps(save)
    def save_checkpoint(save_dir: Any, tag: Any = None, client_state: Any = None, *args: Any, **kwargs: Any) -> Any:
        """The host's, with the evidence in the client state."""
        state = {**(client_state or {}), KEY: guard.state_dict()}
        return save(save_dir, tag, state, *args, **kwargs)

    @wraps(load)
    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        """The host's; the evidence in the client state is taken over and not handed on."""
        path, client_state = load(*args, **kwargs)
        saved = client_state.pop(KEY, None) if isinstance(client_state, dict) else None
        if saved is not None:
            found = guard.load_state_dict(saved)
            if speaks and len(found) < guard.roster.n:
                logger.info(
                    "evidence resumed for %d of %d replicas, by host; the others start anew", len(found), guard.roster.n
                )
        return path, client_state

    bindings.bind(engine, "save_checkpoint", save_checkpoint)
    bindings.bind(engine, "load_checkpoint", load_checkpoint)
