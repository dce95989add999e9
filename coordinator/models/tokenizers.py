"""Tokenizes prompts, all but the shortest on threads: tokenization must never block the event loop.

These prompts have not been admitted yet. So tenants take turns, a tenant's smaller prompts go first, and long prompts
have a thread of their own, where they delay no others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

from coordinator.request.json_bounds import parsed_json
from splitserve.errors import InvalidArgumentError
from splitserve.generation.bounds import MAX_BAD_TOKENS
from splitserve.generation.kv_blocks import block_keys
from splitserve.logs import log_event
from splitserve.models.tokenizer import TemplateArguments, Tokenizer, TooManyTokensError, Turn
from splitserve.runtime.call_thread import SharedCalls
from splitserve.runtime.fair_lane import FairLane
from splitserve.v1 import inference_pb2

MAX_NAMED_BLOCKS = 2048
"""Leading blocks of a prompt whose keys are computed: 32,768 tokens at 16 per block. Longer hits are not seen."""
FEW_BLOCKS = 4
"""Prompts of token ids up to this many blocks are hashed on the event loop, which is faster than a call on a thread."""
SLICE_TOKENS = 2**16
"""Token ids that are copied or compared at once: in less than 2 ms."""
SHORT_BYTES = 512
"""Requests up to this size are tokenized on the event loop: 0.2 ms at most, about the cost of a call on a thread."""
LONG_BYTES = 2**15
"""Requests above this size are tokenized one at a time: a megabyte of digits takes seconds."""
THREADS = 2
"""Threads for chat templates and tokenization, without those for long prompts and for loading tokenizers."""
CHAT_FIELDS = frozenset(inference_pb2.ChatMessages.DESCRIPTOR.fields_by_name) | {"tools"}
"""Variables of the template that no request sets by `template_kwargs_json`: they are fields of their own."""
T = TypeVar("T")


class EncodedPrompt(NamedTuple):
    """A tokenized prompt."""

    token_ids: tuple[int, ...]
    block_keys: tuple[int, ...]
    highest: int
    """The highest token id; -1 of an empty prompt."""
    second_begins: int = 0
    """Where the second text of a pair begins; 0: the model does not tell texts apart."""


class PromptTokenizers:
    """The tokenizers of all models, each loaded once. `load` is called on a pool thread."""

    def __init__(
        self,
        load: Callable[[str], Tokenizer],
        early: Sequence[str] = (),
        threads: int = THREADS,
        *,
        trust_templates: bool = False,
    ) -> None:
        """`early`: sources to load now, which needs a running event loop. `trust_templates`: whether a request may
        bring its own chat template."""
        self._trust_templates = trust_templates
        self._load = load
        self._threads = ThreadPoolExecutor(threads + 2, thread_name_prefix="tokenizer")
        self._lane, self._long_lane = FairLane(threads), FairLane(1)
        self._loading: dict[str, asyncio.Task[Tokenizer]] = {}
        self._encoding: SharedCalls[EncodedPrompt] = SharedCalls()
        """Prompts that are being tokenized, by everything that determines the result."""
        self._bad: SharedCalls[list[list[int]]] = SharedCalls()
        """Bad words that are being tokenized, by tenant, source and words."""
        self._warm: set[tuple[str, str, bool]] = set()
        """(source, prompt form, has tools) of earlier requests: the first such request compiles a chat template."""
        for source in early:
            self._task(source).add_done_callback(partial(_warn_if_failed, source))

    async def tokenizer(self, source: str) -> Tokenizer:
        """The tokenizer of a source. Raises the errors of loading it; the next call tries again."""
        task = self._task(source)
        if task.done():
            return task.result()
        # Shielded: cancelling one caller must not cancel the load for the others.
        return await asyncio.shield(task)

    async def encode(self, source: str, request: inference_pb2.GenerateRequest) -> list[int]:
        """Token ids of the request's prompt.

        Raises InvalidArgumentError if the model has no chat template, or if the template rejects the turns.
        """
        return list((await self.encode_named(source, request, 0, b"")).token_ids)

    async def encode_named(
        self,
        source: str,
        request: inference_pb2.GenerateRequest,
        block_size: int,
        cache_salt: bytes,
        most: int | None = None,
        check: Callable[[], None] = lambda: None,
        tenant: str = "",
        *,
        add_special_tokens: bool = True,
        kept: int | None = None,
    ) -> EncodedPrompt:
        """Token ids as from `encode`, at most the `kept` last ones, and the index keys of the prompt's leading full
        blocks, at most MAX_NAMED_BLOCKS of `block_size` tokens; none if it is 0. `check` is called first, on the same
        thread. Equal prompts that arrive while the first is being tokenized, such as those of several answers, are
        tokenized once. Tenants take turns. Without `add_special_tokens` a text has none but those that it spells.

        Raises TooManyTokensError for more than `most` tokens of a prompt that is not truncated, and the errors of
        `check`.
        """
        most = most if kept is None else None
        form = request.WhichOneof("prompt") or ""
        kind = source, form, bool(request.chat.tools_json)
        if form == "token_ids":
            tokenizer = None
            count = len(request.token_ids.ids)
            if most is not None and count > most:
                raise TooManyTokensError(count)
            is_short = count <= FEW_BLOCKS * max(block_size, 1)
        else:
            tokenizer = await self.tokenizer(source)
            is_short = kind in self._warm and request.ByteSize() <= SHORT_BYTES
            is_short &= not request.chat.chat_template  # its code is not known to be fast

        def work() -> EncodedPrompt:
            check()
            second_begins = 0
            if form == "pair" and tokenizer is not None:
                token_ids, second_begins = tokenizer.encode_pair(
                    request.pair.first, request.pair.second, most
                )
            else:
                token_ids = self._token_ids(tokenizer, request, most, add_special_tokens)
            if kept is not None:
                token_ids = token_ids[-kept:]
            keys = block_keys(token_ids, block_size, cache_salt, MAX_NAMED_BLOCKS) if block_size else ()
            slices = (
                token_ids[start : start + SLICE_TOKENS] for start in range(0, len(token_ids), SLICE_TOKENS)
            )
            highest = max(map(max, slices), default=-1)
            return EncodedPrompt(tuple(token_ids), keys, highest, second_begins)

        if is_short:
            return work()
        key = tenant, kind, _prompt_bytes(request), block_size, cache_salt, most, add_special_tokens, kept
        prompt = await self._encoding.result(key, lambda: self.in_turn(tenant, request.ByteSize(), work))
        self._warm.add(kind)
        return prompt

    def arguments(self, chat: inference_pb2.ChatMessages) -> TemplateArguments:
        """The arguments of the chat template. Takes milliseconds for long ones. Raises InvalidArgumentError."""
        if chat.chat_template and not self._trust_templates:
            message = "prompt.chat.chat_template is not accepted here: trust_request_chat_template is off"
            raise InvalidArgumentError(message, reason="UNSUPPORTED_FIELD", field="prompt.chat.chat_template")
        field = "prompt.chat.template_kwargs_json"
        variables = _object(chat.template_kwargs_json, field)
        for name in sorted(CHAT_FIELDS & variables.keys()):
            message = f"{field}.{name} is no variable of the template: the request has it as a field"
            raise InvalidArgumentError(message, reason="UNSUPPORTED_FIELD", field=f"{field}.{name}")
        documents = variables.get("documents") or []
        if not isinstance(documents, list) or not all(isinstance(document, dict) for document in documents):
            message = f"{field}.documents must be an array of objects"
            raise InvalidArgumentError(message, field=f"{field}.documents")
        continues = chat.continue_final_message
        begins = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not continues
        return TemplateArguments(variables, begins, continues, chat.chat_template)

    async def bad_sequences(self, source: str, words: Sequence[str], tenant: str) -> list[list[int]]:
        """The tokens of each word as it is, and with a space before it unless that only puts tokens before them. vLLM
        leaves out the latter also where they are fewer, and so misses words in the middle of a text.

        Ends with the first tokens beyond MAX_BAD_TOKENS. Equal words that arrive meanwhile are tokenized once.
        """
        tokenizer = await self.tokenizer(source)

        def work() -> list[list[int]]:
            made: list[list[int]] = []
            for word in words:
                if sum(map(len, made)) > MAX_BAD_TOKENS:
                    break
                bare, spaced = (
                    tokenizer.encode(f"{space}{word.lstrip()}", add_special_tokens=False)
                    for space in ("", " ")
                )
                made.append(bare)
                if spaced[-len(bare) :] != bare:
                    made.append(spaced)
            return made

        key, size = (tenant, source, tuple(words)), sum(map(len, words))
        return await self._bad.result(key, lambda: self.in_turn(tenant, size, work))

    async def in_turn(self, tenant: str, size: int, work: Callable[[], T]) -> T:
        """The result of work on `size` bytes, on a thread. The turn lasts as long as the thread works, even if its
        clients leave."""
        lane = self._long_lane if size > LONG_BYTES else self._lane
        async with lane.turn(tenant, size):
            working = asyncio.get_running_loop().run_in_executor(self._threads, work)
            try:
                return await asyncio.shield(working)
            finally:
                await asyncio.gather(working, return_exceptions=True)

    def _token_ids(
        self,
        tokenizer: Tokenizer | None,
        request: inference_pb2.GenerateRequest,
        most: int | None,
        add_special_tokens: bool,
    ) -> list[int]:
        """`tokenizer`: None for a prompt of token ids."""
        if tokenizer is None:
            return _sliced(request.token_ids.ids)
        if request.WhichOneof("prompt") != "chat":
            return tokenizer.encode(request.text, most, add_special_tokens=add_special_tokens)
        chat = request.chat
        turns = [_turn(position, message) for position, message in enumerate(chat.messages)]
        tools = _objects(chat.tools_json, "prompt.chat.tools_json")
        return tokenizer.render_chat(turns, tools, most, self.arguments(chat))

    def close(self) -> None:
        """Shuts down the thread pool without waiting for loads in progress."""
        for task in self._loading.values():
            task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _task(self, source: str) -> asyncio.Task[Tokenizer]:
        task = self._loading.get(source)
        if task is None:
            task = self._loading[source] = asyncio.create_task(self._loaded(source))
            # Retrieves the exception: if all waiters are gone, asyncio must not report it as never retrieved.
            task.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        return task

    async def _loaded(self, source: str) -> Tokenizer:
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, self._load, source)
        except BaseException:
            del self._loading[source]
            raise


def _warn_if_failed(source: str, done: asyncio.Task[Tokenizer]) -> None:
    """Logs a failed early load, for which nobody waits. The next request tries again."""
    if not done.cancelled() and (error := done.exception()) is not None:
        log_event("tokenizer.failed", level=logging.WARNING, source=source, error=str(error))


def _prompt_bytes(request: inference_pb2.GenerateRequest) -> bytes:
    match request.WhichOneof("prompt"):
        case "chat":
            return request.chat.SerializeToString(deterministic=True)
        case "token_ids":
            return request.token_ids.SerializeToString()
        case "pair":
            return request.pair.SerializeToString()
    return request.text.encode()


def _sliced(ids: Sequence[int]) -> list[int]:
    """A copy, made in slices: one call for all would hold the interpreter's lock for long."""
    copied: list[int] = []
    for start in range(0, len(ids), SLICE_TOKENS):
        copied += ids[start : start + SLICE_TOKENS]
    return copied


