"""How the answers to a chat request are read, and what they are held to."""

from __future__ import annotations

from coordinator.entrypoints.inference_api import InferenceApi
from coordinator.entrypoints.openai.call_grammar import functions_in
from coordinator.entrypoints.openai.chat import ChatRequest
from coordinator.entrypoints.openai.formats.table import AnswerFormat, choose_format, format_named
from coordinator.request.inference_request import Caller
from splitserve.errors import InvalidArgumentError
from splitserve.logs import log_event
from splitserve.runtime.call_thread import SHORT_BYTES
from splitserve.v1 import generation_pb2

MAX_NAMED_ROUNDS = 4
"""Checks of a grammar that each give up the tools that the one before has named; the next gives up all."""
MAX_SHOWN = 32
"""Names of tools in a header and an event."""


class AnswerFormats:
    """The formats of all models, each chosen once, by these settings."""

    def __init__(self, api: InferenceApi, tool_format: str, reasoning_format: str) -> None:
        self._api = api
        self._names = tool_format, reasoning_format
        self._chosen: dict[tuple[str, bool], AnswerFormat] = {}

    async def of(self, request: ChatRequest, request_id: str, caller: Caller) -> AnswerFormat:
        """The format of the answers to a request. It is that of the model's template or of the settings."""
        name, key = request.model or "", request.session_id or request_id
        found = await self._api.found_tokenizer(name, key, caller)
        if found is None:
            chosen = format_named(*self._names, with_tools=request.uses_tools)
        else:
            source, tokenizer = found
            kind = source, request.uses_tools
            if kind not in self._chosen:
                # On the thread: it renders a prompt.
                self._chosen[kind] = await self._api.parser.run(
                    SHORT_BYTES + 1, choose_format, tokenizer, *self._names, with_tools=request.uses_tools
                )
            chosen = self._chosen[kind]
        return chosen.forced() if request.must_call else chosen

    async def grammar(
        self, request: ChatRequest, answer: AnswerFormat, caller: Caller, size: int
    ) -> tuple[generation_pb2.Grammar | None, list[str]]:
        """The grammar of the answers to a request of this size in bytes, and the names of the tools whose schemas it
        does not hold: what no grammar can hold fails a request only where it asks for strictness.

        Raises SplitserveError if the grammar cannot be checked now.
        """
        loose: set[int] = set()
        grammar = await self._api.parser.run(size, request.grammar, answer, loose)
        rounds = 0
        while grammar is not None and (lenient := request.lenient_functions - loose):
            try:
                await self._api.check_grammar(grammar, caller)
                break
            except InvalidArgumentError as error:
                named = functions_in(error.message) & lenient
                loose |= named if named and rounds < MAX_NAMED_ROUNDS else lenient
                rounds += 1
                grammar = await self._api.parser.run(size, request.grammar, answer, loose)
        names = request.function_names(loose)[:MAX_SHOWN]
        if names:
            log_event("tools.loosened", request_tools=names, model=request.model or "")
        return grammar, names
