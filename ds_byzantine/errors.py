"""Every exception that ds_byzantine raises on purpose.

A message says WHAT (the value), WHY (the bound) and WHAT TO DO, and carries the dotted config path where there is one.
"""

from __future__ import annotations


class ByzantineError(Exception):
    """Base of all errors of this package: `except ByzantineError` catches every refusal."""


class ConfigError(ByzantineError, ValueError):
    """The `"byzantine"` section is malformed: unknown key, wrong type, value out of range, the string "auto"."""


class InfeasibleError(ByzantineError, ValueError):
    """The section is well formed but cannot hold in this job: n, f, rule, pre-aggregation or scope do not fit."""


class UnsupportedHostError(ByzantineError, RuntimeError):
    """The host (its version, an option, the optimizer, the layout) has a gradient path that would bypass the rule."""


class UnprotectedError(ByzantineError, RuntimeError):
    """A section is present but no gradient passes through the rule: training would go on unprotected."""


class HostStateError(ByzantineError, RuntimeError):
    """The host's private bookkeeping is not what its version promises (a patch point vanished or changed)."""
