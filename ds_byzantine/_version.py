"""The version, from the installed metadata (setup.cfg is its only source)."""

from __future__ import annotations

from importlib import metadata

try:
    VERSION = metadata.version("ds_byzantine")
except metadata.PackageNotFoundError:  # a checkout that is on sys.path but not installed
    VERSION = "0+unknown"
