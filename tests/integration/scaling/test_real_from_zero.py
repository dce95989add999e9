"""`splitserve up --autoscale` with SmolLM2: from zero, by the idle timeout to zero, and from zero once more."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from splitserve.models.hf_tokenizer import load_tokenizer
from tests.support.clients.patient import PatientClient
from tests.support.clients.text import sentences
from tests.support.cluster.real_cluster import held_resources
from tests.support.cluster.streams import eventually
from tests.support.engine.reference import Reference
from tests.support.scaling.scaled_up import scaled_up
from tests.support.waiting import PATIENCE_S

START_S = 150.0
MAX_TOKENS = 6
POOL = {"kind": "slo", "min_replicas": 0, "max_replicas": 1, "gpus_per_replica": 0, "cold_start_s": 20}
POLICY = {
    "interval_s": 0.5,
    "idle_s": 1.0,
    "prefill": POOL | {"target_ms": 2000},
    "decode": POOL | {"target_ms": 500},
}
SETTINGS = {"engine": {"dtype": "float32", "threads": 1, "num_blocks": 256}}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


async def test_answers_from_zero_are_right_and_nothing_is_left(smollm2: str, log_dir: Path) -> None:
    prompt = load_tokenizer(smollm2).encode(sentences(3, 1))[:40]
    expected = Reference(smollm2).greedy(prompt, MAX_TOKENS)
    async with scaled_up(log_dir, POLICY, SETTINGS) as up, PatientClient(up.target) as client:

        def at_zero() -> bool:
            return len(up.children()) == 1  # the coordinator

        for _ in range(2):
            await eventually(at_zero, "its workers have ended")
            (model,) = await client.models()
            assert model.ready
            began_s = time.monotonic()
            answer = await client.generate(
                prompt, temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, timeout_s=START_S
            )
            assert list(answer.token_ids) == expected
            assert answer.timings.ttft_ms / 1e3 <= time.monotonic() - began_s
            deadline = time.monotonic() + PATIENCE_S
            while held := held_resources(await client.server_info()):
                assert time.monotonic() < deadline, held
        await eventually(at_zero, "its workers have ended")
        assert not held_resources(await client.server_info())
