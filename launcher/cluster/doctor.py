"""The diagnosis of `splitserve doctor`, from a cluster's lanes and a machine's facts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from splitserve.host_facts import HostFacts
from splitserve.v1 import inference_pb2

Verdict = Literal["ok", "note", "slow"]

ENOUGH_SHARED_MEMORY_BYTES = 2**28
"""Containers get 64 MiB by default."""


@dataclass(frozen=True, slots=True)
class PairVerdict:
    """Verdict on one prefill worker's lane to one decode worker."""

    prefill: str
    decode: str
    lane: str
    gb_per_second: float
    latency_ms: float
    verdict: Verdict
    text: str
    advice: str = ""
    """Empty if nothing is to be done."""


@dataclass(frozen=True, slots=True)
class HostVerdict:
    """Verdict on one fact of this machine."""

    subject: str
    verdict: Verdict
    text: str
    advice: str = ""
    """Empty if nothing is to be done."""


def pair_verdicts(workers: Sequence[inference_pb2.WorkerInfo], host: HostFacts) -> list[PairVerdict]:
    """A verdict on each pair of workers of the same model of which one writes KV to the other."""
    verdicts = []
    for prefill in (worker for worker in workers if worker.role != "decode"):
        lanes = {lane.peer: lane for lane in prefill.lanes}
        for decode in (worker for worker in workers if worker.role != "prefill"):
            if decode.model == prefill.model and decode.worker_id != prefill.worker_id:
                lane = lanes.get(decode.worker_id)
                verdicts.append(_pair_verdict(prefill.worker_id, decode.worker_id, lane, host))
    return verdicts


def _pair_verdict(
    prefill: str, decode: str, lane: inference_pb2.LaneInfo | None, host: HostFacts
) -> PairVerdict:
    if lane is None:
        text, advice = "not measured: the two are not connected", "wait, or read the prefill worker's log"
        return PairVerdict(prefill, decode, "unknown", 0.0, 0.0, "note", text, advice)
    measured = (prefill, decode, lane.lane, lane.gb_per_second, lane.latency_ms)
    if not lane.problem:
        return PairVerdict(*measured, "ok", "as expected")
    text = f"{lane.problem}; the pair is not used" if lane.refused else lane.problem
    return PairVerdict(*measured, "slow", text, _lane_advice(lane.lane, host))


def _lane_advice(lane: str, host: HostFacts) -> str:
    if lane != "tcp":
        return "check for other load on cores and network, then restart the prefill worker to measure again"
    if "UCX_TLS" in host.variables:
        return f"unset UCX_TLS (here: {host.variables['UCX_TLS']}) for the workers, or add sm, cma, cuda and rc to it"
    if host.in_container:
        return "check the workers' UCX_TLS; their containers need a common ipc and pid namespace and CAP_SYS_PTRACE"
    if host.ptrace_scope:
        return "set kernel.yama.ptrace_scope to 0, or give the workers CAP_SYS_PTRACE"
    return "check UCX_TLS and UCX_NET_DEVICES in the workers' environment, and their containers' namespaces"


def host_verdicts(host: HostFacts) -> list[HostVerdict]:
    """A verdict on each fact of this machine that affects lanes."""
    return [
        _shared_memory(host),
        _memlock(host),
        _namespaces(host),
        _ptrace(host),
        HostVerdict(
            "RDMA", "ok", ", ".join(host.rdma_devices) or "no devices: pairs on other machines use TCP"
        ),
        _gpus(host),
        *_variables(host),
    ]


def is_slow(verdicts: Iterable[PairVerdict]) -> bool:
    """Whether any pair is slower than expected."""
    return any(verdict.verdict == "slow" for verdict in verdicts)


def _shared_memory(host: HostFacts) -> HostVerdict:
    size = host.shared_memory_bytes
    if size is None:
        return HostVerdict("shared memory", "note", "/dev/shm does not exist", "mount a tmpfs at /dev/shm")
    text = f"/dev/shm holds {size / 2**20:.0f} MiB"
    if size < ENOUGH_SHARED_MEMORY_BYTES:
        return HostVerdict("shared memory", "note", text, "raise it: shm_size: 1g in a compose file")
    return HostVerdict("shared memory", "ok", text)


def _memlock(host: HostFacts) -> HostVerdict:
    if host.memlock_bytes is None:
        return HostVerdict("locked memory", "ok", "no limit")
    text = f"at most {host.memlock_bytes / 2**20:.0f} MiB"
    if not host.rdma_devices:
        return HostVerdict("locked memory", "ok", f"{text}; matters for RDMA only")
    advice = "RDMA locks the whole KV cache: ulimit -l unlimited (ulimits: memlock: -1 in a compose file)"
    return HostVerdict("locked memory", "note", text, advice)


def _namespaces(host: HostFacts) -> HostVerdict:
    if not host.in_container:
        return HostVerdict("namespaces", "ok", "no container")
    text = "this is a container: shared memory reaches only containers of the same ipc and pid namespace"
    return HostVerdict("namespaces", "note", text, "ipc: and pid: host (or service:NAME) for all workers")


def _ptrace(host: HostFacts) -> HostVerdict:
    if not host.ptrace_scope:
        return HostVerdict("process_vm_writev", "ok", "not restricted by Yama")
    text = f"kernel.yama.ptrace_scope is {host.ptrace_scope}: processes may not write to each other's memory"
    return HostVerdict("process_vm_writev", "note", text, "set it to 0, or give the workers CAP_SYS_PTRACE")


def _gpus(host: HostFacts) -> HostVerdict:
    if not host.gpus:
        return HostVerdict("CUDA", "ok", "no devices: KV lies in main memory")
    if host.in_container:
        text = f"{host.gpus} devices; CUDA IPC needs one ipc namespace for all workers"
        return HostVerdict("CUDA", "note", text, "ipc: host (or service:NAME) for all workers")
    return HostVerdict("CUDA", "ok", f"{host.gpus} devices, CUDA IPC between processes")


def _variables(host: HostFacts) -> list[HostVerdict]:
    advice = "if the workers have it too, it restricts the lanes: unset it unless that is intended"
    judged = {"UCX_NET_DEVICES"} if host.rdma_devices else set()  # by `rdma_verdicts`
    return [
        HostVerdict(name, "note", value, advice)
        for name, value in sorted(host.variables.items())
        if name not in judged
    ]
