"""The embedded model and a text of some length, for what is judged with real weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitserve.errors import NotFoundError
from splitserve.models.hf_tokenizer import load_tokenizer
from splitserve.models.sources import ModelSource, resolve_model

TEXT = Path(__file__).parents[1] / "data" / "pride_and_prejudice.txt"
"""The first chapter, in the public domain."""


@pytest.fixture(scope="module")
def smollm2() -> ModelSource:
    """The embedded model."""
    try:
        return resolve_model("smollm2-135m-instruct")
    except NotFoundError as error:
        pytest.fail(f"{error} (`make test` does this)")


@pytest.fixture(scope="module")
def text(smollm2: ModelSource) -> list[int]:
    """Tokens of the text."""
    return load_tokenizer(smollm2.tokenizer_source).encode(TEXT.read_text(encoding="utf-8"))
