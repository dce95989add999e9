"""Writes a model's tokenizer, as `transformers` builds it, in the form that `splitserve.models.tokenizer_files` reads.

`python -m splitserve.models.tokenizer_conversion MODEL TARGET PARENT_PID [GGUF]`, run by
`splitserve.models.tokenizer_cache`, with whose process it ends.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from splitserve.models.tokenizer_cache import EXIT_UNUSABLE
from splitserve.models.tokenizer_files import CONFIG_FILE, NAMED_TOKENS, TOKENIZER_FILE
from splitserve.runtime.child_launch import end_with_parent


class UnusableError(Exception):
    """The model has no convertible tokenizer; the message gives the reason."""


def convert(model: str, target: Path, gguf_file: str | None = None) -> None:
    """Writes `TOKENIZER_FILE` and `CONFIG_FILE` into a folder. Raises UnusableError."""
    options = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            model, local_files_only=True, trust_remote_code=False, **options
        )
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise UnusableError(str(error).strip() or type(error).__name__) from None
    write_plain(tokenizer, target)


def write_plain(tokenizer: Any, target: Path) -> None:
    """Writes a tokenizer of `transformers`. Raises UnusableError if it has behaviour beyond its Rust object."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UnusableError("it has no fast form")
    kind = type(tokenizer)
    if (
        kind.decode is not PreTrainedTokenizerFast.decode
        or kind._decode is not PreTrainedTokenizerFast._decode
    ):
        raise UnusableError(f"{kind.__name__} overrides decoding")
    named = tokenizer.special_tokens_map
    standard = {name: token for name, token in named.items() if name in NAMED_TOKENS}
    config = {
        "tokenizer_class": "TokenizersBackend",
        "split_special_tokens": tokenizer.split_special_tokens,
        "chat_template": tokenizer.chat_template or {},
        "extra_special_tokens": {name: token for name, token in named.items() if name not in standard},
        **standard,
    }
    tokenizer.backend_tokenizer.save(str(target / TOKENIZER_FILE))
    (target / CONFIG_FILE).write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Runs the command; for an unusable tokenizer prints the reason and returns EXIT_UNUSABLE."""
    model, target, parent, *gguf_file = arguments
    end_with_parent(int(parent))
    try:
        convert(model, Path(target), *gguf_file)
    except UnusableError as error:
        print(str(error).splitlines()[0])
        return EXIT_UNUSABLE
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
