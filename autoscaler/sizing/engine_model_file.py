"""Reads the file of an engine model."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
from pathlib import Path

from autoscaler.sizing.engine_model import EngineModel
from splitserve.errors import InvalidArgumentError, NotFoundError

MOST_BYTES = 64 * 1024
"""Of one file."""
MOST = 1e18
"""Of any field: times and lengths beyond it are no machine's, and products of a few of them stay finite."""


def load_engine_model(path: Path) -> EngineModel:
    """An engine model from a JSON file of the fields of `EngineModel`, those left out with their defaults.

    Raises NotFoundError, InvalidArgumentError naming the field.
    """
    try:
        values = json.loads(_read(path).decode("utf-8"))
    except OSError as error:
        message = f"engine_model: cannot read {path}: {error.strerror}"
        raise NotFoundError(message, reason="NO_ENGINE_MODEL", field="engine_model") from None
    except (RecursionError, ValueError):
        raise InvalidArgumentError(f"engine_model: {path} is no JSON", field="engine_model") from None
    fields = {field.name: field for field in dataclasses.fields(EngineModel)}
    if not isinstance(values, dict) or (unknown := sorted(values.keys() - fields.keys())):
        what = f"unknown: {', '.join(unknown):.80}" if isinstance(values, dict) else "not an object"
        raise InvalidArgumentError(f"engine_model: {path}: {what}", field="engine_model")
    for name, value in values.items():
        if isinstance(fields[name].default, bool):
            if not isinstance(value, bool):
                message = f"engine_model.{name} must be true or false, not {value!r:.40}"
                raise InvalidArgumentError(message, field=f"engine_model.{name}")
            continue
        least = 0 if name.endswith("_s") and name != "link_gb_per_s" else 1e-9
        good = isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= MOST
        if not good and not (name == "prefill_step_s" and value is None):
            message = f"engine_model.{name} must be a number of at least {least:g}, at most {MOST:g}, not {value!r:.40}"
            raise InvalidArgumentError(message, field=f"engine_model.{name}")
    return EngineModel(**values)


def _read(path: Path) -> bytes:
    """Raises OSError, InvalidArgumentError. A pipe is not waited for."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            message = f"engine_model: cannot read {path}: it is no regular file"
            raise InvalidArgumentError(message, field="engine_model")
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        message = f"engine_model: {path} must have at most {MOST_BYTES} bytes"
        raise InvalidArgumentError(message, field="engine_model")
    return content
