"""Tokenizers of the coordinator: loaded once, used off the event loop unless the prompt is short."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest
from typing_extensions import override

from coordinator.models.tokenizers import LONG_BYTES, SHORT_BYTES, PromptTokenizers
from splitserve.errors import InvalidArgumentError, NotFoundError
from splitserve.generation.bounds import MAX_BAD_TOKENS
from splitserve.models.hf_tokenizer import ByteTokenizer
from splitserve.models.tokenizer import Turn
from splitserve.v1 import inference_pb2
from tests.support.engine.word_tokenizer import WordTokenizer, load_word_tokenizer
from tests.support.waiting import PATIENCE_S


class Witness(WordTokenizer):
    """Records the threads it runs on."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()

    def encode(self, text: str, most: int | None = None, **options: Any) -> list[int]:
        self.threads.add(threading.get_ident())
        return super().encode(text, most, **options)

    def render_chat(
        self, messages: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = (), *rest: Any
    ) -> list[int]:
        self.threads.add(threading.get_ident())
        return super().render_chat(messages, tools, *rest)


KWARGS = "prompt.chat.template_kwargs_json"


class Loader:
    """Counts loads; fails as often as configured."""

    def __init__(self, failures: int = 0) -> None:
        self.tokenizer = Witness()
        self.loads = 0
        self._failures = failures

    def __call__(self, source: str) -> Witness:
        self.loads += 1
        if self.loads <= self._failures:
            raise NotFoundError(f"no tokenizer in {source}")
        return self.tokenizer


@pytest.fixture
async def loader() -> Loader:
    return Loader()


@pytest.fixture
async def tokenizers(loader: Loader) -> AsyncIterator[PromptTokenizers]:
    made = PromptTokenizers(loader, threads=1)
    yield made
    made.close()


async def test_every_form_of_prompt_off_the_loop(tokenizers: PromptTokenizers, loader: Loader) -> None:
    request = inference_pb2.GenerateRequest
    assert await tokenizers.encode("s", request(text="w5 w6")) == [5, 6]
    chat = {"messages": [{"role": "user", "content": "w7"}]}
    assert await tokenizers.encode("s", request(chat=chat)) == [2, 7, 3]  # type: ignore[arg-type]
    assert await tokenizers.encode("s", request(token_ids={"ids": [8]})) == [8]  # type: ignore[arg-type]
    assert threading.get_ident() not in loader.tokenizer.threads


@pytest.mark.parametrize("block_size", [0, 16])
async def test_a_short_prompt_stays_on_the_loop_from_the_second_of_its_kind_on(
    tokenizers: PromptTokenizers, loader: Loader, block_size: int
) -> None:
    here, threads = threading.get_ident(), loader.tokenizer.threads
    short, long = "w5 w6", " ".join(["w5"] * SHORT_BYTES)
    for text, on_loop in ((short, False), (long, False), (short, True), (long, False)):
        threads.clear()
        request = inference_pb2.GenerateRequest(text=text)
        tokens, *_ = await tokenizers.encode_named("s", request, block_size, b"")
        assert tokens[0] == 5
        assert (here in threads) == on_loop
    threads.clear()
    await tokenizers.encode_named("s", chat_of(), block_size, b"")
    await tokenizers.encode_named("s", chat_of('[{"type": "function"}]'), block_size, b"")
    assert here not in threads


async def test_a_long_prompt_is_tokenized_once_for_all_its_answers() -> None:
    class Counting(WordTokenizer):
        calls = 0

        def encode(self, text: str, most: int | None = None, **options: Any) -> list[int]:
            Counting.calls += 1
            return super().encode(text, most, **options)

    tokenizers = PromptTokenizers(lambda source: Counting(), threads=2)
    await tokenizers.tokenizer("s")
    checked: list[int] = []
    texts = ["w1 " * SHORT_BYTES] * 8 + ["w2 " * SHORT_BYTES]
    requests = [inference_pb2.GenerateRequest(text=text, request_id=str(n)) for n, text in enumerate(texts)]
    encode = tokenizers.encode_named
    calls = [
        asyncio.create_task(encode("s", one, 16, b"", check=lambda: checked.append(1))) for one in requests
    ]
    await asyncio.sleep(0)
    calls[0].cancel()
    found = await asyncio.gather(*calls[1:])
    assert [one.token_ids[0] for one in found] == [1] * 7 + [2]
    assert Counting.calls == len(checked) == 2
    await encode("s", requests[1], 16, b"other salt")
    assert Counting.calls == 3
    tokenizers.close()


