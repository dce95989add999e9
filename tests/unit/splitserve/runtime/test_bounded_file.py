"""Small files are read whole or refused, whatever their path leads to."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from splitserve.errors import ConfigError
from splitserve.runtime import bounded_file
from splitserve.runtime.bounded_file import read_named_file, read_named_text, read_small_file, read_small_text

pytestmark = pytest.mark.timeout(20)


def folder(path: Path) -> None:
    path.mkdir()


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def itself(path: Path) -> None:
    path.symlink_to(path)


def large(path: Path) -> None:
    path.write_bytes(bytes(65))


def test_a_file_and_a_link_to_it_are_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes("ä\r\n".encode() + bytes(60))
    (tmp_path / "b").symlink_to("a")
    assert read_small_file(tmp_path / "b", 64) == "ä\r\n".encode() + bytes(60)
    assert read_small_text(tmp_path / "a").startswith("ä\r\n")


def test_a_file_is_read_however_slow_its_disk_is(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    assert read_small_file(tmp_path / "a", 64) == b"x"


def test_the_null_device_is_an_empty_file() -> None:
    assert read_small_file(Path("/dev/null")) == b""


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (folder, "Is a directory"),
        (listening, "No such device"),
        (zeros, "neither a file nor a pipe"),
        (itself, "Too many levels"),
        (large, "more than 64 bytes"),
        (os.mkfifo, "nobody writes to the pipe"),
        (lambda path: None, "No such file"),
    ],
)
def test_anything_else_is_refused_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None], why: str
) -> None:
    monkeypatch.setattr(bounded_file, "PIPE_SILENCE_S", 0.1)
    make(tmp_path / "a")
    with pytest.raises(OSError, match=why):
        read_small_file(tmp_path / "a", 64)


def test_a_name_that_no_path_has_is_an_os_error() -> None:
    with pytest.raises(OSError, match="null"):
        read_small_file(Path("a\0b"))


@pytest.mark.parametrize(("written", "why"), [(b"x" * 64, None), (b"x" * 65, "more than 64 bytes")])
def test_a_pipe_is_read_to_its_end(written: bytes, why: str | None) -> None:
    reads, writes = os.pipe()
    writer = threading.Timer(0.05, lambda: (os.write(writes, written), os.close(writes)))
    writer.start()
    try:
        if why is None:
            assert read_small_file(Path(f"/dev/fd/{reads}"), 64) == written
        else:
            with pytest.raises(OSError, match=why):
                read_small_file(Path(f"/dev/fd/{reads}"), 64)
    finally:
        writer.join()
        os.close(reads)


def test_a_pipe_may_take_its_time_and_not_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_file, "PIPE_SILENCE_S", 5.0)
    reads, writes = os.pipe()

    def write(left: int) -> None:
        os.write(writes, b"x")
        if left:
            threading.Timer(0.01, write, [left - 1]).start()
        else:
            os.close(writes)

    write(49)
    assert read_small_file(Path(f"/dev/fd/{reads}"), 64) == b"x" * 50
    os.close(reads)


def test_a_silent_pipe_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_file, "PIPE_SILENCE_S", 0.1)
    reads, writes = os.pipe()
    os.write(writes, b"half")
    with pytest.raises(TimeoutError, match=r"has given nothing for 0\.1 s"):
        read_small_file(Path(f"/dev/fd/{reads}"), 64)
    os.close(reads)
    os.close(writes)
    os.mkfifo(tmp_path / "a")
    with pytest.raises(TimeoutError, match="nobody writes"):
        read_small_file(tmp_path / "a", 64)


def test_a_pipe_may_be_no_choice(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a")
    with pytest.raises(OSError, match="no regular file"):
        read_small_file(tmp_path / "a", 64, may_be_pipe=False)


def test_a_named_file_fails_with_its_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trace: cannot read .*a: No such file") as caught:
        read_named_file(tmp_path / "a", "trace")
    assert caught.value.field == "trace"
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfab\xff")
    with pytest.raises(ConfigError, match=r"trace: .*a is no UTF-8 text, at byte 5"):
        read_named_text(tmp_path / "a", "trace")
    (tmp_path / "a").write_bytes("äb\r\n".encode())
    assert read_named_text(tmp_path / "a", "trace") == "äb\r\n"
