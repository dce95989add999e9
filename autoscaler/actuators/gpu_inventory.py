"""Which GPUs replicas may get, and which of them is free."""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Sequence

from splitserve.errors import ResourceExhaustedError, UnavailableError

AUTO = ("auto",)
PROBE_S = 20.0
_PROBE = ("nvidia-smi", "--query-gpu=index", "--format=csv,noheader")


def gpu_inventory(listed: Sequence[str]) -> tuple[str, ...]:
    """The GPUs listed, or with `auto` all that the NVIDIA driver of this machine knows, by their numbers.

    Raises UnavailableError (NO_NVIDIA_DRIVER) where `auto` cannot ask.
    """
    if tuple(listed) != AUTO:
        return tuple(listed)
    try:
        answer = subprocess.run(_PROBE, capture_output=True, text=True, timeout=PROBE_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        message = f"gpus: auto: {_PROBE[0]} does not answer here ({error}); list them instead, as 0,1,2,3"
        raise UnavailableError(message, reason="NO_NVIDIA_DRIVER") from None
    return tuple(answer.stdout.split())


def first_free(gpus: Sequence[str], in_use: Collection[str]) -> str:
    """The first GPU that nobody has. Raises ResourceExhaustedError (NO_GPU)."""
    for gpu in gpus:
        if gpu not in in_use:
            return gpu
    raise ResourceExhaustedError(f"none of the {len(gpus)} GPUs is free", reason="NO_GPU")
