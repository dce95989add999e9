"""Several coordinators of a local cluster: each has its own ports, and workers register with all of them."""

from __future__ import annotations

from pathlib import Path

from bench.cluster import cluster_specs
from launcher.cluster.process_specs import each_coordinator
from splitserve.config.cluster import ClusterConfig
from splitserve.config.coordinator import CoordinatorConfig

COORDINATOR = CoordinatorConfig(grpc_port=4000, http_port=8000)


def test_ports_follow_each_other_and_workers_know_all() -> None:
    config = ClusterConfig(model="simulated", coordinators=3, coordinator=COORDINATOR)
    seen = [(c.coordinator.grpc_port, c.coordinator.http_port) for c in each_coordinator(config)]
    assert seen == [(4000, 8000), (4001, 8001), (4002, 8002)]
    specs = {spec.name: spec.command for spec in cluster_specs(config, [0, 1])}
    assert [name for name in specs if name.startswith("coordinator")] == [
        "coordinator",
        "coordinator-1",
        "coordinator-2",
    ]
    for worker in ("prefill-0", "decode-0"):
        assert [a for a in specs[worker] if a.startswith("127.0.0.1:400")] == [
            "127.0.0.1:4000",
            "127.0.0.1:4001",
            "127.0.0.1:4002",
        ]


def test_with_tls_every_coordinator_has_two_grpc_ports() -> None:
    coordinator = COORDINATOR.model_copy(update={"cluster_port": 4001, "http_port": None})
    config = ClusterConfig(model="simulated", coordinators=2, coordinator=coordinator, tls=Path("certs"))
    second = each_coordinator(config)[1].coordinator
    assert (second.grpc_port, second.cluster_port, second.http_port) == (4002, 4003, None)
