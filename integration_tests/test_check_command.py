"""`ds-byzantine check --launch`: real ranks through the launcher, and what happens when they do not end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from world import environment

from ds_byzantine.cli import check_launch

pytestmark = pytest.mark.launch


def left_over() -> list[str]:
    """Command lines of workers that are still alive."""
    lines = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(entry.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return [line for line in lines if check_launch.WORKER in line]


def test_mean_equals_stock_in_every_stage() -> None:
    command = [str(Path(sys.executable).parent / "ds-byzantine"), "check", "--launch", "2", "--json"]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=400, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = [one for one in json.loads(ended.stdout)["checks"] if one["part"] == "2 ranks"]
    assert [one["status"] for one in found] == ["OKAY"] * 5, found
    assert [one["what"][:6] for one in found[:4]] == ["ZeRO-0", "ZeRO-1", "ZeRO-2", "ZeRO-3"]
    assert left_over() == []


def test_ranks_that_do_not_end_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", environment())
    *_, launch = check_launch.compare(2, timeout=3, stages=(2,))
    assert (launch.status, "not done after 3 s and killed" in launch.detail) == ("FAIL", True)
    assert left_over() == []


def test_a_job_that_cannot_start_is_told_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", environment())
    monkeypatch.setattr(check_launch, "WORKER", "ds_byzantine.no_such_module")
    *_, launch = check_launch.compare(2, timeout=120, stages=(2,))
    assert launch.status == "FAIL"
    assert "no_such_module" in launch.detail
