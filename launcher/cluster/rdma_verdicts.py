"""The verdicts of `splitserve doctor` on RDMA: ports, device files, and which network card each GPU uses. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher.cluster.doctor import HostVerdict
from splitserve.gpus.rdma import IN_WORDS, Nearness, PlacedGpu, RdmaFacts, RdmaPort, nearest_ports, nearness
from splitserve.gpus.worker_gpus import NICS_VARIABLE, is_own

RDMA_LANES = (
    "all",
    "ib",
    "rc",
    "rc_v",
    "rc_x",
    "rc_verbs",
    "rc_mlx5",
    "dc",
    "dc_x",
    "dc_mlx5",
    "ud",
    "ud_v",
    "ud_x",
)
"""Names in UCX_TLS that let a transfer go over RDMA."""


def rdma_verdicts(
    facts: RdmaFacts, variables: Mapping[str, str], visible: str | None = None
) -> list[HostVerdict]:
    """A verdict on each part of the RDMA set-up; none where there are no ports.

    `variables`: UCX_TLS and UCX_NET_DEVICES, if set. `visible`: CUDA_VISIBLE_DEVICES, if set; without it all GPUs
    count as those of the workers here.
    """
    if not facts.ports:
        return []
    verdicts = [_ports(facts.ports), _files(facts), _lanes(variables)]
    if facts.gpus:
        verdicts.append(_peer_memory(facts))
    pinned = [name for name in variables.get(NICS_VARIABLE, "").split(",") if name and name != "all"]
    if pinned:
        verdicts.append(_pinned(pinned, facts.ports))
    own = [name for name in (visible or "").split(",") if name]
    gpus = [gpu for gpu in facts.gpus if is_own(gpu.gpu, own)]
    return [*verdicts, *(_locality(gpu, facts.ports, pinned) for gpu in gpus)]


def _ports(ports: Sequence[RdmaPort]) -> HostVerdict:
    down = [port for port in ports if not port.active]
    text = ", ".join(f"{port.name} {port.state} ({port.link_layer})" for port in ports)
    if len(down) == len(ports):
        return HostVerdict(
            "RDMA ports", "note", text, "no port is ACTIVE: check cables, switch and subnet manager"
        )
    if down:
        names = ", ".join(port.name for port in down)
        return HostVerdict("RDMA ports", "note", text, f"bring up {names}, or keep it out of UCX_NET_DEVICES")
    return HostVerdict("RDMA ports", "ok", text)


def _files(facts: RdmaFacts) -> HostVerdict:
    if not facts.unopenable:
        return HostVerdict("RDMA device files", "ok", "/dev/infiniband can be opened")
    text = f"/dev/infiniband has no file for {', '.join(facts.unopenable)} that may be opened here"
    advice = "give the containers the devices: RDMA_DEVICES=/dev/infiniband (devices: in a compose file)"
    return HostVerdict("RDMA device files", "note", text, advice)


def _lanes(variables: Mapping[str, str]) -> HostVerdict:
    lanes = variables.get("UCX_TLS", "all")
    named = set(RDMA_LANES).intersection(lanes.removeprefix("^").split(","))
    if bool(named) != lanes.startswith("^"):  # "^" excludes the named lanes
        return HostVerdict("RDMA lanes", "ok", f"UCX_TLS allows them ({lanes})")
    return HostVerdict(
        "RDMA lanes", "note", f"UCX_TLS={lanes} leaves RDMA out", "unset UCX_TLS, or add rc to it"
    )


def _peer_memory(facts: RdmaFacts) -> HostVerdict:
    if facts.peer_memory:
        return HostVerdict("GPUDirect RDMA", "ok", "the module nvidia_peermem is loaded")
    text = "the module nvidia_peermem is not loaded, so network cards reach the memory of GPUs by dma-buf or not at all"
    return HostVerdict(
        "GPUDirect RDMA", "note", text, "modprobe nvidia_peermem, unless the driver's open modules are used"
    )


def _pinned(pinned: Sequence[str], ports: Sequence[RdmaPort]) -> HostVerdict:
    advice = _pinning_advice(pinned, ports)
    return HostVerdict(
        "NIC pinning", "note" if advice else "ok", f"{NICS_VARIABLE}={','.join(pinned)}", advice
    )


def _pinning_advice(pinned: Sequence[str], ports: Sequence[RdmaPort]) -> str:
    """What to change in UCX_NET_DEVICES, which names the ports `pinned`; empty: nothing."""
    known = {port.name: port for port in ports}
    devices = {port.device for port in ports}
    for name in pinned:
        device, colon, number = name.partition(":")
        if device in devices and not colon:
            return f"name a port: {device}:1 in place of {device}"
        if device in devices and name not in known:
            return f"{device} has no port {number}"
        if name in known and not known[name].active:
            return f"{name} is {known[name].state}: name an active port"
    if missing := [name for name in pinned if name not in known and ":" in name]:
        return f"{missing[0]} does not exist on this machine"
    if not any(name in known for name in pinned):
        return "no RDMA port is among them: add one, or transfers take TCP"
    return ""


def _locality(gpu: PlacedGpu, ports: Sequence[RdmaPort], pinned: Sequence[str]) -> HostVerdict:
    subject = f"GPU {gpu.gpu.index} ({gpu.gpu.address})"
    nearest = nearest_ports(gpu, ports)
    if not nearest:
        return HostVerdict(subject, "note", "no active RDMA port", "bring one up, or its transfers take TCP")
    best = nearness(gpu.place, nearest[0].place)
    names = ", ".join(port.name for port in nearest)
    used = [port for port in ports if port.name in pinned and port.active]
    if not used or any(port in nearest for port in used):
        if best is Nearness.SYSTEM:
            advice = "put a network card on its NUMA node, or give the workers other GPUs"
            return HostVerdict(subject, "note", f"nearest {names}, {IN_WORDS[best]}", advice)
        return HostVerdict(subject, "ok", f"nearest {names}, {IN_WORDS[best]}")
    pinned_nearness = min(nearness(gpu.place, port.place) for port in used)
    text = (
        f"{', '.join(port.name for port in used)} is pinned, {IN_WORDS[pinned_nearness]}; "
        f"{names} is nearer, {IN_WORDS[best]}"
    )
    advice = f"UCX_NET_DEVICES={','.join(port.name for port in nearest)} for its worker, or --nics nearest"
    return HostVerdict(subject, "note", text, advice)
