"""`ds-byzantine plan`: what a section would mean in a job, without starting one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ds_byzantine.cli.output import ConfigFile, Json, console, grid, print_json, read_json, section_of
from ds_byzantine.errors import ByzantineError

if TYPE_CHECKING:
    from ds_byzantine.cli.job import Job
    from ds_byzantine.config import ByzantineConfig

EXAMPLE = "Example: ds-byzantine plan configs/zero2.json --world-size 16 --params 7B"

Speeds = tuple[float, float]

SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)


def command(
    file: ConfigFile,
    world_size: Annotated[int, typer.Option("--world-size", "-n", min=1, help="Ranks of the job.")],
    params: Annotated[str | None, typer.Option(help="Parameters of the model: 7B, 135M, 1.5e9.")] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks of a replica.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline stages of a replica.")] = 1,
    sp: Annotated[int, typer.Option(min=1, help="Sequence-parallel ranks of a replica.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Expert-parallel ranks of a replica.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=1, help='Ranks of a host, for "fault_domain": "node".')] = 8,
    bandwidth: Annotated[
        str | None, typer.Option(help="What a rank sends, for times: 25GB/s or 200Gb/s. Needs --params.")
    ] = None,
    memory_bandwidth: Annotated[
        str, typer.Option(help="What a rank reads from its memory: about 20GB/s a CPU core, 2TB/s and more a GPU.")
    ] = "2TB/s",
    as_json: Json = False,
) -> None:
    """Can the section hold in a job of so many ranks, and what does it cost? Nothing is started.

    Says whether it is feasible, the largest f, bytes and memory against stock DeepSpeed, the rules that would fit, and
    the cost at 8 to 1024 ranks; with --bandwidth also the seconds that a step takes longer, or shorter. Exit code 1 if
    it cannot hold.
    """
    sizes = {"tp": tp, "pp": pp, "sp": sp, "ep": ep}
    found = describe(file, world_size, params, gpus_per_node, sizes, _speeds(bandwidth, memory_bandwidth))
    if as_json:
        print_json(found)
    else:
        _show(found)
    raise typer.Exit(0 if found["ok"] else 1)


def describe(
    file: Path,
    world_size: int,
    params: str | None,
    gpus_per_node: int,
    sizes: Mapping[str, int],
    speeds: Speeds | None = None,
) -> dict[str, Any]:
    """All that the command prints.

    Raises:
        ConfigError: the file or its section is malformed.
    """
    from ds_byzantine.cli.job import job_of, parameters
    from ds_byzantine.config import parse_section
    from ds_byzantine.plan import rules_that_fit

    try:
        numel = None if params is None else parameters(params)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--params") from None
    raw = read_json(file)
    section = parse_section(section_of(raw, file))
    node_size = gpus_per_node if section.fault_domain == "node" else None
    job = job_of(raw, params=numel, node_size=node_size, **sizes)
    n = job.replicas(world_size)
    here = _row(job, section, world_size, speeds)
    warnings = list(here.pop("warnings"))
    if not section.enabled:
        warnings.insert(0, "byzantine.enabled: false, so none of this takes effect.")
    f = here["f"] if here["f"] is not None else section.f or 0
    return {
        "ok": here["feasible"],
        "config": str(file),
        **here,
        "rule": " + ".join([p.name for p in section.pre] + [section.rule.name]),
        "host": (f"ZeRO-{job.stage}" + (f", {job.within} in a replica" if job.within else "")),
        "largest_f": job.largest_f(section, world_size),
        "rules_that_fit": list(rules_that_fit(n, f)),
        "stock_memory": job.stock_memory(world_size),
        "warnings": warnings,
        "assumed": [*job.assumed, *([] if numel else ["without --params no bytes are given"])],
        "scaling": _scaling(job, section, speeds),
    }


def _scaling(job: Job, section: ByzantineConfig, speeds: Speeds | None) -> list[dict[str, Any]]:
    """The same section at other sizes; a drill names replicas of this job only and is left out."""
    plain = section.model_copy(update={"drill": None})
    rows = []
    for size in SIZES:
        if job.fits(size):
            row = _row(job, plain, size, speeds)
            row.pop("warnings")
            rows.append(row)
    return rows


def _row(job: Job, section: ByzantineConfig, world_size: int, speeds: Speeds | None) -> dict[str, Any]:
    row: dict[str, Any] = {"world_size": world_size, "replicas": job.replicas(world_size)}
    try:
        made = job.plan(section, world_size)
    except ByzantineError as error:
        empty = dict.fromkeys(
            ("f", "traffic_ratio", "bytes_sent_per_rank", "stock_bytes_per_rank", "extra_memory", "extra_seconds")
        )
        return {**row, "feasible": False, "reason": str(error), **empty, "warnings": []}
    return {
        **row,
        "feasible": True,
        "reason": None,
        "f": made.f,
        "traffic_ratio": made.traffic_ratio,
        "bytes_sent_per_rank": made.bytes_sent_per_rank,
        "stock_bytes_per_rank": made.stock_bytes_per_rank,
        "extra_memory": made.extra_memory,
        "extra_seconds": None if speeds is None else made.extra_seconds(*speeds),
        "warnings": made.warnings,
    }


def _show(found: dict[str, Any]) -> None:
    from rich.text import Text

    out = console()
    title = f"{found['config']} in a job of {found['world_size']} ranks ({found['host']})"
    out.print(Text(title, style="bold"))
    table = grid("", "")
    table.columns[0].style = "dim"
    if found["feasible"]:
        table.add_row("feasible", Text(f"yes: {found['rule']}, f={found['f']} of {_replicas(found)}", style="green"))
    else:
        table.add_row("feasible", Text("no", style="bold red"))
        table.add_row("", Text(found["reason"]))
    largest = found["largest_f"]
    table.add_row("largest f", "none" if largest is None else f"{largest} with this rule")
    table.add_row("rules that fit", ", ".join(found["rules_that_fit"]) or "none with this f")
    for label, value in (("bytes", _bytes(found)), ("memory", _memory(found)), ("time", _time(found))):
        if value:
            table.add_row(label, value)
    out.print(table)
    for warning in found["warnings"]:
        out.print(Text(f"note: {warning}", style="yellow"))
    out.print()
    out.print(_scaling_table(found["scaling"]))
    for line in found["assumed"]:
        out.print(Text(f"assumed: {line}", style="dim"))


def _replicas(row: dict[str, Any]) -> str:
    return "1 replica" if row["replicas"] == 1 else f"{row['replicas']} replicas"


def _bytes(row: dict[str, Any]) -> str:
    from ds_byzantine.report.words import size

    if row["traffic_ratio"] is None:
        return ""
    ratio = f"x{row['traffic_ratio']:.2f} of stock"
    if row["bytes_sent_per_rank"] is None:
        return ratio
    ours, stock = size(row["bytes_sent_per_rank"]), size(row["stock_bytes_per_rank"])
    return f"{ours} sent by a rank in one reduction of all gradients, stock {stock} ({ratio})"


def _memory(row: dict[str, Any]) -> str:
    from ds_byzantine.report.words import size

    if row["extra_memory"] is None:
        return ""
    stock = row["stock_memory"]
    share = f"; weights, gradients and Adam take {size(stock)} (+{100 * row['extra_memory'] / stock:.1f}%)"
    return f"{size(row['extra_memory'])} on a rank besides stock" + (share if stock else "")


def _time(row: dict[str, Any]) -> str:
    if row["extra_seconds"] is None:
        return ""
    return f"{_milliseconds(row['extra_seconds'])} against stock in one reduction of all gradients, without overlap"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:+.3g} ms"


def _speeds(bandwidth: str | None, memory_bandwidth: str) -> Speeds | None:
    from ds_byzantine.cli.job import speed

    try:
        return None if bandwidth is None else (speed(bandwidth), speed(memory_bandwidth))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--bandwidth, --memory-bandwidth") from None


def _scaling_table(rows: list[dict[str, Any]]) -> Any:
    """The cost at other sizes; without --params only ratios are known."""
    from rich.text import Text

    from ds_byzantine.report.words import size

    known = any(row["bytes_sent_per_rank"] is not None for row in rows)
    timed = any(row["extra_seconds"] is not None for row in rows)
    middle = ("bytes of a rank", "stock") if known else ()
    table = grid(
        "ranks",
        "replicas",
        "f",
        *middle,
        "against stock",
        *(("extra memory",) if known else ()),
        *(("time",) if timed else ()),
        "",
    )
    for column in table.columns[:-1]:
        column.justify = "right"
    for row in rows:
        cells = [str(row["world_size"]), str(row["replicas"]), "-" if row["f"] is None else str(row["f"])]
        cells += [size(row[k]) for k in ("bytes_sent_per_rank", "stock_bytes_per_rank")] if known else []
        cells += ["-" if row["traffic_ratio"] is None else f"x{row['traffic_ratio']:.2f}"]
        cells += [size(row["extra_memory"])] if known else []
        cells += [_milliseconds(row["extra_seconds"])] if timed else []
        table.add_row(*cells, Text("" if row["feasible"] else "cannot hold", style="red"))
    return table
