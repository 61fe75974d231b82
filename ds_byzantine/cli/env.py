"""`ds-byzantine env`: a block for a bug report."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import typer

from ds_byzantine.cli.output import Json, print_json

EXAMPLE = "Example: ds-byzantine env"

PACKAGES = (
    *("ds_byzantine", "deepspeed", "torch", "transformers", "accelerate", "peft"),
    *("pydantic", "typer", "rich", "jinja2", "numpy"),
)

# Settings, never credentials or places. What looks like a path or is long is not shown.
VARIABLES = (
    *(
        "TORCH_DEVICE_BACKEND_AUTOLOAD",
        "DS_BYZANTINE_NATIVE",
        "DS_BYZANTINE_REHEARSAL",
        "DS_BYZANTINE_TRUST_HOST",
        "DS_ACCELERATOR",
        "DS_BUILD_OPS",
        "DS_SKIP_CUDA_CHECK",
    ),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING"),
    *("CUDA_DEVICE_MAX_CONNECTIONS", "CUBLAS_WORKSPACE_CONFIG", "PYTORCH_CUDA_ALLOC_CONF", "HIP_VISIBLE_DEVICES"),
    *(
        "NCCL_ALGO",
        "NCCL_PROTO",
        "NCCL_DEBUG",
        "NCCL_IB_DISABLE",
        "NCCL_P2P_DISABLE",
        "NCCL_P2P_LEVEL",
        "NCCL_SHM_DISABLE",
    ),
    *("NCCL_SOCKET_IFNAME", "NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"),
    *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT", "TORCH_DISTRIBUTED_DEBUG", "GLOO_SOCKET_IFNAME"),
    *("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_DEEPSPEED_ZERO_STAGE"),
)
_HARMLESS = re.compile(r"[A-Za-z0-9_.,:;=^*\[\]-]{1,80}")


def command(as_json: Json = False) -> None:
    """Print what a bug report needs: versions, accelerator, relevant environment variables. No paths, no secrets."""
    found = describe()
    if as_json:
        print_json(found)
        return
    typer.echo("```text")
    for label, value in found.items():
        typer.echo(f"{label}: {'; '.join(f'{k}={v}' for k, v in value.items()) if isinstance(value, dict) else value}")
    typer.echo("```")


def describe() -> dict[str, Any]:
    """Everything that is printed, in order."""
    return {
        **{name: version(name) for name in PACKAGES},
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "os": f"{platform.system()} {platform.release()} {platform.machine()}, {' '.join(platform.libc_ver()).strip()}",
        "cpus": os.cpu_count(),
        **_accelerator(),
        "activation": _activation(),
        "environment": settings(os.environ),
    }


def version(package: str) -> str:
    """Of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The known variables that are set; values that are no plain settings are not shown."""
    found = {name: environment[name] for name in VARIABLES if name in environment}
    return {name: value if _HARMLESS.fullmatch(value) else "(set, not shown)" for name, value in found.items()}


def _activation() -> str:
    registered = any(e.value.startswith("ds_byzantine.") for e in metadata.entry_points(group="torch.backends"))
    off = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0"
    return ("entry point registered" if registered else "no entry point") + (", switched off" if off else "")


def _accelerator() -> dict[str, Any]:
    try:
        import torch
    except Exception as error:
        return {"accelerator": f"torch cannot be imported: {type(error).__name__}"}
    found: dict[str, Any] = {"accelerator": "cpu", "cuda": torch.version.cuda or "none"}
    if torch.version.hip:
        found["rocm"] = torch.version.hip
    if torch.cuda.is_available():
        names = sorted({torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())})
        found["accelerator"] = f"{torch.cuda.device_count()} x {', '.join(names)}"
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    else:
        found["nccl"] = "built in, no GPU" if torch.distributed.is_nccl_available() else "none"
    found["deepspeed accelerator"] = _deepspeed_accelerator()
    return found


def _deepspeed_accelerator() -> str:
    """What DeepSpeed computes on. It talks while it looks, so that its standard output is put aside."""
    import contextlib
    import io

    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            import logging

            logging.disable(logging.WARNING)
            from deepspeed.accelerator import get_accelerator

            return str(get_accelerator().device_name())
    except Exception as error:
        return f"unknown ({type(error).__name__})"
    finally:
        import logging

        logging.disable(logging.NOTSET)
        sys.stdout.flush()
