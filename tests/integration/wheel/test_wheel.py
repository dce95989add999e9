"""The wheel in fresh environments: the base alone, and with engine torch the demo. `make test-wheel` runs them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tarfile
import time
import venv
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from dev import release
from engine.backends.cpu import build
from launcher.cli.own_packages import PACKAGES
from splitserve.models.sources import models_dir
from tests.support.waiting import LEAST_TIMEOUT_S, PATIENCE_S

EPOCH = 1_700_000_000
BASE_BYTES = 200e6
"""What the base takes on disk, without compiled modules: half of it numpy, gRPC and tokenizers."""
IMPORT_S = 0.2
TRIES = 10
NOT_IN_BASE = ("accelerate", "gguf", "nixl_cu13", "safetensors", "torch", "transformers", "triton")
SHARED = {"libc.so.6", "libm.so.6", "libgomp.so.1", "libstdc++.so.6", "ld-linux-x86-64.so.2"}
"""What the kernels may be linked to: glibc, and libraries that torch has loaded."""
NEWEST_GLIBC = 28
"""That of torch's own wheel."""
pytestmark = [pytest.mark.wheel, pytest.mark.timeout(2 * LEAST_TIMEOUT_S)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Source archive, wheel and list of parts."""
    return release.build(tmp_path_factory.mktemp("dist"), EPOCH)


class Installation:
    """A fresh environment in `folder`, and what was said in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.create(folder, with_pip=True)
        self.python = folder / "bin" / "python"
        paths = {"base": str(folder), "platbase": str(folder)}
        self.packages = Path(sysconfig.get_path("purelib", vars=paths))
        self.before = {path.name for path in self.packages.iterdir()}
        # A user's folder with packages of the same names, in which commands are given.
        self.work = folder / "work"
        for name in PACKAGES:
            (self.work / name).mkdir(parents=True)
            (self.work / name / "__init__.py").write_text("raise SystemExit('not splitserve')\n")

    def pip(self, *words: str) -> None:
        subprocess.run([self.python, "-m", "pip", "--quiet", *words], check=True, timeout=PATIENCE_S)

    def run(
        self, *words: str, variables: Mapping[str, str] = MappingProxyType({})
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.folder / "bin" / "splitserve", *words],
            cwd=self.work,
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )


