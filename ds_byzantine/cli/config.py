"""`ds-byzantine config init|schema|validate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ds_byzantine.cli.output import ConfigFile, Json, console, print_json, read_json, section_of
from ds_byzantine.errors import ConfigError

EXAMPLE_INIT = "Example: ds-byzantine config init ds.json --stage 2"
EXAMPLE_SCHEMA = "Example: ds-byzantine config schema > byzantine.schema.json"
EXAMPLE_VALIDATE = "Example: ds-byzantine config validate ds.json"


def init(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="Where to write it; left out: print it.")
    ] = None,
    stage: Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage.")] = 2,
    rule: Annotated[str, typer.Option(help="Aggregation rule.")] = "centered_clip",
    plain: Annotated[
        bool, typer.Option("--plain", help='Numbers instead of the "auto" that Trainer and Accelerate fill in.')
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE.")] = False,
    as_json: Json = False,
) -> None:
    """Write a starter DeepSpeed JSON with a "byzantine" section."""
    from ds_byzantine.config import parse_section

    made = starter(stage, rule, plain=plain)
    parse_section(made["byzantine"])
    if file is None:
        typer.echo(json.dumps(made, indent=2))
        return
    if file.exists() and not force:
        raise ConfigError(f"{file} exists. Name another file, or add --force to overwrite it.")
    file.write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    if as_json:
        print_json({"ok": True, "file": str(file)})
        return
    console().print(f"{file} written. Next: ds-byzantine plan {file} --world-size N")


def schema(as_json: Json = False) -> None:
    """Print the JSON schema of the section, for editors and other checkers."""
    from ds_byzantine.config import json_schema

    print_json(json_schema())


def validate(file: ConfigFile, as_json: Json = False) -> None:
    """Check the section: every problem with its dotted path, what it is and what to do."""
    from ds_byzantine.config import parse_section

    section = parse_section(section_of(read_json(file), file))
    if as_json:
        print_json({"ok": True, "file": str(file), "section": section.model_dump(mode="json")})
        return
    out = console()
    state = "valid" if section.enabled else 'valid, but "enabled" is false: nothing is protected'
    out.print(f"{file}: {state}")
    out.print(json.dumps(section.model_dump(mode="json"), indent=2))


def starter(stage: int, rule: str = "centered_clip", *, plain: bool = False) -> dict[str, Any]:
    """A DeepSpeed config with a section.

    Args:
        plain: numbers instead of the "auto" that Hugging Face Trainer and Accelerate fill in.
    """
    sizes: dict[str, Any] = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0}
    optimizer: dict[str, Any] = {"lr": 2e-5, "weight_decay": 0.0}
    if not plain:
        sizes = dict.fromkeys([*sizes, "gradient_accumulation_steps"], "auto")
        optimizer = dict.fromkeys(["lr", "betas", "eps", "weight_decay"], "auto")
    zero: dict[str, Any] = {"stage": stage}
    if stage >= 2:
        zero |= {"contiguous_gradients": True, "overlap_comm": False, "reduce_bucket_size": 50_000_000}
    if stage == 3:
        zero |= {"stage3_gather_16bit_weights_on_model_save": True}
    return {
        **sizes,
        "bf16": {"enabled": True if plain else "auto"},
        "optimizer": {"type": "AdamW", "params": {**optimizer, "torch_adam": True}},
        "zero_optimization": zero,
        "byzantine": {"rule": rule, "monitor": {"dir": "runs/byzantine"}},
    }
