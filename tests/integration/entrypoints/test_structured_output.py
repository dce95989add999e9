"""Answers held to a grammar, with SmolLM2 through real pairs: random schemas, regex, Lark, resumption, a crowd."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator, FormatChecker

from engine.core.engine import EngineRequest, StopParams
from engine.core.engine_core import EngineCore
from engine.core.model_runner import SamplingParams
from engine.runner.structured_output import GrammarCompiler
from engine.runner.torch_runner import build_torch_runner
from splitserve.client import AsyncClient, ChatMessage, Completion
from splitserve.config.engine import EngineConfig
from splitserve.errors import InvalidArgumentError
from splitserve.models.hf_tokenizer import load_tokenizer
from splitserve.models.sources import checked_model
from splitserve.v1.generation_pb2 import Grammar
from splitserve.v1.generation_pb2 import SamplingParams as SampledProto
from tests.support.clients.patient import PatientClient
from tests.support.clients.schemas import Schema, described, schemas
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.cluster.streams import Reading, until, worker

PROMPT = "An example of such a record in JSON:\n"
AT_ONCE = 48
CROWD = 12
SCHEMAS = int(os.environ.get("SPLITSERVE_TEST_SCHEMAS", "40"))
"""How many are tried: answers of real weights are most of what it takes."""
OPTIONS = ["--dtype", "float32", "--num-blocks", "1600", "--heartbeat", "0.1"]
PERSON: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3, "maxLength": 40},
        "born": {"type": "string", "format": "date"},
        "friends": {
            "type": "array",
            "items": {"type": "string", "maxLength": 20},
            "minItems": 2,
            "maxItems": 3,
        },
        "kind": {"enum": ["writer", "painter", "doctor"]},
    },
    "required": ["name", "born", "friends", "kind"],
    "additionalProperties": False,
}
CALCULATION = """
start: sum
sum: product (" " ("+" | "-") " " product){0,3}
product: NUMBER ("*" NUMBER){0,2} | "(" sum ")"
NUMBER: /[1-9][0-9]{0,2}/
"""

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
async def cluster(short_smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    setup = Cluster(
        tmp_path_factory.mktemp("logs"),
        model=short_smollm2,
        engine="torch",
        worker_options=OPTIONS,
        # On a busy machine, where prompts of six uncached tokens are all that rates are known from, forecasts are high.
        coordinator_options=["--max-queue", "240"],
    )
    async with running(setup) as cluster:
        yield cluster
        await cluster.assert_no_leaks()


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[AsyncClient]:
    async with PatientClient(cluster.target, timeout_s=240) as client:
        yield client


def assert_satisfies(answer: Completion, schema: Schema) -> None:
    assert answer.finish_reason == "stop", (answer.text, schema)
    value = json.loads(answer.text)
    # Not of dates: a year 0, which the formats allow, is none to Python.
    Draft202012Validator(schema, format_checker=FormatChecker(("ipv4", "uuid"))).validate(value)


@pytest.mark.slow
async def test_answers_of_random_schemas_satisfy_them(client: AsyncClient) -> None:
    made, of_each = schemas(seed=11, count=SCHEMAS), SCHEMAS // 20
    used = described(made)
    assert {
        "properties",
        "items",
        "prefixItems",
        "enum",
        "const",
        "pattern",
        "format",
        "minimum",
        "anyOf",
        "$ref",
    } <= {keyword for keyword, used_by in used.items() if used_by >= of_each}
    samplings: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.95}]
    at_once = asyncio.Semaphore(AT_ONCE)

    async def answered(number: int, schema: Schema) -> Completion:
        async with at_once:
            return await client.generate(
                PROMPT, json_schema=schema, max_tokens=700, seed=number, **samplings[number % 2]
            )

    answers = await asyncio.gather(*(answered(number, schema) for number, schema in enumerate(made)))
    for answer, schema in zip(answers, made, strict=True):
        assert_satisfies(answer, schema)
    assert any(answer.served_by.decode_worker for answer in answers)


@pytest.mark.slow
async def test_a_split_answer_is_that_of_one_engine(client: AsyncClient, short_smollm2: str) -> None:
    config = EngineConfig(dtype="float32", num_blocks=256, threads=1, prefix_cache=False)
    tokenizer = load_tokenizer(short_smollm2)
    runner = build_torch_runner(config, checked_model(short_smollm2))
    core = EngineCore(runner, config, tokenizer)
    compiler = GrammarCompiler(tokenizer, runner.facts)
    grammar = await compiler.compiled(SampledProto(grammar=Grammar(json_schema=json.dumps(PERSON))))
    prompt = tokenizer.encode(PROMPT)
    for number, temperature in enumerate((0.0, 1.0)):  # greedy and drawn
        sampling = SamplingParams(temperature=temperature, seed=5)
        stop = StopParams(200, runner.facts.eos_token_ids)
        core.add_request(EngineRequest(f"r{number}", tuple(prompt), sampling, stop, grammar=grammar))
        tokens: list[int] = []
        while core.has_work():
            for output in core.step().outputs:
                tokens += output.token_ids
        answer = await client.generate(
            prompt, json_schema=PERSON, temperature=temperature, seed=5, max_tokens=200
        )
        assert_satisfies(answer, PERSON)
        assert list(answer.token_ids) == tokens
    compiler.close()
    runner.close()


@pytest.mark.slow
async def test_a_mixed_crowd(client: AsyncClient) -> None:
    chat = [ChatMessage("user", "Name a colour and a number.")]
    kinds: list[dict[str, Any]] = [
        {},
        {"json_schema": PERSON, "max_tokens": 300},
        {"regex": r"(red|green|blue) [1-9][0-9]{0,2}", "temperature": 1.0},
        {"lark": CALCULATION, "temperature": 1.0, "logprobs": 2},
    ]
    common = {"temperature": 0.0, "max_tokens": 40}
    asks = [{**common, **kinds[n % 4], "seed": n} for n in range(CROWD)]
    alone = [await client.generate(chat, **ask) for ask in asks[:4]]
    answers = await asyncio.gather(*(client.generate(chat, **ask) for ask in asks))
    assert [answer.token_ids for answer in answers[:4]] == [answer.token_ids for answer in alone]
    for number, answer in enumerate(answers):
        match number % 4:
            case 0:
                assert answer.token_ids == alone[0].token_ids
            case 1:
                assert_satisfies(answer, PERSON)
            case 2:
                assert answer.finish_reason == "stop"
                assert re.fullmatch(kinds[2]["regex"], answer.text)
            case _:
                assert re.fullmatch(r"[0-9+*() -]+", answer.text)
                assert len(answer.logprobs) == len(answer.token_ids)
                if answer.finish_reason == "stop":
                    assert isinstance(eval(answer.text), int)  # noqa: S307 (digits, operators and brackets)


async def test_a_json_object(client: AsyncClient) -> None:
    answer = await client.generate(PROMPT, json_object=True, temperature=0.0, max_tokens=400, stop=["}"])
    assert answer.text.lstrip().startswith("{")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"json_schema": {"not": {}, "x-guidance": {"lenient": False}}}, "not: "),
        ({"regex": "((("}, "unclosed group"),
        ({"lark": "start: ]["}, "expecting"),
        ({"regex": r"[^\s\S]"}, "no text"),
    ],
)
async def test_what_is_not_supported_is_named(client: AsyncClient, options: Any, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words) as caught:
        await client.generate(PROMPT, **options)
    assert caught.value.field == f"sampling.grammar.{next(iter(options))}"


@pytest.mark.slow
async def test_a_killed_decode_worker_is_resumed_within_the_grammar(
    short_smollm2: str, log_dir: Path
) -> None:
    words = ["writer", "doctor", "the"]
    ask: dict[str, Any] = {"json_schema": PERSON, "temperature": 0.8, "seed": 4, "max_tokens": 300}
    ask["bad_words"] = words
    cluster = Cluster(log_dir, model=short_smollm2, engine="torch", decode=2, worker_options=OPTIONS)
    async with running(cluster), PatientClient(cluster.target) as client:
        prompt = load_tokenizer(short_smollm2).encode(PROMPT)
        undisturbed = await client.generate(prompt, **ask)
        assert_satisfies(undisturbed, PERSON)
        banned = {token for word in words for token in load_tokenizer(short_smollm2).encode(f" {word}")}
        assert not banned & set(undisturbed.token_ids)
        reading = Reading(client, prompt, **ask)
        await reading.got(12)
        names = ("decode-0", "decode-1")
        info = await until(
            cluster, lambda info: any(worker(info, name).running_requests for name in names), "one decodes"
        )
        busy = next(name for name in names if worker(info, name).running_requests)
        cluster.members[busy].kill()
        answer = await reading.task
        assert answer.served_by.attempts == 2
        assert (answer.text, answer.token_ids) == (undisturbed.text, undisturbed.token_ids)
        await cluster.assert_no_leaks()
