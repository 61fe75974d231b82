"""The `torch.backends` entry point: PyTorch calls `register` at the end of every `import torch`.

It must be quick and must never raise: an exception here would break `import torch` for every program of the
environment. So it only prepares to act when DeepSpeed's engine is imported, and prints whatever goes wrong.
"""

from __future__ import annotations


def register() -> None:
    """Watch for the import of DeepSpeed's engine. Idempotent, never raises."""
    try:
        from ds_byzantine.activation import watch

        watch()
    except Exception as error:
        import sys

        print(f"ds_byzantine: not active in this process ({type(error).__name__}: {error})", file=sys.stderr)
