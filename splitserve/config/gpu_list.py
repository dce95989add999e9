"""Lists of GPUs as text, such as "0,1", "MIG-…", "0,1;2,3" or "H100=0,1;L40S=2,3"."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, PlainSerializer

from splitserve.errors import InvalidArgumentError

AUTO = "auto"
MAX_GPUS = 256
"""GPUs and MIG slices of one machine: 16 GPUs of 7 slices, and room."""
_KIND = re.compile(r"^[A-Za-z0-9][A-Za-z0-9 .+()/_-]{0,63}$")
_NAME = re.compile(r"^(\d{1,3}|(GPU|MIG)-[A-Za-z0-9][A-Za-z0-9/-]{0,99})$")


def gpu_names(text: str) -> tuple[str, ...]:
    """The names in "0,1", "GPU-…" or "MIG-…": numbers as `nvidia-smi -L` prints them, or UUIDs.

    Raises InvalidArgumentError (field `gpus`) for other names, a name twice and more than MAX_GPUS.
    """
    names = tuple(name.strip() for name in text.split(",")) if text.strip() else ()
    for name in names:
        if not _NAME.match(name):
            raise _bad(f"{name!r} is no GPU; give numbers (0,1), GPU-UUIDs or MIG-UUIDs")
    if len(set(names)) < len(names):
        raise _bad(f"a GPU is named twice in {text!r}")
    if len(names) > MAX_GPUS:
        raise _bad(f"at most {MAX_GPUS} GPUs, not {len(names)}")
    return names


def gpu_groups(text: str) -> tuple[tuple[str, ...], ...]:
    """The groups in "0,1;2,3", which share NVLink. Raises InvalidArgumentError as `gpu_names`, for all together."""
    return tuple(names for _, names in _groups(text))


def gpu_kinds(text: str) -> dict[str, str]:
    """The kinds in "H100=0,1;L40S=2,3", by name of the GPU; GPUs without a kind are left out. Raises as
    `gpu_groups`."""
    return {name: kind for kind, names in _groups(text) for name in names if kind}


def _groups(text: str) -> list[tuple[str, tuple[str, ...]]]:
    """Kind and names of each group."""
    groups = []
    for group in text.split(";"):
        kind, mark, names = group.rpartition("=")
        if mark and not _KIND.match(kind.strip()):
            raise _bad(f"{kind.strip()[:80]!r} is no kind of GPU; write KIND=0,1, as H100=0,1")
        if mark and not names.strip():
            raise _bad(f"no GPU is named for the kind {kind.strip()!r}")
        groups.append((kind.strip(), gpu_names(names)))
    gpu_names(",".join(name for _, names in groups for name in names))
    return [(kind, names) for kind, names in groups if names]


def _checked(text: str) -> str:
    if text != AUTO:
        gpu_groups(text)
    return text


def _named(value: Any) -> Any:
    """Names as a tuple, also from a list or a number in a YAML file."""
    if isinstance(value, list | tuple):
        return gpu_names(",".join(map(str, value)))
    return gpu_names(str(value)) if isinstance(value, str | int) else value


def _bad(why: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"gpus: {why}", field="gpus")


Gpus = Annotated[
    tuple[str, ...],
    BeforeValidator(_named),
    PlainSerializer(",".join, return_type=str),
]
"""Names of GPUs; also accepts text."""
GpuGroups = Annotated[str, AfterValidator(_checked)]
"""Groups of GPUs as text, with or without their kinds, or "auto"."""
