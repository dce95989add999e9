"""The vocabulary that vLLM's grammars are followed with, in the process of its scheduler."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

from vllm.utils.mistral import is_mistral_tokenizer

from splitserve.grammars import child
from splitserve.models.hf_tokenizer import HfTokenizer
from splitserve.models.tokenizer_files import TokenizerDefinition


def grammar_tokenizer(original: Callable[[Any, int], Any], tokenizer: Any, vocabulary_size: int) -> Any:
    """The vocabulary of a vLLM tokenizer for llguidance, in which tags such as `<tool_call>` are text, as for the other
    engines. `original`: what vLLM calls for that."""
    if is_mistral_tokenizer(tokenizer):
        return original(tokenizer, vocabulary_size)
    library = copy(tokenizer.backend_tokenizer)
    library.no_padding()
    library.no_truncation()
    own = HfTokenizer(TokenizerDefinition(library, {}, {}))
    ids = range(max(vocabulary_size, len(tokenizer)))
    vocabulary = {
        "definition": own.definition(),
        "tokens": [own.token_bytes(token_id).decode("latin-1") for token_id in ids],
        "eos": [tokenizer.eos_token_id],
    }
    made = child.tokenizer_of(vocabulary)
    if isinstance(made, str):
        raise ValueError(made)
    return made
