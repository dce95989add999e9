"""Tokenizers: the model's own through `transformers`, and a byte-level one for simulated engines."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from splitserve.errors import InvalidArgumentError, NotFoundError
from splitserve.models import SIMULATED, ModelSource, localize_model, resolve_model
from splitserve.tokenizer import Tokenizer


class HfTokenizer:
    """A fast `transformers` tokenizer behind the protocol. Loads no weights.

    Thread-safe: encoding and decoding work on an immutable Rust object; the chat template is rendered
    under a lock, because compiling it fills a cache.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self._size = len(backend)

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
        return [int(token) for token in self._backend(text, verbose=False)["input_ids"]]

    def render_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Token ids of (role, content) turns through the chat template, generation prompt appended.

        Raises InvalidArgumentError when there is no template or it refuses the turns.
        """
        # Imported here: transformers brings Jinja along.
        from jinja2 import TemplateError

        if not self.has_chat_template:
            message = "prompt.chat: this model has no chat template; send text or token ids"
            raise InvalidArgumentError(message, field="prompt.chat")
        turns = [{"role": role, "content": content} for role, content in messages]
        try:
            with self._lock:
                text = self._backend.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        except (TemplateError, TypeError, ValueError) as error:
            message = f"prompt.chat: the chat template refuses these messages: {error}"
            raise InvalidArgumentError(message, field="prompt.chat") from None
        # The template writes special tokens itself.
        tokens = self._backend(text, add_special_tokens=False, verbose=False)["input_ids"]
        return [int(token) for token in tokens]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out. Incomplete UTF-8 shows as U+FFFD."""
        text = self._backend.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)


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

    def render_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """One line a turn, then "assistant: "."""
        lines = [f"{role}: {content}\n" for role, content in messages]
        return self.encode("".join([*lines, "assistant: "]))

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
