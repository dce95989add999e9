"""A Docker Engine for tests: installed and started if there is none, and then stopped again."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dev.system import debian

PACKAGES = ("docker.io", "docker-compose", "debootstrap", "iptables")
START_S = 60.0
STOP_S = 60.0
LOG = Path("build/dockerd.log")


def engine_answers() -> bool:
    """Whether `docker` reaches an Engine."""
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "version"], capture_output=True, check=False).returncode == 0


def has_compose() -> bool:
    """Whether Compose is there: 2 as a plugin, or docker-compose 1.29."""
    if shutil.which("docker-compose"):
        return True
    plugin = ["docker", "compose", "version"]
    return (
        shutil.which("docker") is not None
        and subprocess.run(plugin, capture_output=True, check=False).returncode == 0
    )


def install_missing(*, base_image_needed: bool) -> None:
    """Installs missing Debian packages. Exits where it lacks permission."""
    missing = (
        (not engine_answers() and shutil.which("dockerd") is None)
        or not has_compose()
        or (base_image_needed and shutil.which("debootstrap") is None)
    )
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise SystemExit(
            "Docker Engine, Compose or debootstrap is missing.\n"
            f"On Debian or Ubuntu: apt-get install {' '.join(PACKAGES)}\n"
            "(as root this command does it itself); elsewhere see https://docs.docker.com/engine/install/"
        )
    print(f"installing {', '.join(PACKAGES)}", flush=True)
    if why := debian.install(*PACKAGES):
        raise SystemExit(why)


@contextmanager
def running_engine() -> Iterator[None]:
    """A responsive Engine. One that already runs is used and left running."""
    if engine_answers():
        yield
        return
    if os.geteuid() != 0:
        raise SystemExit(
            "no Docker Engine answers; start one, or join the group `docker` (root may do neither)"
        )
    LOG.parent.mkdir(exist_ok=True)
    print("starting dockerd", flush=True)
    with LOG.open("wb") as log:
        daemon = subprocess.Popen(["dockerd"], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_S
        while not engine_answers():
            if daemon.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"dockerd does not start:\n{LOG.read_text(errors='replace')[-3000:]}")
            time.sleep(0.3)
        yield
    finally:
        daemon.terminate()
        try:
            daemon.wait(STOP_S)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
