"""Prompts to token ids, long ones on threads of their own: tokenization must never hold up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pydantic_core import from_json

from splitserve.block_hashes import block_keys
from splitserve.errors import InvalidArgumentError
from splitserve.tokenizer import Tokenizer, Turn
from splitserve.v1 import inference_pb2

MAX_NAMED_BLOCKS = 2048
"""Leading blocks of a prompt that routing asks for: 32,768 tokens at 16 each. Longer hits seem to end here."""
FEW_BLOCKS = 4
"""Named on the event loop, which takes less time than a hop to a thread and back."""
SHORT_BYTES = 512
"""A request of no more is tokenized there too: about 0.2 ms at most, where the hop costs nearly as much."""


class PromptTokenizers:
    """The tokenizers of all models, each loaded once; `load` is called on a thread."""

    def __init__(self, load: Callable[[str], Tokenizer], threads: int) -> None:
        self._load = load
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenizer")
        self._loading: dict[str, asyncio.Task[Tokenizer]] = {}
        self._warm: set[tuple[str, str, bool]] = set()
        """Sources, forms of prompt, and whether with tools, seen before: the first time compiles a chat template."""

    async def tokenizer(self, source: str) -> Tokenizer:
        """The tokenizer of a source. What loading raised is raised here; the next call tries again."""
        task = self._loading.get(source)
        if task is None:
            task = self._loading[source] = asyncio.create_task(self._loaded(source))
            # Whoever waited may have gone by then; a failure nobody sees is no error of the loop.
            task.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        if task.done():
            return task.result()
        # Shielded: one caller that goes away must not take the others' tokenizer with it.
        return await asyncio.shield(task)

    async def encode(self, source: str, request: inference_pb2.GenerateRequest) -> list[int]:
        """Token ids of the request's prompt.

        Raises InvalidArgumentError where the model has no chat template or it refuses the turns.
        """
        return (await self.encode_named(source, request, 0, b""))[0]

    async def encode_named(
        self, source: str, request: inference_pb2.GenerateRequest, block_size: int, cache_salt: bytes
    ) -> tuple[list[int], tuple[int, ...]]:
        """As `encode`, and the keys of the prompt's first full blocks, `MAX_NAMED_BLOCKS` at most; with a block size
        of 0 none."""
        form = request.WhichOneof("prompt") or ""
        kind = source, form, bool(request.chat.tools_json)
        if form == "token_ids":
            tokenizer = None
            is_short = not block_size or len(request.token_ids.ids) <= FEW_BLOCKS * block_size
        else:
            tokenizer = await self.tokenizer(source)
            is_short = kind in self._warm and request.ByteSize() <= SHORT_BYTES
        if is_short:
            return _encode_named(tokenizer, request, block_size, cache_salt)
        found = await asyncio.get_running_loop().run_in_executor(
            self._threads, _encode_named, tokenizer, request, block_size, cache_salt
        )
        self._warm.add(kind)
        return found

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


def _encode_named(
    tokenizer: Tokenizer | None, request: inference_pb2.GenerateRequest, block_size: int, cache_salt: bytes
) -> tuple[list[int], tuple[int, ...]]:
    token_ids = list(request.token_ids.ids) if tokenizer is None else _encode(tokenizer, request)
    return token_ids, _keys(token_ids, block_size, cache_salt)


def _keys(token_ids: list[int], block_size: int, cache_salt: bytes) -> tuple[int, ...]:
    return block_keys(token_ids, block_size, cache_salt, MAX_NAMED_BLOCKS) if block_size else ()


def _encode(tokenizer: Tokenizer, request: inference_pb2.GenerateRequest) -> list[int]:
    if request.WhichOneof("prompt") == "chat":
        chat = request.chat
        turns = [_turn(position, message) for position, message in enumerate(chat.messages)]
        return tokenizer.render_chat(turns, _objects(chat.tools_json, "prompt.chat.tools_json"))
    return tokenizer.encode(request.text)


def _turn(position: int, message: inference_pb2.ChatMessage) -> Turn:
    field = f"prompt.chat.messages[{position}].tool_calls_json"
    calls = [_with_parsed_arguments(call, field) for call in _objects(message.tool_calls_json, field)]
    return Turn(message.role, message.content, calls, message.tool_call_id, message.name)


def _with_parsed_arguments(call: dict[str, Any], field: str) -> dict[str, Any]:
    """Templates write the arguments as JSON themselves; OpenAI has them as a string that is JSON already."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidArgumentError(f"{field} must have function.name in each call", field=field)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = from_json(arguments or "{}", allow_inf_nan=False)
        except ValueError:
            # What an earlier answer wrote before it was cut off. The model gets to see it as it is.
            return call
    return call | {"function": function | {"arguments": arguments}}


def _objects(text: str, field: str) -> list[dict[str, Any]]:
    """A JSON array of objects; empty for no text. Raises InvalidArgumentError."""
    if not text:
        return []
    try:
        value = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidArgumentError(f"{field} is no valid JSON: {error}", field=field) from None
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise InvalidArgumentError(f"{field} must be a JSON array of objects", field=field)
    return value