def _turn(position: int, message: inference_pb2.ChatMessage) -> Turn:
    field = f"prompt.chat.messages[{position}].tool_calls_json"
    calls = [_with_parsed_arguments(call, field) for call in _objects(message.tool_calls_json, field)]
    further = _further(message.further_json, f"prompt.chat.messages[{position}].further_json")
    return Turn(message.role, message.content, calls, message.tool_call_id, message.name, further)


def _further(text: str, field: str) -> dict[str, Any]:
    """The further fields of a message that have a value. Raises InvalidArgumentError."""
    value = _object(text, field)
    if value.keys() & Turn._fields:
        raise InvalidArgumentError(f"{field} must have no field that ChatMessage has", field=field)
    return {name: inner for name, inner in value.items() if inner is not None}


def _object(text: str, field: str) -> dict[str, Any]:
    """A JSON object; empty for no text. Raises InvalidArgumentError."""
    value = _field_json(text, field) if text else {}
    if not isinstance(value, dict):
        raise InvalidArgumentError(f"{field} must be a JSON object", field=field)
    return value


def _with_parsed_arguments(call: dict[str, Any], field: str) -> dict[str, Any]:
    """The call with its arguments as an object: OpenAI sends a JSON string, but templates serialize them themselves."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidArgumentError(f"{field} must have function.name in each call", field=field)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = parsed_json(arguments or "{}")
        except ValueError:
            # An earlier answer left these arguments unfinished. The model sees them unchanged.
            return call
    return call | {"function": function | {"arguments": arguments}}


def _objects(text: str, field: str) -> list[dict[str, Any]]:
    """A JSON array of objects; empty for no text. Raises InvalidArgumentError."""
    value = _field_json(text, field) if text else []
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise InvalidArgumentError(f"{field} must be a JSON array of objects", field=field)
    return value


def _field_json(text: str, field: str) -> Any:
    try:
        return parsed_json(text)
    except ValueError as error:
        raise InvalidArgumentError(f"{field} is no valid JSON: {error}", field=field) from None
