"""What `splitserve doctor` says of a machine's RDMA set-up: nothing where all is well, one sentence on what is not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.cli.main import main
from launcher.cluster.doctor import HostVerdict, host_verdicts
from launcher.cluster.rdma_verdicts import rdma_verdicts
from splitserve.gpus.rdma import RdmaFacts, read_rdma_facts
from splitserve.host_facts import read_host_facts
from tests.support.gpus.kernel_files import two_sockets


@pytest.fixture
def facts(tmp_path: Path) -> RdmaFacts:
    return read_rdma_facts(two_sockets().write(tmp_path))


def wrong(verdicts: list[HostVerdict]) -> dict[str, str]:
    """What is to be done, by subject."""
    assert all(bool(verdict.advice) == (verdict.verdict != "ok") for verdict in verdicts)
    return {verdict.subject: verdict.advice for verdict in verdicts if verdict.advice}


def test_a_machine_without_rdma_has_no_verdicts() -> None:
    assert rdma_verdicts(RdmaFacts(), {"UCX_NET_DEVICES": "mlx5_0:1"}) == []


def test_a_good_machine_needs_nothing(facts: RdmaFacts) -> None:
    verdicts = rdma_verdicts(facts, {})
    assert wrong(verdicts) == {}
    said = {verdict.subject: verdict.text for verdict in verdicts}
    assert said["GPU 0 (0000:18:00.0)"] == "nearest mlx5_0:1, one PCIe switch"
    assert said["RDMA ports"] == "mlx5_0:1 ACTIVE (InfiniBand), mlx5_1:1 ACTIVE (InfiniBand)"


@pytest.mark.parametrize(
    ("variables", "subject", "advice"),
    [
        ({"UCX_TLS": "tcp,sm"}, "RDMA lanes", "unset UCX_TLS, or add rc to it"),
        ({"UCX_TLS": "^ib"}, "RDMA lanes", "unset UCX_TLS"),
        ({"UCX_NET_DEVICES": "mlx5_0"}, "NIC pinning", "name a port: mlx5_0:1"),
        ({"UCX_NET_DEVICES": "mlx5_0:2"}, "NIC pinning", "mlx5_0 has no port 2"),
        ({"UCX_NET_DEVICES": "mlx5_7:1,eth0"}, "NIC pinning", "mlx5_7:1 does not exist on this machine"),
        ({"UCX_NET_DEVICES": "eth0"}, "NIC pinning", "no RDMA port is among them"),
        ({"UCX_NET_DEVICES": "mlx5_0:1"}, "GPU 1 (0000:98:00.0)", "UCX_NET_DEVICES=mlx5_1:1"),
    ],
)
def test_settings_that_need_a_change(
    facts: RdmaFacts, variables: dict[str, str], subject: str, advice: str
) -> None:
    found = wrong(rdma_verdicts(facts, variables))
    assert list(found) == [subject]
    assert advice in found[subject]


@pytest.mark.parametrize(
    "variables", [{"UCX_TLS": "rc,cuda_copy"}, {"UCX_TLS": "^tcp"}, {"UCX_NET_DEVICES": "all"}]
)
def test_settings_that_do(facts: RdmaFacts, variables: dict[str, str]) -> None:
    assert wrong(rdma_verdicts(facts, variables)) == {}


def test_only_the_gpus_in_view_are_judged(facts: RdmaFacts) -> None:
    for visible in ("1", "GPU-b"):
        verdicts = rdma_verdicts(facts, {"UCX_NET_DEVICES": "mlx5_1:1"}, visible)
        assert wrong(verdicts) == {}
        assert not any(verdict.subject.startswith("GPU 0") for verdict in verdicts)


def test_facts_that_need_a_change(facts: RdmaFacts) -> None:
    down = tuple(replace(port, state="DOWN") for port in facts.ports)
    assert "no port is ACTIVE" in wrong(rdma_verdicts(replace(facts, ports=down), {}))["RDMA ports"]
    half = wrong(rdma_verdicts(replace(facts, ports=(down[0], facts.ports[1])), {}))
    assert "bring up mlx5_0:1" in half["RDMA ports"]
    assert "NUMA node" in half["GPU 0 (0000:18:00.0)"]
    pinned = rdma_verdicts(replace(facts, ports=(down[0], facts.ports[1])), {"UCX_NET_DEVICES": "mlx5_0:1"})
    assert "mlx5_0:1 is DOWN" in wrong(pinned)["NIC pinning"]
    closed = wrong(rdma_verdicts(replace(facts, unopenable=("mlx5_0",)), {}))
    assert "RDMA_DEVICES=/dev/infiniband" in closed["RDMA device files"]
    plain = wrong(rdma_verdicts(replace(facts, peer_memory=False), {}))
    assert "modprobe nvidia_peermem" in plain["GPUDirect RDMA"]
    assert "GPUDirect RDMA" not in wrong(rdma_verdicts(replace(facts, peer_memory=False, gpus=()), {}))


def test_a_pinned_port_is_judged_once() -> None:
    host = replace(read_host_facts(), rdma_devices=("mlx5_0",), variables={"UCX_NET_DEVICES": "mlx5_0:1"})
    assert "UCX_NET_DEVICES" not in {verdict.subject for verdict in host_verdicts(host)}


def test_the_machine_alone_needs_no_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--machine", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["pairs"] == []
    assert "shared memory" in {fact["subject"] for fact in document["host"]}
    assert main(["doctor", "--machine"]) == 0
    assert capsys.readouterr().out.startswith("this machine\n")
