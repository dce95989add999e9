"""A worker without files of weights starts with those of a worker that runs, and answers as that one does."""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path

import pytest

from engine.backends.cpu.int8_linears import is_exact
from splitserve.models.hf_tokenizer import load_tokenizer
from splitserve.security.certificates import write_certificates
from splitserve.v1 import inference_pb2
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.waiting import PATIENCE_S

PROMPT = "The three largest rivers of Europe are"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


FLOAT32, INT8 = ("--dtype", "float32"), ("--dtype", "bfloat16", "--quantization", "int8")


@pytest.mark.parametrize(
    ("weights", "least_bytes", "most_bytes"),
    [
        (FLOAT32, 500e6, 600e6),
        pytest.param(
            INT8, 150e6, 200e6, marks=pytest.mark.skipif(not is_exact(), reason="no int8 products here")
        ),
    ],
)
async def test_weights_of_a_running_worker(
    weights: tuple[str, ...],
    least_bytes: float,
    most_bytes: float,
    smollm2: str,
    log_dir: Path,
    tmp_path: Path,
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(smollm2, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    options = [*weights, "--num-blocks", "64", "--served-model-name", "m"]
    options += ["--give-weights", "2"]
    write_certificates(tmp_path / "certs", ["127.0.0.1"], 1)
    setup = Cluster(log_dir, model=smollm2, engine="torch", worker_options=options, tls=tmp_path / "certs")
    prompt = load_tokenizer(smollm2).encode(PROMPT)
    async with running(setup):
        async with setup.client() as client:
            expected = await client.generate(prompt, model="m", temperature=0.0, max_tokens=12)
            late = setup.add_worker("decode", "late", "--model", str(bare), "--weights-from", "auto")
            assert late.wait_event("worker.ready")["start"]["weights_from"] == "peer"
            pulled = late.wait_event("weights.pulled")
            assert pulled["peer"] in {"prefill-0", "decode-0"}
            assert least_bytes < pulled["bytes"] < most_bytes
            await setup.wait_ready(1, 2)
            setup.members["decode-0"].terminate()
            info = await _left_alone(setup)
            assert [w.start.weights_from for w in info.workers if w.worker_id == "late"] == ["peer"]
            answer = await client.generate(prompt, model="m", temperature=0.0, max_tokens=12)
        assert answer.token_ids == expected.token_ids
        await setup.assert_no_leaks()


async def _left_alone(setup: Cluster) -> inference_pb2.GetServerInfoResponse:
    """Waits until the decode worker that had the weights has left."""
    deadline_s = time.monotonic() + PATIENCE_S
    async with setup.client() as client:
        while time.monotonic() < deadline_s:
            info = await client.server_info()
            if {w.worker_id for w in info.workers} == {"prefill-0", "late"}:
                return info
            await asyncio.sleep(0.05)
    raise AssertionError("decode-0 has not left")
