"""Prints what the container image installs besides torch: the dependencies of pyproject.toml, one a line.

Only the standard library is imported: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

NEED_TORCH = frozenset({"accelerate"})


EXTRAS = ("docker", "harmony", "kubernetes", "nvml", "tracing")
"""Extras of the autoscaler's actuators, for gpt-oss's answers, and for the export of spans."""


def requirements(project: Path, *, torch: bool, extras: Sequence[str] = EXTRAS) -> list[str]:
    """Build requirements, dependencies and these extras; without `torch` nothing that needs it."""
    document = tomllib.loads(project.read_text(encoding="utf-8"))
    wanted = [
        *document["build-system"]["requires"],
        *document["project"]["dependencies"],
        *(line for extra in extras for line in document["project"]["optional-dependencies"][extra]),
    ]
    left_out = {"torch"} if torch else {"torch"} | NEED_TORCH
    return [line for line in wanted if re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0] not in left_out]


def main() -> None:
    """One requirement a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", choices=("cpu", "cuda", "none"), required=True)
    parser.add_argument("--extras", nargs="*", default=EXTRAS)
    args = parser.parse_args()
    lines = requirements(Path("pyproject.toml"), torch=args.torch != "none", extras=args.extras)
    print(*lines, sep="\n")


if __name__ == "__main__":
    main()
