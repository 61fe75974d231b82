"""What a DeepSpeed JSON says about a job, as far as the cost of a rule depends on it. No torch, no DeepSpeed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_byzantine.config import ByzantineConfig
from ds_byzantine.errors import ByzantineError, ConfigError, InfeasibleError
from ds_byzantine.plan import Plan, plan

BUCKET = 500_000_000  # DeepSpeed's default reduce_bucket_size, in elements

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class Job:
    """A job before it is started.

    Args:
        stage: ZeRO stage.
        dtype_bytes: of a gradient element on the wire.
        bucket: elements that are reduced at once.
        accumulation: micro-steps in an optimizer step.
        everyone: BF16_Optimizer, which needs the whole average on all ranks.
        params: of one copy of the model; None if not given.
        tp, pp: tensor and pipeline ranks of a replica; they hold different parameters.
        sp, ep: sequence and expert ranks of a replica; their gradients are averaged before the rule.
        node_size: ranks of a host; None where hosts do not matter.
        assumed: what the JSON leaves open, and what was taken instead.
    """

    stage: int
    dtype_bytes: int
    bucket: int
    accumulation: int
    everyone: bool
    params: int | None = None
    tp: int = 1
    pp: int = 1
    sp: int = 1
    ep: int = 1
    node_size: int | None = None
    assumed: tuple[str, ...] = ()

    @property
    def within(self) -> str:
        """What a replica consists of, as the plug-in says it at start."""
        sizes = {"pipeline": self.pp, "tensor": self.tp, "sequence": self.sp, "expert": self.ep}
        words = [f"{name} {size}" for name, size in sizes.items() if size > 1]
        return " x ".join(words + (["node"] if self.node_size else []))

    @property
    def numel(self) -> int | None:
        """Gradient elements that one rank reduces."""
        return None if self.params is None else -(-self.params // (self.tp * self.pp))

    @property
    def model_ranks(self) -> int:
        """Ranks of one copy of the model."""
        return self.tp * self.pp * self.sp * self.ep

    @property
    def block(self) -> int:
        """Ranks that fail as one."""
        return max(self.model_ranks, self.node_size or 1)

    def fits(self, world_size: int) -> bool:
        """Whether so many ranks make whole replicas."""
        return world_size % self.model_ranks == 0 and world_size % (self.node_size or 1) == 0

    def replicas(self, world_size: int) -> int:
        """n of a job of so many ranks.

        Raises:
            ConfigError: the ranks do not make whole replicas.
        """
        for size, what in ((self.model_ranks, "tp x pp x sp x ep"), (self.node_size or 1, "ranks of a host")):
            if world_size % size:
                raise ConfigError(
                    f"{world_size} ranks are no multiple of {size} ({what}), so they do not make whole replicas. "
                    f"Use {max(1, world_size // size) * size} or {-(-world_size // size) * size} ranks."
                )
        return world_size // self.block

    def plan(self, section: ByzantineConfig, world_size: int) -> Plan:
        """What the plug-in would do in a job of so many ranks.

        Raises:
            ByzantineError: it cannot hold; the message names a way out.
        """
        if self.pp > 1 and self.stage > 1:
            raise InfeasibleError(
                f"zero_optimization.stage: DeepSpeed's pipeline runs with ZeRO 0 or 1 only; this is {self.stage}. "
                "Use stage 1, or no pipeline."
            )
        kinds = [self.sp > 1, self.ep > 1, self.tp * self.pp > 1]
        if sum(kinds) > 1:
            raise InfeasibleError(
                f"{self.within}: sequence or expert parallelism with another kind was never examined and is refused. "
                "Use one of them."
            )
        return plan(
            section,
            self.replicas(world_size),
            stage=self.stage,
            numel=self.numel,
            dtype_bytes=self.dtype_bytes,
            bucket_numel=self.bucket,
            accumulation=self.accumulation,
            everyone=self.everyone,
            ranks=world_size // (self.tp * self.pp),
            within=self.within,
        )

    def largest_f(self, section: ByzantineConfig, world_size: int) -> int | None:
        """The largest f that rule and pre-aggregations hold for; None if not even 0."""
        for f in range((self.replicas(world_size) - 1) // 2, -1, -1):
            try:
                self.plan(section.model_copy(update={"f": f, "drill": None}), world_size)
            except ByzantineError:
                continue
            return f
        return None

    def stock_memory(self, world_size: int) -> int | None:
        """Bytes of weights, gradients and Adam's state on a rank without this plug-in; None without `params`."""
        if self.numel is None:
            return None
        shares = world_size // (self.tp * self.pp)
        weights, gradients, adam = self.dtype_bytes, self.dtype_bytes, 12 if self.dtype_bytes < 4 else 8
        over = [self.stage >= 3, self.stage >= 2, self.stage >= 1]
        each = sum(b / (shares if o else 1) for b, o in zip((weights, gradients, adam), over, strict=True))
        return round(each * self.numel)


