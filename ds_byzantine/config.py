"""The "byzantine" section of a DeepSpeed JSON config. Importing this does not import torch.

`python -m ds_byzantine.config` prints the JSON schema, with `--markdown` the reference page docs/config.md.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, GetJsonSchemaHandler, ValidationInfo, field_validator, model_serializer
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from ds_byzantine._schema import name_or_object
from ds_byzantine._validation import Problem, Problems, Strict, problems_of, shown, validate
from ds_byzantine.drills.scenario import DrillConfig
from ds_byzantine.errors import ConfigError
from ds_byzantine.rules import catalog
from ds_byzantine.rules.catalog import RuleInfo


class RuleConfig(Strict):
    """A rule with its parameters. In JSON: a name, or an object with `name` and the rule's own parameters."""

    pre: ClassVar[bool] = False

    name: str
    params: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def load(cls, value: Any, path: str) -> RuleConfig:
        """A rule from what stands in the section.

        Raises:
            ConfigError: unknown name or parameter (the nearest is suggested), wrong type or range.
        """
        if isinstance(value, RuleConfig):
            return value
        raw = {"name": value} if isinstance(value, str) else value
        if not isinstance(raw, Mapping) or not isinstance(raw.get("name"), str):
            what = "pre-aggregation" if cls.pre else "rule"
            raise ConfigError(
                f'{path}: got {shown(value)}, but a {what} is a name or an object with a "name", '
                f'e.g. "{"nnm" if cls.pre else "centered_clip"}". Left out, the default is used.'
            )
        info = catalog.lookup(raw["name"], path, pre=cls.pre)
        given = {k: v for k, v in raw.items() if k != "name"}
        return cls(name=info.name, params=info.check_params(given, path))

    @property
    def info(self) -> RuleInfo:
        """The catalog entry."""
        return catalog.lookup(self.name, pre=self.pre)

    def named(self) -> dict[str, Any]:
        """As in JSON: `{"name": ..., <parameters>}`, which is also what `aggregate(rule=...)` takes."""
        return {"name": self.name, **self.params}

    @model_serializer
    def _flat(self) -> dict[str, Any]:
        return self.named()

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        table = catalog.PRES if cls.pre else catalog.RULES
        return {"title": "Pre-aggregation" if cls.pre else "Rule", "anyOf": name_or_object(table)}


class PreConfig(RuleConfig):
    """A pre-aggregation with its parameters, written as a rule is."""

    pre: ClassVar[bool] = True


class TrustConfig(Strict):
    """Who may be believed besides the gradients."""

    replicas: int = Field(
        default=1, ge=1, description="Copies of each optimizer shard. This version: 1, owners are trusted."
    )
    digest_every: int = Field(
        default=0, ge=0, description="Compare a digest of all parameters every k steps. This version: 0, never."
    )

    @field_validator("replicas")
    @classmethod
    def _one_owner(cls, value: int) -> int:
        if value > 1:
            raise ValueError(
                f"got {value}, but this version does not replicate optimizer shards yet. Use 1: bad gradients are "
                "covered, a replica that corrupts the parameters which it owns is not."
            )
        return value

    @field_validator("digest_every")
    @classmethod
    def _no_digest(cls, value: int) -> int:
        if value > 0:
            raise ValueError(
                f"got {value}, but this version does not compare parameter digests yet. Use 0 or leave the key out, "
                "and compare checkpoints if you suspect drift."
            )
        return value


class MonitorConfig(Strict):
    """Where the events of a run go."""

    dir: str = Field(default="runs/byzantine", min_length=1, description="Folder of events.jsonl, written by rank 0.")
    every: int = Field(default=1, ge=1, description="Write an event every k steps.")
    products_every: int = Field(
        default=10,
        ge=0,
        description="Under coordinate-wise rules, which do not need them, compute the inner products of the rows every "
        "k steps, for norms, cosines and the regime ratio; 0: never. Other rules have them in every step.",
    )


