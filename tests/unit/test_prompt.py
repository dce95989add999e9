"""Tokenizers of the coordinator: loaded once, used off the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence

import pytest

from coordinator.prompt import PromptTokenizers
from splitserve.errors import InvalidArgumentError, NotFoundError
from splitserve.v1 import inference_pb2
from tests.fakes.word_tokenizer import WordTokenizer, load_word_tokenizer


class Witness(WordTokenizer):
    """Notes the threads it runs on."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()

    def encode(self, text: str) -> list[int]:
        self.threads.add(threading.get_ident())
        return super().encode(text)

    def render_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        self.threads.add(threading.get_ident())
        return super().render_chat(messages)


class Loader:
    """Counts loads; fails as often as told."""

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


async def test_one_load_for_many_callers(tokenizers: PromptTokenizers, loader: Loader) -> None:
    calls = [asyncio.create_task(tokenizers.tokenizer("s")) for _ in range(5)]
    await asyncio.sleep(0)
    calls[0].cancel()
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert found[1:] == [loader.tokenizer] * 4
    assert loader.loads == 1


async def test_a_failed_load_is_tried_again() -> None:
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
