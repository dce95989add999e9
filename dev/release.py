"""What `make release` makes in dist/: a source archive, a wheel with the cpu kernels, and the list of its parts (SBOM).

Made twice from the same files they are equal, byte for byte: all times in them are SOURCE_DATE_EPOCH, by default the
time of the last commit. The wheel is made from the source archive alone.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from engine.backends.cpu.build import prebuild
from launcher.cli.own_packages import PACKAGES

DIST = Path("dist")
FILES = ("LICENSE", "README.md", "pyproject.toml")
PREBUILT = Path("engine/backends/cpu/prebuilt")
LEAST_GLIBC = 17
"""glibc 2.17 is the oldest that a manylinux tag names by its version."""
_BUILD = """
import json, sys, setuptools.build_meta as backend
name, folder, settings = sys.argv[1:]
print(getattr(backend, name)(folder, json.loads(settings)))
"""


def build(dist: Path, epoch: int) -> list[Path]:
    """Writes the three files into `dist`; returns them. `epoch`: seconds since 1970 for all times in them.

    Raises UnavailableError without a C++ compiler.
    """
    dist.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="splitserve-release-") as name:
        work = Path(name)
        _copy_sources(work / "sources")
        archive = _built(work / "sources", "build_sdist", work, epoch)
        source = dist / archive.name
        _write_archive(archive, source, epoch)
        with tarfile.open(source) as opened:
            opened.extractall(work / "unpacked", filter="data")
        (folder,) = (work / "unpacked").iterdir()
        libraries = prebuild(folder / PREBUILT)
        for library in libraries:
            library.chmod(0o755)
        wheel = _built(folder, "build_wheel", work, epoch, f"--plat-name={platform_tag(libraries)}")
        made = [source, Path(shutil.move(wheel, dist / wheel.name))]
    parts = dist / f"{source.name.removesuffix('.tar.gz')}.cdx.json"
    parts.write_text(json.dumps(parts_list(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return [*made, parts]


def platform_tag(libraries: Sequence[Path]) -> str:
    """The wheel's platform: the newest glibc that these libraries ask for; "any" without libraries."""
    if not libraries:
        return "any"
    asked = (found for path in libraries for found in re.findall(rb"GLIBC_2\.(\d+)\0", path.read_bytes()))
    return f"manylinux_2_{max([LEAST_GLIBC, *map(int, asked)])}_x86_64"


def parts_list() -> dict[str, Any]:
    """What splitserve with the extra `cpu` brings along, in this environment's versions, as CycloneDX 1.6."""
    ours = distribution("splitserve")
    parts = [_component(part) for part in _needed(ours, {"cpu"})]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": _component(ours) | {"type": "application"}},
        "components": sorted(parts, key=lambda part: str(part["name"])),
    }


def _needed(of: Distribution, extras: set[str]) -> Iterator[Distribution]:
    """All that a distribution with these extras needs here, each once."""
    seen, waiting = {"splitserve"}, [(of, extras)]
    while waiting:
        parent, chosen = waiting.pop()
        for need in map(Requirement, parent.requires or ()):
            wanted = [
                need.marker is None or need.marker.evaluate({"extra": extra}) for extra in ("", *chosen)
            ]
            name = canonicalize_name(need.name)
            if name in seen or not any(wanted):
                continue
            seen.add(name)
            try:
                found = distribution(name)
            except PackageNotFoundError:
                raise SystemExit(f"{name}, which {parent.name} needs, is not installed: make setup") from None
            waiting.append((found, set(need.extras)))
            yield found


def _component(part: Distribution) -> dict[str, Any]:
    facts, name = part.metadata, canonicalize_name(part.name)
    version = part.version.partition("+")[0]
    licence = facts["License-Expression"] or facts["License"] or ""
    if not licence or len(licence) > 80:  # some packages put the whole text there
        classes = [entry for entry in facts.get_all("Classifier", ()) if entry.startswith("License ::")]
        licence = ", ".join(entry.rpartition(" :: ")[2] for entry in classes) or "not stated"
    return {
        "type": "library",
        "name": name,
        "version": version,
        "purl": f"pkg:pypi/{name}@{version}",
        "licenses": [{"license": {"name": licence}}],
    }


def _copy_sources(folder: Path) -> None:
    """What git would commit of the packages, and what describes them."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *PACKAGES, *FILES]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for name in filter(os.path.isfile, listed.split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(name, target)


def _built(sources: Path, what: str, target: Path, epoch: int, *options: str) -> Path:
    """Calls a function of the build's backend in the folder of the sources; the file that it wrote into `target`."""
    settings = json.dumps({"--build-option": options})
    command = [sys.executable, "-c", _BUILD, what, str(target), settings]
    environment = os.environ | {"SOURCE_DATE_EPOCH": str(epoch)}
    done = subprocess.run(
        command, cwd=sources, env=environment, umask=0o022, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{what} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return target / done.stdout.split()[-1]


def _write_archive(made: Path, target: Path, epoch: int) -> None:
    """The same archive with nothing in it of who packed it when."""
    with (
        tarfile.open(made) as old,
        open(target, "wb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=epoch) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.mode, member.pax_headers = 0o755 if member.isdir() else 0o644, {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)


def commit_time() -> int:
    """SOURCE_DATE_EPOCH, by default the time of the last commit."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    command = ["git", "log", "-1", "--format=%ct"]
    return int(given or subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Makes the files and names them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dist", type=Path, default=DIST)
    args = parser.parse_args()
    for path in build(args.dist, commit_time()):
        print(f"{path.stat().st_size / 1e6:.1f} MB  {path}")


if __name__ == "__main__":
    main()
