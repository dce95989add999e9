"""Generates splitserve/v1 and /kserve from protos/, or with `--check` verifies that the committed files are current."""

from __future__ import annotations

import argparse
import filecmp
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
GENERATED = (Path("splitserve") / "v1", Path("splitserve") / "kserve")


def generate(into: Path) -> None:
    """Writes the generated modules and their type stubs below `into`."""
    messages = sorted(PROTOS.glob("splitserve/*/*.proto"))
    services = [path for path in messages if "\nservice " in path.read_text(encoding="utf-8")]
    scripts = Path(sys.executable).parent
    plugins = [
        f"--plugin=protoc-gen-{name}={scripts / f'protoc-gen-{name}'}" for name in ("mypy", "mypy_grpc")
    ]
    protoc = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", *plugins]
    outputs = [f"--python_out={into}", f"--mypy_out=quiet:{into}"]
    subprocess.run([*protoc, *outputs, *map(str, messages)], check=True)
    outputs = [f"--grpc_python_out={into}", f"--mypy_grpc_out=quiet:{into}"]
    subprocess.run([*protoc, *outputs, *map(str, services)], check=True)


def stale_files() -> list[str]:
    """Generated files that are missing, left over or outdated."""
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh, committed = Path(scratch), ROOT
        names = {
            path.relative_to(base)
            for base in (fresh, committed)
            for folder in GENERATED
            for path in (base / folder).glob("*_pb2*")
        }
        return sorted(
            str(name)
            for name in names
            if not (fresh / name).exists()
            or not (committed / name).exists()
            or not filecmp.cmp(fresh / name, committed / name, shallow=False)
        )


def main() -> int:
    """Exit code 1 when `--check` finds a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; fail if anything is out of date"
    )
    if not parser.parse_args().check:
        generate(ROOT)
        return 0
    stale = stale_files()
    for name in stale:
        print(f"{name} is out of date: run `make proto`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
