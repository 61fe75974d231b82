"""The section: every default, every refusal, and what is printed about it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from ds_byzantine.config import ByzantineConfig, json_schema, main, parse_section
from ds_byzantine.errors import ByzantineError, ConfigError
from ds_byzantine.rules.catalog import PRES, RULES

ROOT = Path(__file__).parents[1]


def refusal(section: object, path: str = "byzantine") -> str:
    with pytest.raises(ConfigError) as caught:
        parse_section(section, path)  # type: ignore[arg-type]
    return str(caught.value)


def test_an_empty_section_is_complete() -> None:
    config = parse_section({})
    assert config.enabled
    assert config.f is None
    assert config.rule.named() == {"name": "centered_clip", **RULES["centered_clip"].check_params({}, "")}
    assert (config.pre, config.scope, config.aggregate_at) == ((), "tensor", "micro_step")
    assert (config.momentum, config.on_suspect, config.alpha) == (0.0, "log", 0.001)
    assert (config.trust.replicas, config.trust.digest_every) == (1, 0)
    assert (config.monitor.dir, config.monitor.every, config.drill) == ("runs/byzantine", 1, None)


def test_no_section_means_off() -> None:
    assert not parse_section(None).enabled


def test_a_full_section() -> None:
    section = {
        "enabled": True,
        "f": 1,
        "rule": {"name": "centered_clip", "iterations": 7},
        "pre": ["nnm", {"name": "bucketing", "size": 3}],
        "scope": "shard",
        "aggregate_at": "boundary",
        "momentum": 0,
        "on_suspect": "log",
        "alpha": 0.01,
        "trust": {"replicas": 1, "digest_every": 0},
        "monitor": {"dir": "runs/demo", "every": 10},
        "drill": {"name": "alie", "z": 1.5, "replicas": [4], "start": 10},
    }
    config = parse_section(section)
    assert config.rule.params["iterations"] == 7
    assert [p.named() for p in config.pre] == [{"name": "nnm"}, {"name": "bucketing", "size": 3}]
    assert config.monitor.every == 10
    assert config.drill is not None
    assert config.drill.params == {"z": 1.5}
    assert config.drill.replicas == (4,)


def test_what_is_dumped_can_be_parsed_again() -> None:
    config = parse_section({"rule": "krum", "pre": ["nnm"], "drill": {"name": "alie", "replicas": [1, 2]}})
    assert parse_section(json.loads(json.dumps(config.model_dump(mode="json")))) == config


def test_a_config_cannot_be_changed() -> None:
    config = parse_section({})
    with pytest.raises(ValidationError, match="frozen"):
        config.f = 3  # type: ignore[misc]


@pytest.mark.parametrize("name", sorted(RULES))
def test_every_rule_is_accepted_by_name_and_by_object(name: str) -> None:
    assert parse_section({"rule": name}) == parse_section({"rule": {"name": name}})


@pytest.mark.parametrize("name", sorted(PRES))
def test_every_pre_is_accepted(name: str) -> None:
    assert parse_section({"pre": [name]}).pre[0].name == name


WRONG = [
    ({"ruel": "krum"}, "byzantine.ruel: no such key", 'Did you mean "rule"?'),
    ({"trust": {"digst_every": 1}}, "byzantine.trust.digst_every:", 'Did you mean "digest_every"?'),
    ({"monitor": {"folder": "x"}}, "byzantine.monitor.folder:", "Known: dir, every, products_every."),
    ({"rule": "centred_clip"}, "byzantine.rule:", 'Did you mean "centered_clip"?'),
    ({"rule": {"name": "krum", "neighbours": "x"}}, "byzantine.rule.neighbours:", 'Did you mean "neighbors"?'),
    ({"rule": {"name": "centered_clip", "iterations": 0}}, "byzantine.rule.iterations: got 0", "1"),
    ({"rule": {"name": "centered_clip", "iterations": "5"}}, "byzantine.rule.iterations: got '5'", "int"),
    ({"rule": {"name": "centered_clip", "tau": float("nan")}}, "byzantine.rule.tau: got nan", ">= 0"),
    ({"rule": {"iterations": 5}}, "byzantine.rule: got", 'an object with a "name"'),
    ({"rule": 3}, "byzantine.rule: got 3", "a name or an object"),
    ({"rule": None}, "byzantine.rule: got null", "the default is used"),
    ({"rule": "nnm"}, "byzantine.rule: no such rule", "Known:"),
    ({"pre": "nnm"}, 'byzantine.pre: got "nnm"', "this is a list"),
    ({"pre": ["nm"]}, "byzantine.pre[0]:", 'Did you mean "nnm"?'),
    ({"pre": ["nnm", {"name": "bucketing", "size": 0}]}, "byzantine.pre[1].size: got 0", ">= 1"),
    ({"enabled": 1}, "byzantine.enabled: got 1", "Write true."),
    ({"enabled": "false"}, 'byzantine.enabled: got "false"', "Write false."),
    ({"f": "1"}, 'byzantine.f: got "1"', "Write 1 without quotes."),
    ({"f": True}, "byzantine.f: got true", "a whole number"),
    ({"f": 1.0}, "byzantine.f: got 1.0", "Write 1."),
    ({"f": 1.5}, "byzantine.f: got 1.5", "a whole number"),
    ({"f": -1}, "byzantine.f: got -1", ">= 0"),
    ({"alpha": float("nan")}, "byzantine.alpha: got NaN", "a finite number"),
    ({"alpha": 0}, "byzantine.alpha: got 0", "> 0"),
    ({"alpha": 1}, "byzantine.alpha: got 1", "< 1"),
    ({"alpha": True}, "byzantine.alpha: got true", "a number"),
    ({"alpha": "0.01"}, 'byzantine.alpha: got "0.01"', "Write 0.01 without quotes."),
    ({"scope": "layer"}, 'byzantine.scope: got "layer"', "'tensor', 'shard' or 'model'"),
    ({"aggregate_at": "step"}, 'byzantine.aggregate_at: got "step"', "'micro_step' or 'boundary'"),
    ({"monitor": "runs/demo"}, 'byzantine.monitor: got "runs/demo"', "an object"),
    ({"monitor": {"dir": ""}}, 'byzantine.monitor.dir: got ""', "not empty"),
    ({"monitor": {"every": 0}}, "byzantine.monitor.every: got 0", ">= 1"),
    ({"trust": {"replicas": 0}}, "byzantine.trust.replicas: got 0", ">= 1"),
    ({"drill": 5}, "byzantine.drill: got 5", "a name, a .json file or an object"),
    ({1: 2}, "byzantine.1: no such key", "Known:"),
]


@pytest.mark.parametrize(("section", "what", "way_out"), WRONG)
def test_a_wrong_value_is_named_with_its_path(section: dict[str, object], what: str, way_out: str) -> None:
    message = refusal(section)
    assert message.startswith(what)
    assert way_out in message
    assert "\n" not in message
    assert "pydantic" not in message


@pytest.mark.parametrize(
    ("section", "what", "instead"),
    [
        ({"momentum": 0.9}, "byzantine.momentum: got 0.9", "aggregate_at"),
        ({"trust": {"replicas": 2}}, "byzantine.trust.replicas: got 2", "Use 1"),
        ({"trust": {"digest_every": 5}}, "byzantine.trust.digest_every: got 5", "Use 0"),
    ],
)
def test_what_this_version_lacks_is_refused_and_not_ignored(
    section: dict[str, object], what: str, instead: str
) -> None:
    message = refusal(section)
    assert message.startswith(what)
    assert "this version" in message
    assert instead in message


@pytest.mark.parametrize("section", [True, 1, "centered_clip", [], ["krum"]])
def test_a_section_that_is_no_object(section: object) -> None:
    message = refusal(section)
    assert message.startswith(f"byzantine: got {json.dumps(section)}, but this section is an object.")
    assert '{"enabled": false}' in message


@pytest.mark.parametrize(
    ("section", "where"),
    [
        ({"f": "auto"}, "byzantine.f"),
        ({"rule": "auto"}, "byzantine.rule"),
        ({"rule": {"name": "centered_clip", "tau": "auto"}}, "byzantine.rule.tau"),
        ({"rule": {"name": "auto"}}, "byzantine.rule.name"),
        ({"pre": ["nnm", "auto"]}, "byzantine.pre[1]"),
        ({"pre": [{"name": "bucketing", "size": "auto"}]}, "byzantine.pre[0].size"),
        ({"trust": {"replicas": "auto"}}, "byzantine.trust.replicas"),
        ({"drill": {"name": "alie", "replicas": ["auto"]}}, "byzantine.drill.replicas[0]"),
    ],
)
def test_auto_is_refused_at_any_depth_with_the_reason(section: dict[str, object], where: str) -> None:
    message = refusal(section)
    assert f'{where}: got "auto"' in message
    assert "accelerate" in message
    assert "Leave the key out" in message


def test_all_problems_come_in_one_error() -> None:
    message = refusal(
        {
            "f": "1",
            "rule": "krm",
            "pre": ["nm", {"name": "clip", "norm": -1.0}],
            "scope": "auto",
            "momentum": 0.9,
            "trust": {"replicas": 2, "digst": 0},
            "drill": {"name": "alie", "zz": 1, "start": -1},
        },
        path="my.section",
    )
    head, *lines = message.splitlines()
    assert head == "my.section: 10 problems:"
    starts = {line.split(":")[0] for line in lines}
    assert starts == {
        f"  - my.section.{key}"
        for key in (
            *("f", "rule", "pre[0]", "pre[1].norm", "scope", "momentum"),
            *("trust.replicas", "trust.digst", "drill.zz", "drill.start"),
        )
    }


def test_a_refusal_is_caught_as_the_package_s_and_as_a_value_error() -> None:
    assert issubclass(ConfigError, ByzantineError)
    assert issubclass(ConfigError, ValueError)


def test_the_schema_lists_names_descriptions_and_defaults() -> None:
    schema = json_schema()
    assert set(schema["properties"]) == set(ByzantineConfig.model_fields)
    assert schema["additionalProperties"] is False
    assert all(p.get("description") for p in schema["properties"].values())
    names, *objects = schema["$defs"]["RuleConfig"]["anyOf"]
    assert names["enum"] == sorted(RULES)
    clip = next(o for o in objects if o["properties"]["name"]["const"] == "centered_clip")
    iterations = clip["properties"]["iterations"]
    assert iterations["type"] == "integer"
    assert iterations["minimum"] == 1
    assert iterations["default"] == 5
    assert iterations["description"]
    assert schema["$defs"]["PreConfig"]["anyOf"][0]["enum"] == sorted(PRES)
    assert schema["properties"]["f"]["default"] is None
    assert schema["properties"]["rule"]["default"] == "centered_clip"
    json.dumps(schema)


def test_python_m_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema()
    assert main(["--yaml"]) == 2
    assert "usage" in capsys.readouterr().err


def test_the_reference_page_is_up_to_date() -> None:
    """In a process of its own: other tests may have registered rules here."""
    command = [sys.executable, "-m", "ds_byzantine.config", "--markdown"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert printed.stderr == ""
    page = (ROOT / "docs/config.md").read_text(encoding="utf-8")
    assert page == printed.stdout, "write it again: python -m ds_byzantine.config --markdown > docs/config.md"
