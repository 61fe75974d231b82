"""What the demo's runs became: a verdict, a table, a picture and one self-contained HTML page."""

from __future__ import annotations

import base64
import json
import math
from dataclasses import asdict, dataclass
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from rich.console import Console
from rich.table import Table

from ds_byzantine.report.model import summarize
from ds_byzantine.report.page import write
from ds_byzantine.report.read import Reader, find

COLOURS = ("#5b6b7b", "#d1373f", "#1f8a70")


@dataclass(frozen=True)
class Summary:
    """The setting, alike for all runs."""

    model: str
    ranks: int
    attack_from: int
    bad_replica: int
    factor: float
    tolerance: float
    seconds: int


@dataclass(frozen=True)
class Outcome:
    """One run. Losses are (step, value); a value that was not finite is NaN."""

    label: str
    train: list[tuple[int, float]]
    heldout: list[tuple[int, float]]
    events: list[dict[str, Any]]
    verdicts: list[dict[str, Any]]

    @classmethod
    def read(cls, label: str, folder: Path) -> Outcome:
        """Read metrics.jsonl and, if the run was watched, events.jsonl."""
        losses: dict[str, list[tuple[int, float]]] = {"train": [], "heldout": []}
        for record in _lines(folder / "metrics.jsonl"):
            value = math.nan if record["loss"] is None else float(record["loss"])
            losses[record["kind"]].append((int(record["step"]), value))
        events = _lines(folder / "events.jsonl")
        steps, verdicts = ([e for e in events if e.get("kind") == kind] for kind in ("step", "verdict"))
        return cls(label, losses["train"], losses["heldout"], steps, verdicts)

    @property
    def final(self) -> float:
        """The last held-out loss."""
        return self.heldout[-1][1]

    @property
    def named(self) -> dict[str, Any] | None:
        """The first verdict: the evidence against a replica had reached the bound."""
        return self.verdicts[0] if self.verdicts else None


@dataclass(frozen=True)
class Check:
    """One thing that had to come true."""

    text: str
    passed: bool


def verdict(summary: Summary, outcomes: list[Outcome]) -> list[Check]:
    """What the demo claims, each as a check that can fail."""
    clean, mean, rule = outcomes
    bound = clean.final * (1 + summary.tolerance)
    named = rule.named
    who = "no replica named"
    if named is not None:
        who = f"replica {named['replica']} named in step {named['step']}, e-value 10^{named['log10_e']:.1f}"
    return [
        Check(
            f"the clean run learned: {clean.heldout[0][1]:.3f} to {clean.final:.3f}", clean.final < clean.heldout[0][1]
        ),
        Check(f"the mean was hurt: {_shown(mean.final)} against {clean.final:.3f}", not mean.final <= bound),
        Check(
            f"the rule held: {_shown(rule.final)}, within {summary.tolerance:.0%} of {clean.final:.3f}",
            rule.final <= bound,
        ),
        Check(
            f"{who} (the bad one is {summary.bad_replica})",
            named is not None and named["replica"] == summary.bad_replica,
        ),
    ]


def write_report(out: Path, summary: Summary, outcomes: list[Outcome], console: Console) -> bool:
    """Write results.json, demo.png and demo.html to `out`, print the table. Returns whether all checks passed."""
    checks = verdict(summary, outcomes)
    picture = out / "demo.png"
    draw(picture, summary, outcomes)
    (out / "results.json").write_text(json.dumps(_results(summary, outcomes, checks), indent=2) + "\n")
    (out / "demo.html").write_text(_page(picture, summary, outcomes, checks), encoding="utf-8")
    page = _incident(out)
    table = Table(
        title=f"{summary.model}, {summary.ranks} replicas, replica {summary.bad_replica} bad", title_style="bold"
    )
    for column in ("run", "held-out loss, start", "end", "against clean", "replica named"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for row, colour in zip(_rows(outcomes), COLOURS, strict=True):
        table.add_row(*row, style=colour)
    console.print(table)
    for check in checks:
        console.print(
            f"[{'green' if check.passed else 'bold red'}]{'ok  ' if check.passed else 'FAIL'}[/] {check.text}"
        )
    console.print(
        f"{out / 'demo.html'}  {picture}  ({summary.seconds // 60} min {summary.seconds % 60} s)", highlight=False
    )
    console.print(f"The page for the incident review: {page}", highlight=False)
    return all(check.passed for check in checks)


def _incident(out: Path) -> Path:
    """The report on the run with the rule, as `ds-byzantine report RUN --html FILE` makes it."""
    reader = Reader(find(out / "rule"))
    reader.poll()
    return write(summarize(reader.story, "the demo, attacked, with the rule"), out / "report.html")


def draw(path: Path, summary: Summary, outcomes: list[Outcome]) -> None:
    """Left: held-out loss of the three runs. Right: who was how far from the aggregate, in the run with the rule."""
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), width_ratios=(1.25, 1), layout="constrained")
    _draw_losses(left, summary, outcomes)
    _draw_distances(right, summary, outcomes[-1])
    figure.suptitle(f"{summary.model}: {summary.ranks} replicas, one turns bad", x=0.01, ha="left", fontweight="bold")
    figure.savefig(path, dpi=140)
    plt.close(figure)


