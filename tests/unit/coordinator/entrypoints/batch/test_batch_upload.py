"""A form with a file, cut everywhere, and forms that are none."""

from __future__ import annotations

import pytest

from coordinator.entrypoints.batch.upload import MAX_PURPOSE, FileForm
from coordinator.entrypoints.http.exchange import HttpError
from splitserve.errors import InvalidArgumentError

TYPE = "multipart/form-data; boundary=xyz"
CONTENT = b'{"a": 1}\r\n--xy\r\n-- \r\r\n'


def part(name: str, value: bytes, more: str = "") -> bytes:
    head = f'--xyz\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'
    return head.encode() + value + b"\r\n"


PURPOSE, FILE = part("purpose", b"batch"), part("file", CONTENT, '; filename="../../etc/ä.jsonl"')


def read(form: bytes, step: int, content_type: str = TYPE) -> tuple[str, bytes]:
    pieces: list[bytes] = []
    parser = FileForm(content_type, pieces.append)
    for start in range(0, len(form), step):
        parser.feed(form[start : start + step])
    parser.end()
    return parser.filename, b"".join(pieces)


@pytest.mark.parametrize("form", [PURPOSE + FILE, FILE + PURPOSE])
def test_the_content_is_the_same_however_it_comes(form: bytes) -> None:
    whole = form + b"--xyz--\r\n"
    for step in range(1, len(whole) + 1):
        assert read(whole, step) == ("../../etc/ä.jsonl", CONTENT)


@pytest.mark.parametrize(
    ("form", "told", "field"),
    [
        (PURPOSE + FILE, "cut off", None),
        (b"", "cut off", None),
        (b"{}", "cannot be read", None),
        (PURPOSE + b"--xyz--", "file is missing", "file"),
        (FILE + b"--xyz--", "purpose must be batch, not ''", "purpose"),
        (part("purpose", b"vision") + FILE + b"--xyz--", "not 'vision'", "purpose"),
        (part("purpose", b"b" * (MAX_PURPOSE + 1)), "at most 64 bytes", "purpose"),
        (PURPOSE + PURPOSE, "given twice", "purpose"),
        (FILE + FILE, "given twice", "file"),
        (part("expires_after[anchor]", b"created_at"), "not a field", "expires_after[anchor]"),
        (b"--xyz\r\nX: y\r\n\r\nvalue\r\n--xyz--", "must have names", "purpose"),
        (b"--xyz\r\n" + b"X: y\r\n" * 100, "cannot be read", None),
        (b"--xyz\r\nX: " + b"y" * 10_000, "cannot be read", None),
    ],
)
def test_a_form_that_is_none_is_refused_by_name(form: bytes, told: str, field: str | None) -> None:
    for step in (1, 7, len(form) or 1):
        with pytest.raises(InvalidArgumentError, match=told) as refused:
            read(form, step)
        assert refused.value.field == field


@pytest.mark.parametrize(
    "content_type",
    ["", "application/json", "multipart/form-data", f"multipart/form-data; boundary={'x' * 71}"],
)
def test_another_content_type_is_refused(content_type: str) -> None:
    with pytest.raises(HttpError) as refused:
        read(PURPOSE + FILE, 9, content_type)
    assert refused.value.status == 415
