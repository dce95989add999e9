"""What `make e2e-docker` runs: Docker Engine, images, the tests marked `docker`, and cleanup."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from dev.docker_engine import install_missing, running_engine
from dev.docker_image import (
    DEFAULT_BASE,
    MADE_BASE,
    base_image,
    build,
    compile_kernels,
    download_wheels,
    python_of,
)
from dev.install_torch import CPU_INDEX

T = TypeVar("T")
TESTS = (
    ("-m", "docker", "tests/e2e"),
    ("-k", "docker", "tests/contract/actuators/test_actuator.py"),
)


def timed(what: str, action: Callable[[], T]) -> T:
    """Runs a step and prints its duration."""
    began = time.monotonic()
    result = action()
    print(f"{what}: {time.monotonic() - began:.0f} s", flush=True)
    return result


def has_base() -> bool:
    """Whether a local base image exists, so that debootstrap is not needed. Unknown without an Engine."""
    for image in (DEFAULT_BASE, MADE_BASE):
        command = ["docker", "image", "inspect", image]
        try:
            if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                return True
        except FileNotFoundError:
            return False
    return False


def main() -> int:
    """Exit code 0 only if all tests passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu-index", default=CPU_INDEX)
    parser.add_argument("--image-only", action="store_true", help="build the images, run no tests")
    args = parser.parse_args()
    timed("packages", lambda: install_missing(base_image_needed=not has_base()))
    with running_engine():
        with ThreadPoolExecutor() as pool:
            kernels = pool.submit(timed, "kernels", compile_kernels)
            base = timed("base image", base_image)
            timed("wheels", lambda: download_wheels(args.cpu_index, python_of(base)))
            kernels.result()
        images = timed("images", lambda: build(base))
        if args.image_only:
            return 0
        environment = os.environ | {"SPLITSERVE_E2E_BASE": base, "SPLITSERVE_E2E_IMAGE": images["worker"]}
        codes = [
            subprocess.run([sys.executable, "-m", "pytest", *tests], env=environment, check=False).returncode
            for tests in TESTS
        ]
    return max(codes)


if __name__ == "__main__":
    raise SystemExit(main())
