"""Tokenizers that only `transformers` can build: converted once in a child process and cached on disk.

These are GGUF files, slow tokenizers without a `tokenizer.json`, and model families with special rules. The child
process keeps `transformers` out of the loading process.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

from splitserve.errors import MissingExtraError, NotFoundError, UnavailableError
from splitserve.extras import installed
from splitserve.models.conversion import run_conversion
from splitserve.models.sources import ModelSource, cache_folder
from splitserve.models.tokenizer_files import (
    TOKENIZER_FILE,
    TokenizerDefinition,
    read_backend,
    read_tokenizer,
)

CONVERSION = "splitserve.models.tokenizer_conversion"
EXIT_UNUSABLE = 3
"""Exit code of the child process for a model without a convertible tokenizer; the reason is on stdout."""
TIMEOUT_S = 120.0
_FORMAT = 2
_READ = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "additional_chat_templates/*")


def converted_tokenizer(source: ModelSource) -> TokenizerDefinition:
    """The tokenizer of a local model, from the cache or converted now, which takes seconds.

    Without a writable cache folder every start converts it again. A coordinator without `transformers` takes what the
    workers that share its cache folder have converted. Raises NotFoundError for a model without a usable tokenizer,
    ValueError for a damaged one, MissingExtraError where it is neither cached nor `transformers` installed,
    UnavailableError (TOKENIZER_CONVERSION_FAILED) if the child process fails.
    """
    folder, key = cache_folder() / "tokenizers", _key(source)
    if not installed("transformers"):
        converted = sorted(folder.glob(f"{key}-*"), key=lambda path: path.stat().st_mtime_ns)
        if not converted:
            raise MissingExtraError(f"the tokenizer of model {source.path}", "cpu")
        return read_tokenizer(converted[-1])
    target = folder / f"{key}-{version('transformers')}"
    if target.is_dir():
        return read_tokenizer(target)
    file = Path(source.path) / TOKENIZER_FILE
    if not source.gguf_file and file.is_file():
        read_backend(file)  # raises for a damaged file, without the child process
    with _work_folder(target.parent) as work:
        result = work / "tokenizer"
        result.mkdir()
        _convert(source, result)
        definition = read_tokenizer(result)
        with suppress(OSError):  # read-only folder, or a concurrent process has stored it
            result.rename(target)
    return definition


def _key(source: ModelSource) -> str:
    """Cache key of a tokenizer: a hash of its files' metadata."""
    folder = Path(source.path).resolve()
    paths = (
        [folder / source.gguf_file]
        if source.gguf_file
        else [p for pattern in _READ for p in folder.glob(pattern)]
    )
    stats = [(str(path), stat.st_size, stat.st_mtime_ns) for path in sorted(paths) if (stat := path.stat())]
    return hashlib.sha256(json.dumps([_FORMAT, stats]).encode()).hexdigest()[:32]


@contextmanager
def _work_folder(beside: Path) -> Iterator[Path]:
    try:
        beside.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix=".converting-", dir=beside)
    except OSError:
        folder = tempfile.TemporaryDirectory(prefix="splitserve-")
    with folder as name:
        yield Path(name)


def _convert(source: ModelSource, target: Path) -> None:
    arguments = [source.path, str(target), str(os.getpid()), *filter(None, [source.gguf_file])]
    try:
        status, why = run_conversion(CONVERSION, *arguments, timeout_s=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _failed(source, str(error)) from None
    if status == EXIT_UNUSABLE:
        raise NotFoundError(f"model {source.path} has no usable tokenizer: {why}")
    if status != 0:
        raise _failed(source, why)


def _failed(source: ModelSource, reason: str) -> UnavailableError:
    message = f"the tokenizer of model {source.path} could not be converted: {reason}"
    return UnavailableError(message, reason="TOKENIZER_CONVERSION_FAILED")
