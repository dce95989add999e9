"""The whole system over each transport that reaches other processes, and workers whose transports differ."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from splitserve.client import AsyncClient
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.engine.simulated_tokens import expected_tokens
from tests.support.transfer.ucx import require_ucx
from tests.support.waiting import PATIENCE_S

PROMPTS = [[1, 2, 3], list(range(5, 105)), [number % 251 for number in range(2000)]]
MAX_TOKENS = 12

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(params=["nixl", "ucx"])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "ucx":
        require_ucx()
    return str(request.param)


@pytest.mark.parametrize("big", [False, True], ids=["small blocks", "big blocks"])
async def test_answers_are_the_expected_ones(log_dir: Path, kind: str, big: bool) -> None:
    options = ["--transport", kind, "--max-step-tokens", "256"]
    if big:
        options += ["--block-size", "1024", "--num-blocks", "64"]
    async with running(Cluster(log_dir, worker_options=options)) as cluster:
        async with AsyncClient(cluster.target) as client:
            for prompt in PROMPTS:
                answer = await client.generate(prompt, max_tokens=MAX_TOKENS)
                assert list(answer.token_ids) == expected_tokens(prompt, MAX_TOKENS)
                assert answer.served_by.transport == kind
        await cluster.assert_no_leaks()


async def test_another_transport_is_refused_at_registration(log_dir: Path, kind: str) -> None:
    other = "ucx" if kind == "nixl" else "nixl"
    require_ucx()
    async with running(Cluster(log_dir, worker_options=["--transport", kind])) as cluster:
        odd = cluster.add_worker("prefill", "odd", "--transport", other)
        assert odd.process.wait(PATIENCE_S) != 0
        reason = rf"transport differs from (prefill|decode) worker \S+: '{other}' here, '{kind}' there"
        assert re.search(reason, odd.log_tail())
        async with AsyncClient(cluster.target) as client:
            names = {worker.worker_id for worker in (await client.server_info()).workers}
            answer = await client.generate(PROMPTS[0], max_tokens=4)
        assert names == {"prefill-0", "decode-0"}
        assert list(answer.token_ids) == expected_tokens(PROMPTS[0], 4)


async def test_planned_faults_cost_time_and_no_token(log_dir: Path) -> None:
    faults = {"latency_s": 0.02, "duplicate_notification": {"every": 2}, "late_write": {"at": [9]}}
    async with running(Cluster(log_dir, faults=faults)) as cluster:
        event = cluster.members["prefill-0"].wait_event("worker.faults_on")
        assert event["level"] == "warning"
        async with AsyncClient(cluster.target) as client:
            for number, prompt in enumerate(PROMPTS * 2):
                # A prompt of its own each time: what decode has cached is not sent again.
                answer = await client.generate([number, *prompt], max_tokens=MAX_TOKENS)
                assert list(answer.token_ids) == expected_tokens([number, *prompt], MAX_TOKENS)
        assert cluster.members["prefill-0"].wait_event("fault.injected")
        await cluster.assert_no_leaks()
