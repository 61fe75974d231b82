"""Private names of a host: what is relied on, in which versions, and how it is replaced on one instance.

Only instances are changed, never classes: a bound name shadows the class's method, and undoing is deleting it. So one
process can train a protected and a stock engine side by side.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import io
import os
import tokenize
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ds_byzantine.errors import HostStateError, UnsupportedHostError

TRUST_ENVIRONMENT = "DS_BYZANTINE_TRUST_HOST"


@dataclass(frozen=True)
class PatchPoint:
    """One function of the host that is replaced on an instance, or called although it is private.

    Args:
        module: where its class lives.
        owner: the class.
        name: the attribute, mangled if it starts with two underscores.
        parameters: accepted parameter lists, one per signature seen; without `self`.
        digests: of the bodies in the releases that were examined; see `digest_of`.
        versions: host versions in which it exists.
        why: what it does, for messages.
    """

    module: str
    owner: str
    name: str
    parameters: tuple[tuple[str, ...], ...]
    digests: frozenset[str]
    versions: str
    why: str

    def resolve(self) -> Callable[..., Any] | None:
        """The function as the host defines it, or None if this host does not have it."""
        cls = getattr(importlib.import_module(self.module), self.owner, None)
        found = inspect.getattr_static(cls, self.name, None) if cls else None
        return None if found is None else innermost(found)

    def problem(self, version: str) -> str | None:
        """Why this host cannot be patched here; None if all is as expected or `version` does not have the point."""
        if not SpecifierSet(self.versions).contains(Version(version).base_version):
            return None
        function = self.resolve()
        where = f"{self.module}.{self.owner}.{self.name}"
        if function is None:
            return f"{where} does not exist, but it is where DeepSpeed {version} {self.why}"
        names = tuple(inspect.signature(function).parameters)[1:]
        if names not in self.parameters:
            return f"{where} takes ({', '.join(names)}); known: {' or '.join(map(str, self.parameters))}"
        if digest_of(function) not in self.digests:
            return f"{where} has a body that was never examined (digest {digest_of(function)})"
        return None


def innermost(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under its decorators, also under one that does not use functools.wraps (DeepSpeed's nvtx marker)."""
    while True:
        function = inspect.unwrap(function)
        code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
        names = code.co_freevars if code else ()
        wrapped = dict(zip(names, cells, strict=True)).get("func")
        if wrapped is None:
            return function
        function = wrapped.cell_contents


def digest_of(function: Callable[..., Any]) -> str:
    """16 hex digits over a function's tokens: comments, blank lines and layout do not count."""
    source = inspect.getsource(innermost(function))
    skip = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = tokenize.generate_tokens(io.StringIO(inspect.cleandoc("\n" + source) + "\n").readline)
    text = "".join(t.string for t in tokens if t.type not in skip)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def verify(points: Iterable[PatchPoint], version: str, supported: str) -> None:
    """Check the host's version and every patch point.

    Raises:
        UnsupportedHostError: lists all that differs. With DS_BYZANTINE_TRUST_HOST=1 unknown bodies are let through;
            a missing function or a changed signature never is.
    """
    if not SpecifierSet(supported).contains(Version(version).base_version):
        raise UnsupportedHostError(
            f"DeepSpeed {version} is not supported: the gradient paths were checked for {supported}. Install one of "
            f'those, or set "byzantine": {{"enabled": false}} to train without protection.'
        )
    problems = [p for p in (point.problem(version) for point in points) if p]
    if os.environ.get(TRUST_ENVIRONMENT) == "1":
        problems = [p for p in problems if "never examined" not in p]
    if problems:
        listed = "\n  - ".join(problems)
        raise UnsupportedHostError(
            f"DeepSpeed {version} differs from what was examined, so a gradient could bypass the rule:\n  - {listed}\n"
            f"Reinstall an unmodified DeepSpeed {supported}. If you have read the changed code and it still reduces "
            f"gradients at these places only, set {TRUST_ENVIRONMENT}=1."
        )


@dataclass
class Bindings:
    """Names replaced on instances, in order; `undo` gives all of them back."""

    _made: list[tuple[Any, str, Any]] = field(default_factory=list)

    def bind(self, instance: Any, name: str, function: Any) -> None:
        """Make `instance.name` be `function`. Raises HostStateError if the host has no such name."""
        if not hasattr(instance, name):
            raise HostStateError(f"{type(instance).__name__} has no {name}; DeepSpeed's private layout has changed.")
        self._made.append((instance, name, vars(instance).get(name, _ABSENT)))
        setattr(instance, name, function)

    def undo(self) -> None:
        """Restore every instance; idempotent."""
        while self._made:
            instance, name, before = self._made.pop()
            if before is _ABSENT:
                vars(instance).pop(name, None)
            else:
                setattr(instance, name, before)


_ABSENT = object()
