"""The compose file as it is, with a real model: one prefill and one decode worker on CPU answer together."""

from __future__ import annotations

import secrets

import pytest
from openai import AsyncOpenAI

from splitserve.client import AsyncClient, ChatMessage
from splitserve.models import models_dir
from tests.support.compose import Compose

MODEL = "smollm2-135m-instruct"
QUESTION = "What is the capital of France?"
pytestmark = [pytest.mark.docker, pytest.mark.timeout(400)]


async def test_one_answer_from_two_containers() -> None:
    stack = Compose(
        "splitserve-e2e-model",
        {
            "COMPOSE_PROFILES": "cpu",
            "MODELS": str(models_dir().parent),  # fetched already
            "PREFILL_OPTIONS": "--threads 1",
            "DECODE_OPTIONS": "--threads 1",
            "SPLITSERVE_CLUSTER_TOKEN": secrets.token_urlsafe(24),
        },
    )
    try:
        await stack.up("--scale", "autoscaler=0")
        async with AsyncClient(stack.target) as client:
            answer = await client.generate([ChatMessage("user", QUESTION)], max_tokens=16, temperature=0)
        assert "Paris" in answer.text
        assert answer.served_by.prefill_worker.startswith("prefill-")
        assert answer.served_by.decode_worker.startswith("decode-")
        async with AsyncOpenAI(base_url=f"http://127.0.0.1:{stack.http_port}/v1", api_key="none") as http:
            said = await http.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": QUESTION}], max_tokens=16, temperature=0
            )
        assert said.choices[0].message.content == answer.text
    except BaseException:
        print(await stack.run("logs", "--no-color", "--tail", "100"))
        raise
    finally:
        await stack.down()
