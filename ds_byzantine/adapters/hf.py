"""Hugging Face Trainer: our metrics in its logs, and so in whatever `report_to` names."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from ds_byzantine._names import ATTRIBUTE
from ds_byzantine.monitor.metrics import metrics_of


class ByzantineCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Adds the metrics of the last optimizer step to each of Trainer's log entries.

    Use `attach`: a callback that is added in the ordinary way runs after those that report to TensorBoard and others.

    Example:
        >>> trainer = Trainer(model, TrainingArguments(deepspeed="zero2.json"), ...)  # doctest: +SKIP
        >>> ByzantineCallback.attach(trainer)                                         # doctest: +SKIP
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    @classmethod
    def attach(cls, trainer: Any) -> ByzantineCallback:
        """Put a callback in front of all others of a trainer; before or after `train()` was called first."""
        callback = cls(trainer)
        trainer.callback_handler.callbacks.insert(0, callback)
        return callback

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Called by Trainer with the entry that is about to be reported."""
        engine = getattr(self.trainer, "deepspeed", None) or getattr(self.trainer, "model_wrapped", None)
        attachment = getattr(engine, ATTRIBUTE, None)
        event = None if attachment is None else attachment.last_event
        if event is None or logs is None:
            return
        metrics = metrics_of(event)
        logs.update(metrics)
        if state.log_history:
            state.log_history[-1].update(metrics)
