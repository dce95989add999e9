"""The self-test of a device, without a model: `python -m dev.gpu_self_test [--device D] [--transport T] [--json]`.

It is a process of its own, so that a device that ends it ends nothing else. Exit code 1 if a check failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from dev.gpu_self_checks import KvShape, check_attention, check_graphs, check_sampling, check_transfer
from engine.backends.cuda.forward import prepare_device
from engine.backends.cuda.step_graphs import CudaStepGraphs
from engine.backends.select import choose_backend, paged_attention
from engine.model.probe import AttentionKind
from engine.runner.device import choose_device
from kv_transfer.transports import make_transport
from splitserve.errors import SplitserveError

Check = Callable[[], None]
"""Raises if a result is wrong."""
SHAPE = KvShape(kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
KINDS = (AttentionKind(32), AttentionKind(32, window=1024, softcap=30.0))
VOCABULARY = 128_256
"""The shapes of a model of 8B parameters."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check. `why`: empty if the check passed."""

    name: str
    passed: bool
    seconds: float
    why: str = ""


def run_checks(
    checks: Sequence[tuple[str, Check]], clock: Callable[[], float] = time.monotonic
) -> list[CheckResult]:
    """Runs the checks in order. Graphs use attention: where its check has failed, they are not checked."""
    results: list[CheckResult] = []
    for name, check in checks:
        if name == "graphs" and any(result.name == "attention" and not result.passed for result in results):
            continue
        began = clock()
        try:
            check()
        except Exception as error:
            results.append(CheckResult(name, False, clock() - began, str(error) or type(error).__name__))
        else:
            results.append(CheckResult(name, True, clock() - began))
    return results


def device_checks(device: torch.device, transport: str) -> list[tuple[str, Check]]:
    """The checks of a device. torch's attention, the one on cpu, is the reference: it is not checked."""
    checks: list[tuple[str, Check]] = []
    if choose_backend("auto", device) != "torch":
        checks.append(("attention", partial(check_attention, paged_attention, SHAPE, KINDS, device)))
        checks.append(
            ("graphs", partial(check_graphs, CudaStepGraphs, paged_attention, SHAPE, KINDS[0], device))
        )
    checks.append(("sampling", partial(check_sampling, VOCABULARY, SHAPE.dtype, device)))
    checks.append(("transfer", partial(check_transfer, partial(make_transport, transport), device)))
    return checks


def checked_device(name: str, transport: str) -> dict[str, Any]:
    """All checks on a device: `device`, `name` and `checks`. Raises ConfigError for a device that is not there."""
    device = choose_device(name)
    on_cuda = device.type == "cuda"
    if on_cuda:
        prepare_device(device)
    with torch.inference_mode():
        results = run_checks(device_checks(device, transport))
    return {
        "device": str(device),
        "name": torch.cuda.get_device_name(device) if on_cuda else f"{torch.get_num_threads()} threads",
        "checks": [asdict(result) for result in results],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m dev.gpu_self_test")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda or cuda:N")
    parser.add_argument("--transport", default="nixl", choices=("nixl", "ucx"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    try:
        verdict = checked_device(options.device, options.transport)
    except SplitserveError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(verdict, indent=2))
    else:
        for check in verdict["checks"]:
            print(f"{check['name']}: {'ok' if check['passed'] else check['why']}")
    return 0 if all(check["passed"] for check in verdict["checks"]) else 1


if __name__ == "__main__":
    sys.exit(main())
