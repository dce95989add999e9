"""`splitserve doctor --device`: the engine's self-test on each device of this machine, in a process each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from splitserve.cluster.device_verdicts import device_names, device_verdicts
from splitserve.cluster.doctor import HostVerdict
from splitserve.host_facts import read_host_facts
from splitserve.runtime.process import number_devices_like_nvidia_smi

TEST = (sys.executable, "-m", "engine.runner.self_test", "--rates", "--json", "--device")
LIMIT_S = 300.0
"""Kernels are compiled at the first run."""


def all_devices() -> list[str]:
    """What there is to test here."""
    return device_names(read_host_facts().gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))


def self_test_of(
    device: str, command: Sequence[str] | None = None, limit_s: float = LIMIT_S
) -> tuple[str, list[HostVerdict]]:
    """The device with its name, and the verdicts. A test that ends without an answer is a verdict, too."""
    number_devices_like_nvidia_smi()
    try:
        ended = subprocess.run(
            [*(command or TEST), device], capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return device, [_unanswered(f"did not end in {limit_s:.0f} s")]
    try:
        answer: dict[str, Any] = json.loads(ended.stdout)
    except ValueError:
        lines = [line for line in ended.stderr.splitlines() if line.strip()]
        why = lines[-1].removeprefix("error: ") if lines else "no output"
        if ended.returncode < 0:
            why = f"signal {-ended.returncode}; {why}"
        return device, [_unanswered(f"ended with {why}" if ended.returncode < 0 else why)]
    return f"{device} ({answer['name']})", device_verdicts(answer)


def _unanswered(why: str) -> HostVerdict:
    advice = "workers on this device will not start, or end; check its driver: nvidia-smi"
    return HostVerdict("self-test", "slow", why, advice)
