"""The choice of an answer's format by the model's template and tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from transformers import AddedToken

from coordinator.entrypoints.inference_api import InferenceApi
from coordinator.entrypoints.openai import app
from coordinator.entrypoints.openai.app import AnswerFormats
from coordinator.entrypoints.openai.bodies import parsed
from coordinator.entrypoints.openai.chat import CHAT_NOT_SERVED, ChatRequest
from coordinator.entrypoints.openai.formats.table import AnswerFormat, choose_format
from coordinator.models.tokenizers import PromptTokenizers
from coordinator.request.inference_request import ANYONE
from splitserve.errors import InvalidArgumentError
from splitserve.models.hf_tokenizer import ByteTokenizer, HfTokenizer
from splitserve.models.tokenizer import TemplateArguments
from splitserve.models.tokenizer_files import read_tokenizer
from splitserve.runtime.call_thread import ParserThread
from splitserve.v1 import generation_pb2
from tests.support.engine.tiny_models import tiny_tokenizer

HEAD = "{% for message in messages %}{{ message.content }}{% endfor %}"
QWEN = f"{HEAD}{{% if tools %}}<tool_call>\n<function=...><parameter=...>{{% endif %}}"
OPENED = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
CLOSED = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
KIMI_K3 = (
    "{% macro open(tag) %}{{ '<|open|>' + tag + '<|sep|>' }}{% endmacro %}"
    f"{HEAD}{{% if tools %}}{{{{ open('tools') }}}}{{% endif %}}{{{{ open('think') }}}}"
)


def loaded(folder: Path, template: str | None) -> HfTokenizer:
    """The tiny tokenizer with some tags as tokens: those of Mistral are special ones."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    tokenizer.add_tokens([AddedToken("</think>", special=False)])
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]", "[ARGS]"]})
    tokenizer.save_pretrained(folder)
    return HfTokenizer(read_tokenizer(folder))


def chosen(tokenizer: HfTokenizer | ByteTokenizer, *, with_tools: bool = True) -> AnswerFormat:
    return choose_format(tokenizer, "auto", "auto", with_tools=with_tools)


def names(answer: AnswerFormat) -> tuple[str | None, str | None, bool]:
    tools, reasoning = answer.tools, answer.reasoning
    return tools and tools.name, reasoning and reasoning.name, answer.is_reasoning


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (HEAD, ("hermes", None, False)),
        (QWEN + OPENED, ("qwen_xml", "think", True)),
        (QWEN + CLOSED, ("qwen_xml", "think", False)),
        (f"{HEAD}{{{{ message.content.split('</think>')[-1] }}}}", ("hermes", "think", False)),
        (KIMI_K3, ("kimi_k3", "kimi_k3", True)),
        (f"{HEAD}{{{{ raise_exception('no') }}}}<think>", ("hermes", "think", False)),
    ],
)
def test_the_template_and_the_end_of_its_prompts_choose(
    tmp_path: Path, template: str, expected: tuple[str, str, bool]
) -> None:
    tokenizer = loaded(tmp_path, template)
    assert names(chosen(tokenizer)) == expected
    assert names(chosen(tokenizer, with_tools=False)) == (None, *expected[1:])


SWITCHED = "{% if add_generation_prompt %}<assistant>{{ '<think>\n' if thinking else '</think>' }}{% endif %}"


@pytest.mark.parametrize(
    ("arguments", "is_reasoning"),
    [
        (TemplateArguments(), False),
        (TemplateArguments({"thinking": True}), True),
        (TemplateArguments({"thinking": True}, add_generation_prompt=False), False),
        (TemplateArguments({"thinking": True}, template=HEAD + CLOSED), False),
        (TemplateArguments(template=HEAD + OPENED), True),
    ],
)
def test_the_arguments_of_the_template_decide_whether_the_answer_begins_with_reasoning(
    tmp_path: Path, arguments: TemplateArguments, is_reasoning: bool
) -> None:
    tokenizer = loaded(tmp_path, HEAD + SWITCHED)
    answer = choose_format(tokenizer, "auto", "auto", with_tools=False, arguments=arguments)
    assert names(answer) == (None, "think", is_reasoning)


@pytest.mark.parametrize(
    ("text", "is_reasoning"),
    [("", False), ("Hi", False), ("<think>\nHm", True), ("<think>a</think>b", False)],
)
def test_an_answer_that_continues_a_message(tmp_path: Path, text: str, is_reasoning: bool) -> None:
    for template in (HEAD + OPENED, HEAD + CLOSED):
        answer = chosen(loaded(tmp_path, template)).continuing(text)
        assert names(answer) == ("hermes", "think", is_reasoning)
    assert AnswerFormat().continuing("<think>") == AnswerFormat()


class Named:
    """Of the API: one model with this tokenizer, whose choices are counted."""

    def __init__(self, tokenizer: HfTokenizer) -> None:
        self.parser, self.tokenizer, self.choices = ParserThread(), tokenizer, 0
        self.tokenizers = PromptTokenizers(lambda _: tokenizer, threads=1)
        in_turn = self.tokenizers.in_turn

        async def counted(tenant: str, size: int, work: Any) -> Any:
            self.choices += 1
            return await in_turn(tenant, size, work)

        self.tokenizers.in_turn = counted  # type: ignore[method-assign]

    async def tokenizer_of(self, name: str, key: str, caller: Any) -> tuple[str, HfTokenizer]:
        return "source", self.tokenizer


