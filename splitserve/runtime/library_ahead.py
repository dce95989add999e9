"""Loads torch's library on a thread while the interpreter imports other code.

Half a second of a start is the system's loader, at work on one large library: that needs no interpreter, and so can
take another core. `import torch` finds the library loaded; where it is not yet, it waits for the rest. The loader takes
one library at a time, so those that the other code needs are loaded before: `FIRST`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
import threading
import time
from pathlib import Path

FIRST = ("numpy", "psutil", "uvloop", "google.protobuf.json_format", "grpc")
END_POLL_S = 0.0005

_loading: threading.Thread | None = None


def load_ahead() -> None:
    """Begins to load the library, if torch is installed and not imported. One that cannot be loaded is left to `import
    torch`, which says why."""
    global _loading
    library = None if _loading is not None or "torch" in sys.modules else torch_library()
    if library is not None:
        for name in FIRST:
            importlib.import_module(name)
        _loading = threading.Thread(target=_load, args=[library], name="load-torch", daemon=True)
        _loading.start()


def finish_loading() -> None:
    """Waits until the library is loaded, and its thread has ended. For who is going to fork."""
    global _loading
    if _loading is not None:
        _loading.join()
        # The kernel's thread ends a moment after the interpreter's.
        while os.path.exists(f"/proc/self/task/{_loading.native_id}"):
            time.sleep(END_POLL_S)
        _loading = None


def torch_library() -> Path | None:
    """The library of the installed torch, which is not imported for that; None where there is none, and for builds with
    CUDA, which load their libraries in an order of their own."""
    if sys.platform != "linux" or not _is_cpu_build():
        return None
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    library = Path(spec.origin).with_name("lib") / "libtorch_cpu.so"
    return library if library.is_file() else None


def _is_cpu_build() -> bool:
    try:
        return importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False


def _load(library: Path) -> None:
    # Imported here: a command that loads nothing does without it.
    import ctypes

    # Not `ctypes.CDLL(library)`, which keeps the interpreter's lock.
    load = ctypes.CDLL(None).dlopen
    load.argtypes, load.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
    load(os.fsencode(library), os.RTLD_NOW)
