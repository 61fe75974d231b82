"""Helpers beside the tests are imported by their plain names, as the worker of a launched world does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def compiled_op() -> None:
    """For tests that launch scripts as a user would."""
    from launcher import build_op

    build_op()
