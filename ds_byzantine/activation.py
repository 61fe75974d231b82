"""How a "byzantine" section takes effect: the end of `DeepSpeedEngine.__init__` looks for one.

Nothing else of DeepSpeed is touched, and nothing at all on an engine without a section. The engine's module may be
imported long after this one, so a finder on `sys.meta_path` waits for it; it holds no reference to torch or DeepSpeed.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ds_byzantine._names import ATTRIBUTE, REHEARSAL

ENGINE_MODULE = "deepspeed.runtime.engine"


_engines: weakref.WeakSet[Any] = weakref.WeakSet()
_original_init: Any = None


def install() -> None:
    """Make "byzantine" sections take effect in this process. Idempotent.

    Needed only where the automatic way is off: TORCH_DEVICE_BACKEND_AUTOLOAD=0, or the package is not installed but on
    sys.path. Call it before `deepspeed.initialize`.

    Raises:
        UnprotectedError: an engine with a section was built before: its gradients are not protected.
    """
    watch()
    if ENGINE_MODULE in sys.modules:
        _wrap(sys.modules[ENGINE_MODULE])
        _refuse_earlier_engines(sys.modules[ENGINE_MODULE])


def uninstall() -> None:
    """Undo `install` and the automatic activation: engines get their own reductions back. Idempotent."""
    global _original_init
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    for engine in list(_engines):
        attachment_of(engine).detach()
        delattr(engine, ATTRIBUTE)
    _engines.clear()
    if _original_init is not None:
        sys.modules[ENGINE_MODULE].DeepSpeedEngine.__init__ = _original_init
        _original_init = None


def watch() -> None:
    """Act as soon as DeepSpeed's engine is imported. Idempotent."""
    module = sys.modules.get(ENGINE_MODULE)
    if module is not None and hasattr(module, "DeepSpeedEngine"):
        _wrap(module)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def attachment_of(engine: Any) -> Any:
    """The `Attachment` of an engine, or None."""
    return vars(engine).get(ATTRIBUTE)


class _Finder(MetaPathFinder):
    """Lets the ordinary finders find DeepSpeed's engine, and adds a step after its execution."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Called for every import; does nothing but compare the name for all modules but one."""
        if fullname != ENGINE_MODULE:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _ThenWrap(spec.loader)
                return spec
        return None


class _ThenWrap(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module as its own loader would, then put everything back and wrap the engine."""
        self._loader.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader  # inspect.getsource asks the loader
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
        _wrap(module)


def _wrap(module: ModuleType) -> None:
    global _original_init
    if _original_init is not None:
        return
    cls: Any = module.DeepSpeedEngine
    original = cls.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self._config._param_dict.get("byzantine") is not None or os.environ.get(REHEARSAL):
            from ds_byzantine.adapters.deepspeed.attach import attach

            attachment = attach(self)
            if attachment is not None:
                setattr(self, ATTRIBUTE, attachment)
                _engines.add(self)

    cls.__init__ = __init__
    _original_init = original


def _refuse_earlier_engines(module: ModuleType) -> None:
    import gc

    from ds_byzantine.adapters.deepspeed.attach import section_of
    from ds_byzantine.config import parse_section
    from ds_byzantine.errors import UnprotectedError

    engine_class: Any = module.DeepSpeedEngine
    for found in gc.get_objects():
        if not isinstance(found, engine_class) or attachment_of(found) is not None:
            continue
        if parse_section(section_of(found)).enabled:
            raise UnprotectedError(
                'ds_byzantine.install(): an engine with a "byzantine" section was built before this call, so its '
                "gradients are not protected. Call install() before deepspeed.initialize()."
            )
