"""Grammars that strangers send, over HTTP to real processes: served exactly or refused by name, and nothing ends."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import suppress
from itertools import count
from typing import Any

import httpx
import psutil
import pytest
from jsonschema import Draft202012Validator

from splitserve.errors import InvalidArgumentError, ResourceExhaustedError
from tests.support.clients.patient import PatientClient
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.waiting import PATIENCE_S

LOWEST = -(2**63)
CHAT = "/chat/completions"
Body = dict[str, Any]
GRAMMARS = int(os.environ.get("SPLITSERVE_TEST_GRAMMARS", "100"))
"""Hostile ones at once beside plain streams."""


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    setup = Cluster(
        tmp_path_factory.mktemp("logs"), http=True, worker_options=["--simulated-step-s", "0.005"]
    )
    async with running(setup) as cluster:
        yield cluster
        await cluster.assert_no_leaks()


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(base_url=cluster.base_url, timeout=PATIENCE_S, limits=limits) as client:
        yield client


@pytest.fixture(autouse=True)
async def nothing_ends(cluster: Cluster, http: httpx.AsyncClient) -> AsyncIterator[None]:
    before = pids(cluster)
    yield
    assert pids(cluster) == before
    answer = await http.post(CHAT, json=asked(5))
    assert answer.status_code == 200


def pids(cluster: Cluster) -> dict[str, int]:
    return {name: each.pid for name, each in processes(cluster).items() if each.is_running()}


def asked(max_tokens: int = 400, **fields: Any) -> Body:
    messages = [{"role": "user", "content": "hi"}]
    return {"model": "simulated", "messages": messages, "max_tokens": max_tokens, **fields}


def formatted(schema: Any, *, strict: bool = False, **fields: Any) -> Body:
    named = {"name": "x", "schema": schema, "strict": strict}
    return asked(response_format={"type": "json_schema", "json_schema": named}, **fields)


def tool(name: str, parameters: Any, **fields: Any) -> Body:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


async def refusal(http: httpx.AsyncClient, body: Body) -> Body:
    answer = await http.post(CHAT, json=body)
    assert answer.status_code == 400, answer.text
    error: Body = answer.json()["error"]
    return error


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "integer", "minimum": LOWEST, "maximum": LOWEST}, "maximum"),
        ({"type": "integer", "minimum": LOWEST, "maximum": LOWEST + 1}, "maximum"),
        ({"properties": {"n": {"type": "integer", "minimum": 2**63}}}, "properties.n.minimum"),
        ({"const": 1234567890123456789}, "const"),
        ({"enum": [9007199254740993]}, "enum[0]"),
        ({"items": {"const": {"id": -(2**60)}}}, "items.const.id"),
    ],
)
async def test_numbers_that_no_grammar_can_spell(http: httpx.AsyncClient, schema: Any, path: str) -> None:
    error = await refusal(http, formatted(schema))
    assert error["param"].startswith("response_format")
    assert f"{path}: " in error["message"]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": LOWEST, "maximum": 2**63 - 1},
        {"type": "integer", "maximum": 9007199254740999},
        {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 9},
            "uniqueItems": True,
            "maxItems": 1,
        },
        {"type": "string", "format": "password", "maxLength": 9},
        {"type": "string", "format": "uri-reference", "maxLength": 9},
        {"type": "string", "format": "path", "maxLength": 9},
        {"type": "string", "format": "binary", "maxLength": 9},
        {"type": "string", "format": "json-string", "maxLength": 9},
        {"type": "integer", "format": "int64", "minimum": 0, "maximum": 99},
        {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 9},
        {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 2, "maxProperties": 2},
        {"type": "string", "pattern": "^(?!no)[a-z]{1,5}$", "maxLength": 5},
        {"anyOf": [{"type": "string", "maxLength": 3}], "not": {"type": "integer"}},
    ],
)
async def test_what_the_grammar_does_not_hold_is_checked_or_refused_under_strict(
    http: httpx.AsyncClient, schema: Any
) -> None:
    answer = await http.post(CHAT, json=formatted(schema))
    if answer.status_code == 200:
        (choice,) = answer.json()["choices"]
        assert choice["finish_reason"] in ("stop", "length")
        if choice["finish_reason"] == "stop":
            Draft202012Validator(schema).validate(json.loads(choice["message"]["content"]))
    else:
        assert "does not satisfy the schema" in answer.json()["error"]["message"]
    if schema.get("multipleOf") != 0.5 and schema.get("format") != "int64":
        error = await refusal(http, formatted(schema, strict=True))
        assert "strict" in error["message"]


async def test_an_answer_that_the_validator_refuses_ends_with_its_name(http: httpx.AsyncClient) -> None:
    digits = {"type": "integer", "minimum": 1, "maximum": 1}
    twice = {"type": "array", "items": digits, "minItems": 2, "maxItems": 2, "uniqueItems": True}
    error = await refusal(http, formatted(twice))
    assert "unique" in error["message"]
    assert error["code"] == "grammar_failed"


async def test_one_bad_tool_of_many(http: httpx.AsyncClient) -> None:
    fine = [tool(f"t{n}", {"type": "object", "properties": {"a": {"type": "integer"}}}) for n in range(36)]
    bad = [
        tool("names", {"type": "object", "propertyNames": {"pattern": "^a"}}),
        tool("nothing", {"type": "object", "properties": {"a": {"not": {}}}}),
        tool("ahead", {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)a"}}}),
        tool("elsewhere", {"type": "object", "properties": {"a": {"$ref": "https://example.org/a.json"}}}),
        tool("if", {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}}),
        tool("behind", {"type": "object", "patternProperties": {"(?<!a)b": {"type": "string"}}}),
        tool("big", {"type": "object", "properties": {"a": {"minimum": LOWEST, "maximum": 2**63 - 1}}}),
    ]
    answer = await http.post(CHAT, json=asked(20, tools=fine + bad, tool_choice="auto"))
    assert answer.status_code == 200, answer.text
    crash = tool("crash", {"type": "object", "properties": {"a": {"minimum": LOWEST, "maximum": LOWEST}}})
    for choice in ("auto", "required"):
        loose = await http.post(CHAT, json=asked(20, tools=[*fine, crash], tool_choice=choice))
        assert (loose.status_code, loose.headers["x-loose-tools"]) == (200, "crash")
    crash["function"]["strict"] = True
    error = await refusal(http, asked(20, tools=[*fine, crash]))
    assert error["param"] == "tools"
    assert "crash: tools[36].function.parameters.properties.a.minimum: " in error["message"]
    empty = {"type": "object", "properties": {"a": {"enum": []}, "arguments_0": {}}}
    never = tool("never", {**empty, "required": ["a"]}, strict=True)
    error = await refusal(http, asked(20, tools=[*fine, never], response_format={"type": "json_object"}))
    expected = "tools: never: tools[36].function.parameters.properties.a: no value satisfies enum"
    assert error["message"] == expected


HOSTILE: dict[str, Body] = {
    "allOf of empty patterns": formatted({"allOf": [{"type": "string", "pattern": "a{0}"}] * 40}),
    "growing patterns": formatted(
        {"allOf": [{"type": "string", "pattern": f"(a|b)*c{{{n}}}"} for n in range(40)]}
    ),
    "prefixItems with multipleOf": formatted(
        {
            "type": "array",
            "prefixItems": [{"type": "integer", "multipleOf": 10007 + 2 * n} for n in range(50)],
        }
    ),
    "many properties": formatted(
        {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(14_000)}}
    ),
    "many patternProperties": formatted(
        {"type": "object", "patternProperties": {f"^a{n}b$": {"type": "string"} for n in range(300)}}
    ),
}


LETTERS = "abcdefghijklmnopqrstuvwxyz"
TEXTS: dict[str, Body] = {
    "a chain": {
        "lark": "start: r0\n" + "".join(f"r{n}: r{n + 1} r{n + 1}\n" for n in range(3000)) + 'r3000: "a"'
    },
    "a chain of terminals": {
        "lark": "start: T0\n" + "".join(f"T{n}: T{n + 1} T{n + 1}\n" for n in range(60)) + 'T60: "a"'
    },
    "a long repetition": {"lark": 'start: ("a"{1,1000} "b"{1,1000}){1,1000}'},
    "many rules": {"lark": "start: " + " | ".join(f"/{a}.*{b}.{{20}}/" for a in LETTERS for b in LETTERS)},
    "a regex of repetitions": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    "a regex that counts": {"regex": ".*a.{400}"},
    "a regex of many": {"regex": "(" + "|".join(f"{letter}.*{letter}.{{30}}" for letter in LETTERS) + ")"},
}


@pytest.mark.parametrize(
    "leaves", [pytest.param(False, id="stays"), pytest.param(True, id="leaves", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", [*HOSTILE, *TEXTS])
async def test_a_hostile_grammar_is_answered_in_time_and_others_do_not_wait(
    cluster: Cluster, http: httpx.AsyncClient, name: str, leaves: bool
) -> None:
    before = memory(cluster)

    async def ask() -> int:
        if name in HOSTILE:
            return (await http.post(CHAT, json=HOSTILE[name] | {"max_tokens": 20})).status_code
        async with PatientClient(cluster.target) as client:
            with suppress(InvalidArgumentError, ResourceExhaustedError):
                await client.generate("hi", max_tokens=20, **TEXTS[name])
        return 200

    hostile = asyncio.create_task(ask())
    took_s = []
    for number in range(6):
        began_s = time.monotonic()
        answer = await http.post(CHAT, json=formatted({"const": number}))
        took_s.append(time.monotonic() - began_s)
        assert answer.json()["choices"][0]["message"]["content"] == str(number)
        if leaves:
            hostile.cancel()
    assert min(took_s) < 1
    if not leaves:
        assert await hostile in (200, 400)
    await nothing_left(cluster)
    assert max(size - before[each] for each, size in memory(cluster).items()) < 300 * 2**20


@pytest.mark.slow
@pytest.mark.alone
async def test_hostile_grammars_beside_plain_streams(cluster: Cluster, http: httpx.AsyncClient) -> None:
    await crowd(cluster, http, hostile_posts(http, count=GRAMMARS, seed=2))


@pytest.mark.alone
async def test_ambiguous_grammars_beside_plain_streams(cluster: Cluster, http: httpx.AsyncClient) -> None:
    """Each letter of an answer multiplies the ways to read it."""

    async def ambiguous(client: PatientClient, rule: str) -> int:
        try:
            answer = await client.generate("hi", lark=f"start: s\n{rule}\nA: /[a-z]/", max_tokens=100)
        except InvalidArgumentError as error:
            return 400 if error.reason == "GRAMMAR_FAILED" else 500
        return 200 if answer.text.isalpha() else 500

    async with PatientClient(cluster.target) as client:
        posts = [ambiguous(client, rule) for rule in AMBIGUOUS * (60 // len(AMBIGUOUS))]
        await crowd(cluster, http, posts, at_once=60)


AMBIGUOUS = [
    "s: s s | A",
    "s: A | s A s | s s s",
    "s: t t | A\nt: s | A s",
    "s: (A | A A | A A A)+",
    "s: A+ A+ A+ A+ A+",
]


def hostile_posts(http: httpx.AsyncClient, count: int, seed: int) -> list[Coroutine[Any, Any, int]]:
    """So many hostile grammars to be sent."""
    headers = {"content-type": "application/json"}

    async def post(body: bytes) -> int:
        return (await http.post(CHAT, content=body, headers=headers)).status_code

    # Written before: what the test itself computes would be in the gaps.
    return [post(json.dumps(body).encode()) for body in hostile_bodies(random.Random(seed), count)]


class Bystanders:
    """Eight plain streams, and one client with small schemas, until cancelled."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self.gaps_s: list[float] = []
        self.small_s: list[float] = []
        """How long the small schemas took."""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(self._stream())
            group.create_task(self._small())

    async def worst(self, of: int) -> tuple[float, float]:
        """The longest gap of a stream and the slowest of at least so many small schemas since the last call."""
        while len(self.small_s) < of:  # noqa: ASYNC110 - they are many
            await asyncio.sleep(0.05)
        worst = max(self.gaps_s), max(self.small_s)
        self.gaps_s.clear()
        self.small_s.clear()
        return worst

    async def _stream(self) -> None:
        while True:
            body = asked(300, stream=True, ignore_eos=True)
            async with self._http.stream("POST", CHAT, json=body) as lines:
                last_s = None
                async for line in lines.aiter_lines():
                    if line.startswith("data: {"):
                        now_s = time.monotonic()
                        self.gaps_s.extend([now_s - last_s] if last_s is not None else [])
                        last_s = now_s

    async def _small(self) -> None:
        for number in count():
            began_s = time.monotonic()
            answer = await self._http.post(CHAT, json=formatted({"const": {"number": number}}))
            self.small_s.append(time.monotonic() - began_s)
            assert answer.json()["choices"][0]["finish_reason"] == "stop"


