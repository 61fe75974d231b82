"""What the commands share: the `--json` option, printing, and reading a DeepSpeed JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ds_byzantine.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
ConfigFile = Annotated[
    Path, typer.Argument(metavar="CONFIG", exists=True, dir_okay=False, help="DeepSpeed JSON with the section.")
]

STATUS = {"OKAY": "green", "WARN": "yellow", "FAIL": "bold red", "SKIP": "dim"}


def wants_json(arguments: Sequence[str]) -> bool:
    """Whether the command line asks for JSON."""
    return "--json" in arguments


def console() -> Console:
    """A console that prints text as it is; at least 120 columns wide where it is no terminal."""
    from rich.console import Console

    made = Console(highlight=False, markup=False, emoji=False)
    return made if made.is_terminal else Console(highlight=False, markup=False, emoji=False, width=max(made.width, 120))


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def grid(*columns: str, right: Sequence[str] = ()) -> Table:
    """A table without lines; columns named in `right` are aligned to the right."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=any(columns), header_style="dim")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        ConfigError: it is no JSON, no object, or has a key twice, which DeepSpeed refuses.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}).") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: no valid JSON: {error.msg} at line {error.lineno}, column {error.colno}.") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply.") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds {type(value).__name__}, but a DeepSpeed config is an object {{...}}.")
    return value


def section_of(config: dict[str, Any], path: Path) -> Any:
    """The raw "byzantine" section.

    Raises:
        ConfigError: there is none.
    """
    if config.get("byzantine") is None:
        raise ConfigError(
            f'{path}: no "byzantine" section, so nothing is protected. Add "byzantine": {{}} for the defaults; '
            "`ds-byzantine config init` prints a starter file."
        )
    return config["byzantine"]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise ConfigError(f'The key "{key}" stands there twice in one object. DeepSpeed refuses that: remove one.')
        seen[key] = value
    return seen
