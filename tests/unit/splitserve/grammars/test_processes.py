"""Grammars in their processes: what compiles, what is refused by name, and what ends a process alone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from splitserve.errors import InvalidArgumentError, ResourceExhaustedError
from splitserve.grammars import processes
from splitserve.grammars.child import NICENESS, SESSION_NICENESS, SLOW_NICENESS
from splitserve.grammars.forms import MAX_GRAMMAR_BYTES, check_grammar
from splitserve.grammars.processes import QUICK_AT_ONCE, SLOW_CPU_S, Connection, GrammarProcesses
from splitserve.v1.generation_pb2 import Grammar
from tests.support.waiting import PATIENCE_S

CHAIN = 200
INT64 = {"minimum": -(2**63), "maximum": 2**63 - 1}


def schema(value: Any) -> Grammar:
    return Grammar(json_schema=json.dumps(value))


def strict(value: Any) -> Grammar:
    return schema({**value, "x-guidance": {"lenient": False}})


def chain(count: int, last: str = '{"type":"null"}') -> Grammar:
    """A schema with a chain of definitions, each referring to the next."""
    links = ",".join(f'"a{n}":{{"anyOf":[{{"$ref":"#/$defs/a{n + 1}"}},false]}}' for n in range(count))
    return Grammar(json_schema=f'{{"$ref":"#/$defs/a0","$defs":{{{links},"a{count}":{last}}}}}')


def rules(count: int) -> Grammar:
    return Grammar(
        lark="start: r0\n" + "\n".join(f"r{n}:r{n + 1}" for n in range(count)) + f'\nr{count}: "a"'
    )


FINE = [
    schema({"type": "object", "properties": {"a": {"type": "string"}}}),
    schema(True),
    Grammar(json_object=True),
    Grammar(regex=r"[a-z]{3}"),
    Grammar(lark='start: "yes" | "no"'),
    chain(CHAIN),
    rules(CHAIN),
]


@pytest.fixture(scope="module")
def kept() -> Iterator[GrammarProcesses]:
    compiler = GrammarProcesses()
    compiler.start()
    yield compiler
    compiler.close()


@pytest.fixture
def compiler(kept: GrammarProcesses, monkeypatch: pytest.MonkeyPatch) -> GrammarProcesses:
    """Without the verdicts of other tests."""
    monkeypatch.setattr(kept, "_verdicts", OrderedDict())
    return kept


@pytest.mark.parametrize("grammar", FINE)
async def test_what_is_fine(compiler: GrammarProcesses, grammar: Grammar) -> None:
    check_grammar(grammar)
    await compiler.check(grammar)
    await compiler.check(grammar)


async def test_equal_grammars_are_compiled_once(
    compiler: GrammarProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Grammar] = []
    begin = compiler.begin

    def counting(grammar: Grammar, cpu_s: float) -> Connection:
        begun.append(grammar)
        return begin(grammar, cpu_s)

    monkeypatch.setattr(compiler, "begin", counting)
    await asyncio.gather(*(compiler.check(FINE[0]) for _ in range(20)))
    await compiler.check(FINE[0])
    assert len(begun) == 1
    for _ in range(2):
        with pytest.raises(InvalidArgumentError):
            await compiler.check(schema(False))
    assert len(begun) == 2


@pytest.mark.parametrize(
    ("grammar", "field", "words"),
    [
        (Grammar(), "", "one of json_schema, json_object, regex, lark"),
        (Grammar(json_object=False), ".json_object", "true"),
        (Grammar(regex=""), ".regex", "bytes"),
        (Grammar(lark=""), ".lark", "bytes"),
        (Grammar(json_schema=""), ".json_schema", "bytes"),
        (Grammar(regex="a" * (MAX_GRAMMAR_BYTES + 1)), ".regex", "bytes"),
        (Grammar(lark="é" * (MAX_GRAMMAR_BYTES // 2 + 1)), ".lark", "bytes"),
        (Grammar(json_schema="{"), ".json_schema", "JSON"),
        (Grammar(json_schema="[" * 100_000), ".json_schema", "nests too deeply"),
        (Grammar(json_schema="3"), ".json_schema", "object or a boolean"),
        (Grammar(json_schema="[]"), ".json_schema", "object or a boolean"),
    ],
)
def test_bounds(grammar: Grammar, field: str, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words) as caught:
        check_grammar(grammar)
    assert caught.value.field == f"sampling.grammar{field}"


@pytest.mark.parametrize(
    ("grammar", "field", "words"),
    [
        (strict({"not": {"type": "string"}}), "json_schema", "not: "),
        (schema({"type": "integer", "minimum": 5, "maximum": 3}), "json_schema", "minimum"),
        (schema({"$ref": "http://example.com/other.json"}), "json_schema", "example.com"),
        (schema(False), "json_schema", "no value satisfies enum"),
        (Grammar(json_schema='{"enum": ["\\ud800"]}'), "json_schema", "surrogate|hex escape"),
        (Grammar(json_schema='{"a":' * 500 + "1" + "}" * 500), "json_schema", "Recursion limit|too deeply"),
        (Grammar(regex="((("), "regex", "unclosed group"),
        (Grammar(regex="(?=a)b"), "regex", "look-around"),
        (Grammar(regex="(" * 5_000 + ")" * 5_000), "regex", "invalid regex"),
        (Grammar(lark="start: ]["), "lark", "expecting"),
        (Grammar(lark="start: A\nA: B\nB: A"), "lark", "circular"),
        (Grammar(lark="start: " + "(" * 500 + '"a"' + ")" * 500), "lark", "nested"),
        (schema({"type": "foo"}), "json_schema", "type: "),
        (schema({"properties": {"a": {"minLength": -1}}}), "json_schema", "properties.a.minLength: "),
    ],
)
async def test_what_does_not_compile(
    compiler: GrammarProcesses, grammar: Grammar, field: str, words: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=words) as caught:
        await compiler.check(grammar)
    assert caught.value.field == f"sampling.grammar.{field}"
    assert caught.value.reason == "GRAMMAR_REFUSED"
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"const": 1234567890123456789}, "const"),
        ({"enum": [1, {"a": [9007199254740993]}]}, r"enum\[1\].a\[0\]"),
        ({"properties": {"n": {"type": "integer", "minimum": 2**60}}}, "properties.n.minimum"),
        ({"type": "integer", "minimum": -(2**63), "maximum": -(2**63)}, "m(ax|in)imum"),
        ({"type": "integer", "minimum": -(2**63), "maximum": -(2**63) + 1}, "m(ax|in)imum"),
        ({"items": {"exclusiveMaximum": -(2**70)}}, "items.exclusiveMaximum"),
        ({"patternProperties": {"(?=a)a": {}}}, "patternProperties"),
    ],
)
async def test_what_no_grammar_can_spell_is_refused_with_its_path(
    compiler: GrammarProcesses, value: Any, path: str
) -> None:
    for grammar in (schema(value), strict(value)):
        with pytest.raises(InvalidArgumentError, match=f"json_schema: {path}: "):
            await compiler.check(grammar)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"type": "integer", **INT64}, "minimum"),
        ({"type": "integer", "maximum": 9007199254740999}, "maximum"),
        ({"items": {"type": "string", "format": "password"}}, "items.format"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "number", "multipleOf": 0.1}, "multipleOf"),
        ({"type": "number", "multipleOf": 0.07}, "multipleOf"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        (
            {"$defs": {"x": {"propertyNames": {"pattern": "a"}}}, "$ref": "#/$defs/x"},
            r"\$defs.x.propertyNames",
        ),
        ({"anyOf": [{}, {"type": "string", "pattern": "^(?!no)"}]}, r"anyOf\[1\].pattern"),
        ({"not": {}}, "not"),
    ],
)
async def test_what_is_not_held_exactly_is_refused_under_strict_alone(
    compiler: GrammarProcesses, value: Any, path: str
) -> None:
    await compiler.check(schema(value))
    with pytest.raises(InvalidArgumentError, match=f"json_schema: {path}: "):
        await compiler.check(strict(value))


HOSTILE = {
    "long to compile": schema({"type": "object", "properties": {f"p{n}": {} for n in range(9000)}}),
    "large": schema({"patternProperties": {f"^a{n}b$": {"type": "string"} for n in range(300)}}),
    "many optional rules": Grammar(regex="(a|b)*c{900}" * 200),
    "deep": rules(14_000),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_what_is_hostile_ends_in_bounded_time_and_nobody_else_waits(
    compiler: GrammarProcesses, name: str
) -> None:
    hostile = asyncio.create_task(compiler.check(HOSTILE[name], tenant="a"))
    for number in range(5):
        await compiler.check(schema({"const": number}), tenant="b")
    try:
        await hostile
    except (InvalidArgumentError, ResourceExhaustedError) as error:
        # It may as well compile, or get too little of a busy machine.
        assert error.reason in ("GRAMMAR_REFUSED", "GRAMMARS_BUSY")  # noqa: PT017
    await until_nothing_runs(compiler)


def started(parent: psutil.Process) -> list[psutil.Process]:
    """The processes of grammars that compute already."""
    return [child for child in parent.children() if child.cpu_times().user]


async def test_a_crash_is_an_error_of_its_grammar_alone(
    compiler: GrammarProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No grammar is known that crashes the library, so its process is killed as by a crash."""
    begin, crashing = compiler.begin, HOSTILE["long to compile"]
    await compiler.check(FINE[1])
    assert compiler._parent is not None
    parent = psutil.Process(compiler._parent.pid)

    def crashed(grammar: Grammar, cpu_s: float) -> Connection:
        connection = begin(grammar, cpu_s)
        while grammar == crashing and cpu_s == SLOW_CPU_S and not started(parent):
            time.sleep(0.001)
        for child in started(parent) if grammar == crashing else ():
            child.send_signal(signal.SIGSEGV)
        return connection

    monkeypatch.setattr(compiler, "begin", crashed)
    with pytest.raises(InvalidArgumentError, match="more than 1 s or too much memory to compile, or it ends"):
        await compiler.check(crashing)
    await compiler.check(FINE[0])


