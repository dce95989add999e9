"""`python -m engine.runner.self_test [--device D] [--transport T] [--json]`: the self-test without a model.

It is a process of its own, so that a device that ends it ends nothing else. Exit code 1 if a check failed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from engine.backends.cuda.forward import prepare_device
from engine.runner.device import choose_device
from engine.runner.self_test.checks import check_transfer
from engine.runner.self_test.device_checks import (
    GENERAL_KINDS,
    GENERAL_SHAPE,
    GENERAL_VOCABULARY,
    INSTEAD,
    engine_checks,
    require_alive,
    run_checks,
)
from kv_transfer.transports import make_transport
from splitserve.config.engine import EngineConfig
from splitserve.errors import SplitserveError


def checked_device(name: str, transport: str) -> dict[str, Any]:
    """All checks on a device: `device`, `name` and `checks`.

    Raises ConfigError for a device that is not there, UnavailableError for one that stops working.
    """
    device = choose_device(name)
    on_cuda = device.type == "cuda"
    if on_cuda:
        prepare_device(device)
    with torch.inference_mode():
        checks = engine_checks(EngineConfig(), GENERAL_SHAPE, list(GENERAL_KINDS), GENERAL_VOCABULARY, device)
        checks.append(("transfer", partial(check_transfer, partial(make_transport, transport), device)))
        results = run_checks(checks, partial(require_alive, device))
    return {
        "device": str(device),
        "name": torch.cuda.get_device_name(device) if on_cuda else f"{torch.get_num_threads()} threads",
        "checks": [
            asdict(result) | {"instead": "" if result.passed else INSTEAD[result.name]} for result in results
        ],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m engine.runner.self_test")
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