async def crowd(
    cluster: Cluster, http: httpx.AsyncClient, hostile: list[Coroutine[Any, Any, int]], at_once: int = 30
) -> None:
    """Sends what is hostile beside bystanders; each answers its status."""
    before = memory(cluster)
    bystanders, turn = Bystanders(http), asyncio.Semaphore(at_once)

    async def send(request: Coroutine[Any, Any, int]) -> int:
        async with turn:
            return await request

    async with asyncio.TaskGroup() as group:
        others = group.create_task(bystanders.run())
        plain_gap_s, plain_small_s = await bystanders.worst(of=ALONE)
        codes = await asyncio.gather(*map(send, hostile))
        gap_s, small_s = await bystanders.worst(of=1)
        others.cancel()
    grown = {name: size - before[name] for name, size in memory(cluster).items()}
    print(f"\ngap {gap_s:.3f} s (alone {plain_gap_s:.3f}), small {small_s:.3f} s (alone {plain_small_s:.3f})")
    print(f"grown {grown}, codes {Counter(codes)}")
    assert set(codes) <= {200, 400, 429}
    assert gap_s < max(GAP_S, SLOWNESS * plain_gap_s)
    assert small_s < max(SMALL_S, SLOWNESS * plain_small_s)
    assert max(grown.values()) < 300 * 2**20
    await nothing_left(cluster)