@pytest.fixture(scope="module")
def base(made: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """The wheel with what it depends on."""
    there = Installation(tmp_path_factory.mktemp("base"))
    there.pip("install", "--no-compile", "--constraint", "constraints.txt", str(made[1]))
    return there


def test_two_builds_are_equal(made: list[Path], tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        again = release.build(tmp_path / "dist", EPOCH)
    finally:
        os.umask(old)
    digests = [
        {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
        for paths in (made, again)
    ]
    assert digests[0] == digests[1]


def test_what_is_in_the_files(made: list[Path]) -> None:
    source, wheel, parts = made
    with tarfile.open(source) as archive:
        sources = set(archive.getnames())
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
        libraries = [
            opened.extract(name, wheel.parent / "libraries") for name in names if name.endswith(".so")
        ]
    tops = {name.split("/")[0] for name in names}
    assert tops == {*PACKAGES, "splitserve-0.1.0.dist-info"}
    assert {"splitserve-0.1.0.dist-info/licenses/LICENSE", "splitserve/v1/inference_pb2.pyi"} <= names
    assert "coordinator/entrypoints/page/static/index.html" in names
    assert not [name for name in names | sources if name.startswith("tests/") or name.endswith(".pyc")]
    assert not [name for name in sources if name.endswith(".so")]
    assert f"splitserve-0.1.0/{build.SOURCES.relative_to(Path.cwd())}/{build.MAIN}" in sources
    assert len(libraries) == len(build.LEVELS)
    for library in libraries:
        listed = subprocess.run(
            ["readelf", "-dV", library], capture_output=True, text=True, check=True
        ).stdout
        assert set(re.findall(r"\(NEEDED\).*\[(.+)\]", listed)) <= SHARED
    glibc = re.search(r"-py3-none-manylinux_2_(\d+)_x86_64\.whl$", wheel.name)
    assert glibc is not None
    asked = re.findall(r"GLIBC_2\.(\d+)\b", listed)
    assert NEWEST_GLIBC >= int(glibc[1]) >= max(map(int, asked))
    listing = json.loads(parts.read_text())
    assert {"torch", "transformers", "grpcio"} <= {part["name"] for part in listing["components"]}
    assert all(part["licenses"][0]["license"]["name"] for part in listing["components"])


def test_the_base_is_light(base: Installation) -> None:
    assert not [name for name in NOT_IN_BASE if (base.packages / name).exists()]
    files = [path for path in base.packages.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    new = [path for path in files if path.relative_to(base.packages).parts[0] not in base.before]
    size = sum(path.stat().st_size for path in new)
    print(f"the base: {size / 1e6:.0f} MB")
    assert size < BASE_BYTES
    ask = "import time; began = time.process_time(); import splitserve; print(time.process_time() - began)"
    took = []
    for _ in range(TRIES):
        done = subprocess.run([base.python, "-c", ask], capture_output=True, text=True, check=True)
        took.append(float(done.stdout))
    print(f"import splitserve: {min(took):.4f} s")
    assert min(took) < IMPORT_S


def test_the_base_runs_a_coordinator(base: Installation) -> None:
    assert "demo" in base.run("--help").stdout
    done = base.run("demo")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith("pip install 'splitserve[cpu]'\n")
    assert done.stderr.count("\n") == 1
    log = base.work / "coordinator.log"
    with log.open("wb") as output:
        coordinator = subprocess.Popen(
            [base.folder / "bin" / "splitserve", "coordinator", "--grpc-port", "0", "--http-port", "0"],
            cwd=base.work,
            stderr=output,
        )
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not (ready := re.search(r'\{.*"coordinator\.ready".*\}', log.read_text())):
            assert coordinator.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)  # only its log tells
        target = f"127.0.0.1:{json.loads(ready[0])['port']}"
        assert base.run("health", "--target", target).returncode == 0
        assert "no workers registered" in base.run("status", "--target", target).stdout
        coordinator.send_signal(signal.SIGTERM)
        assert coordinator.wait(PATIENCE_S) == 0
    finally:
        coordinator.kill()
        coordinator.wait()


def test_another_projects_file_is_noticed_and_an_uninstall_leaves_nothing(base: Installation) -> None:
    file = base.packages / "engine" / "__init__.py"
    ours = file.read_bytes()
    file.write_text("# another project's\n")
    done = base.run("status")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{file} is another project's" in done.stderr
    file.write_bytes(ours)
    assert "MB" in base.run("model", "caches").stdout
    base.pip("uninstall", "--yes", "splitserve")
    assert not [name for name in PACKAGES if (base.packages / name).exists()]
    assert not (base.folder / "bin" / "splitserve").exists()


def test_the_demo_runs_from_the_wheel(made: list[Path], tmp_path: Path) -> None:
    """With this environment's torch: installing another one would take a minute."""
    there = Installation(tmp_path / "venv")
    there.pip("install", "--no-compile", "--no-deps", str(made[1]))
    (there.packages / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
    home = tmp_path / "home"
    home.mkdir()
    (home / "models").symlink_to(models_dir())
    began = time.monotonic()
    done = there.run("demo", variables={"SPLITSERVE_HOME": str(home)})
    print(f"splitserve demo: {time.monotonic() - began:.0f} s")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Paris" in done.stdout
    assert "demo: ok" in done.stdout
    if build._processor_features() >= build.NEEDED:
        assert not (home / "kernels").exists(), "the kernels come compiled"
    assert sys.prefix not in done.stderr
