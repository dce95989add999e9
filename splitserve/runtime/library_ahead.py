"""Loads torch's library on a thread while the interpreter imports other code.

Half a second of a start is the system's loader, at work on one large library: that needs no interpreter, and so can
take another core. `import torch` finds the library loaded; where it is not yet, it waits for the rest.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

COMPUTING = frozenset({"up", "worker", "prefill-worker", "decode-worker"})
"""Commands that need the library, or whose children do."""
OTHER_ENGINES = ("simulated", "vllm")
VARIABLE = "SPLITSERVE_ENGINE_KIND"
HELP = frozenset({"-h", "--help"})

_loading: threading.Thread | None = None


def load_ahead(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Begins to load the library if this command line is going to need it. One that cannot be loaded is left to
    `import torch`, which says why."""
    global _loading
    if _loading is not None or "torch" in sys.modules or not needs_torch(arguments, environment):
        return
    library = torch_library()
    if library is not None:
        _loading = threading.Thread(target=_load, args=[library], name="load-torch", daemon=True)
        _loading.start()


def finish_loading() -> None:
    """Waits until the library is loaded, and its thread has ended. For who is going to fork."""
    global _loading
    if _loading is not None:
        _loading.join()
        _loading = None


def needs_torch(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether a command computes with torch, as far as its command line and environment tell."""
    if not arguments or arguments[0] not in COMPUTING or HELP & set(arguments):
        return False
    given = [environment.get(VARIABLE, ""), *arguments]
    return not any(one.removeprefix("--engine=") in OTHER_ENGINES for one in given)


def torch_library() -> Path | None:
    """The library of the installed torch, which is not imported for that; None where there is none."""
    if sys.platform != "linux":
        return None
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    library = Path(spec.origin).with_name("lib") / "libtorch_cpu.so"
    return library if library.is_file() else None


def _load(library: Path) -> None:
    # Imported here: few commands load anything.
    import ctypes

    # Not `ctypes.CDLL(library)`, which keeps the interpreter's lock.
    load = ctypes.CDLL(None).dlopen
    load.argtypes, load.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
    load(os.fsencode(library), os.RTLD_NOW)
