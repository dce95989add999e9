"""Structured logs: named events with fields, and the ids of request and trace from a context variable.

`log_event("handoff.completed", request_id=..., bytes=...)` writes one line to stderr: JSON, or readable text
if stderr is a terminal. Fields hold ids, counts and times, never prompts or generated text. The level is
SPLITSERVE_LOG_LEVEL (debug, info, warning, error; default info), the form that of SPLITSERVE_LOG_FORMAT (auto, json,
text; default auto: as the terminal has it).
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Literal, get_args

from typing_extensions import override

from splitserve.errors import ConfigError

LOG_LEVEL_VARIABLE = "SPLITSERVE_LOG_LEVEL"
LOG_FORMAT_VARIABLE = "SPLITSERVE_LOG_FORMAT"
LogFormat = Literal["auto", "json", "text"]
_FORMATS: tuple[str, ...] = get_args(LogFormat)

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
MAX_FIELD_CHARACTERS = 2000
"""Longer texts in a field are cut: the message of an error may repeat what a client sent."""
_QUIET = ("asyncio", "grpc", "grpc_reflection", "transformers", "tokenizers", "urllib3", "filelock", "httpx")
_logger = logging.getLogger("splitserve")
_context_fields: ContextVar[Mapping[str, str]] = ContextVar("context_fields", default=MappingProxyType({}))


@contextmanager
def log_context(**fields: str) -> Iterator[None]:
    """Adds fields, such as `request_id`, to every event logged in this context and in tasks started from it, beside
    those of outer contexts. Empty fields are left out. An event's own field of the same name wins."""
    merged = {**_context_fields.get(), **fields}
    token = _context_fields.set({name: value for name, value in merged.items() if value})
    try:
        yield
    finally:
        _context_fields.reset(token)


def log_event(event: str, *, level: int = logging.INFO, **fields: Any) -> None:
    """Logs one event. `event` is dotted lower case, for example "worker.registered"."""
    _log(event, level, fields, None)


def log_exception(event: str, error: BaseException, **fields: Any) -> None:
    """Logs an event at level error with the exception's traceback."""
    _log(event, logging.ERROR, fields, error)


def _log(event: str, level: int, fields: dict[str, Any], error: BaseException | None) -> None:
    if not _logger.isEnabledFor(level):
        return
    fields = {**_context_fields.get(), **fields}
    exc_info = (type(error), error, error.__traceback__) if error is not None else None
    _logger.log(level, event, exc_info=exc_info, extra={"event_fields": fields})


def configure_logging(part: str, *, format: LogFormat | None = None, level: str | None = None) -> None:
    """Configures logging of a process; `part` ("coordinator", a worker's id) is in every line.

    Form and level default to their variables. Raises ConfigError for unknown ones. Calling it again replaces the
    earlier configuration.
    """
    name = _one_of(_LEVELS, level or os.environ.get(LOG_LEVEL_VARIABLE) or "info", LOG_LEVEL_VARIABLE)
    form = _one_of(_FORMATS, format or os.environ.get(LOG_FORMAT_VARIABLE) or "auto", LOG_FORMAT_VARIABLE)
    as_text = form == "text" or (form == "auto" and sys.stderr.isatty())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextFormatter(part) if as_text else JsonFormatter(part))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    _logger.setLevel(_LEVELS[name])
    for noisy in _QUIET:
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _one_of(known: Collection[str], given: str, variable: str) -> str:
    if given.lower() not in known:
        raise ConfigError(f"{variable}: {given.lower()!r} is none of {', '.join(known)}", field=variable)
    return given.lower()


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    # Records of other libraries have no event fields; their message becomes one.
    fields = record.__dict__.get("event_fields")
    shown = dict(fields) if fields is not None else {"logger": record.name, "message": record.getMessage()}
    return {name: _cut(value) for name, value in shown.items()}


def _cut(value: Any) -> Any:
    if isinstance(value, str) and len(value) > MAX_FIELD_CHARACTERS:
        return f"{value[:MAX_FIELD_CHARACTERS]}… ({len(value)} characters)"
    return value


def _event(record: logging.LogRecord) -> str:
    return record.getMessage() if "event_fields" in record.__dict__ else "library.message"


class JsonFormatter(logging.Formatter):
    """One JSON object a line: `time` (UTC), `level`, `part`, `event`, then the fields."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self._part = part

    @override
    def format(self, record: logging.LogRecord) -> str:
        """Values without a JSON form are written as strings."""
        whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{whole}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "part": self._part,
            "event": _event(record),
        }
        for key, value in _fields(record).items():
            line[f"field_{key}" if key in line else key] = value
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """`HH:MM:SS.mmm level part event key=value ...`, for people."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self._part = part

    @override
    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        pairs = " ".join(f"{key}={_shown(value)}" for key, value in _fields(record).items())
        level = record.levelname.lower()
        line = f"{clock}.{int(record.msecs):03d} {level:7} {self._part} {_event(record)} {pairs}".rstrip()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    quoted = any(ch.isspace() or ch in '"=' or not ch.isprintable() for ch in text)
    return json.dumps(text, ensure_ascii=False) if quoted else text
