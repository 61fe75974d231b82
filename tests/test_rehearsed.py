"""The section of a job that `ds-byzantine drill --script` started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds_byzantine._names import REHEARSAL
from ds_byzantine.drills.rehearsed import rehearsed
from ds_byzantine.errors import ConfigError


def test_outside_a_rehearsal_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REHEARSAL, raising=False)
    assert rehearsed(None) is None
    section = {"rule": "krum"}
    assert rehearsed(section) is section


def test_the_keys_of_the_rehearsal_win(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"f": 2, "drill": {"name": "nan"}, "monitor": {"dir": "here"}}))
    monkeypatch.setenv(REHEARSAL, str(file))
    own = {"enabled": False, "rule": "krum", "f": 1, "monitor": {"dir": "there", "products_every": 3, "every": 50}}
    assert rehearsed({**own, "on_suspect": "checkpoint_exit"}) == {
        "enabled": True,
        "rule": "krum",
        "f": 2,
        "drill": {"name": "nan"},
        "monitor": {"dir": "here", "products_every": 3, "every": 1},
        "on_suspect": "log",
    }
    monitor = {"dir": "here", "every": 1}
    assert rehearsed(None) == {"enabled": True, "f": 2, "drill": {"name": "nan"}, "monitor": monitor}
    assert rehearsed("a mistake") == "a mistake", "for the parser to refuse"
    assert rehearsed({"on_suspect": "quarantine"})["on_suspect"] == "quarantine"
    assert own["f"] == 1


def test_a_forgotten_variable_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(REHEARSAL, str(tmp_path / "gone.json"))
    with pytest.raises(ConfigError, match="unset it"):
        rehearsed({})
