"""What can be checked without starting ranks: versions, activation, DeepSpeed's private functions, a config."""

from __future__ import annotations

import contextlib
import io
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ds_byzantine.errors import ByzantineError

PACKAGE = "ds_byzantine"

REINSTALL = "install the package into this environment: pip install -e . in its checkout"


@dataclass(frozen=True)
class Finding:
    """One line. `status`: "OKAY", "WARN", "FAIL", or "SKIP" where a check does not apply."""

    status: str
    what: str
    detail: str = ""
    fix: str = ""


def versions() -> list[Finding]:
    """Python and every package that setup.cfg asks for."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    try:
        meta = metadata.metadata(PACKAGE)
        wanted = [Requirement(line) for line in metadata.requires(PACKAGE) or []]
    except metadata.PackageNotFoundError:
        return [Finding("WARN", PACKAGE, "not installed, only on sys.path", REINSTALL)]
    found = [Finding("OKAY", PACKAGE, meta["Version"])]
    python = SpecifierSet(meta["Requires-Python"] or "")
    fits = python.contains(platform.python_version(), prereleases=True)
    fix = "" if fits else f"use Python {python}"
    found.append(Finding("OKAY" if fits else "FAIL", "python", platform.python_version(), fix))
    for one in wanted:
        if one.marker is not None and not one.marker.evaluate({"extra": ""}):
            continue
        try:
            has = metadata.version(one.name)
        except metadata.PackageNotFoundError:
            found.append(Finding("FAIL", one.name, "not installed", f'pip install "{one}"'))
            continue
        fits = one.specifier.contains(Version(has).base_version, prereleases=True)
        found.append(Finding("OKAY" if fits else "FAIL", one.name, has, "" if fits else f'pip install "{one}"'))
    return found


def activation() -> list[Finding]:
    """Whether a section takes effect by itself."""
    registered = any(e.value.startswith(f"{PACKAGE}.") for e in metadata.entry_points(group="torch.backends"))
    by_hand = "call ds_byzantine.install() in the script, or start with `deepspeed --module ds_byzantine.launch`"
    if not registered:
        return [Finding("WARN", "entry point", "not registered: sections are ignored without install()", REINSTALL)]
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        return [Finding("WARN", "entry point", "switched off by TORCH_DEVICE_BACKEND_AUTOLOAD=0", by_hand)]
    try:
        with _quiet():
            from deepspeed.runtime.engine import DeepSpeedEngine
    except Exception as error:
        return [
            Finding("FAIL", "DeepSpeed", f"cannot be imported: {type(error).__name__}: {error}", "repair DeepSpeed")
        ]
    if not hasattr(DeepSpeedEngine.__init__, "__wrapped__"):
        return [Finding("FAIL", "entry point", "registered, but DeepSpeed's engine is not watched", by_hand)]
    return [Finding("OKAY", "entry point", "a section takes effect by itself")]


def patch_points() -> list[Finding]:
    """Every private function of DeepSpeed that is replaced or relied on, as it is in the installed version."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    try:
        with _quiet():
            import deepspeed

            from ds_byzantine.adapters._patch import TRUST_ENVIRONMENT
            from ds_byzantine.adapters.deepspeed.points import ALL_POINTS, SUPPORTED
    except Exception as error:
        return [
            Finding("FAIL", "DeepSpeed", f"cannot be imported: {type(error).__name__}: {error}", "repair DeepSpeed")
        ]
    version = str(deepspeed.__version__)
    fix = f'pip install "deepspeed{SUPPORTED}"'
    known = SpecifierSet(SUPPORTED).contains(Version(version).base_version)
    detail = f"{version}, examined are {SUPPORTED}"
    found = [Finding("OKAY" if known else "FAIL", "DeepSpeed", detail, "" if known else fix)]
    for point in ALL_POINTS:
        name = f"{point.owner}.{point.name.removeprefix(f'_{point.owner}')}"
        if not SpecifierSet(point.versions).contains(Version(version).base_version):
            found.append(Finding("SKIP", name, f"not in DeepSpeed {version}"))
            continue
        with _quiet():
            problem = point.problem(version)
        if problem is None:
            found.append(Finding("OKAY", name, point.why))
        elif "never examined" in problem and os.environ.get(TRUST_ENVIRONMENT) == "1":
            found.append(Finding("WARN", name, problem, f"trusted because of {TRUST_ENVIRONMENT}=1; read the function"))
        else:
            found.append(Finding("FAIL", name, problem, f"reinstall an unmodified DeepSpeed: {fix}"))
    return found


def config(file: Path) -> list[Finding]:
    """The section of a DeepSpeed JSON; one line for each problem."""
    from ds_byzantine._validation import problems_of
    from ds_byzantine.cli.output import read_json, section_of
    from ds_byzantine.config import parse_section
    from ds_byzantine.errors import ConfigError

    try:
        section = parse_section(section_of(read_json(file), file))
    except ConfigError as error:
        head, *lines = str(error).split("\n  - ")
        return [
            Finding("FAIL", problem.path, problem.text, "docs/config.md lists all keys")
            for line in lines or [head]
            for problem in problems_of(ConfigError(line), str(file))
        ]
    except ByzantineError as error:
        return [Finding("FAIL", str(file), str(error))]
    found = [Finding("OKAY", str(file), f"rule {section.rule.name}, f {'derived' if section.f is None else section.f}")]
    if not section.enabled:
        found.append(Finding("WARN", "byzantine.enabled", "false: nothing is protected", "set it to true"))
    if section.drill is not None:
        detail = f"{section.drill.name}: a replica misbehaves on purpose"
        found.append(Finding("WARN", "byzantine.drill", detail, "remove it from a config for real training"))
    return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what DeepSpeed says while it is imported."""
    import logging

    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)
