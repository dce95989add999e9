"""Whether the packages that Python finds are splitserve's: other projects have an `engine` or a `worker` too."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

PACKAGES = (
    "autoscaler",
    "coordinator",
    "decode_worker",
    "engine",
    "kv_transfer",
    "launcher",
    "prefill_worker",
    "splitserve",
    "worker",
)
"""The top-level names that a wheel adds."""


def foreign_package(root: Path | None = None) -> str | None:
    """What is wrong with the first of `PACKAGES` that is not splitserve's own; None if all are. Imports none of them.

    `root`: the folder that all lie in; by default that of this package.
    """
    root = root or Path(__file__).resolve().parents[2]
    sizes = _installed_sizes(root)
    for name in PACKAGES:
        file, spec = root / name / "__init__.py", find_spec(name)
        origin = spec.origin if spec is not None else None
        if origin is None or not file.exists():
            return f"splitserve's package {name} is damaged: install splitserve again, in an environment of its own"
        if not file.samefile(origin):
            return (
                f"{origin} hides splitserve's package {name}: move it, or keep its folder out of PYTHONPATH"
            )
        if sizes.get(name, file.stat().st_size) != file.stat().st_size:
            return f"{file} is another project's, not splitserve's: install splitserve in an environment of its own"
    return None


def _installed_sizes(root: Path) -> dict[str, int]:
    """Bytes of each package's `__init__.py` as it was installed into `root`; empty for an editable installation."""
    try:
        found_first = distribution("splitserve")
    except PackageNotFoundError:
        return {}
    # A clone's packages may run where another version is installed.
    if Path(str(found_first.locate_file(""))).resolve() != root.resolve():
        return {}
    record = found_first.read_text("RECORD") or ""
    found = re.findall(r"^(\w+)/__init__\.py,[^,]*,(\d+)$", record, re.MULTILINE)
    return {name: int(size) for name, size in found}
