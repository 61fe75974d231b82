"""`deepspeed --module ds_byzantine.launch train.py ...`: run an unchanged script with `install()` done first.

The third way of activation, for environments in which PyTorch's autoload is off or the package is not installed.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

USAGE = "usage: deepspeed --module ds_byzantine.launch SCRIPT [ARGUMENTS ...]   (or -m MODULE instead of SCRIPT)"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the script that the arguments name.

    Args:
        arguments: left out: `sys.argv[1:]`. The DeepSpeed launcher puts `--local_rank=N` before the script's name; it
            is passed on to the script, where it would have stood without this module.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    moved = []
    while given and given[0].startswith("--local_rank"):
        moved.append(given.pop(0))
        if "=" not in moved[-1] and given:
            moved.append(given.pop(0))
    as_module = bool(given) and given[0] == "-m"
    given = given[as_module:]
    if not given:
        print(USAGE, file=sys.stderr)
        raise SystemExit(2)
    target, rest = given[0], given[1:]
    if not as_module and not Path(target).is_file():
        print(f"ds_byzantine.launch: no such script: {target}\n{USAGE}", file=sys.stderr)
        raise SystemExit(2)
    from ds_byzantine.activation import install

    install()
    sys.argv = [target, *moved, *rest]
    if as_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(target).resolve().parent))
        runpy.run_path(target, run_name="__main__")


if __name__ == "__main__":
    main()
