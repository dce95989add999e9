"""Wrong inputs and missing parts: one clear typed error each; on the command line one line, no traceback."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from splitserve.errors import InvalidArgumentError, NotFoundError, SplitserveError
from splitserve.rpc.channel import make_channel
from splitserve.rpc.status import error_from_rpc
from splitserve.v1 import inference_pb2
from splitserve.v1.inference_pb2_grpc import InferenceServiceStub
from tests.support.clients.patient import PatientClient
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.waiting import PATIENCE_S

CONTEXT = 256

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    options = ["--context-tokens", str(CONTEXT), "--num-blocks", "64"]
    async with running(Cluster(tmp_path_factory.mktemp("logs"), worker_options=options)) as cluster:
        yield cluster


def cli(*arguments: str, stdin: bytes | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launcher", *arguments]
    text = None if stdin is None else stdin.decode()
    return subprocess.run(
        command, capture_output=True, text=True, input=text, timeout=PATIENCE_S, check=False
    )


def assert_one_line(run: subprocess.CompletedProcess[str], *words: str) -> None:
    assert run.returncode != 0
    assert "Traceback" not in run.stderr
    lines = [line for line in run.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, run.stderr
    for word in words:
        assert word in lines[0], run.stderr


BAD: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": 1e9}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"min_p": -1.0}, "min_p"),
    ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ({"presence_penalty": 3.0}, "presence_penalty"),
    ({"frequency_penalty": float("inf")}, "frequency_penalty"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": CONTEXT + 1}, "max_tokens"),
    ({"logprobs": 21}, "logprobs"),
    ({"stop": [""]}, "stop"),
    ({"priority": 101}, "priority"),
    ({"request_id": "a b"}, "request_id"),
]


@pytest.mark.parametrize(("arguments", "field"), BAD, ids=lambda value: str(value)[:40])
async def test_out_of_range_parameters(cluster: Cluster, arguments: dict[str, Any], field: str) -> None:
    async with PatientClient(cluster.target) as client:
        with pytest.raises(InvalidArgumentError) as raised:
            await client.generate("hello", **arguments)
    assert field in str(raised.value.field)
    assert field in str(raised.value)
    await cluster.assert_no_leaks()


@pytest.mark.parametrize(
    ("prompt", "word"), [("", "empty"), ([], "empty"), ([999_999], "0..256"), ([1] * CONTEXT, str(CONTEXT))]
)
async def test_impossible_prompts(cluster: Cluster, prompt: str | list[int], word: str) -> None:
    async with PatientClient(cluster.target) as client:
        with pytest.raises(InvalidArgumentError) as raised:
            await client.generate(prompt)
    assert word in str(raised.value)


async def test_unknown_model(cluster: Cluster) -> None:
    async with PatientClient(cluster.target) as client:
        with pytest.raises(NotFoundError, match="no-such-model"):
            await client.generate("hello", model="no-such-model")


async def test_a_message_of_a_hundred_megabytes_hurts_nobody(cluster: Cluster) -> None:
    async with PatientClient(cluster.target) as client:
        with pytest.raises(SplitserveError):
            await client.generate("x" * 100_000_000)
        answer = await client.generate("hello", max_tokens=3)
    assert len(answer.token_ids) == 3
    await cluster.assert_no_leaks()


async def test_long_ids_are_refused_and_not_logged(cluster: Cluster) -> None:
    log = cluster.members["coordinator"].log_path
    before = log.stat().st_size
    async with make_channel(cluster.target) as channel:
        stub = InferenceServiceStub(channel)
        for field in ("request_id", "session_id", "model"):
            request = inference_pb2.GenerateRequest(text="a", **{field: "x" * 2**20})  # type: ignore[arg-type]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(request, timeout=PATIENCE_S).read()
            assert error_from_rpc(caught.value).field == field
    assert log.stat().st_size < before + 20_000
    await cluster.assert_no_leaks()


def test_wrong_port_on_the_command_line() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        run = cli("generate", "hello", "--target", f"127.0.0.1:{port}")
    assert_one_line(run, str(port))


def test_wrong_values_on_the_command_line(cluster: Cluster) -> None:
    target = ("--target", cluster.target)
    assert_one_line(cli("generate", "hello", "--temperature", "-1", *target), "temperature")
    assert_one_line(cli("generate", "hello", "--model", "nope", *target), "nope")
    assert_one_line(cli("generate", "x" * 3000, *target), str(CONTEXT))
    assert_one_line(cli("generate", "-", *target, stdin=b""), "empty")


def test_a_taken_port(cluster: Cluster) -> None:
    port = cluster.target.rpartition(":")[2]
    run = cli("coordinator", "--grpc-port", port, "--http-port", "off")
    assert run.returncode != 0
    assert "Traceback" not in run.stderr
    assert f"port {port}" in run.stderr


@pytest.mark.slow
def test_a_model_that_does_not_exist() -> None:
    for command in (("decode-worker",), ("up", "--grpc-port", "0", "--http-port", "off")):
        run = cli(*command, "--model", "/no/such/folder")
        assert run.returncode != 0
        assert "Traceback" not in run.stderr
        assert "/no/such/folder" in run.stderr


def test_a_bad_config_file(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("engine:\n  block_size_tokens: 0\n")
    run = cli("up", "--config", str(path))
    assert_one_line(run, "engine.block_size_tokens")
