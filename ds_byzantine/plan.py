"""Can this section hold in this job, and what does it cost? Arithmetic only, no torch.

The one source of truth for the validator, for the refusal at attach time and for the `plan` command.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, comb, log2
from typing import NamedTuple

from ds_byzantine._version import VERSION
from ds_byzantine.config import ByzantineConfig, PreConfig, RuleConfig
from ds_byzantine.errors import ConfigError, InfeasibleError
from ds_byzantine.rules.catalog import MOST_SUBSETS, RULES, Kind, RuleInfo


class Cost(NamedTuple):
    """The last fields of a plan."""

    traffic_ratio: float | None
    bytes_sent_per_rank: int | None = None
    stock_bytes_per_rank: int | None = None
    extra_memory: int | None = None
    rule_bytes: int | None = None


@dataclass(frozen=True)
class Plan:
    """What will happen in a job of n replicas.

    Bytes are those that one rank sends (the mean over ranks) in one reduction of all `numel` gradients; None if `numel`
    was not given. `extra_memory` is what a rank holds besides stock DeepSpeed, in bytes. `rule_bytes` is what its rule
    takes as long as to read so many bytes from memory once.
    """

    n: int
    f: int
    config: ByzantineConfig
    host: str
    warnings: tuple[str, ...]
    drill: str | None
    traffic_ratio: float | None
    bytes_sent_per_rank: int | None = None
    stock_bytes_per_rank: int | None = None
    extra_memory: int | None = None
    rule_bytes: int | None = None

    def extra_seconds(self, bandwidth: float, memory_bandwidth: float) -> float | None:
        """Time that one reduction of all gradients takes longer than stock's; negative if the rule saves time.

        A model of two terms: bytes over the wire, at the same speed for us and for stock, and the rule's passes over
        the rows. Latencies and what overlaps are left out.

        Args:
            bandwidth: bytes per second that a rank sends.
            memory_bandwidth: bytes per second that a rank reads from its memory.

        Example:
            >>> from ds_byzantine.config import parse_section
            >>> made = plan(parse_section({"rule": "median"}), 8, stage=2, numel=10**9, dtype_bytes=2)
            >>> round(made.extra_seconds(25e9, 2e12), 4)
            -0.0582
        """
        if self.bytes_sent_per_rank is None or self.stock_bytes_per_rank is None or self.rule_bytes is None:
            return None
        wire = (self.bytes_sent_per_rank - self.stock_bytes_per_rank) / bandwidth
        return wire + self.rule_bytes / memory_bandwidth

    @property
    def rule(self) -> RuleConfig:
        """The rule of the section."""
        return self.config.rule

    @property
    def pre(self) -> tuple[PreConfig, ...]:
        """The pre-aggregations of the section."""
        return self.config.pre

    @property
    def scope(self) -> str:
        """The scope of the section."""
        return self.config.scope

    def rules_that_fit(self) -> tuple[str, ...]:
        """Names of the rules that hold for this n and f."""
        return rules_that_fit(self.n, self.f)

    def describe(self, version: str | None = None) -> str:
        """The line that rank 0 logs when the rule takes effect.

        Example:
            >>> from ds_byzantine.config import parse_section
            >>> section = parse_section({"rule": "krum", "monitor": {"dir": "runs"}})
            >>> print(plan(section, 5, stage=2).describe("0.1.0"))
            ds_byzantine 0.1.0: krum f=1 over 5 replicas (ZeRO-2, scope tensor), reduce traffic x0.6 of stock, log runs
        """
        rule = " + ".join([p.name for p in self.pre] + [self.rule.name])
        traffic = "no traffic" if self.traffic_ratio is None else f"reduce traffic x{self.traffic_ratio:.2g} of stock"
        drill = f", drill {self.drill}" if self.drill else ""
        count = "1 replica" if self.n == 1 else f"{self.n} replicas"
        return (
            f"ds_byzantine {version or VERSION}: {rule} f={self.f} over {count} ({self.host}, scope {self.scope}), "
            f"{traffic}, log {self.config.monitor.dir}{drill}"
        )


def plan(
    config: ByzantineConfig,
    replicas: int,
    *,
    stage: int | None,
    numel: int | None = None,
    dtype_bytes: int = 4,
    tensors: int | None = None,
    bucket_numel: int | None = None,
    accumulation: int = 1,
    everyone: bool = False,
    ranks: int | None = None,
    within: str = "",
    path: str = "byzantine",
) -> Plan:
    """Decide whether the section can hold, derive what it leaves out and count the cost.

    Args:
        config: the checked section.
        replicas: n, data-parallel copies of the model.
        stage: ZeRO stage 0 to 3; None for a host that all-reduces (DDP).
        numel: gradient elements of one model copy that are reduced; without it no bytes are given.
        dtype_bytes: bytes of an element on the wire.
        tensors: parameter tensors; with it the bytes of the partial statistics are counted.
        bucket_numel: elements that the host reduces at once; left out: all of them.
        accumulation: micro-steps in an optimizer step.
        everyone: the host needs the whole average on all ranks whatever the stage (DeepSpeed's BF16_Optimizer).
        ranks: ranks in a reduction, if more than one of a replica take part (sequence and expert parallelism, nodes).
        within: what a replica consists of, e.g. "pipeline 2 x tensor 2"; empty for one rank.
        path: dotted config path for messages.

    Raises:
        InfeasibleError: n, f, rule, pre-aggregations or scope do not fit together; the message names a way out.
        ConfigError: the drill names a replica that the job does not have; `replicas` or `stage` is not one.

    Example:
        >>> from ds_byzantine.config import parse_section
        >>> plan(parse_section({}), 5, stage=2).f
        1
    """
    n = replicas
    if n < 1 or stage not in (None, 0, 1, 2, 3):
        raise ConfigError(f"plan: got replicas={n}, stage={stage}; a job has at least 1 replica and ZeRO stage 0 to 3.")
    f = _derived(config, n) if config.f is None else config.f
    _check_within(config, n, f, within, path)
    ours, stock = _shares(ranks or n, 0 if stage is None or everyone else stage)
    cost = Cost(None if n == 1 else ours / stock)
    if numel is not None:
        plain = round(stock * numel * dtype_bytes)
        sent = round(ours * numel * dtype_bytes) + _statistics_bytes(config, n, tensors)
        memory = _extra_elements(config, n, stage, numel, bucket_numel or numel) * dtype_bytes
        passes = 0.0 if n == 1 else _passes(config, n)
        cost = Cost(sent / plain if plain else None, sent, plain, memory, round(passes * numel * dtype_bytes))
    host = ("data parallel" if stage is None else f"ZeRO-{stage}") + (f", {within} in a replica" if within else "")
    warnings = _warnings(config, n, f, stage, accumulation, path)
    return Plan(n, f, config, host, warnings, _drill(config, n, f, path), *cost)


def default_f(n: int) -> int:
    """Bad replicas to tolerate among n when the section does not say: 0 for 1-2, 1 for 3-15, n/8 from 16 on.

    Example:
        >>> [default_f(n) for n in (1, 2, 3, 8, 16, 64)]
        [0, 0, 1, 1, 2, 8]
    """
    return 0 if n <= 2 else max(1, n // 8)


def rules_that_fit(n: int, f: int) -> tuple[str, ...]:
    """Names of the rules, in their standard form, that hold for n replicas with f bad ones.

    Example:
        >>> "median" in rules_that_fit(4, 1), "krum" in rules_that_fit(4, 1)
        (True, False)
    """
    return tuple(sorted(name for name, info in RULES.items() if _holds(info, n, f)))


def uses_gram(config: ByzantineConfig) -> bool:
    """Whether decisions need inner products of rows, so that `scope` matters."""
    return bool(config.pre) or config.rule.info.kind is not Kind.COORDINATE


def _holds(info: RuleInfo, n: int, f: int) -> bool:
    small = not info.searches_subsets or comb(n, f) <= MOST_SUBSETS
    return 0 <= f <= info.most_faulty(n) and n > 2 * f and small


# -- feasibility -------------------------------------------------------------------------------------------------------


def _derived(config: ByzantineConfig, n: int) -> int:
    """The largest f up to the default that the rule, after the pre-aggregations, allows."""
    for f in range(default_f(n), 0, -1):
        rows, short = _rows_left(config.pre, n, f)
        if short is None and f <= _rule(config).most_faulty(rows):
            return f
    return 0


def _rule(config: ByzantineConfig) -> RuleInfo:
    return config.rule.info.variant(config.rule.params)


def _rows_left(pre: Sequence[PreConfig], n: int, f: int) -> tuple[int, int | None]:
    """Rows that reach the rule, and the index of the first pre-aggregation that has too few of them."""
    for i, one in enumerate(pre):
        info = one.info.variant(one.params)
        if n < info.least_replicas(f):
            return n, i
        n = info.points_after(n, one.params)
    return n, None


def _check_within(config: ByzantineConfig, n: int, f: int, within: str, path: str) -> None:
    """As `_check`; says why there are fewer replicas than ranks."""
    try:
        _check(config, n, f, path)
    except InfeasibleError as error:
        if not within:
            raise
        why = f"A replica is {within} here: ranks that mix what they compute fail together."
        raise InfeasibleError(f"{error} ({why})") from error


def _check(config: ByzantineConfig, n: int, f: int, path: str) -> None:
    if n == 1 and f == 0:
        return  # the row is its own aggregate
    rule = _rule(config)
    if f and not rule.tolerates_faults:
        fits = [name for name in ("centered_clip", "median") if _holds(RULES[name], n, f)]
        other = f' or rule "{fits[0]}" ({RULES[fits[0]].bound})' if fits else ""
        raise InfeasibleError(
            f"{path}.rule: {rule.name} tolerates no bad replica, but f={f}. Use f=0, which only watches,{other}."
        )
    rows, short = _rows_left(config.pre, n, f)
    if short is not None:
        info = config.pre[short].info
        _refuse_bound(info, f"{path}.pre[{short}]", n, rows, f, config)
    if rows < rule.least_replicas(f):
        _refuse_bound(rule, f"{path}.f", n, rows, f, config)
    if n <= 2 * f:
        raise InfeasibleError(
            f"{path}.f: f={f} needs at least {2 * f + 1} replicas (2f+1) whatever the rule; this job has {n}. "
            f"Use f={(n - 1) // 2} or more ranks."
        )
    if rule.searches_subsets and comb(rows, f) > MOST_SUBSETS:
        raise InfeasibleError(
            f"{path}.rule: {rule.name} with f={f} would search C({rows},{f}) = {comb(rows, f):,} subsets of the rows; "
            f'the limit is {MOST_SUBSETS:,}. Use rule "caf_gated", or pre ["nnm"] with rule "trimmed_mean".'
        )


def _refuse_bound(info: RuleInfo, where: str, n: int, rows: int, f: int, config: ByzantineConfig) -> None:
    ways = []
    most = max((g for g in range(f) if _feasible(config, n, g)), default=None)
    if most is not None:
        ways.append(f"f={most}")
    if rows < n:
        ways.append("smaller buckets")
    median, reach = RULES["median"], (n - 1) // 2
    if info.name != "median" and reach >= f:
        ways.append(f'rule "median" ({median.bound})' + (" without pre" if config.pre else ""))
    elif info.name != "median" and most is not None and reach > most:
        ways.append(f'rule "median" ({median.bound}) with f={reach}')
    has = f"this job has {n}" if rows == n else f"of this job's {n} replicas the pre-aggregations leave {rows} rows"
    unit = "replicas" if rows == n else "rows"
    ways.append("more ranks")
    advice = ways[0] if len(ways) == 1 else ", ".join(ways[:-1]) + (", or " if len(ways) > 2 else " or ") + ways[-1]
    least = f"{info.name} with f={f} needs at least {info.least_replicas(f)} {unit} ({info.bound})"
    raise InfeasibleError(f"{where}: {least}; {has}. Use {advice}.")


def _feasible(config: ByzantineConfig, n: int, f: int) -> bool:
    rows, short = _rows_left(config.pre, n, f)
    return short is None and rows >= _rule(config).least_replicas(f)


# -- cost ----------------------------------------------------------------------------------------------------------


def _shares(n: int, stage: int) -> tuple[float, float]:
    """What a rank sends, in units of the gradient: with a rule, and with stock DeepSpeed.

    Rows to aggregators: (n-1)/n. Then each aggregator sends its 1/n to the owner (ZeRO 1, 2), to everyone (0) or keeps
    it (3). Stock: a ring all-reduce, which ZeRO 1 and 2 use as well by default, or a reduce-scatter (3).
    """
    step = (n - 1) / n
    delivery = {0: step, 1: step / n, 2: step / n, 3: 0.0}[stage]
    return step + delivery, step if stage == 3 else 2 * step


def _statistics_bytes(config: ByzantineConfig, n: int, tensors: int | None) -> int:
    """All-gather of one record per tensor piece: n flags of a byte each, or in float64 with the Gram of n + 1 rows."""
    if tensors is None or config.scope == "shard" or n == 1:
        return 0
    pieces = ceil(tensors / n) + 1  # of one rank's chunk, tensors spread evenly
    record = 8 * (n + (n + 1) * (n + 2) // 2) if uses_gram(config) else n
    return (n - 1) * pieces * record


def _passes(config: ByzantineConfig, n: int) -> float:
    """How often a rule goes through its rows, n of 1/n of the gradient, in units of a plain read.

    Coordinate-wise: finite?, sort, distances. By inner products: those with a median, and the sum; what is sorted after
    that again. Sorting n <= 48 rows is as fast as reading them; above, the n/4 log2(n) (log2(n) - 1) comparators of the
    network take longer: a sixth of a read each, counted per row (measured on CPUs, docs/benchmarks.md).
    """
    log = log2(max(n, 2))
    sort = max(1.0, log * (log - 1) / 4 / 6)
    kind = config.rule.info.kind
    if not uses_gram(config):
        return 2.0 if kind is Kind.COORDINATE and config.rule.name == "mean" else 2.0 + sort
    return 1.0 + sort + (sort if kind in (Kind.COORDINATE, Kind.GRAM_COORDINATE) else 0.0)


def _extra_elements(config: ByzantineConfig, n: int, stage: int | None, numel: int, bucket_numel: int) -> int:
    """Elements held besides stock: the rows of one bucket, and maybe a gradient-sized buffer until the step ends."""
    if n == 1:
        return 0
    at_boundary = config.aggregate_at == "boundary" and stage in (2, 3)
    keeps = at_boundary or (config.scope == "model" and uses_gram(config))
    return min(numel, bucket_numel) + (numel if keeps else 0)


# -- words -------------------------------------------------------------------------------------------------------------


def _warnings(
    config: ByzantineConfig, n: int, f: int, stage: int | None, accumulation: int, path: str
) -> tuple[str, ...]:
    if n == 1:
        return (f"{path}: one replica: its gradients pass through unchanged, there is no other to compare with.",)
    found = []
    if f == 0:
        why = f" ({config.rule.name} tolerates none of {n} replicas)" if config.f is None and n > 2 else ""
        found.append(
            f"{path}.f: f=0{why} tolerates no bad replica: rows are watched and logged, and a non-finite one makes the "
            "step be skipped as in stock DeepSpeed."
        )
    if config.rule.name == "krum" and not config.pre:
        found.append(
            f'{path}.rule: krum alone has 7-15 times the variance of the mean; "multi_krum" or "centered_clip" have '
            "about that of the mean."
        )
    if int(config.rule.params.get("m", 0)) > n - f:
        found.append(
            f"{path}.rule.m: {config.rule.name} averages at most n-f = {n - f} rows, not {config.rule.params['m']}."
        )
    if config.scope != "tensor" and not uses_gram(config):
        found.append(f"{path}.scope: {config.rule.name} decides per coordinate: scope {config.scope} changes nothing.")
    elif config.scope == "model":
        found.append(f"{path}.scope: model keeps all rows until the step ends: one gradient-sized buffer a rank.")
    if stage in (2, 3) and config.aggregate_at == "boundary":
        found.append(f"{path}.aggregate_at: boundary keeps what is accumulated: one gradient-sized buffer a rank.")
    elif stage in (2, 3) and accumulation > 1:
        found.append(
            f"{path}.aggregate_at: ZeRO-{stage} reduces in each of the {accumulation} micro-steps, so the rule sees "
            'noisier gradients than their sum. "boundary" aggregates once, for one gradient-sized buffer a rank.'
        )
    return (*found, *(config.drill.warnings(n, f) if config.drill else ()))


def _drill(config: ByzantineConfig, n: int, f: int, path: str) -> str | None:
    if config.drill is None:
        return None
    bad = config.drill.bad_replicas(n, f, f"{path}.drill")
    until = "" if config.drill.stop is None else f" to {config.drill.stop - 1}"
    return f"{config.drill.name} on replica {', '.join(map(str, bad))} from step {config.drill.start}{until}"
