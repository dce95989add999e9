"""The self-test of a device, at the start of a worker and for `splitserve doctor --device`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from engine.backends.cuda.step_graphs import CudaStepGraphs
from engine.backends.select import choose_backend, paged_attention
from engine.model.loaded_model import LoadedModel
from engine.model.probe import AttentionKind
from engine.runner.self_test.checks import (
    KvShape,
    check_attention,
    check_graphs,
    check_sampling,
    check_transfer,
)
from kv_transfer.transports import make_transport
from kv_transfer.transports.transport import Transport
from splitserve.config.engine import EngineConfig
from splitserve.errors import SplitserveError, UnavailableError
from splitserve.logs import log_event

CheckName = Literal["attention", "graphs", "sampling", "transfer"]
Check = Callable[[], None]
"""Raises if a result is wrong."""
INSTEAD: Mapping[CheckName, str] = {
    "attention": "torch computes attention, without CUDA graphs",
    "graphs": "steps run without CUDA graphs",
    "sampling": "tokens are sampled on the host",
    "transfer": "the worker does not start",
}
"""What happens if a check fails."""
_OFF: Mapping[CheckName, Mapping[str, str]] = {
    "attention": {"attention_backend": "torch", "cuda_graphs": "off"},
    "graphs": {"cuda_graphs": "off"},
    "sampling": {"device_sampling": "off"},
}
MAX_WHY = 300


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check. `why`: one line, empty if the check passed."""

    name: CheckName
    passed: bool
    seconds: float
    why: str = ""


def run_checks(
    checks: Sequence[tuple[CheckName, Check]],
    require_alive: Check,
    clock: Callable[[], float] = time.monotonic,
) -> list[CheckResult]:
    """Runs the checks in order. The check of graphs, which use attention, is left out if that of attention has failed.

    `require_alive` raises if the device has stopped computing, as after an illegal access. Then raises UnavailableError
    (DEVICE_BROKEN), because this process has nothing to fall back to.
    """
    results: list[CheckResult] = []
    for name, check in checks:
        if name == "graphs" and any(result.name == "attention" and not result.passed for result in results):
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
    """The settings with the features off whose checks failed."""
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


GENERAL_SHAPE = KvShape(kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
GENERAL_KINDS = (AttentionKind(32), AttentionKind(32, window=1024, softcap=30.0))
GENERAL_VOCABULARY = 128_256
"""Shapes that are checked if no model is known."""
EXPERIMENTAL = "the CUDA path of this engine is experimental; see docs/internals/engine.md"


def self_tested(
    config: EngineConfig, model: LoadedModel, run: Callable[..., list[CheckResult]] = run_checks
) -> EngineConfig:
    """Checks the kernels for the model's shapes on its device; returns the settings with the failed features off.

    Each failure is logged as a warning that names it. Raises UnavailableError (DEVICE_BROKEN) if the device has stopped
    computing.
    """
    attention, device = model.attention, model.device
    shape = KvShape(attention.num_kv_heads, attention.head_dim, config.block_size_tokens, model.dtype)
    kinds = sorted(attention.kinds, key=str)
    checks = engine_checks(config, shape, kinds, model.facts.vocabulary_size, device)
    with torch.inference_mode():
        results = run(checks, partial(require_alive, device))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    report(results, device)
    return switched_off(config, results)


def engine_checks(
    config: EngineConfig, shape: KvShape, kinds: list[AttentionKind], vocabulary: int, device: torch.device
) -> list[tuple[CheckName, Check]]:
    """The checks of the features that the settings use on this device. torch's attention is the reference: not
    checked."""
    checks: list[tuple[CheckName, Check]] = []
    chosen = choose_backend(config.attention_backend, device)
    if chosen != "torch":
        make = paged_attention
        checks.append(("attention", partial(check_attention, make, shape, kinds, device)))
        if config.cuda_graphs == "auto" and device.type == "cuda":
            checks.append(("graphs", partial(check_graphs, CudaStepGraphs, make, shape, kinds[0], device)))
    if config.device_sampling == "auto":
        checks.append(("sampling", partial(check_sampling, vocabulary, shape.dtype, device)))
    return checks


def require_alive(device: torch.device) -> None:
    """Raises UnavailableError, or the device's own error, if the device has stopped computing."""
    if torch.arange(4, device=device).sum().item() != 6:
        raise UnavailableError(f"{device} adds wrongly", reason="DEVICE_BROKEN")


def report(results: list[CheckResult], device: torch.device) -> None:
    """Logs the results, and a warning for each check that failed."""
    log_event(
        "engine.self_test",
        device=str(device),
        passed=[result.name for result in results if result.passed],
        failed=[result.name for result in results if not result.passed],
        seconds=round(sum(result.seconds for result in results), 2),
    )
    for result in results:
        if not result.passed:
            log_event(
                "engine.self_test_failed",
                level=logging.WARNING,
                check=result.name,
                why=result.why,
                instead=INSTEAD[result.name],
            )


def require_transfer(
    kind: str, device: torch.device, make: Callable[[str], Transport] = make_transport
) -> None:
    """Raises UnavailableError (TRANSFER_SELF_TEST), one sentence, if the transport cannot move the device's memory."""
    try:
        check_transfer(partial(make, kind), device)
    except Exception as error:
        what = f"a write of this process to itself in the memory of {device}"
        message = f"transport {kind}: {what} failed: {one_line(error)}"
        raise UnavailableError(message, reason="TRANSFER_SELF_TEST") from error
