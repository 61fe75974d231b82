"""Compile ranks.cpp for this machine and load it: once for any network, again for each that is used a lot."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from ds_byzantine.rules.network import Ranks

logger = logging.getLogger("ds_byzantine")

SWITCH = "DS_BYZANTINE_NATIVE"
SOURCE = Path(__file__).with_name("ranks.cpp")
# -ffp-contract=off: a fused multiply-add would round otherwise than PyTorch does. Comparisons may take numbers for
# finite and zeros for equal: rows that are not finite show by their bits or their products, whatever the median is.
FLAGS = (
    "-O3", "-march=native", "-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
    "-ffinite-math-only", "-fno-signed-zeros", "-w",
)  # fmt: skip
PATIENCE = 300.0  # seconds for the compiler


class Building:
    """A library that is being compiled in the background.

    Args:
        command: the compiler's, without the name of the output.
        target: where the library will lie; it may be there already.
    """

    def __init__(self, command: Sequence[str], target: Path) -> None:
        self.target = target
        self._process: subprocess.Popen[str] | None = None
        self._made: Path | None = None
        self._until = time.monotonic() + PATIENCE
        if not target.exists():
            handle, name = tempfile.mkstemp(suffix=".part", dir=target.parent)  # ranks may build it at the same time
            os.close(handle)
            self._made = Path(name)
            null = subprocess.DEVNULL
            self._process = subprocess.Popen(
                [*command, "-o", name],
                stdin=null,
                stdout=null,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )

    def library(self, *, wait: bool = False) -> ctypes.CDLL | None:
        """The library, or None while it is not ready.

        Raises:
            OSError: it cannot be built or loaded.
        """
        if self._process is not None:
            if not wait and self._process.poll() is None and time.monotonic() < self._until:
                return None
            self._finish(self._process)
        return ctypes.CDLL(str(self.target))

    def _finish(self, process: subprocess.Popen[str]) -> None:
        assert self._made is not None
        try:
            said = process.communicate(timeout=max(0.1, self._until - time.monotonic()))[1]
            if process.returncode:
                raise OSError(f"the compiler failed: {said.strip()[:300]}")
            self._made.replace(self.target)
        except subprocess.TimeoutExpired:
            os.killpg(
                process.pid, signal.SIGKILL
            )  # with the compiler proper, which is a child of the one that was started
            process.wait()
            raise OSError(f"the compiler was not done after {PATIENCE:.0f} s") from None
        finally:
            self._process = None
            self._made.unlink(missing_ok=True)


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The library for any network, or None: switched off, no compiler, or it cannot be built (said in one line).

    The first call on a machine takes about a second.
    """
    if os.environ.get(SWITCH) == "0":
        return None
    try:
        return _start(()).library(wait=True)
    except OSError as error:
        logger.warning("order statistics run in PyTorch, several times slower: ranks.cpp was not compiled (%s).", error)
        return None


def specialised(n: int, ranks: Ranks) -> Building:
    """Begin to compile the library for these ranks of n rows. Raises OSError if that cannot begin."""
    code = " ".join(f"{_KINDS[c.wants_low, c.wants_high]}({c.low},{c.high})" for c in ranks.network(n))
    lo, hi, halves, keep = ranks
    named = {"ROWS": n, "LO": lo, "HI": hi, "HALVES": int(halves), "KEEP": keep, "NETWORK": code}
    return _start(tuple(f"-D{name}={value}" for name, value in named.items()))


_KINDS = {(True, True): "BOTH", (True, False): "LOW", (False, True): "HIGH"}


def _start(defines: Sequence[str]) -> Building:
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX") or "g++", "g++", "c++", "clang++"))), None)
    if compiler is None:
        raise OSError("there is no C++ compiler; install g++")
    command = [compiler, *FLAGS, *defines, "-shared", "-fPIC", str(SOURCE)]
    key = hashlib.sha256()
    for part in (SOURCE.read_text(encoding="utf-8"), *command[:-1], str(os.stat(compiler).st_mtime), _processor()):
        key.update(part.encode() + b"\0")
    folder = _folder()
    _clear(folder)
    return Building(command, folder / f"ranks-{key.hexdigest()[:16]}.so")


def _folder() -> Path:
    """A folder of this user that nobody else can write to: code from there is run.

    Raises:
        OSError: it is another user's, or others can write to it.
    """
    if not hasattr(os, "getuid"):
        raise OSError("this system has no user numbers, so nobody can tell whose a folder is")
    base = Path(os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache"))
    folder = base / "ds_byzantine"
    if not base.is_absolute() or not _usable(folder):  # a user without a home, or one that cannot be written to
        folder = Path(tempfile.gettempdir()) / f"ds_byzantine-{os.getuid()}"
        folder.mkdir(exist_ok=True, mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise OSError(f"{folder} can be written to by others; make it yours alone (chmod 700) or remove it")
    return folder


def _usable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def _clear(folder: Path) -> None:
    """Remove what compilers left behind whose process was killed."""
    for left in folder.glob("*.part"):
        try:
            if time.time() - left.stat().st_mtime > 2 * PATIENCE:
                left.unlink()
        except OSError:  # another rank was faster
            continue


@lru_cache(maxsize=1)
def _processor() -> str:
    """What -march=native depends on: a home may be shared by machines of different kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
        return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    except OSError:
        return f"{platform.machine()} {platform.processor()} {platform.node()}"