async def test_a_prompt_whose_clients_have_left_is_not_tokenized_any_more() -> None:
    """Else whoever leaves at once would have a queue without end before everybody's prompts."""

    class Slow(WordTokenizer):
        def encode(self, text: str, most: int | None = None, **options: Any) -> list[int]:
            seen.append(text[:2])
            began.set()
            assert may_go_on.wait(PATIENCE_S)
            return super().encode(text, most, **options)

    seen: list[str] = []
    began, may_go_on = threading.Event(), threading.Event()
    tokenizers = PromptTokenizers(lambda source: Slow(), threads=1)
    await tokenizers.tokenizer("s")
    texts = [f"w{number} " * SHORT_BYTES for number in (1, 2, 3)]
    requests = [inference_pb2.GenerateRequest(text=text) for text in texts]
    first, *left = [asyncio.create_task(tokenizers.encode("s", one)) for one in (*requests, requests[1])]
    await asyncio.to_thread(began.wait, PATIENCE_S)
    for one in left:
        one.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    assert len(tokenizers._encoding) == 1, "nothing is kept of them"
    again = asyncio.create_task(tokenizers.encode("s", requests[2]))
    await asyncio.sleep(0)
    may_go_on.set()
    assert (await first)[0] == 1
    assert (await again)[0] == 3
    assert seen == ["w1", "w3"]
    assert not len(tokenizers._encoding)
    tokenizers.close()


async def test_one_load_for_many_callers(tokenizers: PromptTokenizers, loader: Loader) -> None:
    calls = [asyncio.create_task(tokenizers.tokenizer("s")) for _ in range(5)]
    await asyncio.sleep(0)
    calls[0].cancel()
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert found[1:] == [loader.tokenizer] * 4
    assert loader.loads == 1


async def test_an_early_load_is_the_only_one_and_one_that_fails_is_logged_and_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for failures in (0, 1):
        loader = Loader(failures)
        tokenizers = PromptTokenizers(loader, threads=1, early=["s"])
        with caplog.at_level("WARNING", "splitserve"):
            await asyncio.wait(tokenizers._loading.values())
            await asyncio.sleep(0)
        assert ("tokenizer.failed" in caplog.text) == bool(failures)
        assert await tokenizers.tokenizer("s") is loader.tokenizer
        assert loader.loads == 1 + failures
        tokenizers.close()


async def test_a_failed_load_fails_its_request_and_is_tried_again() -> None:
    tokenizers = PromptTokenizers(Loader(failures=1), threads=1)
    with pytest.raises(NotFoundError):
        await tokenizers.tokenizer("s")
    assert isinstance(await tokenizers.tokenizer("s"), Witness)
    tokenizers.close()


async def test_chat_without_a_template() -> None:
    tokenizers = PromptTokenizers(load_word_tokenizer, threads=1)
    request = inference_pb2.GenerateRequest(chat={"messages": [{"role": "user"}]})  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError):
        await tokenizers.encode("words-without-template", request)
    tokenizers.close()


