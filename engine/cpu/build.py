"""Compiles the kernels (`src`) for this machine's processor, once; later starts find the library in the cache."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from splitserve.errors import UnavailableError
from splitserve.models import cache_folder

SOURCES = Path(__file__).with_name("src")
MAIN = "kernels.cpp"
FLAGS = ("-std=c++20", "-O3", "-march=native", "-shared", "-fPIC", "-fopenmp")
NEEDED = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni"})
"""Of a processor, as Linux names them."""
TIMEOUT_S = 120.0


def load_library() -> ctypes.CDLL:
    """The kernels, compiled if need be (some seconds). Raises UnavailableError where they cannot be had; says why."""
    features = _processor_features()
    if missing := sorted(NEEDED - features):
        raise UnavailableError(f"the processor lacks {', '.join(missing)}")
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise UnavailableError("no C++ compiler (c++, g++ or clang++) was found")
    source = b"\0".join(path.read_bytes() for path in sorted(SOURCES.iterdir()))
    # A home directory can be shared by machines with different processors.
    key = (source, os.path.realpath(compiler).encode(), " ".join((*FLAGS, *sorted(features))).encode())
    name = hashlib.sha256(b"\0".join(key)).hexdigest()[:24]
    library = cache_folder() / "kernels" / f"{name}.so"
    if not library.exists():
        _compile(compiler, library)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise UnavailableError(f"{library} cannot be loaded: {error}") from None


def _processor_features() -> frozenset[str]:
    if platform.machine() != "x86_64":
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), []))


def _compile(compiler: str, library: Path) -> None:
    """Others may do the same at the same time: each writes a file of its own and then renames it."""
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder) / library.name
            command = [compiler, *FLAGS, str(SOURCES / MAIN), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
            if done.returncode:
                first = (done.stderr.strip() or "no message").splitlines()[0]
                raise UnavailableError(f"{compiler} failed: {first}")
            made.replace(library)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"the kernels cannot be compiled: {error}") from None
