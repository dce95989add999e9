"""The vocabulary as llguidance needs it: the bytes of every token, and which tokens end an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.runner import ModelFacts
from splitserve.errors import InvalidArgumentError
from splitserve.grammars import FIELD
from splitserve.hf_tokenizer import ByteTokenizer, HfTokenizer
from splitserve.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class _Bytes:
    """The vocabulary of `ByteTokenizer`, in the form that llguidance's wrapper asks for."""

    eos_token_id = ByteTokenizer.EOS
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(ByteTokenizer.EOS)), b"<eos>")
    special_token_ids = (ByteTokenizer.EOS,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def grammar_tokenizer(tokenizer: Tokenizer, facts: ModelFacts) -> LLTokenizer:
    """Builds it; takes about half a second of CPU time for 50,000 tokens.

    Raises InvalidArgumentError for a tokenizer that llguidance cannot read.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    if isinstance(tokenizer, ByteTokenizer):
        return LLTokenizer(TokenizerWrapper(_Bytes()))
    try:
        if not isinstance(tokenizer, HfTokenizer):
            raise ValueError("its vocabulary is not known")
        eos = sorted(facts.eos_token_ids) or None
        return LLTokenizer(tokenizer.definition(), n_vocab=facts.vocabulary_size, eos_token=eos)
    except ValueError as error:
        message = f"{FIELD} is not supported for this model's tokenizer: {error}"
        raise InvalidArgumentError(message, reason="GRAMMAR_NOT_SUPPORTED", field=FIELD) from None
