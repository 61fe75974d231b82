"""The optimizer step: close the books, tell what was dropped, and skip where the aggregate is not finite."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ds_byzantine.adapters._patch import Bindings
from ds_byzantine.adapters.deepspeed.leave import Leave
from ds_byzantine.adapters.deepspeed.tell import Clock, Teller
from ds_byzantine.errors import UnprotectedError
from ds_byzantine.guard import Considered, Guard
from ds_byzantine.monitor.events import EventLog, RunEvent, StepEvent
from ds_byzantine.monitor.metrics import metrics_of
from ds_byzantine.pipeline import ShardAggregator

logger = logging.getLogger("ds_byzantine")

_ABSENT = object()


class Book:
    """The event file, as the first rank keeps it.

    Args:
        log: the file.
        run: the first line, written before the first step.
        every: write a step every so many steps, and always one in which something happened.
    """

    def __init__(self, log: EventLog, run: RunEvent | None, every: int) -> None:
        self.log = log
        self.run = run
        self.every = every

    def write(self, considered: Considered) -> bool:
        """Write what a step showed; whether its event was written."""
        event = considered.event
        if self.run is not None:
            self.log.write(replace(self.run, step=event.step))
            self.run = None
        for verdict in considered.verdicts:
            self.log.write(verdict)
        due = event.step % self.every == 0 or bool(event.dropped) or bool(considered.verdicts)
        if due:
            self.log.write(event)
        return due


class StepHook:
    """Wraps `engine._take_model_step`, which DeepSpeed calls once per optimizer step in every stage.

    Args:
        engine: the host's engine.
        aggregator: the main path.
        guard: weighs the evidence.
        leave: ends the job on a verdict, if that was asked for.
        book: where events go; None on all ranks but the first.
        trainable: names of all parameters that require a gradient.
    """

    def __init__(
        self,
        engine: Any,
        aggregator: ShardAggregator,
        guard: Guard,
        leave: Leave | None,
        book: Book | None,
        trainable: set[str],
    ) -> None:
        self.engine = engine
        self.aggregator = aggregator
        self.guard = guard
        self.leave = leave
        self.book = book
        self.last: StepEvent | None = None
        self._clock = Clock(engine)
        self._teller = Teller(aggregator)
        self.trainable = trainable
        self._first = True

    def bind(self, bindings: Bindings) -> None:
        """Replace `_take_model_step` on the engine."""
        original = self.engine._take_model_step

        def take_model_step(*args: Any, **kwargs: Any) -> Any:
            event = self.close()
            with self._host_skips(bool(event.unsafe)):
                return original(*args, **kwargs)

        bindings.bind(self.engine, "_take_model_step", take_model_step)
        self._clock.bind(bindings)

    def close(self) -> StepEvent:
        """Close the books of this step; a collective call.

        Raises:
            UnprotectedError: no gradient has passed through the rule since the last step.
        """
        self._check_coverage()
        event = self._clock.stamp(self.aggregator.end_step())
        considered = self.guard.consider(event, self.aggregator.digests)
        event = self.last = considered.event
        self.aggregator.left_out = list(self.guard.ledger.quarantined)
        if self.leave is not None:
            self.leave.pending += considered.verdicts
        if self.book is not None:
            self._tell(self.book, considered)
        return event

    def _tell(self, book: Book, considered: Considered) -> None:
        self._teller.tell(considered)
        monitor = getattr(self.engine, "monitor", None)
        if book.write(considered) and monitor is not None and monitor.enabled:
            samples = int(self.engine.global_samples)
            monitor.write_events([(name, value, samples) for name, value in metrics_of(considered.event).items()])

    def _check_coverage(self) -> None:
        seen = self.aggregator.recorder.tensors
        if not seen:
            raise UnprotectedError(
                f"byzantine: step {self.aggregator.step} was about to be taken, but no gradient has passed through the "
                "rule since the last one. Either backward() did not run, or gradients are reduced by code that this "
                'plug-in does not know; remove that code, or set "byzantine": {"enabled": false}.'
            )
        if self._first and self.book is not None and self.aggregator.scope != "shard":
            unused = sorted(self.trainable - seen)
            if unused:
                named = ", ".join(unused[:3]) + (", ..." if len(unused) > 3 else "")
                logger.info("%d of %d trainable tensors had no gradient in the first step: %s",
                            len(unused), len(self.trainable), named)  # fmt: skip
        self._first = False

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
