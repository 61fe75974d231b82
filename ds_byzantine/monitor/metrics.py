"""The numbers of a step for dashboards: TensorBoard, W&B, CSV, the logs of Hugging Face Trainer."""

from __future__ import annotations

from ds_byzantine.monitor.events import StepEvent


def metrics_of(event: StepEvent) -> dict[str, float]:
    """What is known of a step, by metric name; numbers that are not known are left out.

    `byzantine/e_value/<replica>` is log10 of the largest e-value against a replica over all kinds of evidence;
    `byzantine/suspect` is the replica named last, -1 if none is.
    """
    known: dict[str, float | None] = {
        "byzantine/suspect": float(event.named[-1]) if event.named else -1.0,
        "byzantine/kept": float(len(event.kept)),
        "byzantine/nonfinite_rows": float(sum(event.nonfinite)),
        "byzantine/cosine_min": event.cosine_min,
        "byzantine/norm_dispersion": event.norm_dispersion,
        "byzantine/regime_ratio": event.regime_ratio,
        "byzantine/agg_ms": event.rule_ms,
        "byzantine/exchange_ms": event.exchange_ms,
        "byzantine/bytes": float(event.bytes),
    }
    for replica, distance in enumerate(event.distances):
        known[f"byzantine/distance/{replica}"] = distance
    if event.evidence:
        for replica, values in enumerate(zip(*event.evidence.values(), strict=True)):
            known[f"byzantine/e_value/{replica}"] = max(values)
    return {name: value for name, value in known.items() if value is not None}
