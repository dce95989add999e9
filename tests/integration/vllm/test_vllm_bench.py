"""vLLM's load tool against a coordinator, as docs/guides/openai-api.md has it."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from splitserve.models.sources import resolve_model
from tests.support.cluster.real_cluster import Cluster, running

REQUESTS, TOKENS = 8, 16
BENCH = (
    "import argparse\n"
    "from vllm.benchmarks.serve import add_cli_args, main\n"
    "parser = argparse.ArgumentParser()\n"
    "add_cli_args(parser)\n"
    "main(parser.parse_args())\n"
)
"""`vllm bench serve`. The package's CPU build has another name than its command asks for the version of."""

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(180)]


async def test_bench_serve_runs_unchanged(tmp_path: Path) -> None:
    async with running(Cluster(tmp_path, http=True)) as cluster:
        options = {
            "backend": "openai-chat",
            "endpoint": "/v1/chat/completions",
            "base-url": cluster.base_url.removesuffix("/v1"),
            "model": "simulated",
            "tokenizer": resolve_model("smollm2-135m-instruct").path,
            "dataset-name": "random",
            "random-input-len": "64",
            "random-output-len": str(TOKENS),
            "num-prompts": str(REQUESTS),
            "max-concurrency": "4",
            "result-dir": str(tmp_path),
            "result-filename": "result.json",
        }
        written = [word for name, value in options.items() for word in (f"--{name}", value)]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", BENCH, *written, "--ignore-eos", "--save-result"
        )
        assert await process.wait() == 0
        await cluster.assert_no_leaks()
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (REQUESTS, 0)
    assert result["total_output_tokens"] == REQUESTS * TOKENS
