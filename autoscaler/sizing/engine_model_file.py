"""Reads the file of an engine model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from autoscaler.sizing.engine_model import EngineModel
from splitserve.errors import InvalidArgumentError
from splitserve.runtime.bounded_file import read_named_text

MOST_BYTES = 64 * 1024
"""Of one file, and characters of its text."""
FIELD = "engine_model"
MOST = 1e18
"""Of any field: times and lengths beyond it are no machine's, and products of a few of them stay finite."""


def load_engine_model(path: Path) -> EngineModel:
    """An engine model from a JSON file of the fields of `EngineModel`, those left out with their defaults.

    Raises InvalidArgumentError naming the field.
    """
    return engine_model_of(path, read_named_text(path, FIELD, MOST_BYTES, pipes="none"))


def engine_model_of(path: Path, text: str) -> EngineModel:
    """The same of a file that has been read. Raises InvalidArgumentError naming the field."""
    if len(text) > MOST_BYTES:
        raise InvalidArgumentError(f"{FIELD}: {path} must have at most {MOST_BYTES} bytes", field=FIELD)
    try:
        values = json.loads(text)
    except (RecursionError, ValueError):
        raise InvalidArgumentError(f"engine_model: {path} is no JSON", field=FIELD) from None
    fields = {field.name: field for field in dataclasses.fields(EngineModel)}
    if not isinstance(values, dict) or (unknown := sorted(values.keys() - fields.keys())):
        what = f"unknown: {', '.join(unknown):.80}" if isinstance(values, dict) else "not an object"
        raise InvalidArgumentError(f"engine_model: {path}: {what}", field=FIELD)
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