async def test_checks_that_nobody_waits_for_end(compiler: GrammarProcesses) -> None:
    check = asyncio.create_task(compiler.check(HOSTILE["long to compile"]))
    await asyncio.sleep(0)
    check.cancel()
    await asyncio.gather(check, return_exceptions=True)
    await until_nothing_runs(compiler)
    await compiler.check(FINE[1])


async def test_each_tenant_has_a_bounded_number_of_grammars_that_wait(
    compiler: GrammarProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "MAX_WAITING", 2)
    async with AsyncExitStack() as quick_turns:
        for _ in range(QUICK_AT_ONCE):
            await quick_turns.enter_async_context(compiler._quick.turn("z"))
        checks = [asyncio.create_task(compiler.check(grammar, "a")) for grammar in FINE[:2]]
        await asyncio.sleep(0)
        with pytest.raises(ResourceExhaustedError, match="2 others of this tenant wait already") as caught:
            await compiler.check(FINE[2], "a")
        assert caught.value.reason == "GRAMMARS_BUSY"
        assert caught.value.retry_after_s
        checks.append(asyncio.create_task(compiler.check(FINE[2], "b")))
        await asyncio.sleep(0)
    await asyncio.gather(*checks)


async def test_the_child_process_is_started_again(compiler: GrammarProcesses) -> None:
    assert compiler._parent is not None
    before = compiler._parent
    before.kill()
    before.wait()
    await compiler.check(FINE[2])
    assert compiler._parent.pid != before.pid


