"""Which way the arrows point, and how long things may be. Reads the source; runs nothing but two bare imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "ds_byzantine"
FILES = sorted(PACKAGE.rglob("*.py"))
# A part may import parts of a lower level and itself. A part that is not listed is an entry point: it may import
# anything, and nothing listed may import it.
LEVELS = {
    **dict.fromkeys(("errors", "types", "_version", "_names"), 0),
    "rules": 1,
    **dict.fromkeys(("attacks", "_schema", "_validation"), 2),
    **dict.fromkeys(("drills", "exchange", "trust", "monitor", "report"), 3),
    "config": 4,
    "statistics": 4,
    "plan": 5,
    "agreement": 5,
    "guard": 5,
    "pipeline": 6,
    "adapters": 7,
    "cli": 9,
}
ENTRY = 8
# (files, what they must not import)
FORBIDDEN = [
    ("rules/*.py", ("torch.distributed", "deepspeed")),
    ("attacks/*.py", ("torch.distributed", "deepspeed")),
    ("drills/*.py", ("torch.distributed", "deepspeed")),
    ("report/*.py", ("torch", "deepspeed")),
    ("exchange/*.py", ("deepspeed", "transformers")),
    ("pipeline.py", ("torch.distributed", "deepspeed", "transformers")),
    ("agreement.py", ("torch.distributed", "deepspeed", "transformers")),
    ("statistics.py", ("torch.distributed", "deepspeed", "transformers")),
]
TORCH_FREE = ["config", "config_docs", "plan", "rules.catalog", "attacks.catalog", "drills.scenario", "errors"]


def imports(source: str) -> Iterator[str]:
    """Absolute names of all modules that the source imports, at any depth of the code."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part(name: str) -> str:
    """'ds_byzantine.rules.base' -> 'rules'; config.py prints what config_docs.py writes, so the two are one part."""
    return name.split(".")[1].removesuffix("_docs")


def wrong_way(path: Path, source: str) -> list[str]:
    """Imports of `path` that point upwards or sideways."""
    here = ["ds_byzantine", *path.relative_to(PACKAGE).with_suffix("").parts]
    own = part(".".join(here))
    level = LEVELS.get(own, ENTRY)
    out = []
    for name in imports(source):
        if not name.startswith("ds_byzantine."):
            continue
        target, host = part(name), [*name.split("."), ""][2]
        if target != own and level < ENTRY and LEVELS.get(target, ENTRY) >= level:
            out.append(name)
        if target == own == "adapters" and not host.startswith("_") and host != here[2]:
            out.append(name)
    return out


def forbidden(path: Path, source: str) -> list[str]:
    """Imports of `path` that FORBIDDEN lists."""
    relative = path.relative_to(PACKAGE)
    banned = [b for pattern, names in FORBIDDEN if relative.match(pattern) for b in names]
    return [name for name in imports(source) if any(name == b or name.startswith(b + ".") for b in banned)]


def too_long(source: str) -> list[str]:
    """Functions of more than 60 lines, and the file if it has more than 500."""
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    out = [f.name for f in functions if (f.end_lineno or f.lineno) - f.lineno >= 60]
    return out + (["the file"] if len(source.splitlines()) > 500 else [])


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_every_file(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert wrong_way(path, source) == []
    assert forbidden(path, source) == []
    assert too_long(source) == []


@pytest.mark.parametrize("module", TORCH_FREE)
def test_torch_is_not_imported(module: str) -> None:
    code = f"import sys, ds_byzantine.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, check=False).returncode == 0


@pytest.mark.parametrize(
    ("file", "line", "found"),
    [
        ("rules/krum.py", "from ds_byzantine.config import RuleConfig", wrong_way),
        ("rules/krum.py", "from ds_byzantine.exchange import local", wrong_way),
        ("exchange/local.py", "def f():\n    from ds_byzantine.monitor.events import StepEvent", wrong_way),
        ("pipeline.py", "import ds_byzantine.adapters.hf", wrong_way),
        ("pipeline.py", "from ds_byzantine import launch", wrong_way),
        ("adapters/hf.py", "from ds_byzantine.adapters.deepspeed import points", wrong_way),
        ("adapters/hf.py", "from ds_byzantine.adapters import ddp", wrong_way),
        ("rules/krum.py", "import torch.distributed as dist", forbidden),
        ("attacks/alone.py", "from torch import distributed", forbidden),
        ("report/page.py", "import torch", forbidden),
        ("plan.py", "def f():\n" + "    pass\n" * 60, too_long),
        ("plan.py", "pass\n" * 501, too_long),
    ],
)
def test_a_violation_is_found(file: str, line: str, found: object) -> None:
    assert (too_long(line) if found is too_long else found(PACKAGE / file, line)) != []  # type: ignore[operator]


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("adapters/hf.py", "from ds_byzantine.adapters._patch import PatchPoint"),
        ("adapters/deepspeed/zero3.py", "from ds_byzantine.adapters.deepspeed import points"),
        ("adapters/hf.py", "from ds_byzantine import pipeline"),
        ("launch.py", "from ds_byzantine.adapters import hf"),
        ("cli/check.py", "from ds_byzantine import launch"),
    ],
)
def test_the_right_way_is_open(file: str, line: str) -> None:
    assert wrong_way(PACKAGE / file, line) == []