async def nothing_left(cluster: Cluster) -> None:
    """Waits until no process of a grammar computes, once the clients have gone."""
    deadline_s = time.monotonic() + 5 * SLOWNESS
    while busy(cluster):
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.2)


GAP_S, SMALL_S = 0.25, 1.0
ALONE = 15
"""Small schemas before the hostile ones, to see how the machine is: the bounds hold on one that is free."""
SLOWNESS = 5.0
"""The machine of the tests has two cores, which everything here shares, and runs other tests meanwhile."""


def processes(cluster: Cluster) -> dict[str, psutil.Process]:
    return {name: psutil.Process(member.process.pid) for name, member in cluster.members.items()}


def memory(cluster: Cluster) -> dict[str, int]:
    return {name: each.memory_info().rss for name, each in processes(cluster).items()}


def busy(cluster: Cluster) -> bool:
    """Whether a process of a grammar computes."""
    for child in [child for each in processes(cluster).values() for child in each.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # those that take too long are ended
            if child.cpu_percent(0.05) > 50:
                return True
    return False


def hostile_bodies(pick: random.Random, count: int) -> Iterator[Body]:
    """So many different requests with hostile grammars."""
    for number in range(count):
        size = pick.choice([3, 30, 300])
        kinds: list[Any] = [
            {"allOf": [{"type": "string", "pattern": pick.choice(PATTERNS)} for _ in range(size)]},
            {"type": "array", "prefixItems": [{"multipleOf": pick.randrange(10**6)} for _ in range(size)]},
            {"type": "object", "properties": {f"p{number}_{n}": {} for n in range(30 * size)}},
            {
                "type": "object",
                "patternProperties": {f"^{pick.choice('ab')}{n}.{{{n}}}$": {} for n in range(size)},
            },
            {"type": "integer", "minimum": pick.choice(EXTREMES), "maximum": pick.choice(EXTREMES)},
            {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"items": {"$ref": "#/$defs/a"}}] * size}}},
            {"enum": [f"{number} {'x' * pick.randrange(50)} {n}" for n in range(30 * size)]},
            {"type": "string", "minLength": pick.randrange(10**6), "maxLength": 10 ** pick.randrange(7)},
            {"type": "array", "minItems": pick.randrange(10**5), "items": {"type": "array", "minItems": 50}},
            nested({"type": "object"}, pick.randrange(1, 400)),
        ]
        yield formatted({**pick.choice(kinds), "title": str(number)}, max_tokens=30)


PATTERNS = ["a{0}", "(a|b)*c{50}", "(.*a){12}", "[^a]{3,3000}", "(a?){40}a{40}", ".*x.{30}", "(ab|a|b)*"]
EXTREMES = [LOWEST, LOWEST + 1, -(2**53) - 1, -1, 0, 2**53 + 1, 2**63 - 1, 2**64, 1e300, -1e300, 0.1]


def nested(schema: Any, depth: int) -> Any:
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema
