"""Prompts to token ids, on threads of their own: tokenization must never hold up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from splitserve.tokenizer import Tokenizer
from splitserve.v1 import inference_pb2


class PromptTokenizers:
    """The tokenizers of all models, each loaded once; `load` is called on a thread."""

    def __init__(self, load: Callable[[str], Tokenizer], threads: int) -> None:
        self._load = load
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenizer")
        self._loading: dict[str, asyncio.Task[Tokenizer]] = {}

    async def tokenizer(self, source: str) -> Tokenizer:
        """The tokenizer of a source. What loading raised is raised here; the next call tries again."""
        task = self._loading.get(source)
        if task is None:
            task = self._loading[source] = asyncio.create_task(self._loaded(source))
            # Whoever waited may have gone by then; a failure nobody sees is no error of the loop.
            task.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        # Shielded: one caller that goes away must not take the others' tokenizer with it.
        return await asyncio.shield(task)

    async def encode(self, source: str, request: inference_pb2.GenerateRequest) -> list[int]:
        """Token ids of the request's prompt.

        Raises InvalidArgumentError where the model has no chat template or it refuses the turns.
        """
        if request.WhichOneof("prompt") == "token_ids":
            return list(request.token_ids.ids)
        tokenizer = await self.tokenizer(source)
        return await asyncio.get_running_loop().run_in_executor(self._threads, _encode, tokenizer, request)

    def close(self) -> None:
        """Ends the threads without waiting for a load that is still under way."""
        for task in self._loading.values():
            task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _loaded(self, source: str) -> Tokenizer:
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, self._load, source)
        except BaseException:
            del self._loading[source]
            raise


def _encode(tokenizer: Tokenizer, request: inference_pb2.GenerateRequest) -> list[int]:
    if request.WhichOneof("prompt") == "chat":
        return tokenizer.render_chat([(turn.role, turn.content) for turn in request.chat.messages])
    return tokenizer.encode(request.text)
