"""What the installed plug-in adds to `import torch` and `import deepspeed`: `python -m benchmarks.import_time`.

Fresh interpreters in turn, with the entry point switched off and on (TORCH_DEVICE_BACKEND_AUTOLOAD); inside the second
kind the time of the entry point itself is taken as well, since the whole import varies by more than it costs.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

WHOLE = "import time; t = time.perf_counter(); import torch; print(time.perf_counter() - t)"
ENTRY = (
    "import torch, sys, time\n"
    "for name in [m for m in sys.modules if m.startswith('ds_byzantine')]: del sys.modules[name]\n"
    "t = time.perf_counter(); from ds_byzantine._autoload import register; register(); print(time.perf_counter() - t)"
)


def seconds(code: str, autoload: str) -> float:
    """What a fresh interpreter prints."""
    env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return float(out.stdout)


def main() -> None:
    """Print medians in milliseconds."""
    off, on, entry = [], [], []
    for _ in range(9):
        off.append(seconds(WHOLE, "0"))
        on.append(seconds(WHOLE, "1"))
        entry.append(seconds(ENTRY, "0"))
    print(f"import torch, entry point off: {1e3 * statistics.median(off):.0f} ms")
    print(f"import torch, entry point on:  {1e3 * statistics.median(on):.0f} ms")
    print(f"the entry point alone:         {1e3 * statistics.median(entry):.2f} ms")


if __name__ == "__main__":
    main()
