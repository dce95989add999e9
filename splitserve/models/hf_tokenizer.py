"""Tokenizer implementations: the model's own, by the library `tokenizers`, and a byte-level one for simulation."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from typing_extensions import override

from splitserve.config.engine import SIMULATED
from splitserve.errors import InvalidArgumentError, NotFoundError, SplitserveError
from splitserve.models.chat_template import REASONING_FIELDS, ChatTemplates, compiled
from splitserve.models.sources import ModelSource, localize_model, resolve_model
from splitserve.models.tokenizer import (
    DEFAULT_ARGUMENTS,
    THINKING,
    PromptStyle,
    TemplateArguments,
    Tokenizer,
    TooManyTokensError,
    Turn,
)
from splitserve.models.tokenizer_cache import converted_tokenizer
from splitserve.models.tokenizer_files import TokenizerDefinition, has_tokenizer, is_plain, read_tokenizer

SHORT_CHARACTERS = 1024
"""For texts up to this length the library's calls for one text, which hold the interpreter's lock, take 2 ms at most.
Longer texts use the calls for batches, which release the lock."""
SHORT_TOKENS = 1024
PIECE_CHARACTERS = 2**14
USUAL_CHARACTERS = 4
"""A token stands for about so many. Only texts with more of them for each token that they may have are tried in pieces:
others seldom have too many tokens."""
PROMPT_END_CHARACTERS = 256
_SOME_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "f", "parameters": {"type": "object", "properties": {}}},
}


LONGEST_NAME = 64
"""Leading characters of a field's name that an error shows."""
_MESSAGE = frozenset(Turn._fields) - {"further"} | frozenset(REASONING_FIELDS)
"""Fields of a message that are accepted whether the template reads them or not."""
_CALL, _FUNCTION = frozenset({"id", "type", "function", "index"}), frozenset({"name", "arguments"})
_READERS: Mapping[str, frozenset[str]] = {
    "documents": frozenset({"documents"}),
    "reasoning_effort": frozenset({"reasoning_effort", *THINKING}),
}
"""Variables that are refused with a template that reads none of these."""
_HARMLESS: tuple[Any, ...] = (None, [], "none", "medium")
"""Values of those variables that are accepted with any template."""


def rendered(
    templates: ChatTemplates,
    turns: Sequence[Turn],
    tools: Sequence[Mapping[str, Any]],
    arguments: TemplateArguments,
) -> str:
    """The turns as text. Raises InvalidArgumentError, as `Tokenizer.render_chat` does."""
    if not (templates or arguments.template):
        message = "prompt.chat: this model has no chat template; send text or token ids"
        raise InvalidArgumentError(message, field="prompt.chat")
    try:
        names, variables = compiled(templates.text(arguments, with_tools=bool(tools)))[1:]
        _require_read(tools, arguments, variables)
        return templates.render(fitted(turns, names), tools, arguments)
    except SplitserveError:
        raise
    except Exception as error:  # the template is the model's code, which may raise anything
        message = f"prompt.chat: the chat template refuses these messages: {error}"
        raise InvalidArgumentError(message, field="prompt.chat") from None


def _require_read(
    tools: Sequence[Mapping[str, Any]], arguments: TemplateArguments, read: Container[str]
) -> None:
    """Raises InvalidArgumentError for what the template, which reads these variables, would drop in silence."""
    if tools and "tools" not in read:
        field = "prompt.chat.tools_json"
        message = f"{field}: this model's chat template does not support tools"
        raise InvalidArgumentError(message, reason="TOOLS_UNSUPPORTED", field=field)
    for name, readers in _READERS.items():
        if arguments.variables.get(name) not in _HARMLESS and not any(reader in read for reader in readers):
            field = f"prompt.chat.template_kwargs_json.{name}"
            message = f"{field} is not known to the model's chat template"
            raise InvalidArgumentError(message, reason="UNSUPPORTED_FIELD", field=field)


def fitted(turns: Sequence[Turn], mentioned: Container[str]) -> list[Turn]:
    """The turns for a template that mentions these names. The role "developer", OpenAI's newer name for "system",
    becomes "system" where the template does not know it.

    Raises InvalidArgumentError (UNSUPPORTED_FIELD) for a field of a message or of its calls that would be lost.
    """
    for position, turn in enumerate(turns):
        for path, name, usual in _fields(turn):
            if name not in usual and name not in mentioned:
                field = f"prompt.chat.messages[{position}].{path}{name[:LONGEST_NAME]}"
                message = f"{field} is not known to the model's chat template"
                raise InvalidArgumentError(message, reason="UNSUPPORTED_FIELD", field=field)
    if "developer" in mentioned:
        return list(turns)
    return [turn._replace(role="system") if turn.role == "developer" else turn for turn in turns]


