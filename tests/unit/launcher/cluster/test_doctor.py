"""Verdicts of `splitserve doctor` from given lanes and facts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.cluster.doctor import host_verdicts, is_slow, pair_verdicts
from splitserve.host_facts import HostFacts, network_bytes_sent, read_host_facts
from splitserve.v1 import inference_pb2

HOST = HostFacts(
    shared_memory_bytes=2**30,
    memlock_bytes=None,
    in_container=False,
    rdma_devices=(),
    gpus=0,
    ptrace_scope=0,
    variables={},
)


def workers(*lanes: inference_pb2.LaneInfo) -> list[inference_pb2.WorkerInfo]:
    return [
        inference_pb2.WorkerInfo(worker_id="d0", role="decode", model="m"),
        inference_pb2.WorkerInfo(worker_id="d1", role="decode", model="other"),
        inference_pb2.WorkerInfo(worker_id="p0", role="prefill", model="m", lanes=lanes),
    ]


def a_lane(problem: str = "", **fields: object) -> inference_pb2.LaneInfo:
    values = {"peer": "d0", "lane": "tcp", "gb_per_second": 2.5, "latency_ms": 0.1, "problem": problem}
    return inference_pb2.LaneInfo(**(values | fields))  # type: ignore[arg-type]


def test_a_good_pair() -> None:
    (pair,) = pair_verdicts(workers(a_lane(lane="local")), HOST)
    assert (pair.prefill, pair.decode, pair.lane, pair.verdict) == ("p0", "d0", "local", "ok")
    assert (pair.gb_per_second, pair.latency_ms, pair.advice) == (2.5, 0.1, "")
    assert not is_slow([pair])


def test_a_pair_without_a_lane_is_told_but_not_slow() -> None:
    pairs = pair_verdicts(workers(), HOST)
    assert [pair.verdict for pair in pairs] == ["note"]
    assert not is_slow(pairs)


@pytest.mark.parametrize(
    ("host", "named"),
    [
        (HOST, "UCX_TLS and UCX_NET_DEVICES"),
        (replace(HOST, variables={"UCX_TLS": "tcp"}), "unset UCX_TLS (here: tcp)"),
        (replace(HOST, in_container=True), "ipc"),
        (replace(HOST, ptrace_scope=1), "ptrace_scope"),
    ],
)
def test_a_slow_pair_says_what_to_change(host: HostFacts, named: str) -> None:
    pairs = pair_verdicts(workers(a_lane("2.50 GB/s over tcp", refused=True)), host)
    assert is_slow(pairs)
    assert pairs[0].text == "2.50 GB/s over tcp; the pair is not used"
    assert named in pairs[0].advice


def test_a_slow_lane_that_is_not_tcp_blames_the_load() -> None:
    (pair,) = pair_verdicts(workers(a_lane("0.10 GB/s over local", lane="local")), HOST)
    assert "load" in pair.advice


@pytest.mark.parametrize(
    ("changed", "subject", "advice"),
    [
        ({"shared_memory_bytes": 2**26}, "shared memory", "shm_size"),
        ({"shared_memory_bytes": None}, "shared memory", "tmpfs"),
        ({"memlock_bytes": 2**23, "rdma_devices": ("mlx5_0",)}, "locked memory", "ulimit -l"),
        ({"in_container": True}, "namespaces", "ipc"),
        ({"in_container": True, "gpus": 2}, "CUDA", "ipc"),
        ({"ptrace_scope": 1}, "process_vm_writev", "SYS_PTRACE"),
        ({"variables": {"UCX_NET_DEVICES": "eth0"}}, "UCX_NET_DEVICES", "unset"),
    ],
)
def test_facts_that_need_a_change(changed: dict[str, object], subject: str, advice: str) -> None:
    verdict = next(v for v in host_verdicts(replace(HOST, **changed)) if v.subject == subject)  # type: ignore[arg-type]
    assert verdict.verdict == "note"
    assert advice in verdict.advice


def test_a_good_machine_needs_nothing() -> None:
    for host in (HOST, replace(HOST, rdma_devices=("mlx5_0",), gpus=8)):
        assert {(v.verdict, v.advice) for v in host_verdicts(host)} == {("ok", "")}


def test_this_machine_can_be_read() -> None:
    assert len(host_verdicts(read_host_facts())) >= 6
    sent = network_bytes_sent()
    assert sent is None or sent >= 0
