"""The compose file as it is, with a real model: one prefill and one decode worker on CPU answer together."""

from __future__ import annotations

import pytest

from splitserve.client import AsyncClient, ChatMessage
from splitserve.models import models_dir
from tests.support.compose import Compose

pytestmark = [pytest.mark.docker, pytest.mark.timeout(400)]


async def test_one_answer_from_two_containers() -> None:
    stack = Compose(
        "splitserve-e2e-model",
        {
            "COMPOSE_PROFILES": "cpu",
            "MODELS": str(models_dir().parent),  # fetched already
            "PREFILL_OPTIONS": "--threads 1",
            "DECODE_OPTIONS": "--threads 1",
        },
    )
    try:
        await stack.up("--scale", "autoscaler=0")
        async with AsyncClient(stack.target) as client:
            answer = await client.generate(
                [ChatMessage("user", "What is the capital of France?")], max_tokens=16, temperature=0
            )
        assert "Paris" in answer.text
        assert answer.served_by.prefill_worker.startswith("prefill-")
        assert answer.served_by.decode_worker.startswith("decode-")
    except BaseException:
        print(await stack.run("logs", "--no-color", "--tail", "100"))
        raise
    finally:
        await stack.down()
