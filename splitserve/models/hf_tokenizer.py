"""Tokenizer implementations: the model's own, by the library `tokenizers`, and a byte-level one for simulation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from splitserve.errors import ConfigError, InvalidArgumentError, NotFoundError
from splitserve.models.chat_template import ChatTemplates
from splitserve.models.sources import SIMULATED, ModelSource, localize_model, resolve_model
from splitserve.models.tokenizer import Tokenizer, TooManyTokensError, Turn
from splitserve.models.tokenizer_cache import converted_tokenizer
from splitserve.models.tokenizer_files import TokenizerDefinition, has_tokenizer, is_plain, read_tokenizer

_TOOLS = re.compile(r"\btools\b")
SHORT_CHARACTERS = 1024
"""Up to here the library's calls for one text, which keep the interpreter to themselves, take 2 ms. Those for batches
leave it to other threads."""
SHORT_TOKENS = 1024


class HfTokenizer:
    """A model's own tokenizer. Needs neither weights nor `transformers` nor torch.

    Thread-safe: encoding and decoding use an immutable Rust object.
    """

    def __init__(self, definition: TokenizerDefinition) -> None:
        self._rust = definition.tokenizer
        self._templates = ChatTemplates(definition.templates, definition.special_tokens)
        self._size = int(self._rust.get_vocab_size(with_added_tokens=True))
        added = self._rust.get_added_tokens_decoder().items()
        self._added = {int(token_id): str(token.content).encode() for token_id, token in added}
        # The only way to detect a decoder inside a sequence of decoders.
        self._byte_level = "ByteLevel(" in repr(self._rust.decoder)
        self._separators = separators(self._rust)
        self._fixed: dict[str, list[int]] | None = None
        """Ids of what the template itself writes, by text; None before the first chat."""

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids; they are 0..vocabulary_size-1."""
        return self._size

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` works."""
        return bool(self._templates)

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """Token ids of a text without a template, with the model's special tokens. See Tokenizer."""
        return self._ids(text, most, add_special_tokens=True)

    def render_chat(
        self, messages: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = (), most: int | None = None
    ) -> list[int]:
        """Token ids of turns rendered by the chat template, generation prompt appended. See Tokenizer."""
        if not self.has_chat_template:
            message = "prompt.chat: this model has no chat template; send text or token ids"
            raise InvalidArgumentError(message, field="prompt.chat")
        try:
            if tools:
                self._require_tools_in_template()
            text = self._templates.render(messages, tools)
        except (TemplateError, TypeError, ValueError) as error:
            message = f"prompt.chat: the chat template refuses these messages: {error}"
            raise InvalidArgumentError(message, field="prompt.chat") from None
        if self._separators is not None and len(text) <= SHORT_CHARACTERS:
            ids = self._rendered(text, self._separators)
            if most is not None and len(ids) > most:
                raise TooManyTokensError(len(ids))
            return ids
        # The template has written the special tokens.
        return self._ids(text, most, add_special_tokens=False)

    def _rendered(self, text: str, separators: re.Pattern[str]) -> list[int]:
        """Ids of a rendered template. What it writes around each message, and where none is given as the system's, is
        encoded once: half of a short prompt, and more of its time."""
        if self._fixed is None:
            self._fixed = self._fixed_parts(separators)
        ids: list[int] = []
        for part in separators.split(text):
            if part:
                known = self._fixed.get(part)
                ids += self._ids(part, None, add_special_tokens=False) if known is None else known
        return ids

    def _fixed_parts(self, separators: re.Pattern[str]) -> dict[str, list[int]]:
        """Never a client's text, whose time would then tell others that it was there before."""
        try:
            probes = [self._templates.render([Turn("user", content)], ()) for content in _PROBES]
        except (TemplateError, TypeError, ValueError):  # it wants more than that
            return {}
        first, second = (set(separators.split(probe)) for probe in probes)
        return {part: self._ids(part, None, add_special_tokens=False) for part in first & second if part}

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; for a special token its name. Empty for an unused id."""
        added = self._added.get(token_id)
        if added is not None:
            return added
        entry = self._rust.id_to_token(token_id)
        return entry_bytes(entry, byte_level=self._byte_level) if entry else b""

    def _ids(self, text: str, most: int | None, *, add_special_tokens: bool) -> list[int]:
        if len(text) <= SHORT_CHARACTERS:
            encoding = self._rust.encode(text, add_special_tokens=add_special_tokens)
        else:
            encoding = self._rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        if most is not None and len(encoding) > most:
            raise TooManyTokensError(len(encoding))
        ids: list[int] = encoding.ids
        return ids

    def _require_tools_in_template(self) -> None:
        # A template that does not read `tools` would silently drop them.
        if _TOOLS.search(self._templates.text(with_tools=True)) is None:
            field = "prompt.chat.tools_json"
            message = f"{field}: this model's chat template does not support tools"
            raise InvalidArgumentError(message, reason="TOOLS_UNSUPPORTED", field=field)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids without special tokens. Incomplete UTF-8 becomes U+FFFD."""
        if len(token_ids) <= SHORT_TOKENS:
            return str(self._rust.decode(list(token_ids), skip_special_tokens=True))
        return str(self._rust.decode_batch([list(token_ids)], skip_special_tokens=True)[0])

    def definition(self) -> str:
        """The whole tokenizer as the JSON of a `tokenizer.json`."""
        return str(self._rust.to_str())


class ByteTokenizer:
    """UTF-8 bytes as token ids 0..255, and 256 for end of sequence."""

    EOS = 256

    @property
    def vocabulary_size(self) -> int:
        """257."""
        return 257

    @property
    def has_chat_template(self) -> bool:
        """True: a turn becomes a line "role: content"."""
        return True

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """The text's bytes. See Tokenizer."""
        data = text.encode("utf-8", errors="replace")
        if most is not None and len(data) > most:
            raise TooManyTokensError(len(data))
        return list(data)

    def render_chat(
        self, messages: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = (), most: int | None = None
    ) -> list[int]:
        """A line of the tools, if any, a line per turn, then "assistant: "."""
        lines = [f"tools: {json.dumps(tools)}\n"] if tools else []
        lines += [f"{turn.role}: {turn.content}\n" for turn in messages]
        return self.encode("".join([*lines, "assistant: "]), most)

    def token_bytes(self, token_id: int) -> bytes:
        """One byte; empty for the end of sequence."""
        return bytes([token_id]) if 0 <= token_id < self.EOS else b""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the bytes; ids from 256 on are skipped."""
        return bytes(token for token in token_ids if token < self.EOS).decode("utf-8", errors="replace")


def load_tokenizer(source: str) -> Tokenizer:
    """The tokenizer of a model, named as for `resolve_model`; ByteTokenizer for "simulated".

    Raises NotFoundError for an unknown model or one without a usable tokenizer, UnavailableError if it must be
    downloaded and Hugging Face is unreachable, or if its conversion fails.
    """
    if source == SIMULATED:
        return ByteTokenizer()
    try:
        found = localize_model(resolve_model(source), weights=False)
    except ConfigError as error:  # here a peer gives the name, and no setting of this process
        raise NotFoundError(error.message) from None
    return HfTokenizer(_read(found))


def _read(source: ModelSource) -> TokenizerDefinition:
    folder = Path(source.path)
    if source.gguf_file:
        return converted_tokenizer(source)
    if not has_tokenizer(folder):
        raise NotFoundError(f"model {source.path} has no usable tokenizer: it has no tokenizer files")
    try:
        return read_tokenizer(folder) if is_plain(folder) else converted_tokenizer(source)
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        raise NotFoundError(f"model {source.path} has no usable tokenizer: {error}") from None


_PROBES = "a", "b"


def separators(tokenizer: Any) -> re.Pattern[str] | None:
    """Matches special tokens where the text between two of them is encoded as it is by itself; else None.

    The library finds them in the text as it is, the longest at each place, before anything else, unless it is told to
    take them for text. What they then do to their neighbours is stripping spaces; what depends on the place of a part
    in the text is `Metaspace`.
    """
    names = []
    for token in tokenizer.get_added_tokens_decoder().values():
        if not token.normalized:
            if token.lstrip or token.rstrip or token.single_word:
                return None
            names.append(str(token.content))
    cuts = tokenizer.truncation is not None or tokenizer.padding is not None
    if tokenizer.encode_special_tokens or not names or cuts or "Metaspace(" in repr(tokenizer.pre_tokenizer):
        return None
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")


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
