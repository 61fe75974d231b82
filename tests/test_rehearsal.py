"""Rehearsals without ranks: which runs, what their results mean, how the table looks."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest

from ds_byzantine.cli import matrix
from ds_byzantine.cli.rehearsal import Cell, cells, every_attack, every_rule, judged, made, table_for
from ds_byzantine.config import parse_section
from ds_byzantine.errors import ByzantineError, ConfigError, InfeasibleError


def test_the_runs_are_valid_sections() -> None:
    attacks, rules = every_attack(), every_rule(7, [1])
    assert "label_flip" not in attacks
    assert {"median", "krum", "bulyan", "centered_clip"} <= set(rules)
    assert rules[0] == "mean"
    runs = table_for(attacks, rules, 7, [1], steps=3)
    assert runs[0]["name"] == "clean"
    assert "section" not in runs[0]
    assert len({run["name"] for run in runs}) == len(runs)
    for run in runs[1:]:
        section = parse_section(run["section"])
        assert section.f == (0 if section.rule.name == "mean" else 1)
        assert section.drill is not None
        assert section.drill.replicas == (6,)
        assert run["steps"] == 3


def test_several_numbers_of_bad_replicas() -> None:
    runs = table_for(["scale"], every_rule(7, [1, 2]), 7, [1, 2], controls=True)
    tried = {(run["section"]["rule"], run["bad"]) for run in runs[1:]}
    assert ("bulyan", 1) in tried
    assert ("bulyan", 2) not in tried
    assert {run["section"]["drill"]["replicas"][0] for run in runs[1:] if "drill" in run["section"]} == {6, 5}
    assert {tuple(run["section"].get("pre", ())) for run in runs[1:]} == {(), ("nnm",)}
    controls = [run for run in runs[1:] if "drill" not in run["section"]]
    assert len(controls) == len(tried) - 2 + 2 * 3  # nnm stands before rules that also stand alone; not the mean
    assert len({run["name"] for run in runs}) == len(runs)


def test_a_rule_that_cannot_hold_is_refused_before_anything_is_launched() -> None:
    with pytest.raises(InfeasibleError, match="krum"):
        table_for(["scale"], ["krum"], 5, [2])


def test_a_drill_file_keeps_its_own_replicas(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"name": "nan", "replicas": [0]}))
    [_, run] = table_for([str(file)], ["median"], 5, [1])
    assert run["section"]["drill"] == {"name": "nan", "replicas": [0]}
    assert run["name"] == "median-f1-mine"
    with pytest.raises(ByzantineError, match="no such file"):
        table_for([str(tmp_path / "other.json")], ["median"], 5, [1])


def result(rule: str, loss: float, named: list[list[Any]]) -> dict[str, Any]:
    drill = {"name": "scale", "replicas": [4]}
    return {"section": {"rule": rule, "f": 1, "drill": drill}, "bad": 1, "held_out": loss, "named": named}


def test_what_results_mean() -> None:
    found = cells(
        {
            "clean": {"held_out": 2.0},
            "a": result("median", 2.1, [[9, 4, "outlying"]]),
            "b": result("mean", math.nan, [[3, 1, "outlying"], [5, 4, "outlying"], [6, 0, "duplicate"]]),
        }
    )
    good, bad = found
    assert (good.excess, good.held, good.named, good.wrong) == (pytest.approx(0.05), True, 9, ())
    assert (bad.held, bad.named, bad.wrong) == (False, 5, (1,))


@pytest.mark.parametrize(
    ("clean", "loss", "held"),
    [
        (2.0, 2.19, True),
        (2.0, 2.21, False),
        (-2.0, -1.0, False),
        (-2.0, -3.0, True),
        (0.0, 1.0, False),
        (0.0, 0.0, True),
    ],
)
def test_a_loss_may_have_any_sign(clean: float, loss: float, held: bool) -> None:
    assert Cell("median", "scale", 1, clean, loss, None, ()).held == held


def test_the_first_of_several_verdicts_counts() -> None:
    assert judged([[9, 4, "outlying"], [5, 4, "nonfinite"], [7, 1, "zero"]], [4]) == (5, (1,))


def test_another_number_of_ranks_is_another_run() -> None:
    assert table_for(["scale"], ["median"], 5, [1])[0] != table_for(["scale"], ["median"], 7, [1])[0]
    with pytest.raises(ConfigError, match="median"):
        table_for(["scale"], ["medain"], 7, [1, 2])


def test_only_exactly_this_run_counts_as_made(tmp_path: Path) -> None:
    run = {"name": "clean", "steps": 5, "seed": 0}
    assert not made(tmp_path, run)
    (tmp_path / "clean.json").write_text(json.dumps({**run, "held_out": 1.0}))
    assert made(tmp_path, run)
    assert not made(tmp_path, {**run, "steps": 6})


def test_the_matrix(tmp_path: Path) -> None:
    some = [
        Cell("median", "scale", 1, 2.0, 2.02, 7, ()),
        Cell("mean", "scale", 1, 2.0, math.nan, None, (1,)),
        Cell("mean", "zero", 1, 2.0, 1e9, None, ()),
    ]
    rules, rows = matrix.rows_for(some)
    assert rules == ["median", "mean"]
    assert rows == [["scale", "+1% @7", "NaN wrong"], ["zero", "", ">+999%"]]
    written = matrix.write([*some, Cell("median", "none", 2, 2.0, 1.9, None, ())], tmp_path)
    tables = (tmp_path / "matrix.md").read_text()
    assert tables.splitlines()[2] == "| attack | median | mean |"
    assert "2 bad replicas" in tables
    page = (tmp_path / "matrix.html").read_text()
    assert "hsl(130 " in page
    assert page.count("hsl(0 ") == 2, "not a number, and far too much"
    assert "{" not in page.split("</style>")[1]
    if importlib.util.find_spec("matplotlib") is not None:
        assert written[-1].read_bytes()[1:4] == b"PNG"
