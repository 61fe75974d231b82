"""From an engine whose config has a "byzantine" section to an engine whose gradients pass through the rule."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch

from ds_byzantine._version import VERSION
from ds_byzantine.adapters._patch import Bindings, verify
from ds_byzantine.adapters.deepspeed import boundary, parallel, points, stage0, state
from ds_byzantine.adapters.deepspeed.leave import Leave
from ds_byzantine.adapters.deepspeed.refuse import refuse_unsupported
from ds_byzantine.adapters.deepspeed.step import Book, StepHook
from ds_byzantine.adapters.deepspeed.zero3 import Zero3
from ds_byzantine.adapters.deepspeed.zero12 import Zero12
from ds_byzantine.config import ByzantineConfig, parse_section
from ds_byzantine.drills.injector import Injector
from ds_byzantine.drills.rehearsed import rehearsed
from ds_byzantine.errors import ConfigError, UnsupportedHostError
from ds_byzantine.exchange.all_to_all import gather_rows
from ds_byzantine.exchange.groups import Peers
from ds_byzantine.exchange.transport import TorchTransport, Transport
from ds_byzantine.guard import Guard
from ds_byzantine.monitor.events import EventLog, RunEvent, StepEvent
from ds_byzantine.pipeline import ShardAggregator, Tap
from ds_byzantine.plan import Plan, plan
from ds_byzantine.rules.aggregate import aggregate
from ds_byzantine.rules.apply import Aggregator

logger = logging.getLogger("ds_byzantine")

SECTION = "byzantine"


@dataclass
class Attachment:
    """What protects one engine.

    Args:
        config: the checked section.
        plan: n, f and the cost.
        aggregator: the main path; None with a single replica, where gradients pass through unchanged.
        log: where the first rank writes events; None on the others.
        run: the first of them, written before the first step, when it is known whether the run was resumed.
        hook: what happens in each optimizer step; None with a single replica.
    """

    config: ByzantineConfig
    plan: Plan
    aggregator: ShardAggregator | None
    bindings: Bindings
    log: EventLog | None = None
    run: RunEvent | None = None
    hook: StepHook | None = None

    @property
    def last_event(self) -> StepEvent | None:
        """The event of the last optimizer step, on every rank alike but for times and bytes."""
        return None if self.hook is None else self.hook.last

    def detach(self) -> None:
        """Give the engine its own reductions back; idempotent."""
        self.bindings.undo()
        if self.log is not None:
            self.log.close()
            self.log = None


def section_of(engine: Any) -> Any:
    """The raw "byzantine" section of an engine's config, or None; in a rehearsal, that of the rehearsal."""
    return rehearsed(engine._config._param_dict.get(SECTION))


def attach(engine: Any) -> Attachment | None:
    """Bind the rule to an engine; a collective call over its data-parallel ranks.

    Args:
        engine: a `DeepSpeedEngine` after its construction.

    Returns:
        None if there is no section, or if it says `"enabled": false`.

    Raises:
        ConfigError: the section is malformed, or differs between ranks.
        InfeasibleError: n, f, rule and scope do not fit.
        UnsupportedHostError: this DeepSpeed, or an option in use, has a gradient path that would bypass the rule.
        UnprotectedError: there is nothing to protect.
    """
    section = section_of(engine)
    if section is None:
        return None
    config = parse_section(section)
    if not config.enabled:
        return None
    import deepspeed

    _show_messages()
    world = TorchTransport()
    with parallel.failing_together(world, engine.device):
        verify(_points(engine), deepspeed.__version__, points.SUPPORTED)
        refuse_unsupported(engine)
        _refuse_late_offload(engine, config)
    peers = parallel.peers_of(engine, config.fault_domain)
    within = parallel.describe(engine, config.fault_domain)
    settled = _plan(engine, peers, config, within)
    log, problem = _opened_log(config) if world.rank == 0 else (None, None)
    _agree(engine, world, config, problem)
    attachment = Attachment(config, settled, None, Bindings(), log)
    if log is not None:
        attachment.run = _run_event(engine, settled, peers, within)
        for line in (settled.describe(VERSION), *settled.warnings):
            logger.info(line)
    if settled.n > 1:
        _bind(engine, peers, attachment)
    elif log is not None and attachment.run is not None:
        log.write(attachment.run)
    return attachment


