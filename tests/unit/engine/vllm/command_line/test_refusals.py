"""What vLLM raised, as one sentence."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, Field, ValidationError

from engine.vllm.command_line.refusals import MAX_REASON, reason_of


class Checked(BaseModel):
    share: float = Field(le=1)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("too long\nand more"), "too long"),
        (ValueError("<function loads at 0x7f3c588800e0> failed"), "<function loads> failed"),
        (AssertionError(), "AssertionError"),
        (KeyError("llama9"), "KeyError: 'llama9'"),
        (ValueError("x" * 1000), "x" * MAX_REASON),
        (
            ValueError("max_model_len is too long"),
            "max_model_len is too long (max_model_len: engine.context_tokens)",
        ),
    ],
)
def test_reasons(error: Exception, reason: str) -> None:
    assert reason_of(error) == reason


def test_a_failed_check_names_its_field() -> None:
    with pytest.raises(ValidationError) as raised:
        Checked(share=7)
    assert reason_of(raised.value) == "share: Input should be less than or equal to 1"
