"""`splitserve generate` and `status` as programs, against a scripted server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from splitserve.errors import NotFoundError, ResourceExhaustedError
from splitserve.v1 import generation_pb2, inference_pb2
from tests.support.clients.fake_inference import FakeInference, delta, done, serving
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


async def start(*arguments: str, target: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-m", "launcher", *arguments)
    environment = os.environ | {"SPLITSERVE_TARGET": target}
    return await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, cwd=ROOT
    )


async def run(*arguments: str, target: str, stdin: bytes = b"") -> Ended:
    process = await start(*arguments, target=target)
    out, err = await asyncio.wait_for(process.communicate(stdin), PATIENCE_S)
    assert process.returncode is not None
    assert b"Traceback" not in err
    return Ended(process.returncode, out.decode(), err.decode())


@pytest.fixture
async def fake() -> AsyncIterator[FakeInference]:
    async with serving(FakeInference()) as server:
        yield server


async def test_the_answer_is_streamed_as_a_chat_turn(fake: FakeInference) -> None:
    ended = await run("generate", "Capital of France?", "--system", "Be brief.", target=fake.target)
    assert ended == Ended(0, "It is Paris ✓.\n", "")
    request = fake.requests[0]
    assert [(turn.role, turn.content) for turn in request.chat.messages] == [
        ("system", "Be brief."),
        ("user", "Capital of France?"),
    ]
    assert request.sampling.temperature == 0
    assert request.sampling.HasField("temperature")
    assert request.model == "fake-1b"


async def test_options_reach_the_server(fake: FakeInference) -> None:
    options = (
        "--raw --max-tokens 5 --temperature 0.5 --top-k 3 --top-p 0.5 --min-p 0.25 --seed 9 --stop a --stop b"
    )
    ended = await run("generate", "Once", *options.split(), "--timeout", "90", target=fake.target)
    assert ended.code == 0
    request = fake.requests[0]
    assert request.text == "Once"
    assert (request.stop.max_tokens, list(request.stop.stop_strings)) == (5, ["a", "b"])
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 3, 0.5)
    assert (sampling.min_p, sampling.seed) == (0.25, 9)
    assert 0 < fake.time_left_s[0] < 93


async def test_json_is_one_object_of_the_documented_shape(fake: FakeInference) -> None:
    ended = await run("generate", "hi", "--json", target=fake.target)
    document = json.loads(ended.out)
    assert ended.out.count("\n") == 1
    assert set(document) == {
        *("text", "token_ids", "finish_reason", "usage", "timings", "served_by"),
        *("request_id", "model", "seed"),
    }
    assert document["text"] == "It is Paris ✓."
    assert document["token_ids"] == [11, 12, 13]
    assert document["finish_reason"] == "stop"
    assert document["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "cached_prompt_tokens": 2,
        "decode_cached_tokens": 1,
    }
    assert document["timings"] == {
        "queue_ms": 1.5,
        "prefill_ms": 20.5,
        "transfer_ms": 2.5,
        "decode_admit_ms": 0.0,
        "ttft_ms": 25.0,
        "tpot_ms": 8.0,
        "reserve_ms": 0.0,
        "transfer_bytes": 4096,
    }
    assert document["served_by"] == {
        "prefill_worker": "prefill-0",
        "decode_worker": "decode-0",
        "transport": "nixl",
        "attempts": 1,
    }
    assert (document["request_id"], document["model"]) == ("req-1", "fake-1b")
    assert document["seed"] == 2**63 + 1


async def test_timings_go_to_stderr(fake: FakeInference) -> None:
    ended = await run("generate", "hi", "--timings", target=fake.target)
    assert ended.out == "It is Paris ✓.\n"
    for part in ("TTFT", "25.0", "TPOT", "8.0", "transfer", "over nixl", "prefill-0"):
        assert part in ended.err


async def test_the_prompt_can_come_from_stdin(fake: FakeInference) -> None:
    ended = await run("generate", "-", "--raw", target=fake.target, stdin="Grüße\n".encode())
    assert ended.code == 0
    assert fake.requests[0].text == "Grüße\n"
    bad = await run("generate", "-", target=fake.target, stdin=b"\xff\xfe")
    assert (bad.code, bad.err) == (2, "error: prompt: standard input is not UTF-8 text\n")


@pytest.mark.parametrize(
    "arguments", [("",), ("  ",), ("", "--raw"), ("", "--token-ids"), ("1,x", "--token-ids")]
)
async def test_useless_prompts(fake: FakeInference, arguments: Sequence[str]) -> None:
    ended = await run("generate", *arguments, target=fake.target)
    assert ended.code == 2
    assert ended.err.startswith("error: prompt")
    assert fake.requests == []


async def test_token_ids_are_sent_as_they_are(fake: FakeInference) -> None:
    ended = await run("generate", "5, 6 7", "--token-ids", target=fake.target)
    assert ended.code == 0
    assert list(fake.requests[0].token_ids.ids) == [5, 6, 7]


async def test_a_model_without_template_gets_raw_text(fake: FakeInference) -> None:
    fake.models = [inference_pb2.ModelInfo(name="base", ready=True)]
    assert (await run("generate", "hi", target=fake.target)).code == 0
    assert fake.requests[0].text == "hi"
    ended = await run("generate", "hi", "--system", "x", target=fake.target)
    assert (ended.code, "system must not" in ended.err) == (2, True)


async def test_which_model(fake: FakeInference) -> None:
    ended = await run("generate", "hi", "--model", "nope", target=fake.target)
    assert ended.code == 1
    assert ended.err == f"error: model 'nope' is not served at {fake.target}; served: fake-1b\n"
    fake.models = [inference_pb2.ModelInfo(name=name) for name in ("a", "b")]
    ended = await run("generate", "hi", target=fake.target)
    assert (ended.code, ended.err) == (2, "error: model must be named with --model: one of a, b\n")
    fake.models = []
    ended = await run("generate", "hi", target=fake.target)
    assert (ended.code, "serves no model yet" in ended.err) == (1, True)


async def test_errors_of_the_server_are_one_line(fake: FakeInference) -> None:
    fake.script = [ResourceExhaustedError("too many requests", retry_after_s=2)]
    ended = await run("generate", "hi", target=fake.target)
    assert ended == Ended(1, "", "error: too many requests (try again in 2 s)\n")
    fake.script = [RuntimeError("secret")]
    ended = await run("generate", "hi", target=fake.target)
    assert ended.code == 1
    assert ended.err.startswith("error: internal error, incident ")
    fake.script = [delta(0, [1], "half"), NotFoundError("gone")]
    ended = await run("generate", "hi", target=fake.target)
    assert ended == Ended(1, "half\n", "error: gone\n")


async def test_an_aborted_answer_is_a_failure(fake: FakeInference) -> None:
    fake.script = [delta(0, [1], "half"), done(generation_pb2.FINISH_REASON_ABORT)]
    ended = await run("generate", "hi", "--json", target=fake.target)
    assert ended.code == 1
    assert json.loads(ended.out)["finish_reason"] == "abort"
    assert ended.err.startswith("error: ")


async def test_a_timeout(fake: FakeInference) -> None:
    fake.script = [delta(0, [1], "slow"), asyncio.Event()]
    ended = await run("generate", "hi", "--timeout", "4", target=fake.target)
    assert ended.code == 1
    assert ended.err == f"error: {fake.target} gave no complete answer within 4 s\n"
    await asyncio.wait_for(fake.cancelled.wait(), PATIENCE_S)


async def test_interrupt_cancels_the_generation(fake: FakeInference) -> None:
    fake.script = [delta(0, [1], "begun "), asyncio.Event()]
    process = await start("generate", "hi", target=fake.target)
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.read(6), PATIENCE_S) == b"begun "
    process.send_signal(signal.SIGINT)
    _, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert process.returncode == 130, err
    assert err == b""
    await asyncio.wait_for(fake.cancelled.wait(), PATIENCE_S)


async def test_a_broken_pipe_is_quiet_and_cancels(fake: FakeInference) -> None:
    more = asyncio.Event()
    fake.script = [delta(0, [1], "begun "), more, *(delta(n, [n], "x" * 1000) for n in range(1, 400)), done()]
    process = await start("generate", "hi", target=fake.target)
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.read(6), PATIENCE_S) == b"begun "
    process._transport.get_pipe_transport(1).close()  # type: ignore[attr-defined]
    more.set()
    assert process.stderr is not None
    assert await asyncio.wait_for(process.stderr.read(), PATIENCE_S) == b""
    assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 141


async def test_status_shows_the_pools(fake: FakeInference) -> None:
    ended = await run("status", target=fake.target)
    assert ended.code == 0
    for part in ("prefill-0", "decode-0", "ready", "500/512", "127.0.0.1:7001", "fake-1b (ready)"):
        assert part in ended.out
    document = json.loads((await run("status", "--json", target=fake.target)).out)
    assert [worker["worker_id"] for worker in document["workers"]] == ["decode-0", "prefill-0"]
    assert document["workers"][0]["rss_bytes"] == 2**33
    assert document["models"][0]["has_chat_template"] is True


async def test_status_marks_an_experimental_engine(fake: FakeInference) -> None:
    fake.workers[1].experimental = True
    lines = (await run("status", target=fake.target)).out.splitlines()
    assert [
        ("(experimental CUDA path)" in line, "prefill-0" in line) for line in lines if "ready " in line
    ] == [(False, False), (True, True)]
    document = json.loads((await run("status", "--json", target=fake.target)).out)
    assert [worker["experimental"] for worker in document["workers"]] == [False, True]


async def test_generate_loads_neither_torch_nor_transformers(fake: FakeInference) -> None:
    program = (
        "import sys; from launcher.cli.main import main; code = main(['generate', 'hi']); "
        "sys.exit(code or ' '.join({'torch', 'transformers'} & set(sys.modules)) or None)"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program), env=os.environ | {"SPLITSERVE_TARGET": fake.target}, cwd=ROOT
    )
    assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