def _fields(turn: Turn) -> Iterator[tuple[str, str, Container[str]]]:
    """Path, name, and the usual names at that place, of each field of a turn."""
    yield from (("", name, _MESSAGE) for name in turn.further)
    for number, call in enumerate(turn.tool_calls):
        yield from ((f"tool_calls[{number}].", name, _CALL) for name in call)
        path = f"tool_calls[{number}].function."
        yield from ((path, name, _FUNCTION) for name in call.get("function", ()))


class HfTokenizer(Tokenizer):
    """A model's own tokenizer. Needs neither weights nor `transformers` nor torch.

    Thread-safe: encoding and decoding use an immutable Rust object.
    """

    def __init__(self, definition: TokenizerDefinition) -> None:
        self._rust = definition.tokenizer
        self._templates = ChatTemplates(definition.templates, definition.special_tokens)
        self.has_chat_template = bool(self._templates)
        self.vocabulary_size = int(self._rust.get_vocab_size(with_added_tokens=True))
        added = self._rust.get_added_tokens_decoder().items()
        self._added = {int(token_id): str(token.content).encode() for token_id, token in added}
        # The only way to detect a decoder inside a sequence of decoders.
        self._byte_level = "ByteLevel(" in repr(self._rust.decoder)

    @override
    def encode(self, text: str, most: int | None = None, *, add_special_tokens: bool = True) -> list[int]:
        return self._ids(text, most, add_special_tokens=add_special_tokens)

    @override
    def encode_pair(self, first: str, second: str, most: int | None = None) -> tuple[list[int], int]:
        for text in (first, second):
            if most is not None and len(text) > USUAL_CHARACTERS * most:
                self._try_in_pieces(text, most)
        encoding = self._rust.encode_batch([(first, second)])[0]
        if most is not None and len(encoding) > most:
            raise TooManyTokensError(len(encoding))
        types: list[int] = encoding.type_ids
        return encoding.ids, types.index(1) if 1 in types else 0

    @override
    def render_chat(
        self,
        messages: Sequence[Turn],
        tools: Sequence[Mapping[str, Any]] = (),
        most: int | None = None,
        arguments: TemplateArguments = DEFAULT_ARGUMENTS,
    ) -> list[int]:
        text = rendered(self._templates, messages, tools, arguments)
        # The template has written the special tokens.
        return self._ids(text, most, add_special_tokens=False)

    @override
    def entry(self, token_id: int) -> str:
        return self._rust.id_to_token(token_id) or ""

    @override
    def token_bytes(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            return added
        entry = self._rust.id_to_token(token_id)
        return entry_bytes(entry, byte_level=self._byte_level) if entry else b""

    def _ids(self, text: str, most: int | None, *, add_special_tokens: bool) -> list[int]:
        if most is not None and len(text) > USUAL_CHARACTERS * most:
            self._try_in_pieces(text, most)
        if len(text) <= SHORT_CHARACTERS:
            encoding = self._rust.encode(text, add_special_tokens=add_special_tokens)
        else:
            encoding = self._rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        if most is not None and len(encoding) > most:
            raise TooManyTokensError(len(encoding))
        ids: list[int] = encoding.ids
        return ids

    def _try_in_pieces(self, text: str, most: int) -> None:
        """Raises TooManyTokensError as soon as the beginning of a text has too many tokens: to encode a whole megabyte
        takes seconds. Cuts in a text add tokens, but few, so the pieces may have twice as many as the text."""
        count = 0
        for start in range(0, len(text), PIECE_CHARACTERS):
            piece = text[start : start + PIECE_CHARACTERS]
            count += len(self._rust.encode_batch_fast([piece], add_special_tokens=False)[0])
            if count > 2 * most:
                raise TooManyTokensError(most + 1)

    @override
    def prompt_style(
        self, *, with_tools: bool, arguments: TemplateArguments = DEFAULT_ARGUMENTS
    ) -> PromptStyle:
        if not (self._templates or arguments.template):
            return PromptStyle()
        turns, tools = [Turn("user", "Hello")], [_SOME_TOOL] if with_tools else []
        try:
            text = self._templates.text(arguments, with_tools=with_tools)
        except ValueError:
            return PromptStyle()
        try:
            prompt = self._templates.render(turns, tools, arguments)
        except Exception:  # the template is the model's code, which may raise anything
            return PromptStyle(text)
        return PromptStyle(text, prompt[-PROMPT_END_CHARACTERS:])

    @override
    def decode(self, token_ids: Sequence[int], *, keep_special: bool = False) -> str:
        if len(token_ids) <= SHORT_TOKENS:
            return str(self._rust.decode(list(token_ids), skip_special_tokens=not keep_special))
        return str(self._rust.decode_batch([list(token_ids)], skip_special_tokens=not keep_special)[0])

    def definition(self) -> str:
        """The whole tokenizer as the JSON of a `tokenizer.json`."""
        return str(self._rust.to_str())


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as token ids 0..255, and 256 for end of sequence."""

    EOS = 256
    vocabulary_size = 257
    has_chat_template = True

    @override
    def encode(self, text: str, most: int | None = None, *, add_special_tokens: bool = True) -> list[int]:
        data = text.encode("utf-8", errors="replace")
        if most is not None and len(data) > most:
            raise TooManyTokensError(len(data))
        return list(data)

    @override
    def encode_pair(self, first: str, second: str, most: int | None = None) -> tuple[list[int], int]:
        return self.encode(first + second, most), len(first.encode("utf-8", errors="replace"))

    @override
    def render_chat(
        self,
        messages: Sequence[Turn],
        tools: Sequence[Mapping[str, Any]] = (),
        most: int | None = None,
        arguments: TemplateArguments = DEFAULT_ARGUMENTS,
    ) -> list[int]:
        """A line of the tools, if any, a line "role: content" per turn, then "assistant: "."""
        if arguments.template:
            return self.encode(rendered(ChatTemplates({}, {}), messages, tools, arguments), most)
        _require_read(tools, arguments, {"tools"})
        lines = [f"tools: {json.dumps(tools)}\n"] if tools else []
        lines += [f"{turn.role}: {turn.content}\n" for turn in fitted(messages, ())]
        if arguments.continue_final_message:
            lines[-1] = lines[-1].removesuffix("\n")
        if arguments.add_generation_prompt:
            lines.append("assistant: ")
        return self.encode("".join(lines), most)

    @override
    def prompt_style(
        self, *, with_tools: bool, arguments: TemplateArguments = DEFAULT_ARGUMENTS
    ) -> PromptStyle:
        """No template."""
        return PromptStyle()

    @override
    def entry(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("latin-1")

    @override
    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if 0 <= token_id < self.EOS else b""

    @override
    def decode(self, token_ids: Sequence[int], *, keep_special: bool = False) -> str:
        return bytes([token for token in token_ids if token < self.EOS]).decode("utf-8", errors="replace")


_SHARED_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
)


def load_tokenizer(source: str) -> Tokenizer:
    """The tokenizer of a model, named as for `resolve_model`; ByteTokenizer for "simulated".

    Raises NotFoundError for an unknown model or one without a usable tokenizer, UnavailableError if it must be
    downloaded and Hugging Face is unreachable, or if its conversion fails.
    """
    return ByteTokenizer() if source == SIMULATED else tokenizer_of(_local_files(source))


def tokenizer_files(source: str) -> list[Path]:
    """The files of a model's tokenizer and settings, for clients that tokenize themselves. The model is named as for
    `resolve_model`. Raises NotFoundError and UnavailableError as `load_tokenizer` does."""
    names = () if source == SIMULATED else _SHARED_FILES
    folder = Path(_local_files(source).path) if names else Path()
    if not (present := [folder / name for name in names if (folder / name).is_file()]):
        raise NotFoundError("this model has no tokenizer files", reason="NO_TOKENIZER_FILES")
    return present


def _local_files(source: str) -> ModelSource:
    try:
        return localize_model(resolve_model(source), weights=False)
    except InvalidArgumentError as error:  # a peer may have given the name: it is no setting of this process
        raise NotFoundError(error.message) from None


def tokenizer_of(files: ModelSource) -> HfTokenizer:
    """The tokenizer of a model whose files are on this machine and checked; see `localize_model`.

    Raises NotFoundError for a model without a usable tokenizer, UnavailableError if its conversion fails.
    """
    folder = Path(files.path)
    if not files.gguf_file and not has_tokenizer(folder):
        why = "it has no tokenizer files, such as tokenizer.json"
        raise NotFoundError(f"model {files.path} has no usable tokenizer: {why}")
    try:
        plain = not files.gguf_file and is_plain(folder)
        return HfTokenizer(read_tokenizer(folder) if plain else converted_tokenizer(files))
    except InvalidArgumentError as error:
        raise NotFoundError(error.message) from None
    except (ValueError, TypeError, OSError) as error:
        raise NotFoundError(f"model {files.path} has no usable tokenizer: {error}") from None


_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE = "\u2581"
"""SentencePiece's symbol for a space."""


def entry_bytes(entry: str, *, byte_level: bool) -> bytes:
    """The bytes of a vocabulary entry.

    With `byte_level` each character is one byte in GPT-2's alphabet. Otherwise the entry is text with `SPACE` for
    spaces, or one byte written as "<0x0A>".
    """
    if byte_level:
        alphabet = _alphabet()
        if all(character in alphabet for character in entry):
            return bytes(alphabet[character] for character in entry)
        return entry.encode()
    if byte := _BYTE.fullmatch(entry):
        return bytes.fromhex(byte[1])
    return entry.replace(SPACE, " ").encode()


@cache
def _alphabet() -> dict[str, int]:
    """GPT-2's byte alphabet: printable Latin-1 characters stand for themselves, other bytes are U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}
