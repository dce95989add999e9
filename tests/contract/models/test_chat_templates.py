"""Prompts of `/v1/chat/completions` against `transformers`: the same ids for the templates of each family.

Those in `tests/data/chat_templates` are written in the manner of a family. With SPLITSERVE_TEST_TEMPLATES=FOLDER the
templates of a folder, such as real ones, are tried in place of them.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from coordinator.entrypoints.openai.bodies import parsed
from coordinator.entrypoints.openai.chat import CHAT_NOT_SERVED, ChatRequest
from coordinator.models.tokenizers import PromptTokenizers
from splitserve.errors import InvalidArgumentError
from splitserve.models.hf_tokenizer import HfTokenizer
from splitserve.models.sources import resolve_model
from splitserve.models.tokenizer_files import read_tokenizer

FOLDER = Path(os.environ.get("SPLITSERVE_TEST_TEMPLATES", "tests/data/chat_templates"))
TEMPLATES = {file.stem: file.read_text() for file in sorted(FOLDER.glob("*.jinja"))}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks <it> up, it's & fast.",
            "parameters": {
                "type": "object",
                "properties": {
                    "word": {"type": "string", "description": "Größe"},
                    "most": {"type": ["integer", "null"]},
                },
                "required": ["word"],
            },
        },
    }
]
CALL = {
    "id": "call12345",
    "type": "function",
    "function": {"name": "look_up", "arguments": {"word": 'a "b" <c>', "most": 3}},
}
SYSTEM = {"role": "system", "content": " Be brief. "}
USER = {"role": "user", "content": "Hi there 👋\n"}
HELLO = {"role": "assistant", "content": "Hello. "}
ASKS = {"role": "user", "content": "What is a <b>?"}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": '{"found": ["b"]}', "tool_call_id": "call12345", "name": "look_up"}
THOUGHT = {"role": "assistant", "content": "It is b.", "reasoning_content": "Let me see.\nYes."}
DOCUMENTS = [{"doc_id": 1, "title": "B", "text": "b is b."}, {"doc_id": 2, "title": "C", "text": "c"}]
CASES: dict[str, dict[str, Any]] = {
    "plain": {"messages": [USER]},
    "turns": {"messages": [SYSTEM, USER, HELLO, ASKS]},
    "system in the middle": {"messages": [USER, HELLO, SYSTEM, ASKS]},
    "tools": {"messages": [SYSTEM, USER], "tools": TOOLS},
    "tool results": {"messages": [USER, CALLS, RESULT, THOUGHT, ASKS], "tools": TOOLS},
    "last result": {"messages": [USER, CALLS | {"content": "I look."}, RESULT], "tools": TOOLS},
    "reasoning history": {"messages": [USER, THOUGHT, ASKS]},
    "reasoning by its other name": {
        "messages": [USER, {"role": "assistant", "content": "b", "reasoning": "Hm."}, ASKS]
    },
    "empty content": {"messages": [USER, HELLO | {"content": ""}, ASKS | {"content": ""}]},
    "null content": {"messages": [USER, CALLS | {"content": None}, RESULT], "tools": TOOLS},
    "documents": {"messages": [USER], "documents": DOCUMENTS},
    "thinking": {
        "messages": [SYSTEM, USER],
        "chat_template_kwargs": {"enable_thinking": True, "thinking": True},
    },
    "no thinking": {
        "messages": [SYSTEM, USER],
        "chat_template_kwargs": {"enable_thinking": False, "thinking": False, "nobody_reads_this": [1, None]},
    },
    "no thinking with tools": {
        "messages": [USER, CALLS, RESULT],
        "tools": TOOLS,
        "chat_template_kwargs": {"enable_thinking": False, "thinking": False},
    },
    "own special token": {"messages": [USER], "chat_template_kwargs": {"bos_token": "<B>", "unk": None}},
    "effort": {
        "messages": [USER],
        "chat_template_kwargs": {"reasoning_effort": "high", "enable_thinking": True},
    },
    "continued": {"messages": [USER, HELLO], "continue_final_message": True},
    "continued thought": {
        "messages": [USER, THOUGHT | {"content": "It is\n"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "no generation prompt": {"messages": [USER, HELLO, ASKS], "add_generation_prompt": False},
}


@pytest.fixture(scope="module")
def folder() -> Path:
    return Path(resolve_model("smollm2-135m-instruct").path)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def their_ids(theirs: Any, template: str, case: dict[str, Any]) -> list[int] | None:
    """None: refused. A content of null is empty: without one, as `transformers` has it, many templates fail."""
    case = {"tools": None, "documents": None} | case
    messages = [m | {"content": m["content"] or ""} for m in case["messages"]]
    continues = case.get("continue_final_message", False)
    try:
        text = theirs.apply_chat_template(
            messages,
            tools=case["tools"],
            documents=case["documents"],
            chat_template=template,
            add_generation_prompt=case.get("add_generation_prompt", not continues),
            continue_final_message=continues,
            tokenize=False,
            **case.get("chat_template_kwargs", {}),
        )
    except Exception:
        return None
    return theirs.encode(text, add_special_tokens=False)


def as_sent(case: dict[str, Any]) -> bytes:
    """The body of a request: there, the arguments of calls are texts."""
    sent = json.loads(json.dumps(case))
    for message in sent["messages"]:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return json.dumps(sent).encode()


LOST = {"tools_json": "tools"} | {
    f"template_kwargs_json.{name}": name for name in ("documents", "reasoning_effort")
}


def without(case: dict[str, Any], name: str) -> dict[str, Any]:
    """The case without this field, or variable."""
    variables = {key: value for key, value in case.get("chat_template_kwargs", {}).items() if key != name}
    return {key: value for key, value in case.items() if key != name} | {"chat_template_kwargs": variables}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
async def test_the_prompt_is_that_of_transformers(template: str, folder: Path, theirs: Any) -> None:
    ours = HfTokenizer(replace(read_tokenizer(folder), templates={"default": template}))
    tokenizers = PromptTokenizers(lambda _: ours, threads=1)
    compared = 0
    try:
        for name, case in CASES.items():
            (request,) = parsed(ChatRequest, as_sent(case), CHAT_NOT_SERVED).generate_requests()
            expected = their_ids(theirs, template, case)
            try:
                ids = await tokenizers.encode("any", request)
            except InvalidArgumentError as error:
                lost = LOST.get((error.field or "").removeprefix("prompt.chat."))
                # The template drops in silence what is refused here.
                assert expected is None or (
                    lost and their_ids(theirs, template, without(case, lost)) == expected
                ), name
                continue
            shown = (name, ours.decode(ids, keep_special=True), expected and theirs.decode(expected))
            assert ids == expected, shown
            compared += 1
    finally:
        tokenizers.close()
    assert compared >= 3 or "SPLITSERVE_TEST_TEMPLATES" in os.environ