class Listener(WordTokenizer):
    """Keeps its render_chat arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: list[Turn] = []
        self.tools: list[Mapping[str, Any]] = []

    def render_chat(
        self, messages: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = (), *rest: Any
    ) -> list[int]:
        self.turns, self.tools = list(messages), list(tools)
        return super().render_chat(messages, tools, *rest)


def with_fields(**fields: Any) -> inference_pb2.GenerateRequest:
    turn = inference_pb2.ChatMessage(role="user", content="w1")
    return inference_pb2.GenerateRequest(chat=inference_pb2.ChatMessages(messages=[turn], **fields))


def chat_of(tools_json: str = "", **message: str) -> inference_pb2.GenerateRequest:
    turn = inference_pb2.ChatMessage(**({"role": "user", "content": "w1"} | message))  # type: ignore[arg-type]
    return inference_pb2.GenerateRequest(
        chat=inference_pb2.ChatMessages(messages=[turn], tools_json=tools_json)
    )


async def test_tools_and_calls_are_given_to_the_template() -> None:
    listener = Listener()
    tokenizers = PromptTokenizers(lambda _: listener, threads=1)
    call = '[{"id": "c", "function": {"name": "f", "arguments": "{\\"a\\": [1]}"}}]'
    request = chat_of('[{"function": {"name": "f"}}]', role="assistant", tool_calls_json=call, name="n")
    assert await tokenizers.encode("s", request) == [4, 2, 1, 3]
    assert listener.tools == [{"function": {"name": "f"}}]
    (turn,) = listener.turns
    assert turn.tool_calls == [{"id": "c", "function": {"name": "f", "arguments": {"a": [1]}}}]
    assert (turn.role, turn.name) == ("assistant", "n")
    broken = chat_of(tool_calls_json='[{"function": {"name": "f", "arguments": "{cut o"}}]')
    await tokenizers.encode("s", broken)
    assert listener.turns[0].tool_calls == [{"function": {"name": "f", "arguments": "{cut o"}}]
    tokenizers.close()


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (chat_of("{"), "prompt.chat.tools_json"),
        (chat_of("{}"), "prompt.chat.tools_json"),
        (chat_of("[1]"), "prompt.chat.tools_json"),
        (chat_of("[NaN]"), "prompt.chat.tools_json"),
        (chat_of("[" * 10_000), "prompt.chat.tools_json"),
        (chat_of(tool_calls_json="x"), "prompt.chat.messages[0].tool_calls_json"),
        (chat_of(tool_calls_json="[{}]"), "prompt.chat.messages[0].tool_calls_json"),
        (with_fields(template_kwargs_json="["), KWARGS),
        (with_fields(template_kwargs_json="[1]"), KWARGS),
        *(
            (with_fields(template_kwargs_json=f'{{"a": 1, "{name}": []}}'), f"{KWARGS}.{name}")
            for name in (
                "messages",
                "tools",
                "add_generation_prompt",
                "continue_final_message",
                "chat_template",
            )
        ),
        (with_fields(template_kwargs_json='{"documents": {"a": 1}}'), f"{KWARGS}.documents"),
        (with_fields(template_kwargs_json='{"documents": [[]]}'), f"{KWARGS}.documents"),
        (with_fields(chat_template="x"), "prompt.chat.chat_template"),
    ],
)
async def test_broken_fields(request_: inference_pb2.GenerateRequest, field: str) -> None:
    tokenizers = PromptTokenizers(load_word_tokenizer, threads=1)
    with pytest.raises(InvalidArgumentError) as caught:
        await tokenizers.encode("words", request_)
    assert caught.value.field == field
    tokenizers.close()


async def test_tenants_take_turns_small_prompts_first_and_long_ones_stop_no_others() -> None:
    """A tenant floods with long prompts and short ones; another's come next, also when the first's clients leave."""
    begun: list[str] = []
    held, working = threading.Semaphore(0), threading.Semaphore(0)

    class Held(WordTokenizer):
        @override
        def encode(self, text: str, most: int | None = None, **options: Any) -> list[int]:
            begun.append(text[:2])
            working.release()
            if text[0] == "w":
                assert held.acquire(timeout=PATIENCE_S)
            return [1]

    tokenizers = PromptTokenizers(lambda source: Held(), threads=1)
    await tokenizers.tokenizer("s")

    def send(text: str, tenant: str) -> asyncio.Task[object]:
        request = inference_pb2.GenerateRequest(text=text)
        return asyncio.create_task(tokenizers.encode_named("s", request, 0, b"", tenant=tenant))

    long, longer = LONG_BYTES + 1, LONG_BYTES + 2
    calls = [send(f"w{n}" * longer, "a") for n in range(4)] + [send("w9" * long, "b")]
    assert await asyncio.to_thread(working.acquire, timeout=PATIENCE_S)
    await send("short " * SHORT_BYTES, "b")
    assert begun == ["w0", "sh"]
    calls[0].cancel()
    calls += [send("w4" * long, "a")]
    await asyncio.sleep(0)
    held.release(6)
    await asyncio.gather(*calls[1:])
    assert begun == ["w0", "sh", "w4", "w9", "w1", "w2", "w3"]
    tokenizers.close()


async def test_arguments_of_the_template_reach_it_and_a_template_of_a_request_runs_on_a_thread() -> None:
    tokenizers = PromptTokenizers(lambda _: ByteTokenizer(), threads=1, trust_templates=True)
    here = threading.get_ident()

    async def text_of(**fields: Any) -> str:
        return bytes(await tokenizers.encode("any", with_fields(**fields))).decode()

    assert await text_of() == "user: w1\nassistant: "
    assert await text_of(add_generation_prompt=False) == "user: w1\n"
    assert await text_of(continue_final_message=True) == "user: w1"
    threads: list[int] = []
    for number in (1, 2):
        own = {
            "chat_template": "{{ a }}{{ messages[0].content }}",
            "template_kwargs_json": f'{{"a": {number}}}',
        }
        request = with_fields(**own)
        prompt = await tokenizers.encode_named(
            "any", request, 0, b"", check=lambda: threads.append(threading.get_ident())
        )
        assert bytes(prompt.token_ids).decode() == f"{number}w1"
    assert here not in threads


async def test_a_prompt_is_cut_at_its_front_and_bad_words_get_their_tokens() -> None:
    class Spelled(ByteTokenizer):
        @override
        def encode(self, text: str, most: int | None = None, *, add_special_tokens: bool = True) -> list[int]:
            return [self.EOS] * add_special_tokens + super().encode(
                text.replace(" a", "A").replace("b", "BB"), most
            )

    tokenizers = PromptTokenizers(lambda source: Spelled())
    for kept, omits, expected in ((3, False, "cde"), (None, True, "acde"), (9, True, "acde")):
        request = inference_pb2.GenerateRequest(text="acde")
        prompt = await tokenizers.encode_named(
            "s", request, 0, b"", most=6, add_special_tokens=not omits, kept=kept
        )
        assert bytes(prompt.token_ids).decode() == expected
    found = await tokenizers.bad_sequences("s", ["a", " b", "ab"], "tenant")
    assert [bytes(tokens).decode() for tokens in found] == ["a", "A", "BB", "aBB", "ABB"]
    longest = await asyncio.gather(*(tokenizers.bad_sequences("s", ["c" * 256] * 128, "t") for _ in range(2)))
    assert sum(map(len, longest[0])) < 2 * MAX_BAD_TOKENS
    assert longest[0] is longest[1]  # tokenized once
    tokenizers.close()