def _bind(engine: Any, peers: Peers, attachment: Attachment) -> None:
    config, settled, bindings = attachment.config, attachment.plan, attachment.bindings
    rule = Aggregator.create(config.rule.named(), settled.f, [p.named() for p in config.pre])
    aggregator = ShardAggregator(
        peers,
        rule,
        scope=config.scope,
        tap=_tap(peers, settled, config),
        distances_every=config.monitor.every,
        products_every=config.monitor.products_every,
        step_of=lambda: int(engine.global_steps),
    )
    attachment.aggregator = aggregator
    trainable = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    if _reduces_as_stage0(engine):
        stage0.bind(engine, aggregator, bindings)
    elif _stage(engine) == 3:
        Zero3(engine.optimizer, aggregator, {p.ds_id: name for name, p in trainable.items()}).bind(bindings)
    else:
        Zero12(engine, aggregator, {id(p): name for name, p in trainable.items()}).bind(bindings)
    if config.aggregate_at == "boundary" and _stage(engine) >= 2:
        boundary.bind(engine, bindings)
    guard = Guard(peers.roster, settled.f, config.alpha, config.on_suspect)
    state.bind(engine, guard, bindings, speaks=attachment.log is not None)
    leave = Leave(engine, config.monitor.dir) if config.on_suspect == "checkpoint_exit" else None
    if leave is not None:
        leave.bind(bindings)
    book = Book(attachment.log, attachment.run, config.monitor.every) if attachment.log is not None else None
    attachment.hook = StepHook(engine, aggregator, guard, leave, book, set(trainable))
    attachment.hook.bind(bindings)


def _tap(peers: Peers, settled: Plan, config: ByzantineConfig) -> Tap | None:
    if config.drill is None:
        return None
    rank = torch.distributed.get_rank()
    replica = peers.roster.replica_of(rank)
    ranks = peers.roster.replicas[replica]
    config.drill.check_model_ranks(len(ranks))
    rule, pre = config.rule.named(), [p.named() for p in config.pre]
    return Injector(
        config.drill,
        settled.n,
        settled.f,
        replica,
        lambda block, part: gather_rows(part, block),
        ranks.index(rank),
        lambda rows, step: aggregate(rows, rule=rule, f=settled.f, pre=pre, seed=step),
    ).tap


def _reduces_as_stage0(engine: Any) -> bool:
    """Stage 0, and what `engine.allreduce_gradients` treats like it: BF16_Optimizer in stage 1."""
    stage = _stage(engine)
    return stage == 0 or (stage == 1 and not hasattr(engine.optimizer, "reduce_gradients"))


def _points(engine: Any) -> tuple[Any, ...]:
    pipe = points.PIPE_POINTS if getattr(engine, "pipeline_parallelism", False) else ()
    return pipe + _reduction_points(engine)


def _reduction_points(engine: Any) -> tuple[Any, ...]:
    if _reduces_as_stage0(engine):
        bf16 = points.BF16_POINTS if hasattr(engine.optimizer, "get_grads_for_reduction") else ()
        return points.ENGINE_POINTS + points.STAGE0_POINTS + bf16
    return points.ENGINE_POINTS + (points.ZERO3_POINTS if _stage(engine) == 3 else points.ZERO12_POINTS)


def _stage(engine: Any) -> int:
    return int(engine.zero_optimization_stage())


