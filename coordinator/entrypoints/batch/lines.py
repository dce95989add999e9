"""The lines of a batch's files: requests, checked and parsed, and results. Pure.

Formats: https://platform.openai.com/docs/api-reference/batch/request-input and .../request-output.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from coordinator.entrypoints.openai.bodies import compact_json
from coordinator.request.json_bounds import check_structure
from splitserve.errors import InvalidArgumentError

MAX_LINES = 50_000
"""Most lines of a file, as with OpenAI."""
MAX_CUSTOM_ID = 256
"""Most characters of a `custom_id`."""
MAX_ERRORS = 100
"""The check of a file stops at so many wrong lines."""
RESPONSES = "/v1/responses"
FIELDS = frozenset(("custom_id", "method", "url", "body"))


@dataclass(frozen=True, slots=True)
class RequestLine:
    """One request of a batch: its line's number, from 1, and the bytes of the file before it."""

    number: int
    offset: int
    custom_id: str
    model: str
    """The name that the body gives; empty without one."""
    body: bytes


class LineError(Exception):
    """A line is no request."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


def parsed_line(text: bytes, number: int, offset: int, endpoint: str) -> RequestLine:
    """The request on a line, for a batch of this endpoint. Raises LineError."""
    try:
        check_structure(text)
        value = from_json(text.decode("utf-8"), allow_inf_nan=False)
    except InvalidArgumentError as error:
        message = error.message.replace("the request's body", "the line")
        raise LineError("invalid_json_line", message) from None
    except UnicodeDecodeError as error:
        raise LineError("invalid_json_line", f"the line is no UTF-8 at its byte {error.start}") from None
    except ValueError as error:
        raise LineError("invalid_json_line", f"the line is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise LineError("invalid_json_line", "the line must be a JSON object")
    if unknown := min(value.keys() - FIELDS, default="")[:64]:
        raise LineError("unknown_field", f"{unknown!r} is not a field of a line", unknown)
    custom_id, method, url, body = (value.get(name) for name in ("custom_id", "method", "url", "body"))
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID:
        message = f"custom_id must be a text of 1..{MAX_CUSTOM_ID} characters"
        raise LineError("invalid_custom_id", message, "custom_id")
    if method != "POST":
        raise LineError("invalid_method", "method must be POST", "method")
    if url != endpoint:
        raise LineError("mismatched_url", f"url must be the batch's endpoint, {endpoint}", "url")
    if not isinstance(body, dict) or body.get("stream"):
        raise LineError("invalid_body", "body must be a JSON object, without stream", "body")
    if endpoint == RESPONSES:
        body["store"] = False  # a batch would push the tenant's other responses out of the store
    model = body.get("model")
    name = model if isinstance(model, str) else ""
    return RequestLine(number, offset, custom_id, name, compact_json(body).encode())


@dataclass(slots=True)
class InputCheck:
    """Checks the lines of an input file, in order, before anything runs. `most_bytes`: of a line."""

    endpoint: str
    most_bytes: int
    errors: list[dict[str, Any]] = field(default_factory=list)
    """OpenAI's error objects."""
    lines: int = 0
    requests: int = 0
    offset: int = 0
    """Bytes that are checked."""
    ended: bool = False
    """Whether the rest of the file needs no check, or there is none."""
    _seen: set[bytes] = field(default_factory=set)
    """Hashes of the ids so far."""

    def add(self, text: bytes) -> None:
        """Takes the next line, or the first `most_bytes` + 1 bytes of a longer one; an empty text is the file's end."""
        if not text:
            self.ended = True
            if not self.requests and not self.errors:
                self._fail(LineError("empty_file", "the file has no requests"), None)
            return
        self.lines += 1
        start, self.offset = self.offset, self.offset + len(text)
        try:
            if self.lines > MAX_LINES:
                raise LineError("too_many_lines", f"the file has more than {MAX_LINES} lines")
            if len(text) > self.most_bytes:
                raise LineError("line_too_long", f"the line has more than {self.most_bytes} bytes")
            if text.strip():
                self._count(parsed_line(text, self.lines, start, self.endpoint).custom_id)
        except LineError as error:
            self._fail(error, self.lines)
            is_last = error.code in ("too_many_lines", "line_too_long") or len(self.errors) >= MAX_ERRORS
            self.ended = self.ended or is_last

    def _count(self, custom_id: str) -> None:
        digest = hashlib.blake2b(custom_id.encode(), digest_size=16).digest()
        if digest in self._seen:
            raise LineError("duplicate_custom_id", "custom_id stands on an earlier line", "custom_id")
        self._seen.add(digest)
        self.requests += 1

    def _fail(self, error: LineError, line: int | None) -> None:
        shown = {"code": error.code, "message": error.message, "line": line, "param": error.param}
        self.errors.append(shown)


LINE_ID = re.compile(rb'\{"id":"batch_req_[0-9a-f]{32}_([1-9][0-9]{0,5})",')


def line_id(batch_id: str, number: int) -> str:
    """The id of a request's result. It is also the id that the request has in records and logs."""
    return f"batch_req_{batch_id.partition('_')[2]}_{number}"


def result_line(own_id: str, custom_id: str, answer: tuple[int, bytes] | tuple[str, str]) -> bytes:
    """A line of results, its end included. `answer`: status and JSON body, or code and message of a request that got no
    answer."""
    head = compact_json({"id": own_id, "custom_id": custom_id})[:-1].encode()
    code, body = answer
    if isinstance(body, str):
        error = compact_json({"code": code, "message": body}).encode()
        return b'%b,"response":null,"error":%b}\n' % (head, error)
    start = f',"response":{{"status_code":{code},"request_id":"{own_id}","body":'
    return b'%b%b%b},"error":null}\n' % (head, start.encode(), body.replace(b"\n", b" "))


def number_of(result: bytes) -> int | None:
    """The number of the request whose result this line is; None: the line is torn."""
    found = LINE_ID.match(result)
    return int(found[1]) if found and result.endswith(b"}\n") and b"\0" not in result else None
