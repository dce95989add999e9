"""The compose file as it is, with a real model: one prefill and one decode worker on CPU answer together."""

from __future__ import annotations

import secrets

import pytest
from openai import AsyncOpenAI

from splitserve.client import AsyncClient, ChatMessage
from splitserve.errors import UnauthenticatedError
from splitserve.models.sources import models_dir
from tests.support.scaling.compose import Compose

MODEL = "smollm2-135m-instruct"
QUESTION = "What is the name of the capital of France?"
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
        async with stack.client() as client:
            answer = await client.generate([ChatMessage("user", QUESTION)], max_tokens=16, temperature=0)
        assert "Paris" in answer.text
        assert answer.served_by.prefill_worker.startswith("prefill-")
        assert answer.served_by.decode_worker.startswith("decode-")
        async with AsyncOpenAI(base_url=f"http://127.0.0.1:{stack.http_port}/v1", api_key=stack.key) as http:
            said = await http.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": QUESTION}], max_tokens=16, temperature=0
            )
        assert said.choices[0].message.content == answer.text
        await check_doors(stack)
        check_kernels(stack)
    except BaseException:
        print(await stack.run("logs", "--no-color", "--tail", "100"))
        raise
    finally:
        await stack.down()


async def check_doors(stack: Compose) -> None:
    """Nobody gets in without the key, which is the operator's own."""
    async with AsyncClient(stack.target) as stranger:
        with pytest.raises(UnauthenticatedError):
            await stranger.generate("Hello", max_tokens=1)
    assert stack.key in await stack.run("run", "--rm", "client", "show-key")
    assert "coordinator" in await stack.run("run", "--rm", "client", "status")


def check_kernels(stack: Compose) -> None:
    """They were compiled with the image, which has no compiler."""
    program = (
        "import shutil, torch; from engine.backends.cpu import build; "
        "print([shutil.which(name) for name in ('c++', 'g++', 'clang++')]); "
        "fits = build._processor_features() >= build.NEEDED; "
        "print(not fits or build.load_library()._name.startswith(str(build.PREBUILT)))"
    )
    assert stack.python("prefill", program).splitlines() == ["[None, None, None]", "True"]
