"""The examples in docstrings run. Those of the rules are run by test_rules.py, which also wants one of every rule."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import ds_byzantine

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(ds_byzantine.__path__, "ds_byzantine.")
    if not module.name.startswith("ds_byzantine.rules.")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    module = importlib.import_module(name)
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).failed == 0


def test_there_are_examples_to_run() -> None:
    finder = doctest.DocTestFinder()
    modules = [importlib.import_module(name) for name in MODULES]
    assert sum(bool(test.examples) for module in modules for test in finder.find(module)) >= 5
