"""The optimizer step: close the books, tell what was dropped, and skip where the aggregate is not finite."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ds_byzantine.adapters._patch import Bindings
from ds_byzantine.errors import UnprotectedError
from ds_byzantine.monitor.events import EventLog, StepEvent
from ds_byzantine.pipeline import ShardAggregator

logger = logging.getLogger("ds_byzantine")

_ABSENT = object()


class StepHook:
    """Wraps `engine._take_model_step`, which DeepSpeed calls once per optimizer step in every stage.

    Args:
        engine: the host's engine.
        aggregator: the main path.
        log: where step events go; None on all ranks but the first.
        every: write every so many steps.
        trainable: names of all parameters that require a gradient.
    """

    def __init__(
        self, engine: Any, aggregator: ShardAggregator, log: EventLog | None, every: int, trainable: set[str]
    ) -> None:
        self.engine = engine
        self.aggregator = aggregator
        self.log = log
        self.every = every
        self.trainable = trainable
        self._drops: Counter[int] = Counter()
        self._first = True

    def bind(self, bindings: Bindings) -> None:
        """Replace `_take_model_step` on the engine."""
        original = self.engine._take_model_step

        def take_model_step(*args: Any, **kwargs: Any) -> Any:
            event = self.close()
            with self._host_skips(bool(event.unsafe)):
                return original(*args, **kwargs)

        bindings.bind(self.engine, "_take_model_step", take_model_step)

    def close(self) -> StepEvent:
        """Close the books of this step; a collective call.

        Raises:
            UnprotectedError: no gradient has passed through the rule since the last step.
        """
        self._check_coverage()
        event = self.aggregator.end_step()
        if self.log is not None:
            self._tell(event)
            if event.step % self.every == 0 or event.dropped:
                self.log.write(event)
        return event

    def _check_coverage(self) -> None:
        seen = self.aggregator.recorder.tensors
        if not seen:
            raise UnprotectedError(
                f"byzantine: step {self.aggregator.step} was about to be taken, but no gradient has passed through the "
                "rule since the last one. Either backward() did not run, or gradients are reduced by code that this "
                'plug-in does not know; remove that code, or set "byzantine": {"enabled": false}.'
            )
        if self._first and self.log is not None and self.aggregator.scope != "shard":
            unused = sorted(self.trainable - seen)
            if unused:
                named = ", ".join(unused[:3]) + (", ..." if len(unused) > 3 else "")
                logger.info("%d of %d trainable tensors had no gradient in the first step: %s",
                            len(unused), len(self.trainable), named)  # fmt: skip
        self._first = False

    def _tell(self, event: StepEvent) -> None:
        """One line for a step that is skipped; one line, ever more rarely, for a replica whose rows were dropped."""
        if event.unsafe:
            tensor, replicas = next(iter(event.unsafe.items()))
            more = f" (and {len(event.unsafe) - 1} more tensors)" if len(event.unsafe) > 1 else ""
            who = ", ".join(map(str, replicas))
            logger.warning(
                "step %d is skipped: replicas %s sent NaN or Inf for %s%s, which are more than f=%d. If all do, the "
                "loss has diverged or its scale is too high; if few do, they are faulty: raise byzantine.f or replace "
                "them.",
                event.step, who, tensor, more, self.aggregator.aggregator.f,
            )  # fmt: skip
            return
        for replica in event.dropped:
            self._drops[replica] += 1
            times = self._drops[replica]
            if times & (times - 1) == 0:  # the 1st, 2nd, 4th, 8th, ... time
                logger.warning(
                    "step %d: replica %d (%s) sent NaN or Inf in %d tensors; its rows there were left out and training "
                    "goes on (so far in %d steps).",
                    event.step, replica, self._where(event, replica), event.nonfinite[replica], times,
                )  # fmt: skip

    def _where(self, event: StepEvent, replica: int) -> str:
        """Ranks and hosts of a replica; of the suspect, those in which its trouble is concentrated."""
        roster = self.aggregator.peers.roster
        ranks = event.suspect_ranks if replica == event.suspect else roster.replicas[replica]
        hosts = " and ".join(sorted({roster.hosts[rank] for rank in ranks}))
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} on {hosts}"

    @contextmanager
    def _host_skips(self, unsafe: bool) -> Iterator[None]:
        """Make DeepSpeed skip a step whose gradient is not finite, also where it has no check of its own.

        With fp16, and by the gradient norm in most other modes, it skips by itself. Stage 0 in float32, and stages 1
        and 2 with both checks switched off, would write NaN into the weights.
        """
        optimizer = self.engine.optimizer
        if self.engine.zero_optimization() and not hasattr(optimizer, "bf16_groups"):
            # HACK 0.18.3-0.19.7: without fp16, stage 3 obeys this flag but never sets it, and stages 1 and 2 never
            # reset it, so that one skipped step would be followed by nothing but skipped steps.
            optimizer.overflow = unsafe
        if not unsafe:
            yield
        elif hasattr(optimizer, "check_grad_overflow"):
            with _changed(optimizer, "check_grad_overflow", True):
                yield
        elif hasattr(optimizer, "bf16_groups") or not hasattr(optimizer, "overflow"):
            with _changed(optimizer, "overflow", True), _changed(optimizer, "step", self._discard):
                yield
        else:
            yield

    def _discard(self, closure: Any = None) -> None:
        """In place of the optimizer's step: forget the gradients."""
        optimizer = self.engine.optimizer
        if hasattr(optimizer, "clear_hp_grads"):
            optimizer._global_grad_norm = float("inf")
            optimizer.clear_hp_grads()
            optimizer.clear_lp_grads()


@contextmanager
def _changed(instance: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(instance).get(name, _ABSENT)
    setattr(instance, name, value)
    try:
        yield
    finally:
        if before is _ABSENT:
            vars(instance).pop(name, None)
        else:
            setattr(instance, name, before)
