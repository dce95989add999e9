"""The file of golden prompts: one text a line, and what is wrong with it in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.canary.canary import BUILT_IN, MAX_PROMPT_BYTES, MAX_PROMPTS, read_prompts
from splitserve.errors import ConfigError


def test_each_line_is_a_prompt(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one\n\n  two \n")
    assert read_prompts(tmp_path / "a") == ("one", "two")
    assert read_prompts(None) == BUILT_IN


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"\n", f"needs 1 to {MAX_PROMPTS} lines"),
        (b"a\n" * (MAX_PROMPTS + 1), f"needs 1 to {MAX_PROMPTS} lines"),
        (b"a" * (MAX_PROMPT_BYTES + 1), f"it has more than {MAX_PROMPT_BYTES} bytes"),
        (b"\xff", "no UTF-8 text, at byte 0"),
        (None, "No such file or directory"),
    ],
)
def test_what_is_wrong_is_said_without_numbers_of_errors(
    tmp_path: Path, content: bytes | None, why: str
) -> None:
    if content is not None:
        (tmp_path / "a").write_bytes(content)
    with pytest.raises(ConfigError, match=why) as caught:
        read_prompts(tmp_path / "a")
    assert caught.value.field == "canary.prompts"
    assert "Errno" not in caught.value.message
