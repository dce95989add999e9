"""Tokenizers: the model's own through `transformers`, and a byte-level one for simulated engines."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from splitserve.errors import InvalidArgumentError, NotFoundError
from splitserve.models import SIMULATED, ModelSource, localize_model, resolve_model
from splitserve.token_bytes import entry_bytes
from splitserve.tokenizer import Tokenizer, Turn

_TOOLS = re.compile(r"\btools\b")


class HfTokenizer:
    """A fast `transformers` tokenizer behind the protocol. Loads no weights.

    Thread-safe: encoding and decoding work on a Rust object that nothing changes; compiled chat templates are kept
    in a `functools.lru_cache`.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        # Asked directly: what `transformers` puts around it takes longer than a short text does.
        self._rust = backend.backend_tokenizer
        self._rust.no_truncation()
        self._rust.no_padding()
        self._rust.encode_special_tokens = backend.split_special_tokens
        from transformers import PreTrainedTokenizerFast as Plain

        # A few families add something of their own when they decode.
        kind = type(backend)
        self._decodes_plainly = kind.decode is Plain.decode and kind._decode is Plain._decode
        self._size = len(backend)
        self._added = {int(i): str(t.content).encode() for i, t in backend.added_tokens_decoder.items()}
        # The decoder's type is not told otherwise where it is one of a sequence.
        self._byte_level = "ByteLevel(" in repr(self._rust.decoder)

    @property
    def vocabulary_size(self) -> int:
        """Token ids are in 0..vocabulary_size-1."""
        return self._size

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` works."""
        return bool(self._backend.chat_template)

    def encode(self, text: str) -> list[int]:
        """Token ids of a raw text, with the model's special tokens."""
        ids: list[int] = self._rust.encode(text).ids
        return ids

    def render_chat(self, messages: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Token ids of turns through the chat template, generation prompt appended.

        Raises InvalidArgumentError when there is no template, it refuses the turns, or it knows no tools.
        """
        # Imported here: transformers brings Jinja along.
        from jinja2 import TemplateError

        if not self.has_chat_template:
            message = "prompt.chat: this model has no chat template; send text or token ids"
            raise InvalidArgumentError(message, field="prompt.chat")
        if tools:
            self._require_tools_in_template()
        turns = [_template_turn(turn) for turn in messages]
        try:
            text = self._backend.apply_chat_template(
                turns, tools=list(tools) or None, add_generation_prompt=True, tokenize=False
            )
        except (TemplateError, TypeError, ValueError) as error:
            message = f"prompt.chat: the chat template refuses these messages: {error}"
            raise InvalidArgumentError(message, field="prompt.chat") from None
        # The template writes special tokens itself.
        ids: list[int] = self._rust.encode(text, add_special_tokens=False).ids
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for; of a special token its name. Empty for an id without a token."""
        added = self._added.get(token_id)
        if added is not None:
            return added
        entry = self._backend.convert_ids_to_tokens(token_id)
        return entry_bytes(entry, byte_level=self._byte_level) if entry else b""

    def _require_tools_in_template(self) -> None:
        # A template that does not read them would leave them out without a word.
        if _TOOLS.search(self._backend.get_chat_template(tools=[{}])) is None:
            field = "prompt.chat.tools_json"
            message = f"{field}: this model's chat template knows no tools"
            raise InvalidArgumentError(message, reason="TOOLS_UNSUPPORTED", field=field)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out. Incomplete UTF-8 shows as U+FFFD."""
        if self._decodes_plainly:
            shown: str = self._rust.decode(list(token_ids), skip_special_tokens=True)
            return shown
        text = self._backend.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)

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
        """True: turns become lines of "role: content"."""
        return True

    def encode(self, text: str) -> list[int]:
        """The text's bytes."""
        return list(text.encode("utf-8", errors="replace"))

    def render_chat(self, messages: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """A line of the tools, where there are any, one line a turn, then "assistant: "."""
        lines = [f"tools: {json.dumps(tools)}\n"] if tools else []
        lines += [f"{turn.role}: {turn.content}\n" for turn in messages]
        return self.encode("".join([*lines, "assistant: "]))

    def token_bytes(self, token_id: int) -> bytes:
        """One byte, none for the end of sequence."""
        return bytes([token_id]) if 0 <= token_id < self.EOS else b""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the bytes; ids from 256 on are left out."""
        return bytes(token for token in token_ids if token < self.EOS).decode("utf-8", errors="replace")


def load_tokenizer(source: str) -> Tokenizer:
    """The tokenizer of a model name as `resolve_model` takes it; "simulated" gives ByteTokenizer.

    Raises NotFoundError for an unknown model or one without a usable tokenizer, UnavailableError when it
    is on Hugging Face only and that cannot be reached.
    """
    if source == SIMULATED:
        return ByteTokenizer()
    return HfTokenizer(_load(localize_model(resolve_model(source), weights=False)))


def _load(source: ModelSource) -> Any:
    # Imported here: a coordinator of simulated workers starts without transformers.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    options = {"gguf_file": source.gguf_file} if source.gguf_file else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.path, local_files_only=True, **options)
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise NotFoundError(f"model {source.path} has no usable tokenizer: {reason}") from None
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise NotFoundError(f"model {source.path} has no tokenizer.json (a fast tokenizer is needed)")
    return tokenizer


def _template_turn(turn: Turn) -> dict[str, Any]:
    """What templates read; many ask whether a field is there at all."""
    shown: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if turn.tool_calls:
        shown["tool_calls"] = [dict(call) for call in turn.tool_calls]
    if turn.tool_call_id:
        shown["tool_call_id"] = turn.tool_call_id
    if turn.name:
        shown["name"] = turn.name
    return shown
