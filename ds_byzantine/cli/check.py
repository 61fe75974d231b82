"""`ds-byzantine check`: does everything fit together on this machine?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ds_byzantine.cli.output import STATUS, Json, console, grid, print_json

if TYPE_CHECKING:
    from ds_byzantine.cli.check_installed import Finding

EXAMPLE = "Example: ds-byzantine check configs/zero2.json --launch 2"


def command(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[CONFIG]", exists=True, dir_okay=False, help="DeepSpeed JSON to check too."),
    ] = None,
    launch: Annotated[
        int | None, typer.Option(min=2, max=64, help="Start so many ranks here and take two real steps.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=10, help="Seconds after which the ranks are killed.")] = 300.0,
    as_json: Json = False,
) -> None:
    """Check versions, DeepSpeed's private functions that are replaced, and the config. Exit code 1 if something fails.

    With --launch the ranks train a tiny model with stock DeepSpeed and with "rule": "mean", "f": 0, and the weights are
    compared: the largest difference may be 1e-5 of the largest change (float32 sums in another order).
    """
    from ds_byzantine.cli import check_installed

    found = [("versions", check_installed.versions()), ("activation", check_installed.activation())]
    found.append(("DeepSpeed's functions", check_installed.patch_points()))
    if file is not None:
        found.append(("config", check_installed.config(file)))
    if launch is not None:
        from ds_byzantine.cli import check_launch

        if not as_json:
            console().print(f"starting {launch} ranks, a minute or so ...", style="dim")
        found.append((f"{launch} ranks", check_launch.compare(launch, timeout, _stages(file))))
    failed = sum(one.status == "FAIL" for _, part in found for one in part)
    if as_json:
        print_json(
            {"ok": not failed, "failed": failed, "checks": [_plain(part, one) for part, all_ in found for one in all_]}
        )
    else:
        _show(found, failed)
    raise typer.Exit(1 if failed else 0)


def _stages(file: Path | None) -> tuple[int, ...]:
    """The ZeRO stage of the config, or all of them."""
    if file is None:
        return (0, 1, 2, 3)
    from ds_byzantine.cli.job import job_of
    from ds_byzantine.cli.output import read_json
    from ds_byzantine.errors import ByzantineError

    try:
        return (job_of(read_json(file), params=None).stage,)
    except ByzantineError:  # reported as a finding
        return (0, 1, 2, 3)


def _plain(part: str, one: Finding) -> dict[str, Any]:
    return {"part": part, "status": one.status, "what": one.what, "detail": one.detail, "fix": one.fix}


def _show(found: list[tuple[str, list[Finding]]], failed: int) -> None:
    from rich.text import Text

    out = console()
    for part, findings in found:
        out.print(Text(part, style="bold"))
        table = grid("", "", "")
        for one in findings:
            detail = Text(one.detail)
            if one.fix:
                detail.append(f"\nfix: {one.fix}", style=STATUS[one.status])
            table.add_row(Text(f"[{one.status}]", style=STATUS[one.status]), Text(one.what), detail)
        out.print(table)
    verdict = f"{failed} failed" if failed else "all is well"
    out.print(Text(verdict, style=STATUS["FAIL" if failed else "OKAY"]))
