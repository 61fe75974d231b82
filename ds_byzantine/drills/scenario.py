"""Which replica misbehaves, how and when: the `drill` of the section. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, GetJsonSchemaHandler, ValidationInfo, field_validator, model_serializer, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from ds_byzantine._schema import name_or_object
from ds_byzantine._validation import Problem, Problems, Strict, checked, refuse, shown, unknown, without_auto
from ds_byzantine.attacks.catalog import ATTACKS, IN_THE_DATA, AttackSpec, z_max
from ds_byzantine.errors import ConfigError


class DrillConfig(Strict):
    """An attack on purpose. In JSON the attack's own parameters stand beside these keys."""

    name: str = Field(description="The attack: " + ", ".join(sorted(ATTACKS)) + ".")
    replicas: tuple[int, ...] | None = Field(
        default=None, description="Indices of the bad replicas, from 0. Left out: the last max(f, 1) ones."
    )
    model_ranks: tuple[int, ...] | None = Field(
        default=None,
        description="Which ranks of a bad replica misbehave, from 0, under pipeline, tensor, sequence or expert "
        "parallelism. Left out: all of them.",
    )
    start: int = Field(default=0, ge=0, description="First bad step, from 0.")
    stop: int | None = Field(default=None, ge=0, description="First good step again. Left out: bad to the end.")
    every: int = Field(default=1, ge=1, description="Bad in every k-th step from start on.")
    seed: int = Field(default=0, ge=0, description="Seed of the attack's randomness.")
    params: dict[str, Any] = Field(
        default_factory=dict, validate_default=True, description="The attack's parameters, defaults filled in."
    )

    @field_validator("name")
    @classmethod
    def _known_attack(cls, name: str) -> str:
        if name in IN_THE_DATA:
            raise ValueError(f"got {shown(name)}, but {IN_THE_DATA[name]}")
        if name not in ATTACKS:
            raise ValueError(unknown("attack", name, ATTACKS))
        return name

    @field_validator("replicas", "model_ranks", mode="before")
    @classmethod
    def _distinct(cls, value: Any) -> Any:
        if value is None:
            return None
        whole = isinstance(value, (list, tuple)) and all(type(i) is int and i >= 0 for i in value)
        if not whole or not value or len(set(value)) < len(value):
            raise ValueError(f"got {shown(value)}, but this is a list of different indices from 0, e.g. [4].")
        return tuple(value)

    @field_validator("params")
    @classmethod
    def _fitting(cls, given: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        name = info.data.get("name")
        if name is None:  # refused already
            return given
        path = (info.context or {}).get("path", "byzantine.drill")
        spec = ATTACKS[name]
        known = [p.name for p in spec.params] + [k for k in cls.model_fields if k != "params"]
        strange = [
            Problem(f"{path}.{k}", unknown(f"key of the {name} drill", k, known)) for k in given if k not in known
        ]
        if strange:
            raise Problems(strange)
        return spec.check_params(given, path)

    @model_validator(mode="after")
    def _ordered(self) -> DrillConfig:
        if self.stop is not None and self.stop <= self.start:
            raise ValueError(f"stop={self.stop} is not after start={self.start}: no step would be bad. Raise stop.")
        return self

    @model_serializer
    def _flat(self) -> dict[str, Any]:
        own = {k: getattr(self, k) for k in type(self).model_fields if k != "params"}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in own.items()} | self.params

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        keys = handler.resolve_ref_schema(handler(core))["properties"]
        shared = {k: v for k, v in keys.items() if k not in ("name", "params")}
        file = {"type": "string", "pattern": r"\.json$", "description": "A file with such an object."}
        return {"title": "Drill", "anyOf": [*name_or_object(ATTACKS, shared), file]}

    @classmethod
    def load(cls, value: Any, path: str = "byzantine.drill") -> DrillConfig:
        """A drill from what stands in the section.

        Args:
            value: the name of an attack, the path of a .json file, or an object.
            path: dotted config path for messages.

        Raises:
            ConfigError: unknown attack or key (with the nearest name), wrong value, file missing or not JSON.

        Example:
            >>> DrillConfig.load({"name": "alie", "z": 1.5, "replicas": [4]}).params
            {'z': 1.5}
        """
        try:
            return cls.read(value, path)
        except Problems as problems:
            refuse(problems.found, path)

    @classmethod
    def read(cls, value: Any, path: str) -> DrillConfig:
        """As `load`, for use inside a validator of the section. Raises Problems or ConfigError."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str) and value.endswith(".json"):
            return cls.read(_load_json(value, path), f"{path}({value})")
        raw: Any = {"name": value} if isinstance(value, str) else value
        if not isinstance(raw, Mapping):
            raise ConfigError(f"{path}: got {shown(raw)}, but a drill is a name, a .json file or an object {{...}}.")
        raw, autos = without_auto(raw, path)
        if autos:
            raise Problems(autos)
        own = {k: v for k, v in raw.items() if k in cls.model_fields and k != "params"}
        rest = {k: v for k, v in raw.items() if k not in own}
        return checked(cls, {**own, "params": rest}, path)

    @property
    def spec(self) -> AttackSpec:
        """The attack's catalog entry."""
        return ATTACKS[self.name]

    def bad_replicas(self, n: int, f: int, path: str = "byzantine.drill") -> tuple[int, ...]:
        """Indices of the bad replicas in a job of n.

        Raises:
            ConfigError: an index that the job does not have, a colluding attack with no honest replica left, or one
                that copies a replica which is not honest.
        """
        chosen = self.replicas if self.replicas is not None else tuple(range(max(n - max(f, 1), 0), n))
        beyond = [i for i in chosen if i >= n]
        if beyond:
            raise ConfigError(f"{path}.replicas: got {shown(beyond)}, but this job has replicas 0 to {n - 1}.")
        if self.spec.needs_honest and len(chosen) >= n:
            raise ConfigError(
                f"{path}.replicas: {self.name} is computed from the honest gradients, but all {n} replicas are bad. "
                "Leave at least one out."
            )
        copied = self.params.get(self.spec.names_replica)
        if copied is not None and (copied >= n or copied in chosen):
            honest = [i for i in range(n) if i not in chosen]
            raise ConfigError(
                f"{path}.{self.spec.names_replica}: got {copied}, but in this job the honest replicas are {honest}. "
                "Name one of them."
            )
        return chosen

    def check_model_ranks(self, ranks: int, path: str = "byzantine.drill") -> None:
        """Raise ConfigError if a bad replica, of so many ranks, has no rank that is named in `model_ranks`."""
        beyond = [i for i in self.model_ranks or () if i >= ranks]
        if beyond:
            raise ConfigError(
                f"{path}.model_ranks: got {shown(beyond)}, but a replica of this job has ranks 0 to {ranks - 1}."
            )

    def warnings(self, n: int, f: int) -> tuple[str, ...]:
        """What the user should know before this drill: one sentence each."""
        bad = len(self.bad_replicas(n, f))
        found = []
        if bad > f:
            found.append(f"drill {self.name}: {bad} bad replicas are more than f={f}: the rule is expected to break.")
        if self.name == "alie" and self.params.get("z") is None and z_max(n, bad) == 0.0:
            found.append(f"drill alie: z for n={n} with {bad} bad is 0: it sends the honest mean. Give z, e.g. 1.5.")
        return tuple(found)

    def active(self, step: int) -> bool:
        """Whether the bad replicas are bad in this step."""
        return step >= self.start and not self.over(step) and (step - self.start) % self.every == 0

    def over(self, step: int) -> bool:
        """Whether no step from this one on is bad."""
        return self.stop is not None and step >= self.stop


def _load_json(name: str, path: str) -> Any:
    file = Path(name)
    if not file.is_file():
        near = f' Did you mean the attack "{file.stem}"?' if file.stem in ATTACKS else ""
        raise ConfigError(f"{path}: no such file: {name} (looked for it from {Path.cwd()}).{near}")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {name} cannot be read as JSON: {error}") from error
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path}: {name} holds {shown(content)}, but a drill file holds one object {{...}}.")
    return content
