"""The tokenizer of the tiny model with a large vocabulary."""

from __future__ import annotations

import json

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

from bench.vllm.models import widened


def test_every_id_below_the_vocabulary_has_a_text_and_the_old_ones_keep_theirs() -> None:
    tokenizer = Tokenizer(BPE({"a": 0, "b": 1, "ab": 3}, [("a", "b")]))
    tokenizer.decoder = ByteLevel()
    wide = Tokenizer.from_str(json.dumps(widened(json.loads(tokenizer.to_str()), 200)))
    assert [wide.decode([number]) for number in (0, 3, 2, 199)] == ["a", "ab", " <2>", " <199>"]
    assert wide.encode("abab").ids == tokenizer.encode("abab").ids