async def test_all_others_on_the_machine_come_first(compiler: GrammarProcesses) -> None:
    """Also those of other sessions, between which Linux shares the cores out first."""
    await compiler.check(FINE[0])
    assert compiler._parent is not None
    pid = compiler._parent.pid
    assert os.getsid(pid) == pid
    assert psutil.Process(pid).nice() == NICENESS
    assert niceness_of_session(pid) in (SESSION_NICENESS, None)
    slow = compiler.begin(FINE[0], SLOW_CPU_S)
    while len(slow.receive()) < 1:
        await slow.readable()
    forked = psutil.Process(pid).children()
    assert {each.nice() for each in forked} <= {NICENESS, NICENESS + SLOW_NICENESS}
    slow.close()


def niceness_of_session(pid: int) -> int | None:
    """None where the kernel, or the container, has none."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/autogroup").read_text().rpartition(" ")[2])
    return None


async def test_nothing_can_be_forked(compiler: GrammarProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    monkeypatch.setattr(compiler, "begin", lambda grammar, cpu_s: Connection(ours))
    with pytest.raises(ResourceExhaustedError) as caught:
        await compiler.check(FINE[3])
    assert caught.value.reason == "GRAMMARS_BUSY"


async def until_nothing_runs(compiler: GrammarProcesses) -> None:
    """Waits until the child process has no children."""
    assert compiler._parent is not None
    process = psutil.Process(compiler._parent.pid)
    async with asyncio.timeout(PATIENCE_S):
        while process.children():  # noqa: ASYNC110 - a process that ends signals nobody here
            await asyncio.sleep(0.01)
