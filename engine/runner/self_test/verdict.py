"""What a device got right, and what the engine goes without where it did not. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from splitserve.config.engine import EngineConfig
from splitserve.errors import SplitserveError, UnavailableError

CheckName = Literal["attention", "graphs", "sampling", "transfer"]
Check = Callable[[], None]
"""Raises where a result is wrong."""
INSTEAD: Mapping[CheckName, str] = {
    "attention": "torch computes attention, without CUDA graphs",
    "graphs": "steps run without CUDA graphs",
    "sampling": "tokens are sampled on the host",
    "transfer": "the worker does not start",
}
"""What happens where a check fails."""
_OFF: Mapping[CheckName, Mapping[str, str]] = {
    "attention": {"attention_backend": "torch", "cuda_graphs": "off"},
    "graphs": {"cuda_graphs": "off"},
    "sampling": {"device_sampling": "off"},
}
MAX_WHY = 300


class WrongResultError(AssertionError):
    """What was computed differs from the reference."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check. `why`: one line, where it failed."""

    name: CheckName
    passed: bool
    seconds: float
    why: str = ""


def run_checks(
    checks: Sequence[tuple[CheckName, Check]],
    require_alive: Check,
    clock: Callable[[], float] = time.monotonic,
) -> list[CheckResult]:
    """Runs the checks in order; graphs are left out after attention has failed, which is part of them.

    `require_alive` raises where the device computes nothing any more, as after an illegal access. Raises
    UnavailableError (DEVICE_BROKEN) then: there is nothing to fall back to in this process.
    """
    results: list[CheckResult] = []
    for name, check in checks:
        if name == "graphs" and any(found.name == "attention" and not found.passed for found in results):
            continue
        began = clock()
        try:
            check()
        except Exception as error:
            why = one_line(error)
            results.append(CheckResult(name, False, clock() - began, why))
            try:
                require_alive()
            except Exception as after:
                raise UnavailableError(_broken(name, why), reason="DEVICE_BROKEN") from after
        else:
            results.append(CheckResult(name, True, clock() - began))
    return results


def _broken(name: CheckName, why: str) -> str:
    settings = _OFF.get(name, {})
    without = " ".join(f"--{field.replace('_', '-')} {value}" for field, value in settings.items())
    advice = f"; to start without it: {without}" if without else ""
    return f"the device stopped working in its self-test of {name} ({why}){advice}"


def switched_off(config: EngineConfig, results: Iterable[CheckResult]) -> EngineConfig:
    """The settings without what failed."""
    changes: dict[str, str] = {}
    for result in results:
        if not result.passed:
            changes |= _OFF.get(result.name, {})
    return config.model_copy(update=changes) if changes else config


def one_line(error: BaseException) -> str:
    """An error's message in one line of bounded length."""
    text = error.message if isinstance(error, SplitserveError) else str(error)
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    return first[:MAX_WHY]
