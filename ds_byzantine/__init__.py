"""Robust gradient aggregation for DeepSpeed: training that survives replicas which send wrong gradients.

Importing this package changes nothing and imports no torch. Add a "byzantine" section to a DeepSpeed config to turn it
on, or call `install()` where PyTorch's autoload of installed backends is switched off.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_byzantine._version import VERSION as __version__
    from ds_byzantine.activation import install, uninstall
    from ds_byzantine.adapters.deepspeed.attach import attach
    from ds_byzantine.config import json_schema, parse_section
    from ds_byzantine.errors import ByzantineError
    from ds_byzantine.plan import plan
    from ds_byzantine.rules.aggregate import aggregate
    from ds_byzantine.rules.base import register_rule

_HOMES = {
    "ByzantineError": ("ds_byzantine.errors", "ByzantineError"),
    "__version__": ("ds_byzantine._version", "VERSION"),
    "aggregate": ("ds_byzantine.rules.aggregate", "aggregate"),
    "attach": ("ds_byzantine.adapters.deepspeed.attach", "attach"),
    "install": ("ds_byzantine.activation", "install"),
    "json_schema": ("ds_byzantine.config", "json_schema"),
    "parse_section": ("ds_byzantine.config", "parse_section"),
    "plan": ("ds_byzantine.plan", "plan"),
    "register_rule": ("ds_byzantine.rules.base", "register_rule"),
    "uninstall": ("ds_byzantine.activation", "uninstall"),
}

__all__ = [
    "ByzantineError",
    "__version__",
    "aggregate",
    "attach",
    "install",
    "json_schema",
    "parse_section",
    "plan",
    "register_rule",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name]
    value = getattr(import_module(module), attribute)
    globals()[name] = value  # also over the submodule of the same name (`plan`), which the import has just set
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
