"""What the first rank says in the log, and what the host's clock and loss add to a step's event."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import replace
from functools import wraps
from typing import Any

import torch

from ds_byzantine.adapters._patch import Bindings
from ds_byzantine.guard import Considered
from ds_byzantine.monitor.events import StepEvent
from ds_byzantine.pipeline import ShardAggregator

logger = logging.getLogger("ds_byzantine")

PATIENCE = 50  # steps in a row with a regime ratio above 1 before a warning


class Clock:
    """Time and loss of each step.

    Args:
        engine: the host's engine; the losses that go through its `backward` are averaged.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._losses: list[torch.Tensor] = []
        self._before: float | None = None

    def bind(self, bindings: Bindings) -> None:
        """Listen to `backward`."""
        original = self.engine.backward

        @wraps(original)
        def backward(loss: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(loss, torch.Tensor) and loss.numel() == 1:
                self._losses.append(loss.detach())
            return original(loss, *args, **kwargs)

        bindings.bind(self.engine, "backward", backward)

    def stamp(self, event: StepEvent) -> StepEvent:
        """The event with the time and the mean loss since the last step."""
        now = time.perf_counter()
        took = None if self._before is None else round((now - self._before) * 1e3, 3)
        self._before = now
        loss = float(torch.stack([one.float().reshape(()) for one in self._losses]).mean()) if self._losses else None
        self._losses = []
        return replace(event, step_ms=took, time=time.time(), loss=loss)


class Teller:
    """One line for what is worth one; ever more rarely for what goes on.

    Args:
        aggregator: knows the replicas.
    """

    def __init__(self, aggregator: ShardAggregator) -> None:
        self.aggregator = aggregator
        self._drops: Counter[int] = Counter()
        self._noisy = 0
        self._same_data = False

    def tell(self, considered: Considered) -> None:
        """Log what a step showed."""
        for verdict in considered.verdicts:
            where = f"ranks {', '.join(map(str, verdict.ranks))} on {' and '.join(verdict.hosts)}"
            done = {"quarantine": "its rows are left out from now on", "none": "f replicas are in quarantine already"}
            logger.warning(
                "%s: %s. Evidence: e-value 10^%.1f, bound 10^%.1f (alpha %g over the whole run). %s.",
                where, verdict.why, verdict.log10_e, verdict.bound, verdict.alpha,
                done.get(verdict.action, "see the events").capitalize(),
            )  # fmt: skip
        if considered.event.unsafe:
            self._unsafe(considered.event)
        else:
            self._dropped(considered.event)
        self._regime(considered)

    def _unsafe(self, event: StepEvent) -> None:
        tensor, replicas = next(iter(event.unsafe.items()))
        more = f" (and {len(event.unsafe) - 1} more tensors)" if len(event.unsafe) > 1 else ""
        logger.warning(
            "step %d is skipped: replicas %s sent NaN or Inf for %s%s, which are more than f=%d. If all do, the loss "
            "has diverged or its scale is too high; if few do, they are faulty: raise byzantine.f or replace them.",
            event.step, ", ".join(map(str, replicas)), tensor, more, self.aggregator.aggregator.f,
        )  # fmt: skip

    def _dropped(self, event: StepEvent) -> None:
        for replica in event.dropped:
            self._drops[replica] += 1
            times = self._drops[replica]
            if times & (times - 1) == 0:  # the 1st, 2nd, 4th, 8th, ... time
                logger.warning(
                    "step %d: replica %d (%s) sent NaN or Inf in %d tensors; its rows there were left out and training "
                    "goes on (so far in %d steps).",
                    event.step, replica, self._where(event, replica), event.nonfinite[replica], times,
                )  # fmt: skip

    def _regime(self, considered: Considered) -> None:
        ratio = considered.event.regime_ratio
        if ratio is not None:
            self._noisy = self._noisy + 1 if ratio > 1 else 0
            if self._noisy == PATIENCE:
                logger.warning(
                    "for %d steps the gradient noise has been too large for any rule to help (regime ratio %.1f > 1): "
                    'raise the local batch or gradient accumulation (with "aggregate_at": "boundary").',
                    PATIENCE, ratio,
                )  # fmt: skip
        if considered.same_data and not self._same_data:
            self._same_data = True
            logger.warning(
                "step %d: all replicas send the same gradient. Give each its own data (a DistributedSampler); as it "
                "is, there is nothing to compare.", considered.event.step,
            )  # fmt: skip

    def _where(self, event: StepEvent, replica: int) -> str:
        """Ranks and hosts of a replica; of the suspect, those in which its trouble is concentrated."""
        roster = self.aggregator.peers.roster
        ranks = event.suspect_ranks if replica == event.suspect else roster.replicas[replica]
        hosts = " and ".join(sorted({roster.hosts[rank] for rank in ranks}))
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} on {hosts}"
