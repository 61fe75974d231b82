"""Helpers beside the tests are imported by their plain names, as the worker of a launched world does."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
