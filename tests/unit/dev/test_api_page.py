"""The page of the API: every call and field of the protos it covers, and every method of the client."""

from __future__ import annotations

import inspect

from dev.docs.api_page import FILES, OPERATOR_FILES, PAGE, page, proto_files
from splitserve.client import AsyncClient
from splitserve.client.types import GenerateOptions


def test_it_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()


def test_every_call_and_field_is_there_with_a_text() -> None:
    rows = {line.split("`")[1]: line for line in page().splitlines() if line.startswith("| `")}
    files = proto_files()
    for name in FILES:
        file = files[name]
        calls = [method.name for service in file.service for method in service.method]
        fields = [field.name for message in file.message_type for field in message.field]
        for entry in (*calls, *fields):
            assert not rows[entry].endswith("|  |"), entry


def test_every_call_for_operators_is_there_with_a_text() -> None:
    rows = {line.split("`")[1]: line for line in page().splitlines() if line.startswith("| `")}
    files = proto_files()
    for name in OPERATOR_FILES:
        for service in files[name].service:
            assert all(not rows[method.name].endswith("|  |") for method in service.method)


def test_every_method_and_option_of_the_client_is_there() -> None:
    text = page()
    methods = [name for name, _ in inspect.getmembers(AsyncClient, inspect.isroutine) if name[0] != "_"]
    assert {"generate", "stream", "models", "wait_ready"} <= set(methods)
    assert all(f"### `AsyncClient.{name}(" in text for name in methods)
    assert all(f"| `{option}` | " in text for option in inspect.get_annotations(GenerateOptions))
