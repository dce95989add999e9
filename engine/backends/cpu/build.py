"""Compiles the kernels (`src`) for this processor at the first start; later starts load them from the cache.

`python -m engine.backends.cpu.build FOLDER` compiles them beforehand for each of `LEVELS`, for wheels and container
images, which know neither the compiler nor the processor of the machine that they come to. Libraries in `PREBUILT` are
used without compiling. They are linked to libraries that torch has loaded before, its own OpenMP among them.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from splitserve.errors import UnavailableError
from splitserve.logs import log_event
from splitserve.models.sources import cache_folder

SOURCES = Path(__file__).with_name("src")
MAIN = "kernels.cpp"
PREBUILT = Path(__file__).with_name("prebuilt")
FLAGS = ("-std=c++20", "-O3", "-shared", "-fPIC", "-fopenmp")
NATIVE = ("-march=native",)
AMX = frozenset({"amx_tile", "amx_bf16"})
WITHOUT_AMX = ("-DSPLITSERVE_NO_AMX",)
NEEDED = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"})
"""Processor features, by their names in /proc/cpuinfo."""
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class X86Level:
    """A set of processors that share one prebuilt library."""

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]
    """Processor features, by their names in /proc/cpuinfo."""


_BASE_FLAGS = ("-march=x86-64-v4", "-mavx512bf16")
LEVELS = (
    X86Level("v4-amx", (*_BASE_FLAGS, "-mamx-bf16", "-mamx-tile"), NEEDED | AMX),
    X86Level("v4-bf16", _BASE_FLAGS, NEEDED),
)
"""The most capable first: Sapphire Rapids and later; Cooper Lake, Zen 4 and later. On other processors torch
computes."""
_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18
"""https://docs.kernel.org/arch/x86/xstate.html: a process asks before it uses tile registers."""


def load_library() -> ctypes.CDLL:
    """Loads the kernels, compiling them if they are neither prebuilt nor cached (a few seconds).

    With tile multipliers where the processor has them and the system lets this process use them.
    Raises UnavailableError with the reason when the processor, the compiler or the file system does not allow it.
    """
    features = _processor_features()
    if not (features >= AMX and _may_use_tiles()):
        features -= AMX
    if missing := sorted(NEEDED - features):
        raise UnavailableError(f"the processor lacks {', '.join(missing)}")
    library = prebuilt_library(features) or _cached_library(features)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise UnavailableError(f"{library} cannot be loaded: {error}") from None


def prebuilt_library(features: frozenset[str]) -> Path | None:
    """The most capable prebuilt library for these processor features and the present sources; None if there is none."""
    fitting = (PREBUILT / _prebuilt_name(level) for level in LEVELS if level.needs <= features)
    return next((path for path in fitting if path.exists()), None)


def prebuild(folder: Path) -> list[Path]:
    """Compiles the libraries that the folder lacks; removes those of other sources. Returns the new files.

    Raises UnavailableError without a compiler, or when it fails. Does nothing for other processors than x86-64.
    """
    names = {_prebuilt_name(level) for level in LEVELS}
    for stale in folder.glob("*.so"):
        if stale.name not in names:
            stale.unlink()
    missing = [level for level in LEVELS if not (folder / _prebuilt_name(level)).exists()]
    if platform.machine() != "x86_64" or not missing:
        return []
    compiler, made = _compiler(), [folder / _prebuilt_name(level) for level in missing]
    for level, library in zip(missing, made, strict=True):
        _compile(compiler, library, level.flags)
    return made


def _prebuilt_name(level: X86Level) -> str:
    flags = " ".join((*FLAGS, *level.flags)).encode()
    key = hashlib.sha256(b"\0".join((_source(), flags))).hexdigest()[:16]
    return f"{level.name}-{key}.so"


def _cached_library(features: frozenset[str]) -> Path:
    compiler, native = _compiler(), NATIVE if features >= AMX else (*NATIVE, *WITHOUT_AMX)
    # Features are part of the key: machines with different processors may share a home directory.
    flags = " ".join((*FLAGS, *native, *sorted(features))).encode()
    key = (_source(), os.path.realpath(compiler).encode(), flags)
    name = hashlib.sha256(b"\0".join(key)).hexdigest()[:24]
    library = cache_folder() / "kernels" / f"{name}.so"
    if not library.exists():
        log_event("engine.compiling_kernels", compiler=compiler)
        _compile(compiler, library, native)
    return library


def _source() -> bytes:
    return b"\0".join(path.read_bytes() for path in sorted(SOURCES.iterdir()))


def _compiler() -> str:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise UnavailableError("no C++ compiler (c++, g++ or clang++) was found")
    return compiler


def _processor_features() -> frozenset[str]:
    if platform.machine() != "x86_64":
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), []))


def _may_use_tiles() -> bool:
    system = ctypes.CDLL(None)
    return not system.syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)


def _compile(compiler: str, library: Path, flags: Sequence[str]) -> None:
    """Compiles into a temporary file and renames it: several processes may compile at the same time."""
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            output = Path(folder) / library.name
            command = [compiler, *FLAGS, *flags, str(SOURCES / MAIN), "-o", str(output)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
            if done.returncode:
                first = (done.stderr.strip() or "no message").splitlines()[0]
                raise UnavailableError(f"{compiler} failed: {first}")
            output.replace(library)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"the kernels cannot be compiled: {error}") from None


def main() -> None:
    """Compiles beforehand. Exit code 1, with the reason, if that fails."""
    try:
        for path in prebuild(Path(sys.argv[1])):
            print(path)
    except UnavailableError as error:
        raise SystemExit(error.message) from None


if __name__ == "__main__":
    main()
