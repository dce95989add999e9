"""Bounds that hold before anything is built from a request: bytes by the models' context, values of its JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.entrypoints.inference_api import LEAST_BYTES, InputLimits
from coordinator.entrypoints.openai.bodies import dumped, parsed
from coordinator.entrypoints.openai.chat import CHAT_NOT_SERVED, ChatRequest
from coordinator.request import json_bounds
from coordinator.request.json_bounds import check_structure
from coordinator.workers.snapshot import Model
from splitserve.errors import InvalidArgumentError

TEXTS = st.text(alphabet='ab"\\[]{}:,é\n')
VALUES = st.recursive(
    st.none() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
)


def counted(value: Any) -> dict[str, int]:
    """What `check_structure` counts, from the parsed value."""
    if not isinstance(value, dict | list):
        return {"objects and arrays": 0, "keys": 0, "values": 0}
    total = {"objects and arrays": 1, "keys": 0, "values": 1 + max(0, len(value) - 1)}
    if isinstance(value, dict):
        total["keys"] = len(value)
    for inner in value.values() if isinstance(value, dict) else value:
        total = {what: total[what] + count for what, count in counted(inner).items()}
    return total


@given(VALUES, st.booleans(), st.integers(1, 40))
def test_marks_are_counted_outside_of_strings_only(value: Any, ascii_only: bool, slice_bytes: int) -> None:
    found: dict[str, int] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_bounds, "SLICE_BYTES", slice_bytes)
        patch.setattr(json_bounds, "_at_most", lambda what, count, most: found.__setitem__(what, count))
        check_structure(json.dumps(value, ensure_ascii=ascii_only).encode() + b" ")
    assert found == counted(value)


@pytest.mark.parametrize(
    ("item", "what"),
    [("[]", "objects and arrays"), ("{}", "objects and arrays"), ("1", "values"), ('"a"', "values")],
)
def test_too_many_of_anything(item: str, what: str) -> None:
    body = f"[{','.join([item] * 300_000)}]".encode()
    with pytest.raises(InvalidArgumentError, match=what) as caught:
        check_structure(body)
    assert caught.value.reason == "TOO_MANY_VALUES"


def test_too_many_keys() -> None:
    body = json.dumps(dict.fromkeys(map(str, range(40_000)))).encode()
    with pytest.raises(InvalidArgumentError, match="keys"):
        check_structure(body)


def test_token_ids_as_many_as_the_context_holds_pass() -> None:
    check_structure(b"[" + b"1," * 400_000 + b"1]", 400_001)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("messages", [{"role": "user", "content": "a"}] * 4097),
        ("tools", [{}] * 1025),
        ("logit_bias", dict.fromkeys(map(str, range(1025)), 1)),
        ("stop", ["a"] * 17),
        ("stop_token_ids", [1] * 65),
    ],
)
def test_lists_are_bounded_before_their_items_are_read(name: str, value: Any) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "a"}]} | {name: value}).encode()
    with pytest.raises(InvalidArgumentError, match="at most") as caught:
        parsed(ChatRequest, body, CHAT_NOT_SERVED)
    assert caught.value.field == name


@pytest.mark.parametrize("digits", [11, 4300, 5000])
def test_numbers_of_many_digits_are_refused_like_others(digits: int) -> None:
    number = "9" * digits
    for fields in (
        f'"logit_bias":{{"{number}":1}}',
        f'"max_tokens":{number}',
        f'"temperature":{number}',
        f'"x":{number}',
    ):
        body = f'{{"messages":[{{"role":"user","content":"a"}}],{fields}}}'.encode()
        try:
            parsed(ChatRequest, body, CHAT_NOT_SERVED).generate_requests()
        except InvalidArgumentError:
            continue
        assert digits <= 4300
        assert '"x"' in fields or digits <= 308


def test_a_request_may_be_as_long_as_the_longest_context_can_use() -> None:
    models: dict[str, Model] = {}
    limits = InputLimits(lambda: models, 16 * 2**20)
    assert limits.request_bytes == LEAST_BYTES
    models["small"] = Model("small", "s", 8192, 100)
    assert limits.request_bytes == LEAST_BYTES
    models["large"] = Model("large", "s", 500_000, 100)
    assert limits.request_bytes == 8_000_000
    models["huge"] = Model("huge", "s", 2**24, 100)
    assert limits.request_bytes == 16 * 2**20
    assert limits.limit_of("/splitserve.v1.InferenceService/Generate") == 16 * 2**20
    assert limits.limit_of("/splitserve.v1.RegistryService/Report") is None


@given(VALUES | st.lists(st.integers(), max_size=300))
def test_rendering_in_slices_changes_nothing(value: Any) -> None:
    assert json.loads(dumped(value)) == value
