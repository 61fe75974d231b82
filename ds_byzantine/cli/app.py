"""The command `ds-byzantine`: which commands there are, and how they end.

Exit codes: 0 ok, 1 the thing that was checked failed, 2 usage. What this package refuses on purpose is one message,
never a traceback. Commands import what they need when they run, so that `--help` is quick.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from ds_byzantine.cli import check, config, drill, env, plan, report
from ds_byzantine.cli.output import wants_json
from ds_byzantine.errors import ByzantineError

DEBUG = "DS_BYZANTINE_DEBUG"

STYLE: dict[str, Any] = {
    "context_settings": {
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: name.replace("_", "-"),  # --world_size is --world-size
    },
    "no_args_is_help": True,
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": "rich",
}

app = typer.Typer(
    name="ds-byzantine", help="Robust gradient aggregation for DeepSpeed: plan, check, drill, report.", **STYLE
)
app.command("plan", epilog=plan.EXAMPLE)(plan.command)
app.command("check", epilog=check.EXAMPLE)(check.command)
app.command("drill", epilog=drill.EXAMPLE)(drill.command)
app.command("report", epilog=report.EXAMPLE)(report.command)
app.command("env", epilog=env.EXAMPLE)(env.command)
sections = typer.Typer(help='The "byzantine" section of a DeepSpeed config.', no_args_is_help=True)
sections.command("init", epilog=config.EXAMPLE_INIT)(config.init)
sections.command("schema", epilog=config.EXAMPLE_SCHEMA)(config.schema)
sections.command("validate", epilog=config.EXAMPLE_VALIDATE)(config.validate)
app.add_typer(sections, name="config")


def _version(wanted: bool) -> None:
    if wanted:
        from ds_byzantine._version import VERSION

        print(VERSION)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    pass


def main() -> None:
    """The entry point."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character is no reason to fail
    sys.exit(run(app))


def run(command: Callable[[], Any]) -> int:
    """Run a command, turning what goes wrong into one message and an exit code."""
    try:
        command()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `ds-byzantine ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ByzantineError as error:
        return _failed(str(error))
    except OSError as error:
        return _failed(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except Exception as error:
        if os.environ.get(DEBUG):
            raise
        return _failed(
            f"internal error: {type(error).__name__}: {error}\nPlease report this together with the output of "
            f"`ds-byzantine env`. {DEBUG}=1 shows where it happened."
        )
    return 0


def _failed(message: str) -> int:
    if wants_json(sys.argv):
        print(json.dumps({"ok": False, "error": message}))
    else:
        print(message, file=sys.stderr)
    return 1