def _plan(engine: Any, peers: Peers, config: ByzantineConfig, within: str) -> Plan:
    trainable = [p for p in engine.module.parameters() if p.requires_grad]
    return plan(
        config,
        peers.n,
        stage=_stage(engine),
        numel=sum(int(getattr(p, "ds_numel", p.numel())) for p in trainable),
        dtype_bytes=engine.communication_data_type.itemsize,
        tensors=len(trainable),
        bucket_numel=int(engine._config.zero_config.reduce_bucket_size),
        accumulation=int(engine.gradient_accumulation_steps()),
        everyone=_reduces_as_stage0(engine),
        ranks=peers.parts[0].transport.size,
        within=within,
    )


def _refuse_late_offload(engine: Any, config: ByzantineConfig) -> None:
    """With offload DeepSpeed moves each bucket to the CPU at once, so none can wait for the last one."""
    offload = getattr(engine._config.zero_config, "offload_optimizer", None)
    if offload is None or str(offload.device).rsplit(".", 1)[-1] == "none":
        return
    if config.scope == "model":
        raise UnsupportedHostError(
            'byzantine.scope: "model" decides after the last bucket, but with offload_optimizer DeepSpeed moves each '
            'bucket to the CPU at once. Use scope "tensor", or no offload.'
        )
    if any(True for _ in parallel.ties(engine)):
        raise UnsupportedHostError(
            "byzantine: weights tied over pipeline stages are aggregated after the last bucket, but with "
            "offload_optimizer DeepSpeed moves each bucket to the CPU at once. Use untied weights, or no offload."
        )


def _opened_log(config: ByzantineConfig) -> tuple[EventLog | None, OSError | None]:
    try:
        return EventLog(config.monitor.dir), None
    except OSError as error:
        return None, error


def _agree(engine: Any, world: Transport, config: ByzantineConfig, problem: OSError | None) -> None:
    """Go on together or fail together: a rank that stopped alone, or with another rule, would hang all others.

    Compares a digest of the section over the ranks, and whether the first rank could open its log (`problem`).
    """
    section = config.model_dump_json(exclude={"monitor": {"dir"}})  # only the first rank writes there
    own = int.from_bytes(blake2b(section.encode(), digest_size=7).digest(), "big")
    everybody = torch.empty(2 * world.size, dtype=torch.int64, device=engine.device)
    said = torch.tensor([own, int(problem is not None)], dtype=torch.int64, device=engine.device)
    world.all_gather(everybody, said)
    digests, failed = everybody.view(-1, 2).T.tolist()
    if any(failed):
        why = f" ({problem})" if problem is not None else ""
        raise ConfigError(
            f'byzantine.monitor.dir: the first rank cannot write to "{config.monitor.dir}"{why}. Name a folder that it '
            "can create or write to."
        )
    others = [rank for rank, digest in enumerate(digests) if digest != own]
    if others:
        raise ConfigError(
            f"byzantine: the section differs between ranks (rank {world.rank} disagrees with {others}). Start all "
            "ranks with the same DeepSpeed JSON."
        )


def _run_event(engine: Any, settled: Plan, peers: Peers, within: str) -> RunEvent:
    roster = peers.roster
    return RunEvent(
        version=VERSION,
        rule=" + ".join([p.name for p in settled.pre] + [settled.rule.name]),
        f=settled.f,
        replicas=settled.n,
        scope=settled.scope,
        stage=_stage(engine),
        host=settled.host,
        drill=settled.drill,
        ranks={str(i): list(ranks) for i, ranks in enumerate(roster.replicas)},
        hosts={str(i): sorted({roster.hosts[r] for r in ranks}) for i, ranks in enumerate(roster.replicas)},
        parallel=within,
        alpha=settled.config.alpha,
        on_suspect=settled.config.on_suspect,
        started=time.time(),
        devices={str(i): [roster.devices[r] for r in ranks] for i, ranks in enumerate(roster.replicas)},
    )


def _show_messages() -> None:
    """The banner and the warnings must be seen in a script that never configured logging."""
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
        logger.addHandler(handler)
