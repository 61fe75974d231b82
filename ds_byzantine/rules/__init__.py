"""Robust aggregation rules: pure functions on tensors, which know neither torch.distributed nor any config object.

Importing this package is inert; the names below are loaded when they are first used, so that the catalog can be read
without torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "PRES": "catalog",
    "RULES": "catalog",
    "Aggregator": "apply",
    "Geometry": "geometry",
    "Kind": "catalog",
    "Param": "catalog",
    "Rule": "base",
    "RuleInfo": "catalog",
    "register_rule": "base",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