def job_of(
    config: Mapping[str, Any],
    *,
    params: int | None,
    tp: int = 1,
    pp: int = 1,
    sp: int = 1,
    ep: int = 1,
    node_size: int | None = None,
) -> Job:
    """Read a DeepSpeed JSON; what it does not say is given beside it, as `Job` has it.

    Raises:
        ConfigError: a value is of the wrong kind.
    """
    assumed: list[str] = []
    zero = _part(config, "zero_optimization")
    stage = _int(zero, "stage", 0, "zero_optimization.stage", assumed)
    if stage not in (0, 1, 2, 3):
        raise ConfigError(f"zero_optimization.stage: got {stage}, but there are only the stages 0 to 3.")
    auto_tp = _int(_part(config, "tensor_parallel"), "autotp_size", 1, "tensor_parallel.autotp_size", assumed)
    dtype_bytes = _dtype_bytes(config, assumed)
    if ep > 1:
        assumed.append("experts counted like dense parameters; fewer ranks reduce them, so they cost less")
    accumulated = _part(config, "data_types").get("grad_accum_dtype")
    return Job(
        stage=stage,
        dtype_bytes=dtype_bytes,
        bucket=_int(zero, "reduce_bucket_size", BUCKET, "zero_optimization.reduce_bucket_size", assumed),
        accumulation=max(1, _int(config, "gradient_accumulation_steps", 1, "gradient_accumulation_steps", assumed)),
        everyone=stage == 1 and dtype_bytes == 2 and accumulated == "fp32" and not _part(config, "fp16").get("enabled"),
        params=params,
        tp=max(tp, auto_tp),
        pp=pp,
        sp=max(sp, _int(config, "sequence_parallel_size", 1, "sequence_parallel_size", assumed)),
        ep=ep,
        node_size=node_size,
        assumed=tuple(assumed),
    )


def parameters(text: str) -> int:
    """How many parameters "7B", "135M" or "1.5e9" are.

    Raises:
        ValueError: it is no such text.

    Example:
        >>> parameters("7B"), parameters("1.5e9"), parameters("135_000_000")
        (7000000000, 1500000000, 135000000)
    """
    found = re.fullmatch(r"(\d[\d_,]*(?:\.\d+)?(?:e\d{1,2})?)\s*([KMBT]?)", text.strip(), re.IGNORECASE)
    number = float(found[1].replace(",", "").replace("_", "")) * _UNITS[found[2].upper()] if found else 0.0
    if not 1 <= number <= 1e16:
        raise ValueError(f'"{text}" is no number of parameters. Write e.g. 7B, 135M or 1.5e9.')
    return round(number)


def speed(text: str) -> float:
    """Bytes per second in "25GB/s" or "200Gb/s" (bits).

    Raises:
        ValueError: it is no such text.

    Example:
        >>> speed("25GB/s") == speed("200Gb/s") == 25e9
        True
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT])(B|b)(?:/s|ps)", text.strip())
    if found is None or float(found[1]) == 0:
        raise ValueError(f'"{text}" is no speed. Write e.g. 25GB/s (bytes) or 200Gb/s (bits).')
    units = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
    return float(found[1]) * units[found[2]] / (8 if found[3] == "b" else 1)


def _part(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}


def _int(config: Mapping[str, Any], key: str, default: int, path: str, assumed: list[str]) -> int:
    value = config.get(key, default)
    if value == "auto":
        assumed.append(f'{path} is "auto": taken as {default:,}')
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value):
        raise ConfigError(f"{path}: got {value!r}, but this is a whole number.")
    return int(value)


def _dtype_bytes(config: Mapping[str, Any], assumed: list[str]) -> int:
    wire = config.get("communication_data_type")
    if isinstance(wire, str):
        return 4 if wire in ("fp32", "float32", "torch.float32") else 2
    enabled = [_part(config, name).get("enabled") for name in ("bf16", "bfloat16", "fp16")]
    if True not in enabled and "auto" in enabled:
        assumed.append('bf16.enabled is "auto": gradients taken as 2 bytes an element')
    return 2 if True in enabled or "auto" in enabled else 4
