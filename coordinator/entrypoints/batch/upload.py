"""Reads `multipart/form-data` (RFC 7578) as it comes: the field `file`, whose content goes to the disk, and `purpose`.

`python-multipart` parses; what is too much is refused before it is kept. Runs on the folder's thread.
"""

from __future__ import annotations

from collections.abc import Callable

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from coordinator.entrypoints.http.exchange import HttpError
from splitserve.errors import InvalidArgumentError

MAX_PURPOSE, MAX_FILENAME, MAX_BOUNDARY = 64, 255, 70
"""Most bytes of `purpose` and of a boundary (RFC 2046, section 5.1.1), most characters that are kept of a name."""
FORM_BYTES = 2**16
"""Room for all of a form but the file's content."""


class FileForm:
    """A form with a file. `write` takes the file's content, piece by piece."""

    def __init__(self, content_type: str, write: Callable[[bytes], None]) -> None:
        """Raises HttpError for a content type that is no form."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not 0 < len(boundary) <= MAX_BOUNDARY:
            message = "content-type must be multipart/form-data with a boundary"
            raise HttpError(415, message, "UNSUPPORTED_MEDIA_TYPE")
        self.filename = ""
        self._write = write
        self._purpose = self._header = self._value = b""
        self._names: list[str] = []
        """Of the parts so far; empty for a part whose name is not known yet."""
        self._ended = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": lambda: self._names.append(""),
                "on_header_field": self._add_header,
                "on_header_value": self._add_value,
                "on_header_end": self._end_header,
                "on_part_data": self._add_content,
                "on_end": self._end,
            },
        )

    def feed(self, data: bytes) -> None:
        """Takes the next bytes of the form. Raises InvalidArgumentError, or what `write` raises."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            message = f"the form cannot be read: {error}"[:256]
            raise InvalidArgumentError(message, reason="MALFORMED_FORM") from None

    def end(self) -> None:
        """Raises InvalidArgumentError unless the form is whole, with a file for batches."""
        if not self._ended:
            raise InvalidArgumentError("the form cannot be read: it is cut off", reason="MALFORMED_FORM")
        if "file" not in self._names:
            raise InvalidArgumentError("file is missing", field="file")
        if self._purpose != b"batch":
            given = self._purpose.decode("utf-8", "replace")
            raise InvalidArgumentError(f"purpose must be batch, not {given!r}", field="purpose")

    def _add_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(self._value.decode("latin-1"))
            name = options.get(b"name", b"").decode("utf-8", "replace")[:MAX_PURPOSE]
            if name not in ("file", "purpose") or name in self._names:
                reason = "INVALID_ARGUMENT" if name in self._names else "UNSUPPORTED_FIELD"
                message = f"{name!r} is not a field of this form, or is given twice"
                raise InvalidArgumentError(message, reason=reason, field=name)
            self._names[-1] = name
            if name == "file":
                given = options.get(b"filename", b"").decode("utf-8", "replace")
                self.filename = given[:MAX_FILENAME] or "file"
        self._header = self._value = b""

    def _add_content(self, data: bytes, start: int, end: int) -> None:
        if self._names[-1] == "file":
            self._write(data[start:end])
        else:
            self._purpose += data[start:end]
        if len(self._purpose) > MAX_PURPOSE or not self._names[-1]:
            message = f"the form's parts must have names, and purpose at most {MAX_PURPOSE} bytes"
            raise InvalidArgumentError(message, field="purpose")

    def _end(self) -> None:
        self._ended = True