async def test_formats_are_kept_for_short_arguments_up_to_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "MAX_CHOSEN", 2)
    api = Named(loaded(tmp_path, HEAD + SWITCHED))
    formats = AnswerFormats(cast(InferenceApi, api), "auto", "auto")
    body = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>"}]}

    async def chosen_for(**fields: Any) -> tuple[bool, str, int]:
        request = parsed(ChatRequest, json.dumps(body | fields).encode(), CHAT_NOT_SERVED)
        answer, failure = await formats.of(request, "id", ANYONE)
        return answer.is_reasoning, (failure and failure.field) or "", api.choices

    thinking = {"chat_template_kwargs": {"thinking": True}}
    assert await chosen_for() == (False, "", 1)
    assert await chosen_for(**thinking) == (True, "", 2)
    assert await chosen_for(**thinking, documents=[{"a": 1}]) == (True, "", 2)
    assert await chosen_for(continue_final_message=True, add_generation_prompt=False) == (True, "", 2)
    assert await chosen_for(reasoning_effort="none") == (False, "", 3)
    assert await chosen_for(**thinking) == (True, "", 4)
    for count in (5, 6):
        long = thinking["chat_template_kwargs"] | {"x": "a" * 600}
        assert await chosen_for(chat_template_kwargs=long) == (True, "", count)
    assert await chosen_for(chat_template="x") == (False, "prompt.chat.chat_template", 7)
    assert (await chosen_for(chat_template_kwargs={"tools": 1}))[
        1
    ] == "prompt.chat.template_kwargs_json.tools"
    api.tokenizers.close()


def test_without_a_template(tmp_path: Path) -> None:
    for tokenizer in (loaded(tmp_path, None), ByteTokenizer()):
        assert names(chosen(tokenizer)) == ("hermes", None, False)
        assert names(chosen(tokenizer, with_tools=False)) == (None, None, False)


def test_special_tokens_are_kept_where_tags_are_some(tmp_path: Path) -> None:
    tokenizer = loaded(tmp_path, QWEN + OPENED)
    assert not chosen(tokenizer).keep_special
    assert choose_format(tokenizer, "mistral", "none", with_tools=True).keep_special
    assert not choose_format(tokenizer, "mistral", "none", with_tools=False).keep_special
    text = "[TOOL_CALLS]f[ARGS]{}"
    ids = tokenizer.encode(text)
    assert (tokenizer.decode(ids), tokenizer.decode(ids, keep_special=True)) == ("f{}", text)


def test_the_tokens_of_the_tag_that_ends_the_reasoning(tmp_path: Path) -> None:
    tokenizer = loaded(tmp_path, QWEN + OPENED)
    (token_id,) = chosen(tokenizer).end_ids
    assert tokenizer.token_bytes(token_id) == b"</think>"
    assert choose_format(ByteTokenizer(), "auto", "think", with_tools=False).end_ids == tuple(b"</think>")


def test_forced_calls_are_spelled_by_a_grammar() -> None:
    gemma = choose_format(ByteTokenizer(), "gemma", "none", with_tools=True)
    assert names(gemma.forced())[0] == "hermes"
    glm = choose_format(ByteTokenizer(), "glm", "none", with_tools=True)
    assert glm.forced() is glm
    with pytest.raises(InvalidArgumentError, match="tool_format none") as caught:
        choose_format(ByteTokenizer(), "none", "none", with_tools=True).forced()
    assert caught.value.field == "tool_choice"


class Checks:
    """Of the API: refuses grammars with one of these words in them, and says so by these messages."""

    def __init__(self, refused: dict[str, str]) -> None:
        self.parser = ParserThread()
        self._refused = refused
        self.checked = 0

    async def check_grammar(self, grammar: generation_pb2.Grammar, caller: Any) -> None:
        self.checked += 1
        for word, message in self._refused.items():
            if word in grammar.lark:
                raise InvalidArgumentError(message, reason="GRAMMAR_REFUSED", field="sampling.grammar.lark")


def asking(*functions: dict[str, Any]) -> ChatRequest:
    tools = [{"type": "function", "function": function} for function in functions]
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools}
    return parsed(ChatRequest, json.dumps(body).encode(), CHAT_NOT_SERVED)


def held(name: str, word: str, **further: Any) -> dict[str, Any]:
    return {"name": name, "parameters": {"properties": {word: {"type": "integer"}}}, **further}


async def loosened(
    request: ChatRequest, refused: dict[str, str]
) -> tuple[generation_pb2.Grammar, list[str], int]:
    api = Checks(refused)
    formats = AnswerFormats(cast(InferenceApi, api), "auto", "auto")
    hermes = choose_format(ByteTokenizer(), "hermes", "none", with_tools=True)
    grammar, names = await formats.grammar(request, hermes, ANYONE, 100)
    assert grammar is not None
    return grammar, names, api.checked


async def test_a_schema_that_no_grammar_holds_is_given_up() -> None:
    request = asking(held("a", "good"), held("b", "odd"), held("c", "bad"))
    grammar, names, checked = await loosened(request, {})
    assert (names, checked) == ([], 1)
    grammar, names, _ = await loosened(request, {"odd": "arguments_1.odd: no", "bad": "arguments_2: no"})
    assert names == ["b", "c"]
    assert '"good"' in grammar.lark
    assert not {"odd", "bad"} & set(grammar.lark.split('"'))


async def test_all_schemas_are_given_up_where_none_is_named() -> None:
    grammar, names, _ = await loosened(
        asking(held("a", "good"), held("b", "odd")), {"odd": "it takes too long"}
    )
    assert names == ["a", "b"]
    assert '"good"' not in grammar.lark


async def test_a_strict_schema_is_never_given_up() -> None:
    request = asking(held("a", "odd", strict=True), held("b", "odd"), held("c", "odd", strict=False))
    grammar, names, _ = await loosened(request, {"odd": "arguments_0: no"})
    assert names == ["b"]
    assert '"odd"' in grammar.lark