class ByzantineConfig(Strict):
    """The whole section. Every key may be left out."""

    enabled: bool = Field(default=True, description="false: as if the section were absent.")
    f: int | None = Field(
        default=None,
        ge=0,
        description="How many replicas may be bad at once. Left out: derived from n, the number of replicas.",
    )
    rule: RuleConfig = Field(default="centered_clip", validate_default=True, description="What replaces the mean.")
    pre: tuple[PreConfig, ...] = Field(default=(), description="Pre-aggregations before the rule, in this order.")
    scope: Literal["tensor", "shard", "model"] = Field(
        default="tensor",
        description="The block over which a rule decides: each parameter tensor, each piece that a rank aggregates, "
        "or all gradients of the step.",
    )
    fault_domain: Literal["replica", "node"] = Field(
        default="replica",
        description='What fails as one: a replica, or with "node" all replicas of a host, whose mean is one row. That '
        "divides n, and the bytes between hosts, by the replicas of a host.",
    )
    aggregate_at: Literal["micro_step", "boundary"] = Field(
        default="micro_step",
        description="What the rule sees with gradient accumulation: each micro-step's gradients when the host reduces "
        "them (ZeRO 2 and 3), or the accumulated gradients once per optimizer step.",
    )
    momentum: float = Field(default=0.0, ge=0, lt=1, description="Worker momentum. This version: 0, none.")
    on_suspect: Literal["log", "quarantine", "checkpoint_exit"] = Field(
        default="log",
        description="What happens when the evidence against a replica reaches the bound: log it; leave its rows out "
        "from then on (never more than f replicas); or save a checkpoint, write verdict.json and end all ranks with "
        "exit code 86.",
    )
    alpha: float = Field(
        default=0.001, gt=0, lt=1, description="Largest acceptable probability of a false accusation in a healthy run."
    )
    trust: TrustConfig = Field(default=TrustConfig(), description="Checks beyond the gradients.")
    monitor: MonitorConfig = Field(default=MonitorConfig(), description="Where and how often events are written.")
    drill: DrillConfig | None = Field(
        default=None,
        description="An attack on purpose: a name, the path of a .json file, or an object. Left out: none.",
    )

    @field_validator("rule", mode="before")
    @classmethod
    def _load_rule(cls, value: Any, info: ValidationInfo) -> RuleConfig:
        return RuleConfig.load(value, f"{_path(info)}.rule")

    @field_validator("pre", mode="before")
    @classmethod
    def _load_pre(cls, value: Any, info: ValidationInfo) -> tuple[RuleConfig, ...]:
        path = f"{_path(info)}.pre"
        if not isinstance(value, (list, tuple)):
            raise ValueError(f'got {shown(value)}, but this is a list, e.g. ["nnm"]; [] for none.')
        loaded, found = [], list[Problem]()
        for i, one in enumerate(value):
            try:
                loaded.append(PreConfig.load(one, f"{path}[{i}]"))
            except ConfigError as error:
                found += problems_of(error, f"{path}[{i}]")
        if found:
            raise Problems(found)
        return tuple(loaded)

    @field_validator("drill", mode="before")
    @classmethod
    def _load_drill(cls, value: Any, info: ValidationInfo) -> DrillConfig | None:
        return None if value is None else DrillConfig.read(value, f"{_path(info)}.drill")

    @field_validator("momentum")
    @classmethod
    def _no_momentum(cls, value: float) -> float:
        if value > 0:
            raise ValueError(
                f"got {value}, but this version has no worker momentum yet. Use 0.0 and lower the gradient noise by a "
                'larger local batch, or by more gradient accumulation with "aggregate_at": "boundary".'
            )
        return value


def parse_section(section: Mapping[str, Any] | None, path: str = "byzantine") -> ByzantineConfig:
    """The checked section.

    Args:
        section: the object under "byzantine"; None if there is none, which gives a config with `enabled=False`.
        path: dotted config path for messages.

    Raises:
        ConfigError: one error that lists all problems, each with its dotted path, what was given, why it cannot be and
            what to do.

    Example:
        >>> parse_section({"alhpa": 0.01})
        Traceback (most recent call last):
        ds_byzantine.errors.ConfigError: byzantine.alhpa: no such key "alhpa". Did you mean "alpha"? Known: ...
    """
    if section is None:
        return ByzantineConfig(enabled=False)
    if not isinstance(section, Mapping):
        raise ConfigError(
            f"{path}: got {shown(section)}, but this section is an object. "
            'Write {} for the defaults, {"enabled": false} to be off.'
        )
    return validate(ByzantineConfig, section, path)


def json_schema() -> dict[str, Any]:
    """JSON schema of the section, with descriptions, defaults and the names of all known rules and attacks."""
    schema = ByzantineConfig.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def main(arguments: Sequence[str]) -> int:
    """Print the JSON schema, or the reference page with `--markdown`."""
    import json

    from ds_byzantine.config_docs import markdown

    if list(arguments) not in ([], ["--markdown"]):
        print("usage: python -m ds_byzantine.config [--markdown]", file=sys.stderr)
        return 2
    print(markdown() if arguments else json.dumps(json_schema(), indent=2))
    return 0


def _path(info: ValidationInfo) -> str:
    return str((info.context or {}).get("path", "byzantine"))


if __name__ == "__main__":
    from ds_byzantine import config as this_module  # not __main__, so that there is one copy of the models

    sys.exit(this_module.main(sys.argv[1:]))
