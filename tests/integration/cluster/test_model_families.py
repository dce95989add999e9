"""Every supported family of models gives `transformers`' greedy output through a split pair, in float32."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from pathlib import Path

import pytest

from splitserve.client import AsyncClient
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.engine.reference import Reference
from tests.support.engine.tiny_models import FAMILIES, make_tiny_model
from tests.support.waiting import PATIENCE_S

BLOCK = 8
CHUNK = 32
MAX_TOKENS = 10
LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 75, 100]

FIRST = ("llama", "gemma2")
"""The families of `make test`: the plainest, and one with windows and soft caps. `make test-all` takes all."""

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in FIRST else [pytest.mark.slow]) for name in FAMILIES]
)
async def test_family_through_a_split_pair(
    family: str, tmp_path_factory: pytest.TempPathFactory, log_dir: Path
) -> None:
    folder = make_tiny_model(family, tmp_path_factory.getbasetemp() / "tiny")
    pick = random.Random(7)
    prompts = [[pick.randrange(1, 250) for _ in range(length)] for length in LENGTHS]
    reference = Reference(str(folder))
    expected = [reference.greedy(prompt, MAX_TOKENS) for prompt in prompts]
    options = ["--dtype", "float32", "--block-size", str(BLOCK), "--max-step-tokens", str(CHUNK)]
    cluster = Cluster(
        log_dir, model=str(folder), engine="torch", worker_options=[*options, "--num-blocks", "256"]
    )
    async with running(cluster), AsyncClient(cluster.target, timeout_s=PATIENCE_S) as client:
        tasks = [client.generate(p, temperature=0.0, max_tokens=MAX_TOKENS) for p in prompts]
        answers = await asyncio.gather(*tasks)
        await cluster.assert_no_leaks()
    assert [list(answer.token_ids) for answer in answers] == expected


@pytest.mark.slow
def test_unsupported_family_is_refused_with_the_reason(tmp_path: Path) -> None:
    folder = make_tiny_model("mamba", tmp_path)
    command = [sys.executable, "-m", "launcher", "prefill-worker", "--model", str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert run.returncode != 0
    assert "mamba" in run.stderr.lower()
    assert "Traceback" not in run.stderr
