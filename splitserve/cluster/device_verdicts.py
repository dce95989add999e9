"""What `splitserve doctor --device` says of a device, from its self-test's answer. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from splitserve.cluster.doctor import HostVerdict

LEAST_NOMINAL_SHARE = 0.6
"""A device below this share of what its clocks allow is throttled, shared, or a part of one."""
SUBJECTS: Mapping[str, str] = {
    "attention": "attention kernels",
    "graphs": "CUDA graphs",
    "sampling": "sampling on the device",
    "transfer": "KV write to itself",
}


def device_names(gpus: int, visible: str | None) -> list[str]:
    """The devices to test, as `engine.device` names them: all CUDA devices that a process sees, or the cpu.

    `visible`: the variable CUDA_VISIBLE_DEVICES, if set.
    """
    count = gpus if visible is None else len([name for name in visible.split(",") if name.strip()])
    return [f"cuda:{index}" for index in range(min(gpus, count) or 0)] or ["cpu"]


def device_verdicts(answer: Mapping[str, Any]) -> list[HostVerdict]:
    """A verdict on each check and rate; `answer` as `engine.runner.self_test --json` prints it."""
    verdicts = []
    for check in answer["checks"]:
        subject = SUBJECTS[check["name"]]
        if check["passed"]:
            verdicts.append(
                HostVerdict(subject, "ok", f"equals the reference ({check['seconds']:.1f} s)", "")
            )
        else:
            advice = f"a worker warns and goes on: {check['instead']}"
            if check["name"] == "transfer":
                advice = "a worker ends with this error; check the driver, and UCX_TLS if it is set"
            verdicts.append(HostVerdict(subject, "slow", check["why"], advice))
    rates = answer["rates"]
    if rates is not None:
        memory = ("memory", rates["memory_gb_per_s"], "GB/s", rates["nominal_gb_per_s"])
        products = ("bf16 products", rates["bf16_tflops"], "TFLOP/s", rates["nominal_tflops"])
        verdicts.append(_rate(*memory, rates["decode_share"], "a linear layer of 8 rows"))
        verdicts.append(_rate(*products, rates["prompt_share"], "a linear layer of a prompt"))
    return verdicts


def _rate(
    subject: str, measured: float, unit: str, nominal: float | None, share: float, what: str
) -> HostVerdict:
    text = f"{measured:.4g} {unit}"
    if nominal is not None:
        text += f", {measured / nominal:.0%} of its {nominal:.4g}"
    text += f"; {what} reaches {share:.0%} of it"
    if nominal is not None and measured / nominal < LEAST_NOMINAL_SHARE:
        advice = "check its clocks, temperature and other processes: nvidia-smi -q -d PERFORMANCE,PIDS"
        return HostVerdict(subject, "note", text, advice)
    return HostVerdict(subject, "ok", text, "")


def is_broken(verdicts: list[HostVerdict]) -> bool:
    """Whether a check failed."""
    return any(verdict.verdict == "slow" for verdict in verdicts)
