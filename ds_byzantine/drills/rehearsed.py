"""A rehearsal of a user's own script: the section as `ds-byzantine drill --script` wants it. No torch."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_byzantine._names import REHEARSAL
from ds_byzantine.errors import ConfigError

logger = logging.getLogger("ds_byzantine")


def rehearsed(section: Any) -> Any:
    """The section of this job; in a rehearsal, with the rehearsal's keys in place of its own.

    The environment variable `DS_BYZANTINE_REHEARSAL` names a JSON file of keys. Only `ds-byzantine drill --script` sets
    it, for the ranks that it starts. `monitor` is merged key by key. A job that would end at a verdict goes on: losses
    of runs of different length could not be compared.

    Args:
        section: what stands in the DeepSpeed JSON; None if there is none.

    Raises:
        ConfigError: the file cannot be read.
    """
    name = os.environ.get(REHEARSAL)
    if not name:
        return section
    try:
        keys = json.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{REHEARSAL} names {name}, which cannot be read ({error}). It belongs to `ds-byzantine drill --script`; "
            "unset it in any other job."
        ) from error
    if section is not None and not isinstance(section, Mapping):
        return section  # the parser says what is wrong with it
    logger.warning("this job is a rehearsal: %s changes its section. Unset it if you did not ask for one.", REHEARSAL)
    own = dict(section or {})
    monitor = own.get("monitor")
    merged = {**own, **keys, "enabled": True}
    if isinstance(monitor, Mapping) or "monitor" not in own:
        merged["monitor"] = {**(monitor or {}), **keys.get("monitor", {}), "every": 1}
    if merged.get("on_suspect") == "checkpoint_exit":
        merged["on_suspect"] = "log"
    return merged
