"""The tokenizer protocol; `hf_tokenizer.py` implements it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol


class Turn(NamedTuple):
    """One message of a conversation, as chat templates read it."""

    role: str
    content: str
    tool_calls: Sequence[Mapping[str, Any]] = ()
    """Calls made by the assistant, as in OpenAI's `tool_calls`, but with arguments as objects, not JSON strings."""
    tool_call_id: str = ""
    """The call that a turn of role "tool" answers."""
    name: str = ""
    """Name of the speaker or the tool."""
    further: Mapping[str, Any] = MappingProxyType({})
    """Further fields for the template, by name."""


class TemplateArguments(NamedTuple):
    """What a request tells the chat template beside its messages and tools."""

    variables: Mapping[str, Any] = MappingProxyType({})
    """Further variables by name, such as "enable_thinking". They win over special tokens of the same name."""
    add_generation_prompt: bool = True
    """Whether the prompt ends with what begins an answer."""
    continue_final_message: bool = False
    """Whether the prompt ends where the content of the last message ends. Excludes `add_generation_prompt`."""
    template: str = ""
    """A Jinja source in place of the model's template; empty: the model's."""


DEFAULT_ARGUMENTS = TemplateArguments()
THINKING = ("enable_thinking", "thinking")
"""The variables by which chat templates switch thinking on and off."""


class PromptStyle(NamedTuple):
    """How a model's prompts are made."""

    template: str = ""
    """The chat template's source; empty if there is none."""
    end: str = ""
    """How a prompt ends, where the answer begins. Empty if the template has not told."""


class TooManyTokensError(Exception):
    """A text has more tokens than the caller of the tokenizer can use: `count` of them, or more."""

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} tokens or more")
        self.count = count


class Tokenizer(Protocol):
    """Tokenizer of the coordinator and the engine. Thread-safe."""

    vocabulary_size: int
    """Number of token ids; they are 0..vocabulary_size-1."""
    has_chat_template: bool
    """Whether `render_chat` works."""

    def encode(self, text: str, most: int | None = None, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text without a template, with the special tokens that `transformers` adds unless told
        otherwise.

        Raises TooManyTokensError for more than `most`. Long texts leave the interpreter to other threads.
        """

    def encode_pair(self, first: str, second: str, most: int | None = None) -> tuple[list[int], int]:
        """Token ids of two texts in one prompt with the special tokens that `transformers` adds, and the position at
        which the second begins for models that tell them apart, else 0. Raises TooManyTokensError as `encode`."""

    def render_chat(
        self,
        messages: Sequence[Turn],
        tools: Sequence[Mapping[str, Any]] = (),
        most: int | None = None,
        arguments: TemplateArguments = DEFAULT_ARGUMENTS,
    ) -> list[int]:
        """Token ids of turns rendered by the chat template; `tools` as in OpenAI's API.

        Raises InvalidArgumentError if there is no template, it refuses the turns, or it does not read `tools` or
        another argument that would change the answer; TooManyTokensError for more than `most`.
        """

    def entry(self, token_id: int) -> str:
        """The vocabulary's entry of a token, as `convert_ids_to_tokens` of `transformers`. Empty for an unused id."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; for a special token its name. Empty for an unused id."""

    def prompt_style(
        self, *, with_tools: bool, arguments: TemplateArguments = DEFAULT_ARGUMENTS
    ) -> PromptStyle:
        """How prompts of conversations with these arguments are made. Takes as long as rendering a prompt."""

    def decode(self, token_ids: Sequence[int], *, keep_special: bool = False) -> str:
        """Text of token ids, without special tokens unless they are kept. Incomplete UTF-8 becomes U+FFFD."""