def _draw_losses(axes: Axes, summary: Summary, outcomes: list[Outcome]) -> None:
    for outcome, colour, width in zip(outcomes, COLOURS, (5.0, 2.0, 2.0), strict=True):
        # The clean curve lies broad and pale beneath, so that a curve which follows it stays visible.
        look: dict[str, Any] = {"color": colour, "alpha": 0.35 if width > 2 else 1.0, "solid_capstyle": "round"}
        steps, values = zip(*outcome.heldout, strict=True)
        axes.plot(
            steps,
            values,
            linewidth=width,
            marker="o",
            markersize=width + 2,
            label=f"{outcome.label}: {_shown(outcome.final)}",
            **look,
        )
    axes.axvline(summary.attack_from, color="#999999", linestyle=":", linewidth=1.2)
    note = f"replica {summary.bad_replica} starts to send\n{-summary.factor:g} times its gradient"
    axes.annotate(note, (summary.attack_from, 0.97), xycoords=("data", "axes fraction"), xytext=(6, 0),
                  textcoords="offset points", va="top", fontsize=8.5, color="#555555")  # fmt: skip
    axes.set(xlabel="optimizer step", ylabel="held-out loss", title="Held-out loss")
    axes.legend(loc="best", frameon=False)
    axes.grid(axis="y", color="#eeeeee")


def _draw_distances(axes: Axes, summary: Summary, outcome: Outcome) -> None:
    rows = [[math.nan if d is None else d for d in event["distances"]] for event in outcome.events]
    ratio_NS = np.array(rows).T
    ratio_NS = ratio_NS / np.nanmedian(ratio_NS, axis=0)
    first, last = outcome.events[0]["step"], outcome.events[-1]["step"]
    # Steps are counted from 0 in the events, from 1 in the losses.
    box = (first + 0.5, last + 1.5, summary.ranks - 0.5, -0.5)
    image = axes.imshow(
        ratio_NS, aspect="auto", cmap="YlOrRd", norm=LogNorm(0.8, max(10, np.nanmax(ratio_NS))), extent=box
    )
    axes.set(xlabel="optimizer step", ylabel="replica", title=f"Distance to the aggregate ({outcome.label})")
    axes.set_yticks(range(summary.ranks))
    axes.spines[:].set_visible(False)
    bar = axes.figure.colorbar(image, ax=axes)
    bar.set_label("times the median replica")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def _shown(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "not finite"


def _rows(outcomes: list[Outcome]) -> list[tuple[str, ...]]:
    clean = outcomes[0].final
    rows: list[tuple[str, ...]] = []
    for outcome in outcomes:
        change = outcome.final / clean - 1
        against = "" if outcome is outcomes[0] else f"{change:+.1%}" if math.isfinite(change) else "not finite"
        named = f"{outcome.named['replica']} (step {outcome.named['step']})" if outcome.named else ""
        rows.append((outcome.label, _shown(outcome.heldout[0][1]), _shown(outcome.final), against, named))
    return rows


def _results(summary: Summary, outcomes: list[Outcome], checks: list[Check]) -> dict[str, Any]:
    packages = ("ds_byzantine", "deepspeed", "torch", "transformers")
    runs = [
        {
            "run": o.label,
            "heldout": [[step, value if math.isfinite(value) else None] for step, value in o.heldout],
            "named": o.named["replica"] if o.named else None,
        }
        for o in outcomes
    ]
    return {
        "setting": asdict(summary),
        "versions": {name: version(name) for name in packages},
        "runs": runs,
        "checks": [asdict(check) for check in checks],
    }


def _page(picture: Path, summary: Summary, outcomes: list[Outcome], checks: list[Check]) -> str:
    heads = "".join(f"<th>{h}</th>" for h in ("run", "held-out loss, start", "end", "against clean", "replica named"))
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in _rows(outcomes))
    marks = "".join(f'<li class="{"ok" if c.passed else "bad"}">{escape(c.text)}</li>' for c in checks)
    image = base64.b64encode(picture.read_bytes()).decode()
    title = escape(f"{summary.model}: {summary.ranks} replicas, replica {summary.bad_replica} bad")
    packages = ", ".join(f"{name} {version(name)}" for name in ("ds_byzantine", "deepspeed", "torch"))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
img {{ width: 100%; }} table {{ border-collapse: collapse; margin: 1rem 0; }}
th, td {{ text-align: right; padding: .3rem .8rem; border-bottom: 1px solid #ddd; font-variant-numeric: tabular-nums; }}
th:first-child, td:first-child {{ text-align: left; }} li.ok::marker {{ content: "ok  "; color: #1f8a70; }}
li.bad {{ color: #d1373f; }} li.bad::marker {{ content: "FAIL  "; }}
</style></head><body>
<h1>{title}</h1>
<img alt="Held-out loss of the three runs, and the distance of each replica to the aggregate"
 src="data:image/png;base64,{image}">
<table><tr>{heads}</tr>{body}</table>
<ul>{marks}</ul>
<p><a href="report.html">The page for the incident review</a>, made from the events of the run with the rule.</p>
<p>From step {summary.attack_from} on replica {summary.bad_replica} sends {-summary.factor:g} times its gradient.</p>
<p>{packages}</p>
</body></html>
"""
